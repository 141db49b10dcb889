//! Both sides of rules on random programs, for whoever can compute them by other means: torch, gradients included.

use std::collections::BTreeSet;

use egg::{AstSize, Extractor, Id, Language, RecExpr};

use super::sample::Sampler;
use super::{applied, forms, frozen};
use crate::egraph::EGraph;
use crate::ir::node::{Node, Op};
use crate::ir::program::Program;
use crate::random::Random;
use crate::rules::Rule;
use crate::ty::Ty;

/// Two expressions that a rule says are equal.
pub struct Pair {
    /// The terms of both; its inputs are those of the sample.
    pub terms: Program,
    /// As in the sample.
    pub before: Id,
    /// As the rule would have it.
    pub after: Id,
    /// Which inputs make sense above zero only.
    pub positive: Vec<bool>,
}

/// Draws for one pair.
const TRIES: usize = 100;

/// At most `count` pairs for each form of a rule, all different.
pub fn pairs(rule: &Rule, count: usize, seed: u64) -> Vec<Pair> {
    let mut found = vec![];
    for (i, form) in forms(rule).unwrap_or_default().iter().enumerate() {
        let mut random = Random(rule.name.bytes().fold(seed ^ i as u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        }));
        let mut own = 0;
        for _ in 0..TRIES * count {
            if own == count {
                break;
            }
            let frozen = frozen(rule, form, &mut random);
            let pair = Sampler::sample(form, &frozen, &mut random, &mut 0).and_then(|sample| {
                let egraph = applied(rule, &sample)?;
                let (terms, before, after) = differing(&egraph, &sample.program)?;
                Some(Pair {
                    terms,
                    before,
                    after,
                    positive: sample.positive,
                })
            });
            own += usize::from(pair.is_some());
            found.extend(pair);
        }
    }
    found
}

/// A node of the program that is a tensor, and another expression of its class.
fn differing(egraph: &EGraph, program: &Program) -> Option<(Program, Id, Id)> {
    let extractor = Extractor::new(egraph, AstSize);
    let mut seen = BTreeSet::new();
    for id in program.reachable().into_iter().rev() {
        if !matches!(program.ty(id), Ty::Tensor(_)) || matches!(program.node(id).op, Op::Input(_)) {
            continue;
        }
        let mut part = program.clone();
        part.root = id;
        let own = part.expr().0;
        let class = egraph.find(egraph.lookup_expr(&own)?);
        if !seen.insert(class) {
            continue;
        }
        for node in &egraph[class].nodes {
            let other: RecExpr<Node> = node.join_recexprs(|c| extractor.find_best(c).1);
            let mut terms = program.clone();
            let after = add(&mut terms, &other)?;
            if after != id {
                return Some((terms, id, after));
            }
        }
    }
    None
}

fn add(terms: &mut Program, expr: &RecExpr<Node>) -> Option<Id> {
    let mut place: Vec<Id> = vec![];
    for node in expr.as_ref() {
        place.push(terms.add(node.clone().map_children(|c| place[usize::from(c)])).ok()?);
    }
    place.last().copied()
}
