//! A chosen program written down, to be lowered again without a search. Its leaves are those of the captured graph.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use serde::{Deserialize, Serialize};

use super::node::{Node, Op};
use super::program::Program;
use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::ops::{op_id, table};

/// A program without its leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// What each node does, and its operands.
    nodes: Vec<(Word, Vec<usize>)>,
    root: usize,
    /// Which nodes are made of frozen weights only.
    weights: Vec<bool>,
    /// The captured records that have the same values, by node.
    origins: Vec<Option<u32>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    Op(String),
    Attr(String),
    Input(u32),
    Opaque(u32),
}

impl Kept {
    /// Writes a program down; none if one of its compile-time values has no text that can be read again.
    pub fn of(program: &Program, weights: &[bool]) -> Option<Kept> {
        let word = |node: &Node| {
            Some(match &node.op {
                Op::Row(id) => Word::Op(table().row(*id).name.into()),
                Op::Attr(a) => {
                    let text = a.to_string();
                    Word::Attr((Attr::parse(&text).as_ref() == Some(a)).then_some(text)?)
                }
                Op::Input(i) => Word::Input(*i),
                Op::Opaque(i) => Word::Opaque(*i),
            })
        };
        let nodes = program.nodes().iter().map(|n| {
            let operands = n.children.iter().map(|c| usize::from(*c)).collect();
            Some((word(n)?, operands))
        });
        Some(Kept {
            nodes: nodes.collect::<Option<_>>()?,
            root: program.root.into(),
            weights: weights.to_vec(),
            origins: (0..program.nodes().len())
                .map(|i| program.origin.get(&Id::from(i)).copied())
                .collect(),
        })
    }

    /// The program over the leaves of its source, with the nodes at their old places, and which are made of weights.
    ///
    /// It may come from anywhere: ops are those of the table, types are inferred anew, and what is captured is the
    /// source's own.
    pub fn program(&self, source: &Program) -> Result<(Program, &[bool])> {
        let broken = |what: &str| Error::Graph(format!("a kept program: {what}"));
        let nodes = self.nodes.len();
        if self.root >= nodes || self.weights.len() != nodes || self.origins.len() != nodes {
            return Err(broken("its parts do not fit"));
        }
        let records: BTreeSet<u32> = source
            .origin
            .values()
            .chain(source.leaves.opaques.keys())
            .copied()
            .collect();
        if self.origins.iter().flatten().any(|o| !records.contains(o)) {
            return Err(broken("a record that was not captured"));
        }
        let mut program = Program::over(&source.leaves);
        for (at, (word, operands)) in self.nodes.iter().enumerate() {
            if operands.iter().any(|o| *o >= at) {
                return Err(broken("operands come after their users"));
            }
            let op = match word {
                Word::Op(name) => Op::Row(
                    table()
                        .by_name(name)
                        .ok_or_else(|| broken("an op that does not exist"))?,
                ),
                Word::Attr(text) => Op::Attr(Attr::parse(text).ok_or_else(|| broken("a value that cannot be read"))?),
                Word::Input(i) => Op::Input(*i),
                Word::Opaque(i) => Op::Opaque(*i),
            };
            let children = operands.iter().map(|o| Id::from(*o)).collect();
            if let Op::Row(id) = op
                && !table().row(id).takes(operands.len())
            {
                return Err(broken("an op with another number of operands"));
            }
            if usize::from(program.add(Node { op, children })?) != at {
                return Err(broken("a node is there twice"));
            }
        }
        program.root = Id::from(self.root);
        let several = |p: &Program| p.node(p.root).op == Op::Row(op_id("tuple"));
        if program.ty(program.root) != source.ty(source.root) || several(&program) != several(source) {
            return Err(broken("its results are others"));
        }
        if !self.weights_hold(&program) {
            return Err(broken("what changes is no weight"));
        }
        program.origin = self.origins(&program, source);
        Ok((program, &self.weights))
    }

    /// Whether nodes that count as weights read nothing else.
    fn weights_hold(&self, program: &Program) -> bool {
        let mut fixed: Vec<bool> = vec![];
        for node in program.nodes() {
            fixed.push(match &node.op {
                Op::Input(i) => program.leaves.inputs[*i as usize].weight,
                Op::Opaque(_) => false,
                Op::Attr(_) | Op::Row(_) => node.children.iter().all(|c| fixed[usize::from(*c)]),
            });
        }
        self.weights.iter().zip(&fixed).all(|(said, fixed)| !said || *fixed)
    }

    /// Where the nodes come from; of inputs the source tells it.
    fn origins(&self, program: &Program, source: &Program) -> BTreeMap<Id, u32> {
        let captured = |node: &Node| {
            let found = source.nodes().iter().position(|n| n.op == node.op);
            found.and_then(|i| source.origin.get(&Id::from(i)).copied())
        };
        let origin = |(node, kept): (&Node, &Option<u32>)| match node.op {
            Op::Input(_) => captured(node),
            _ => *kept,
        };
        let all = program.nodes().iter().zip(&self.origins).map(origin);
        let known = all.enumerate().filter_map(|(i, o)| Some((Id::from(i), o?)));
        known.collect()
    }
}
