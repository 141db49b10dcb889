//! Every rule of this build is sound, and the walk that says so can be trusted.

use hypatia::rules::rules;
use hypatia::rules::soundness::{reports, walk};

#[test]
fn every_rule_is_sound() {
    let found = walk(rules());
    let text: Vec<String> = found.iter().map(|f| format!("{} ({:?}): {}", f.rule, f.kind, f.detail)).collect();
    assert!(found.is_empty(), "{}", text.join("\n"));
}
