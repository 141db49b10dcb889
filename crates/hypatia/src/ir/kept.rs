//! A chosen program written down, to be lowered again without a search. Its leaves are those of the captured graph.

use egg::Id;
use serde::{Deserialize, Serialize};

use super::node::{Node, Op};
use super::program::{Leaves, Program};
use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::ops::table;

/// A program without its leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// What each node does, and its operands.
    nodes: Vec<(Word, Vec<usize>)>,
    root: usize,
    /// Which nodes are made of frozen weights only.
    weights: Vec<bool>,
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
        })
    }

    /// The program over its leaves, with the nodes at their old places, and which are made of weights.
    pub fn program(&self, leaves: &Leaves) -> Result<(Program, &[bool])> {
        let broken = |what: &str| Error::Graph(format!("a kept program: {what}"));
        let mut program = Program::over(leaves);
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
            if usize::from(program.add(Node { op, children })?) != at {
                return Err(broken("a node is there twice"));
            }
        }
        if self.root >= self.nodes.len() || self.weights.len() != self.nodes.len() {
            return Err(broken("its parts do not fit"));
        }
        program.root = Id::from(self.root);
        Ok((program, &self.weights))
    }
}
