//! What is known of every class: its type, whether it is made of weights only, whether all its
//! elements are one known number. Merged classes must agree.

use std::sync::Arc;

use egg::{Analysis, DidMerge, Id};

use super::EGraph;
use crate::attr::Attr;
use crate::cost;
use crate::ir::node::{Node, Op};
use crate::ir::program::Leaves;
use crate::ops::table;
use crate::ty::Ty;

/// Facts about a class.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Its type.
    pub ty: Ty,
    /// Computed from frozen weights and constants only.
    pub weight: bool,
    /// The one value of all elements, by its bits.
    pub constant: Option<u64>,
}

impl Facts {
    /// Facts of a compile-time value.
    pub fn of_attr(attr: Attr) -> Facts {
        let constant = attr.number().map(f64::to_bits);
        Facts {
            ty: Ty::Attr(attr),
            weight: true,
            constant,
        }
    }
}

/// What the analysis needs to know, and what it found wrong.
#[derive(Debug, Clone, Default)]
pub struct Context {
    /// What the leaves stand for.
    pub leaves: Arc<Leaves>,
    /// Facts that did not agree: a rule is unsound, the result must not be used.
    pub conflicts: Vec<String>,
}

impl Analysis<Node> for Context {
    type Data = Facts;

    fn make(egraph: &mut EGraph, node: &Node, _: Id) -> Facts {
        let operand = |id: &Id| &egraph[*id].data;
        if let Op::Attr(a) = &node.op {
            return Facts::of_attr(a.clone());
        }
        let types: Vec<Ty> = node.children.iter().map(|c| operand(c).ty.clone()).collect();
        let ty = egraph.analysis.leaves.infer(&node.op, &types).unwrap_or(Ty::Unknown);
        let all_weights = node.children.iter().all(|c| operand(c).weight);
        let leaves = &egraph.analysis.leaves;
        let weight = match &node.op {
            Op::Input(i) => leaves.inputs.get(*i as usize).is_some_and(|i| i.weight),
            // A call without operands has nothing that could be watched for changes.
            Op::Opaque(i) => all_weights && !types.is_empty() && leaves.opaques.get(i).is_some_and(|o| !o.effect),
            _ => all_weights,
        };
        let constant = match &node.op {
            Op::Row(op) if table().row(*op).name == "full" => {
                let value = operand(&node.children[2]).constant.map(f64::from_bits);
                value.zip(ty.tensor()).map(|(v, t)| t.dtype.round(v).to_bits())
            }
            Op::Row(op) if cost::is_view(*op) && types.first().is_some_and(|t| t.tensor().is_some()) => {
                operand(&node.children[0]).constant
            }
            _ => None,
        };
        Facts { ty, weight, constant }
    }

    fn merge(&mut self, a: &mut Facts, b: Facts) -> DidMerge {
        let mut did = DidMerge(false, false);
        if a.ty != b.ty {
            self.conflicts.push(format!("{} and {} were merged", a.ty, b.ty));
        }
        if a.weight != b.weight {
            did = did | DidMerge(!a.weight, !b.weight);
            a.weight = true;
        }
        match (a.constant, b.constant) {
            (None, Some(_)) => {
                a.constant = b.constant;
                did = did | DidMerge(true, false);
            }
            (Some(_), None) => did = did | DidMerge(false, true),
            (Some(x), Some(y)) if f64::from_bits(x) != f64::from_bits(y) => {
                self.conflicts.push(format!(
                    "constants {} and {} were merged",
                    f64::from_bits(x),
                    f64::from_bits(y)
                ));
            }
            _ => {}
        }
        did
    }
}
