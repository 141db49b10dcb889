//! The examples in `docs/` are read by the compiler.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hypatia_core::rules::soundness::check_rule;
use hypatia_core::rules::{Numerics, Phase, try_rule};

fn page(name: &str) -> String {
    let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

/// All files of a folder and of those in it.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// The words between double quotes of a line; they live as long as the test.
fn quoted(line: &str) -> Vec<&'static str> {
    line.split('"')
        .skip(1)
        .step_by(2)
        .map(|w| &*w.to_string().leak())
        .collect()
}

#[test]
fn rules_of_the_page_are_sound() {
    let page = page("adding-a-rule.md");
    let block = page
        .split("```text\n")
        .nth(1)
        .and_then(|b| b.split("```").next())
        .unwrap();
    let mut seen = 0;
    for line in block.lines() {
        let words = quoted(line);
        let [name, left, right, guards @ ..] = words.as_slice() else {
            panic!("{line}")
        };
        let numerics = if line.contains("Exact") {
            Numerics::Exact
        } else {
            Numerics::Reassoc
        };
        let guards: &'static [&'static str] = guards.to_vec().leak();
        let rule = try_rule(name, Phase::Algebra, numerics, left, right, guards).unwrap();
        let report = check_rule(&rule, 400, 1);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        assert!(!report.fired.is_empty(), "{name} never fired");
        seen += 1;
    }
    assert_eq!(seen, 3);
}

#[test]
fn the_fused_op_of_the_page_is_in_the_table() {
    let page = page("adding-an-op.md");
    let line = page.lines().find(|l| l.starts_with("defined(")).unwrap();
    let words = quoted(line);
    let row = hypatia_core::ops::table().row(hypatia_core::ops::op_id(words[0]));
    let definition = hypatia_core::sexp::parse_one(words[2]).unwrap();
    assert_eq!(row.definition(row.params.len()), Some(definition));
}

#[test]
fn the_files_of_a_kind_of_step_are_all_that_name_it() {
    let page = page("adding-a-kernel.md");
    let section = page.split("## A kind of step").nth(1).unwrap();
    let block = section.split("```").nth(1).unwrap();
    let listed: BTreeSet<&str> = block.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = BTreeSet::new();
    for name in ["hypatia-core", "hypatia-runtime", "hypatia-cuda", "hypatia-py"] {
        let mut paths = vec![];
        files(&root.join("crates").join(name).join("src"), &mut paths);
        for path in paths.iter().filter(|p| p.extension().is_some_and(|e| e == "rs")) {
            if !path.ends_with("tests.rs")
                && std::fs::read_to_string(path)
                    .unwrap()
                    .to_lowercase()
                    .contains("depthwise")
            {
                found.insert(path.strip_prefix(&root).unwrap().display().to_string());
            }
        }
    }
    assert_eq!(listed, found.iter().map(String::as_str).collect());
}
