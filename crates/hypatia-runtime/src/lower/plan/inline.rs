//! A program with its fused ops replaced by what they mean.

use std::collections::BTreeMap;

use egg::Id;
use hypatia_core::ir::expand::expand;
use hypatia_core::ir::node::{Node, Op};
use hypatia_core::ir::program::Program;
use hypatia_core::ops::{Meaning, table};
use rustc_hash::FxHashMap;

use crate::error::Result;

/// A program without fused ops, and which of its nodes are made of weights only.
pub(super) struct Inlined {
    pub program: Program,
    /// The node of the original program that a weight-only node or an input stands for.
    pub origin: BTreeMap<Id, Id>,
    pub weight: Vec<bool>,
    /// Images of convolutions have their channels last.
    pub images: bool,
}

impl Inlined {
    /// Replaces symbols by sizes, where they are given.
    pub fn new(source: &Program, weight: &dyn Fn(Id) -> bool, sizes: &BTreeMap<String, i64>) -> Result<Inlined> {
        let mut leaves = source.leaves.clone();
        leaves.inputs.iter_mut().for_each(|i| i.ty = i.ty.at(sizes));
        leaves.opaques.values_mut().for_each(|o| o.ty = o.ty.at(sizes));
        let mut inlined = Inlined {
            program: Program::over(&leaves),
            origin: BTreeMap::new(),
            weight: vec![],
            images: false,
        };
        let mut place: FxHashMap<Id, Id> = FxHashMap::default();
        for id in source.reachable() {
            let node = source.node(id);
            let operands: Vec<Id> = node.children.iter().map(|c| place[c]).collect();
            let new = match &node.op {
                Op::Row(op) if matches!(table().row(*op).meaning, Meaning::Defined(_)) => {
                    expand(*op, &mut inlined.program, operands)?
                }
                op => inlined.program.add(Node {
                    op: match op {
                        Op::Attr(a) => Op::Attr(a.at(sizes)),
                        other => other.clone(),
                    },
                    children: operands.into_iter().collect(),
                })?,
            };
            place.insert(id, new);
            inlined.weight.resize(inlined.program.nodes().len(), false);
            if weight(id) || matches!(node.op, Op::Input(_)) {
                inlined.weight[usize::from(new)] = weight(id);
                inlined.origin.insert(new, id);
            }
        }
        inlined.program.root = place[&source.root];
        Ok(inlined)
    }
}
