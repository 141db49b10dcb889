//! A program with its fused ops replaced by what they mean.

use std::collections::BTreeMap;

use egg::Id;
use rustc_hash::FxHashMap;

use crate::attr::Attr;
use crate::error::Result;
use crate::ir::build::Sink;
use crate::ir::define::{self, Operands, operand_index};
use crate::ir::node::{Node, Op};
use crate::ir::program::Program;
use crate::ir::sexp::Pos;
use crate::ops::{Meaning, OpId, Row, table};

/// A program without fused ops, and which of its nodes are made of weights only.
pub(super) struct Inlined {
    pub program: Program,
    /// The node of the original program that a weight-only node or an input stands for.
    pub origin: BTreeMap<Id, Id>,
    pub weight: Vec<bool>,
}

impl Inlined {
    pub fn new(source: &Program, weight: &dyn Fn(Id) -> bool) -> Result<Inlined> {
        let mut inlined = Inlined {
            program: Program::over(&source.leaves),
            origin: BTreeMap::new(),
            weight: vec![],
        };
        let mut place: FxHashMap<Id, Id> = FxHashMap::default();
        for id in source.reachable() {
            let node = source.node(id);
            let operands: Vec<Id> = node.children.iter().map(|c| place[c]).collect();
            let new = match &node.op {
                Op::Row(op) if matches!(table().row(*op).meaning, Meaning::Defined(_)) => {
                    let mut sink = Inline {
                        row: table().row(*op),
                        program: &mut inlined.program,
                        operands,
                    };
                    define::expand(*op, &mut sink)?
                }
                op => inlined.program.add(Node {
                    op: op.clone(),
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

struct Inline<'a> {
    row: &'static Row,
    program: &'a mut Program,
    operands: Vec<Id>,
}

impl Operands for Inline<'_> {
    fn count(&self) -> usize {
        self.operands.len()
    }
}

impl Sink for Inline<'_> {
    type Ref = Id;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Id> {
        operand_index(self.row, word)
            .and_then(|i| self.operands.get(i).copied())
            .ok_or_else(|| pos.error(format!("{} has no operand {word}", self.row.name)))
    }

    fn attr(&mut self, attr: Attr) -> Result<Id> {
        Ok(self.program.attr(attr))
    }

    fn op(&mut self, op: OpId, operands: Vec<Id>, _: Pos) -> Result<Id> {
        self.program.op(op, operands)
    }
}
