//! What Python calls goes through the guard that makes an exception of a panic. The sources of the extension are read as
//! text.

use std::path::{Path, PathBuf};

/// Functions that only hand out what is there.
const GETTERS: [&str; 10] = [
    "aux",
    "bytes",
    "early",
    "is_native",
    "key",
    "kinds",
    "outputs",
    "report",
    "scratch_bytes",
    "targets",
];

/// Those that call what they are given with the guard around it.
const GUARDS: [&str; 3] = ["caught(", "guarded(", "logged("];

/// The text between the first opening brace and the closing one for it.
fn block(text: &str) -> &str {
    let Some(start) = text.find('{') else { return "" };
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[start + 1..start + at];
        }
    }
    ""
}

/// The functions of a text, by their names, with what they do. Functions inside of functions are parts of those.
fn functions(mut text: &str) -> Vec<(&str, &str)> {
    let mut found = vec![];
    while let Some(at) = text.find("fn ") {
        let rest = &text[at + 3..];
        let name = &rest[..rest.find(['(', '<']).unwrap_or(rest.len())];
        let body = block(rest);
        let end = body.as_ptr() as usize - text.as_ptr() as usize + body.len();
        found.push((name, body));
        text = &text[end..];
    }
    found
}

/// Functions that Python calls: their names, and what they do.
fn entries(text: &str) -> Vec<(&str, &str)> {
    let lone = text.split("#[pyfunction]").skip(1);
    let lone = lone.filter_map(|rest| functions(&rest[..rest.find("\n}\n").map_or(rest.len(), |at| at + 3)]).pop());
    let methods = text.split("#[pymethods]").skip(1);
    lone.chain(methods.flat_map(|rest| functions(block(rest)))).collect()
}

/// Names of functions that Python calls and that are neither guarded nor getters.
fn unguarded(text: &str) -> Vec<&str> {
    let bare = |(name, body): &(&str, &str)| !GETTERS.contains(name) && !GUARDS.iter().any(|g| body.contains(g));
    entries(text).into_iter().filter(bare).map(|(name, _)| name).collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn what_python_calls_is_guarded() {
    let mut paths = vec![];
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("../hypatia-py/src"),
        &mut paths,
    );
    let mut count = 0;
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        count += entries(&text).len();
        let bare = unguarded(&text);
        assert!(bare.is_empty(), "{}: {bare:?} may panic into Python", path.display());
    }
    assert!(count > 50, "only {count} functions were found");
}

// The check itself, given text.

#[test]
fn a_function_without_a_guard_is_found() {
    let text = "
#[pyfunction]
#[pyo3(signature = (a = None))]
fn first(py: Python<'_>, a: Option<u32>) -> PyResult<u32> {
    guarded(py, || Ok(a.map_or(0, |a| a)))
}

fn helper() {
    first();
}

#[pyfunction]
fn second() -> u32 {
    helper()
}

#[pymethods]
impl Thing {
    fn third(&self) -> PyResult<()> {
        caught(|| { Ok(()) })
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn fourth(&self) {
        self.bytes.unwrap();
    }
}

impl Thing {
    fn fifth(&self) {}
}
";
    assert_eq!(entries(text).len(), 5);
    assert_eq!(unguarded(text), ["second", "fourth"]);
}
