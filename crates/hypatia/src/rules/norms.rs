//! Rules to come.

use super::Rule;

pub(super) fn rules() -> Vec<Rule> {
    vec![]
}
