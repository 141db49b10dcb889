//! Wrong rules, for tests: they show that a compilation that goes wrong is noticed. They are used
//! only by name ([`crate::Options::planted`]) and are in no table.

use std::sync::OnceLock;

use super::Rule;
use super::canon::laws;

/// The wrong rules. Each makes a program cheaper, so that it is chosen.
pub fn planted() -> &'static [Rule] {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    RULES.get_or_init(|| {
        laws! {
            "planted-relu-lost": Canon Exact, "(relu ?x)" => "?x";
            "planted-bias-lost": Canon Exact, "(linear ?w ?b ?x)" => "(linear ?w none ?x)" if "(rank ?b 1)";
            "planted-scale-lost": Canon Exact, "(mul ?x ?a)" => "?x" if "(number ?a)";
        }
    })
}
