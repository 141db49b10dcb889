//! Which modules import which: the core's stand in an order, and nobody's in a circle.
//!
//! Paths of the sources are read as text. Code of tests is left out: it may import what it likes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the core. Each imports only those before it.
const ORDER: [&str; 20] = [
    "dim", "dtype", "attr", "ty", "error", "sexp", "eval", "args", "work", "ops", "ir", "random", "cost", "egraph",
    "rules", "extract", "proof", "emit", "optimize", "report",
];

/// An import of another module of the same crate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Import {
    /// The file and the line that has it.
    place: String,
    /// The module that the file belongs to.
    from: String,
    /// The module that it imports.
    to: String,
}

/// A source file of a crate.
struct Source {
    name: String,
    /// Its modules from the crate's root on.
    path: Vec<String>,
    text: String,
}

// What a text imports.

fn word(text: &str) -> &str {
    let end = text.find(|c: char| c != '_' && !c.is_ascii_alphanumeric());
    &text[..end.unwrap_or(text.len())]
}

/// The text after a closing brace for an opening one at its start.
fn after_braces(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[at + c.len_utf8()..];
        }
    }
    ""
}

/// The same number of lines, blank where there were comments or modules of tests.
fn code(text: &str) -> String {
    let blank = |line: &str| line.trim_start().starts_with("//");
    let lines: Vec<&str> = text.lines().map(|l| if blank(l) { "" } else { l }).collect();
    let mut left = lines.join("\n");
    let mut from = 0;
    while let Some(at) = left[from..].find("#[cfg(test)]").map(|at| from + at) {
        from = at + 1;
        let item = &left[at..];
        let head = item.find(['{', ';']).unwrap_or(item.len());
        let is_module = item[..head].split_whitespace().any(|w| w == "mod");
        if is_module && item[head..].starts_with('{') {
            let end = left.len() - after_braces(&item[head..]).len();
            let lines = left[at..end].matches('\n').count();
            left.replace_range(at..end, &"\n".repeat(lines));
        }
    }
    left
}

/// The names of files that are modules of tests.
fn test_modules(text: &str) -> BTreeSet<String> {
    let parts = text.split("#[cfg(test)]").skip(1);
    let named = parts.filter_map(|part| {
        let declared = part[..part.find(['{', ';'])?].split_once("mod ")?.1;
        Some(word(declared).to_string())
    });
    named.collect()
}

/// The names that a path or a group of paths begins with.
fn heads(rest: &str) -> Vec<&str> {
    if !rest.starts_with('{') {
        return vec![word(rest)];
    }
    let group = &rest[1..rest.len() - after_braces(rest).len() - 1];
    let mut depth = 0;
    let at_top = |c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    };
    let parts: Vec<&str> = group.split(at_top).collect();
    parts.into_iter().map(|part| word(part.trim_start())).collect()
}

/// The names under the crate's root that a file so deep in it takes, with their lines.
fn names(text: &str, depth: usize) -> Vec<(usize, String)> {
    let text = code(text);
    let mut found = vec![];
    for root in ["crate::".to_string(), "super::".repeat(depth)] {
        for (at, _) in text.match_indices(&root) {
            let before = text[..at].chars().next_back();
            let inside = before.is_some_and(|c| c == '_' || c == ':' || c.is_ascii_alphanumeric());
            let rest = &text[at + root.len()..];
            if !inside && !rest.starts_with("super::") {
                let line = text[..at].matches('\n').count() + 1;
                found.extend(heads(rest).into_iter().map(|head| (line, head.to_string())));
            }
        }
    }
    found
}

/// What a crate's root hands on: names, and the modules that have them.
fn exports(root: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for part in root.split("pub use ").skip(1) {
        let Some((module, rest)) = part.split_once("::") else {
            continue;
        };
        for name in heads(rest) {
            found.insert(name.to_string(), module.to_string());
        }
    }
    found
}

/// The imports of one file from other modules.
fn imports(source: &Source, exports: &BTreeMap<String, String>) -> Vec<Import> {
    let from = &source.path[0];
    let found = names(&source.text, source.path.len()).into_iter();
    let resolved = found.map(|(line, name)| Import {
        place: format!("{}:{line}", source.name),
        from: from.clone(),
        to: exports.get(&name).cloned().unwrap_or(name),
    });
    resolved.filter(|i| i.to != *from && !i.to.is_empty()).collect()
}

// What is wrong with imports.

/// A sentence for each import of a module that does not stand before its own.
fn upward(order: &[&str], imports: &[Import]) -> Vec<String> {
    let stands = |name: &str| order.iter().position(|m| *m == name);
    let mut wrong = vec![];
    for Import { place, from, to } in imports {
        match (stands(from), stands(to)) {
            (Some(own), Some(other)) if other < own => {}
            (Some(_), Some(_)) => wrong.push(format!("{place}: {from} imports {to}, which stands after it")),
            (None, _) => wrong.push(format!("{place}: {from} is not in the list")),
            (_, None) => wrong.push(format!("{place}: {from} imports {to}, which is not in the list")),
        }
    }
    wrong
}

/// The imports of a circle of modules, if there is one.
fn circle(imports: &[Import]) -> Option<Vec<Import>> {
    let mut left: Vec<&Import> = imports.iter().collect();
    loop {
        // Whoever imports nothing that imports something is in no circle.
        let importers: BTreeSet<&str> = left.iter().map(|i| i.from.as_str()).collect();
        let before = left.len();
        left.retain(|i| importers.contains(i.to.as_str()));
        if left.is_empty() {
            return None;
        }
        if left.len() == before {
            break;
        }
    }
    // From here on every step leads to another one: at last to a module that was there before.
    let mut way: Vec<&Import> = vec![left[0]];
    loop {
        let at = &way[way.len() - 1].to;
        if let Some(start) = way.iter().position(|i| i.from == *at) {
            return Some(way[start..].iter().map(|i| (*i).clone()).collect());
        }
        way.push(left.iter().find(|i| i.from == *at)?);
    }
}

