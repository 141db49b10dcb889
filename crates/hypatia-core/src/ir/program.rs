//! A typed program: inputs, nodes in the order of their definition, a root.

use std::collections::BTreeMap;

use egg::{Id, Language, RecExpr};
use rustc_hash::FxHashMap;

use super::captured::Devices;
use super::define;
use super::node::{Node, Op};
use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::eval::{Mode, Val};
use crate::ops::{OpId, op_id, table};
use crate::ty::Ty;

/// An input of the program.
#[derive(Debug, Clone)]
pub struct Input {
    /// Its name in the captured graph or the text.
    pub name: String,
    /// Its type.
    pub ty: Ty,
    /// A parameter or buffer whose value stays the same between calls.
    pub weight: bool,
}

/// A call that only torch understands.
#[derive(Debug, Clone)]
pub struct Opaque {
    /// Its name in the captured graph.
    pub name: String,
    /// What it calls.
    pub target: String,
    /// Type of its result.
    pub ty: Ty,
    /// It must run exactly once, in its place: it draws random numbers or changes state.
    pub effect: bool,
    /// It changes an input in place: it must run after everything else.
    pub mutates: bool,
    /// Which of its operands it changes.
    pub changes: Vec<usize>,
}

/// What a program's leaves stand for; shared by the program and its e-graph.
#[derive(Debug, Clone, Default)]
pub struct Leaves {
    /// Inputs by index.
    pub inputs: Vec<Input>,
    /// Opaque calls by their index in the captured graph.
    pub opaques: BTreeMap<u32, Opaque>,
    /// Sizes to assume for symbols when costs are estimated.
    pub hints: BTreeMap<String, i64>,
    /// The devices that types name by number.
    pub devices: Devices,
}

impl Leaves {
    /// The size to assume for a symbol.
    pub fn hint(&self, symbol: &str) -> i64 {
        self.hints.get(symbol).copied().unwrap_or(64)
    }

    /// Type of a node whose operands have these types.
    pub fn infer(&self, op: &Op, operands: &[Ty]) -> Result<Ty> {
        match op {
            Op::Row(id) => match define::infer(*id, operands)? {
                Ty::Tensor(t) if !t.can_exist() => Err(Error::Type {
                    op: table().row(*id).name.into(),
                    message: format!("no tensor can have the type {t}"),
                }),
                ty => Ok(ty),
            },
            Op::Attr(a) => Ok(Ty::Attr(a.clone())),
            Op::Input(i) => self
                .inputs
                .get(*i as usize)
                .map(|i| i.ty.clone())
                .ok_or_else(|| Error::Graph(format!("no input {i}"))),
            Op::Opaque(i) => self
                .opaques
                .get(i)
                .map(|o| o.ty.clone())
                .ok_or_else(|| Error::Graph(format!("no opaque call {i}"))),
        }
    }
}

/// A typed program.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// What its leaves stand for.
    pub leaves: Leaves,
    nodes: Vec<Node>,
    types: Vec<Ty>,
    memo: FxHashMap<Node, Id>,
    /// The result, a `tuple` for several.
    pub root: Id,
    /// Which captured node a node came from.
    pub origin: BTreeMap<Id, u32>,
}

impl Program {
    /// An empty program over the given leaves.
    pub fn over(leaves: &Leaves) -> Program {
        Program {
            leaves: leaves.clone(),
            ..Program::default()
        }
    }

    /// Adds a node, or finds the equal one that is already there.
    pub fn add(&mut self, node: Node) -> Result<Id> {
        if let Some(id) = self.memo.get(&node) {
            return Ok(*id);
        }
        let operands: Vec<Ty> = node.children.iter().map(|c| self.ty(*c).clone()).collect();
        let ty = self.leaves.infer(&node.op, &operands)?;
        let id = Id::from(self.nodes.len());
        self.memo.insert(node.clone(), id);
        self.nodes.push(node);
        self.types.push(ty);
        self.root = id;
        Ok(id)
    }

    /// Adds an op.
    pub fn op(&mut self, op: OpId, operands: impl IntoIterator<Item = Id>) -> Result<Id> {
        self.add(Node::new(op, operands))
    }

    /// Adds a compile-time value.
    pub fn attr(&mut self, attr: Attr) -> Id {
        // A compile-time value always has a type.
        self.add(Node::attr(attr)).unwrap_or(self.root)
    }

    /// Adds an input.
    pub fn input(&mut self, input: Input) -> Result<Id> {
        self.leaves.inputs.push(input);
        let op = Op::Input(self.leaves.inputs.len() as u32 - 1);
        self.add(Node {
            op,
            children: Default::default(),
        })
    }

    /// Makes the root a `tuple` of these results.
    pub fn set_outputs(&mut self, outputs: impl IntoIterator<Item = Id>) -> Result<()> {
        self.root = self.op(op_id("tuple"), outputs)?;
        Ok(())
    }

    /// A node.
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[usize::from(id)]
    }

    /// Type of a node.
    pub fn ty(&self, id: Id) -> &Ty {
        &self.types[usize::from(id)]
    }

    /// All nodes in the order of their definition.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Nodes that the root needs, operands first.
    pub fn reachable(&self) -> Vec<Id> {
        let mut seen = vec![false; self.nodes.len()];
        seen[usize::from(self.root)] = true;
        for i in (0..self.nodes.len()).rev() {
            if seen[i] {
                self.nodes[i].for_each(|c| seen[usize::from(c)] = true);
            }
        }
        (0..self.nodes.len()).filter(|i| seen[*i]).map(Id::from).collect()
    }

    /// The expression of the root, without unused nodes, and where each node went.
    pub fn expr(&self) -> (RecExpr<Node>, BTreeMap<Id, Id>) {
        let mut expr = RecExpr::default();
        let mut place = BTreeMap::new();
        for id in self.reachable() {
            let node = self.node(id).clone().map_children(|c| place[&c]);
            place.insert(id, expr.add(node));
        }
        (expr, place)
    }

    /// A program over the same leaves from an expression.
    pub fn from_expr(leaves: &Leaves, expr: &RecExpr<Node>) -> Result<Program> {
        let mut program = Program::over(leaves);
        let mut place: Vec<Id> = Vec::with_capacity(expr.len());
        for node in expr.as_ref() {
            let node = node.clone().map_children(|c| place[usize::from(c)]);
            place.push(program.add(node)?);
        }
        program.root = *place.last().ok_or_else(|| Error::Graph("empty program".into()))?;
        Ok(program)
    }

    /// Values of all nodes that the root needs, given those of the leaves.
    pub fn eval(&self, leaf: &dyn Fn(&Op, &[Val]) -> Result<Val>, mode: Mode) -> Result<BTreeMap<Id, Val>> {
        let mut values: BTreeMap<Id, Val> = BTreeMap::new();
        for id in self.reachable() {
            let node = self.node(id);
            let operands: Vec<Val> = node.children.iter().map(|c| values[c].clone()).collect();
            let value = match &node.op {
                Op::Row(op) => {
                    let types: Vec<Ty> = node.children.iter().map(|c| self.ty(*c).clone()).collect();
                    define::eval(*op, &operands, &types, mode)?
                }
                Op::Attr(a) => Val::Attr(a.clone()),
                other => leaf(other, &operands)?,
            };
            values.insert(id, value);
        }
        Ok(values)
    }

    /// Names of the ops that the root needs, in order, without leaves.
    pub fn op_names(&self) -> Vec<&'static str> {
        self.reachable()
            .into_iter()
            .filter_map(|id| match self.node(id).op {
                Op::Row(op) => Some(table().row(op).name),
                _ => None,
            })
            .collect()
    }
}
