//! The rules. A rule is one line: name, phase, numerics class, left side, right side, guards. One whose sides have the
//! same values but not everywhere the same gradient has the word `of_values` behind its class.
//!
//! A rule fires only when both sides provably have the same type, so type rules are guards
//! too. `(add~ a b)` on a left side stands for both orders of the operands.

pub mod faults;
pub mod guards;
pub mod pattern;
pub mod saturate;
pub mod soundness;

mod algebra;
mod canon;
mod contractions;
mod equality;
mod fusion;
mod linear;
mod merge;
mod mlp;
mod norms;
mod views;

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::egraph::EGraph;
use crate::error::Result;
use pattern::Rewrite;

/// How a rule may change the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Numerics {
    /// Bit for bit the same.
    Exact,
    /// The same real number, fewer roundings than eager.
    Wider,
    /// The same real number, rounded in another order.
    Reassoc,
    /// Another real number, close by: off unless an error budget pays for it.
    Approx,
}

/// When a rule is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// One spelling for each meaning.
    Canon,
    /// Other ways to compute the same.
    Algebra,
    /// Work that shares an operand becomes one piece of work; once.
    Merge,
    /// Several ops become one kernel.
    Fuse,
}

/// How a rule is carried out.
pub enum Action {
    /// By patterns.
    Pattern(Vec<Rewrite>),
    /// By a function over the whole e-graph, for rules with any number of operands or several
    /// results; it returns how many equalities it added.
    Program(fn(&mut EGraph, &Rule) -> usize),
}

/// A rule.
pub struct Rule {
    /// Its name, unique.
    pub name: &'static str,
    /// When it is tried.
    pub phase: Phase,
    /// How it may change the numbers.
    pub numerics: Numerics,
    /// The law, `left = right`.
    pub law: String,
    /// Whether both sides have the same gradient too, at ties and bounds as elsewhere. If not, it does not fire in graphs
    /// that autograd differentiates.
    pub gradient: bool,
    /// What must hold for it to fire.
    pub guards: &'static [&'static str],
    /// How it is carried out.
    pub action: Action,
    /// Programs on which the soundness walk tries it; the left side for a pattern.
    pub samples: Vec<String>,
}

impl Rule {
    /// The same, of values alone: the sides have other gradients somewhere.
    pub fn of_values(mut self) -> Rule {
        self.gradient = false;
        self
    }
}

/// A rule given by patterns.
pub(crate) fn rule(
    name: &'static str,
    phase: Phase,
    numerics: Numerics,
    left: &'static str,
    right: &'static str,
    guards: &'static [&'static str],
) -> Rule {
    match try_rule(name, phase, numerics, left, right, guards) {
        Ok(rule) => rule,
        Err(e) => panic!("rule {name}: {e}"),
    }
}

/// A rule given by patterns, from text that may be wrong.
pub fn try_rule(
    name: &'static str,
    phase: Phase,
    numerics: Numerics,
    left: &'static str,
    right: &'static str,
    guards: &'static [&'static str],
) -> Result<Rule> {
    Ok(Rule {
        name,
        phase,
        numerics,
        law: format!("{} = {right}", left.replace('~', "")),
        gradient: true,
        guards,
        action: Action::Pattern(Rewrite::variants(left, right, guards)?),
        samples: vec![left.replace('~', "")],
    })
}

/// A rule given by a function.
pub(crate) fn program(
    name: &'static str,
    phase: Phase,
    numerics: Numerics,
    law: &str,
    samples: &[&str],
    action: fn(&mut EGraph, &Rule) -> usize,
) -> Rule {
    Rule {
        name,
        phase,
        numerics,
        law: law.into(),
        gradient: true,
        guards: &[],
        action: Action::Program(action),
        samples: samples.iter().map(|s| s.to_string()).collect(),
    }
}

/// All rules of this build.
pub fn rules() -> &'static [Rule] {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    RULES.get_or_init(|| {
        [
            canon::rules(),
            views::rules(),
            algebra::rules(),
            contractions::rules(),
            linear::rules(),
            norms::rules(),
            merge::rules(),
            fusion::rules(),
            mlp::rules(),
        ]
        .into_iter()
        .flatten()
        .collect()
    })
}