fn described(circle: &[Import]) -> String {
    let lines = circle
        .iter()
        .map(|i| format!("  {}: {} imports {}", i.place, i.from, i.to));
    lines.collect::<Vec<_>>().join("\n")
}

// The sources.

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn modules(path: &Path) -> Vec<String> {
    let parts = path.with_extension("");
    let parts = parts.iter().map(|p| p.to_string_lossy().into_owned());
    parts.filter(|p| p != "mod").collect()
}

/// All imports of a crate, and the names of its modules.
fn imports_of(name: &str) -> (Vec<Import>, BTreeSet<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
    let mut paths = vec![];
    files(&root, &mut paths);
    let mut sources = vec![];
    for path in paths {
        let relative = path.strip_prefix(&root).unwrap();
        sources.push(Source {
            name: format!("crates/{name}/src/{}", relative.display()),
            path: modules(relative),
            text: fs::read_to_string(&path).unwrap(),
        });
    }
    let mut of_tests = BTreeSet::new();
    for source in &sources {
        for module in test_modules(&source.text) {
            let parent = if source.path == ["lib"] {
                &[][..]
            } else {
                &source.path[..]
            };
            of_tests.insert([parent, &[module]].concat());
        }
    }
    let root = sources.iter().find(|s| s.path == ["lib"]).unwrap();
    let exports = exports(&root.text);
    let (mut found, mut names) = (vec![], BTreeSet::new());
    for source in &sources {
        let in_tests = (1..=source.path.len()).any(|n| of_tests.contains(&source.path[..n]));
        let in_tests = in_tests || source.path.last().is_some_and(|m| m == "tests");
        if !in_tests && source.path[0] != "lib" && source.path[0] != "bin" {
            names.insert(source.path[0].clone());
            found.extend(imports(source, &exports));
        }
    }
    (found, names)
}

#[test]
fn modules_of_the_core_import_only_those_before_them() {
    let (imports, modules) = imports_of("hypatia-core");
    assert!(imports.len() > 100, "only {} imports were found", imports.len());
    let listed: BTreeSet<String> = ORDER.iter().map(|m| m.to_string()).collect();
    assert_eq!(modules, listed, "the list in this test and the modules of the core");
    let wrong = upward(&ORDER, &imports);
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn modules_of_the_other_crates_are_in_no_circle() {
    for name in ["hypatia-runtime", "hypatia-cuda", "hypatia-py"] {
        let (imports, _) = imports_of(name);
        assert!(
            imports.len() > 20,
            "only {} imports were found in {name}",
            imports.len()
        );
        if let Some(circle) = circle(&imports) {
            panic!("modules of {name} import each other:\n{}", described(&circle));
        }
    }
}

// The check itself, given text.

fn planted(path: &[&str], text: &str) -> Vec<Import> {
    let exports = exports("pub use error::{Error, Result};\npub use optimize::optimize;\n");
    let source = Source {
        name: "planted.rs".into(),
        path: path.iter().map(|p| p.to_string()).collect(),
        text: text.into(),
    };
    imports(&source, &exports)
}

#[test]
fn an_upward_import_is_found() {
    let order = ["error", "ops", "ir", "optimize"];
    let found = |path: &[&str], text: &str| upward(&order, &planted(path, text));
    assert!(found(&["ir", "node"], "use crate::ops::Row;\nuse crate::{Error, Result};\n").is_empty());
    let wrong = "planted.rs:2: ops imports ir, which stands after it";
    assert_eq!(
        found(&["ops"], "use crate::Error;\nuse crate::ir::node::Op;\n"),
        [wrong]
    );
    assert_eq!(found(&["ops"], "\nfn f(x: crate::ir::node::Op) {}\n"), [wrong]);
    assert_eq!(found(&["ops"], "\nuse crate::{Error, ir::{node, text}};\n"), [wrong]);
    assert_eq!(found(&["ops"], "\nuse super::ir::node::Op;\n"), [wrong]);
    assert_eq!(found(&["ops", "view"], "\nuse super::super::ir::node::Op;\n"), [wrong]);
    // A name that the root hands on counts as its module's.
    let wrong = "planted.rs:1: ops imports optimize, which stands after it";
    assert_eq!(found(&["ops"], "use crate::optimize;\n"), [wrong]);
    let wrong = "planted.rs:1: ops imports plan, which is not in the list";
    assert_eq!(found(&["ops"], "use crate::plan::Plan;\n"), [wrong]);
}

#[test]
fn comments_tests_and_neighbours_are_no_imports() {
    let text =
        "//! See [`crate::ir`].\nuse super::args;\n#[cfg(test)]\nmod tests {\n    use crate::ir;\n    fn f() {}\n}\n";
    assert_eq!(planted(&["ops", "view"], text), []);
    let later = format!("{text}use crate::ir;\n");
    let places: Vec<String> = planted(&["ops", "view"], &later).into_iter().map(|i| i.place).collect();
    assert_eq!(places, ["planted.rs:8"]);
}

#[test]
fn a_circle_is_found() {
    let import = |from: &str, to: &str| Import {
        place: format!("{from}.rs:1"),
        from: from.into(),
        to: to.into(),
    };
    let straight = [import("a", "b"), import("b", "c"), import("a", "c")];
    assert_eq!(circle(&straight), None);
    let round = [&straight[..], &[import("c", "b")]].concat();
    let found = circle(&round).unwrap();
    assert_eq!(described(&found), "  b.rs:1: b imports c\n  c.rs:1: c imports b");
}
