//! Multi-layer perceptrons of any depth: `linear → act → linear → … → linear` is one op.

use egg::Id;

use super::Phase::Fuse;
use super::equality::{Sides, classes_of, nodes_of};
use super::{Numerics, Rule, program};
use crate::egraph::EGraph;
use crate::ops::fused::activations;
use crate::ops::{OpId, op_id};

macro_rules! perceptrons {
    ($($act:literal $_short:literal $numerics:ident $fused:literal $name:literal;)*) => {
        vec![$(program(
            $name,
            Fuse,
            Numerics::$numerics,
            concat!(
                "(linear ?wn ?bn (", $act, " (linear … (", $act, " (linear ?w1 ?b1 ?x))))) = (",
                $fused, " ?w1 ?b1 … ?wn ?bn ?x)"
            ),
            &[
                concat!("(linear ?w2 ?b2 (", $act, " (linear ?w1 ?b1 ?x)))"),
                concat!("(linear ?w3 ?b3 (", $act, " (linear ?w2 ?b2 (", $act, " (linear ?w1 ?b1 ?x)))))"),
            ],
            |egraph, rule| grow(egraph, rule, op_id($act), op_id($fused)),
        )),*]
    };
}

pub(super) fn rules() -> Vec<Rule> {
    activations!(perceptrons)
}

/// Finds `(linear w b (act h))` and unites it with the fused op that ends in this layer, for
/// every linear layer or shorter fused op `h`. One layer is added in each round.
fn grow(egraph: &mut EGraph, rule: &Rule, act: OpId, fused: OpId) -> usize {
    let mut found: Vec<(Vec<Id>, Vec<Id>)> = vec![];
    for class in classes_of(egraph, op_id("linear"), 3) {
        for last in nodes_of(egraph, class, op_id("linear")) {
            for activation in nodes_of(egraph, last[2], act) {
                for op in [op_id("linear"), fused] {
                    for first in nodes_of(egraph, activation[0], op) {
                        found.push((last.clone(), first));
                    }
                }
            }
        }
    }
    found.sort();
    found.dedup();
    found
        .into_iter()
        .filter(|(last, first)| unite(egraph, rule, act, fused, last, first))
        .count()
}

fn unite(egraph: &mut EGraph, rule: &Rule, act: OpId, fused: OpId, last: &[Id], first: &[Id]) -> bool {
    // Operands of a chain: `first` is either `w b x` or `w1 b1 … x` already.
    let mut sides = Sides::default();
    let inner: Vec<Id> = first.iter().map(|id| sides.left.var(*id)).collect();
    let is_chain = first.len() > 3;
    let head = sides.left.add(if is_chain { fused } else { op_id("linear") }, &inner);
    let activation = sides.left.add(act, &[head]);
    let (w, b) = (sides.left.var(last[0]), sides.left.var(last[1]));
    sides.left.add(op_id("linear"), &[w, b, activation]);

    let (layers, x) = first.split_at(first.len() - 1);
    let operands: Vec<Id> = layers
        .iter()
        .chain(&last[..2])
        .chain(x)
        .map(|id| sides.right.var(*id))
        .collect();
    sides.right.add(fused, &operands);
    sides.unite(egraph, rule.name)
}
