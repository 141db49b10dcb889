//! The chosen program as calls into torch, for the rebuilt FX graph. A fused op is one call
//! with a body.

use std::collections::BTreeMap;

use egg::Id;
use serde::Serialize;

use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::ir::captured::{CapturedArg, CapturedDim};
use crate::ir::expand::expand;
use crate::ir::node::Op;
use crate::ir::program::{Input, Program};
use crate::ops::{AtenCall, AtenOperand, Meaning, OpId, Row, table};
use crate::ty::Ty;

/// What a node of the rebuilt graph is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A captured input or attribute.
    Input,
    /// A captured call, copied as it was.
    Copy,
    /// A call of one torch op.
    Call,
    /// A fused op: its body is called as one.
    Fused,
}

/// A node of the rebuilt graph; its place in the list is its number.
#[derive(Debug, Clone, Serialize)]
pub struct Emitted {
    /// What it is.
    pub kind: Kind,
    /// The node of the program.
    pub id: u32,
    /// Name of the op; empty for captured nodes.
    pub op: &'static str,
    /// The torch op to call.
    pub target: String,
    /// Arguments in schema order; for a copy, the values that it reads.
    pub args: Vec<CapturedArg>,
    /// The captured record that has the same value, if there is one.
    pub origin: Option<u32>,
    /// Made of frozen weights only: computed once, and again when they change.
    pub folded: bool,
    /// Torch chose its kernel by how the operands lie.
    pub keeps_layout: bool,
    /// What a fused op computes, over its arguments.
    pub body: Option<Emission>,
}

/// A rebuilt graph.
#[derive(Debug, Clone, Serialize)]
pub struct Emission {
    /// Nodes, operands first.
    pub nodes: Vec<Emitted>,
    /// Results.
    pub outputs: Vec<u32>,
}

/// Emits a program whose root is a `tuple`; `weight` says which nodes are made of weights only,
/// and the first `results` items of the root are results, the rest are effects.
pub fn emit(program: &Program, results: usize, weight: &dyn Fn(Id) -> bool) -> Result<Emission> {
    let roots: Vec<Id> = program.node(program.root).children.to_vec();
    let (outputs, effects) = roots.split_at(results.min(roots.len()));
    let mutates = |id: &&Id| match &program.node(**id).op {
        Op::Opaque(i) => program.leaves.opaques.get(i).is_some_and(|o| o.mutates),
        _ => false,
    };
    // Random calls keep their order and come first, changes of inputs come last.
    let order = effects
        .iter()
        .filter(|e| !mutates(e))
        .chain(outputs)
        .chain(effects.iter().filter(mutates));
    let mut emitter = Emitter {
        program,
        weight,
        nodes: vec![],
        place: BTreeMap::new(),
    };
    for id in order {
        emitter.emit(*id)?;
    }
    let outputs = outputs.iter().map(|id| emitter.place[id]).collect();
    Ok(Emission {
        nodes: emitter.nodes,
        outputs,
    })
}

/// Emits both sides of equations over one program: the results are left, right, left, right, ….
/// Also says which equations these are; those that torch cannot compute are left out.
pub fn emit_pairs(program: &Program, pairs: &[(Id, Id)]) -> (Emission, Vec<usize>) {
    let mut emitter = Emitter {
        program,
        weight: &|_| false,
        nodes: vec![],
        place: BTreeMap::new(),
    };
    let mut outputs = vec![];
    let mut emitted = vec![];
    for (i, (left, right)) in pairs.iter().enumerate() {
        if emitter.emit(*left).is_ok() && emitter.emit(*right).is_ok() {
            outputs.extend([emitter.place[left], emitter.place[right]]);
            emitted.push(i);
        }
    }
    let nodes = emitter.nodes;
    (Emission { nodes, outputs }, emitted)
}

/// One node as a call on operands that are numbered in their order.
pub fn emit_node(program: &Program, id: Id) -> Result<Emitted> {
    let tensors = program.node(id).children.iter().enumerate();
    let emitter = Emitter {
        program,
        weight: &|_| false,
        nodes: vec![],
        place: tensors.map(|(i, c)| (*c, i as u32)).collect(),
    };
    emitter.node(id)
}

struct Emitter<'a> {
    program: &'a Program,
    weight: &'a dyn Fn(Id) -> bool,
    nodes: Vec<Emitted>,
    place: BTreeMap<Id, u32>,
}

impl Emitter<'_> {
    fn emit(&mut self, root: Id) -> Result<()> {
        let mut stack = vec![root];
        while let Some(id) = stack.last().copied() {
            let node = self.program.node(id);
            let missing = node
                .children
                .iter()
                .rev()
                .filter(|c| !self.place.contains_key(c) && !self.is_attr(**c));
            let before = stack.len();
            if !self.place.contains_key(&id) {
                stack.extend(missing.copied().collect::<Vec<_>>());
            }
            if stack.len() == before {
                stack.pop();
                if !self.place.contains_key(&id) {
                    let emitted = self.node(id)?;
                    self.place.insert(id, self.nodes.len() as u32);
                    self.nodes.push(emitted);
                }
            }
        }
        Ok(())
    }

    fn is_attr(&self, id: Id) -> bool {
        matches!(self.program.node(id).op, Op::Attr(_))
    }

    fn arg(&self, id: Id) -> CapturedArg {
        match &self.program.node(id).op {
            Op::Attr(a) => attr_arg(a),
            _ => CapturedArg::Node(self.place[&id]),
        }
    }

    fn node(&self, id: Id) -> Result<Emitted> {
        let node = self.program.node(id);
        let mut emitted = Emitted {
            kind: Kind::Copy,
            id: usize::from(id) as u32,
            op: "",
            target: String::new(),
            args: vec![],
            origin: self.program.origin.get(&id).copied(),
            folded: !matches!(node.op, Op::Input(_)) && (self.weight)(id),
            keeps_layout: false,
            body: None,
        };
        match &node.op {
            Op::Input(_) => emitted.kind = Kind::Input,
            Op::Opaque(i) => {
                emitted.origin = Some(*i);
                emitted.args = node.children.iter().map(|c| self.arg(*c)).collect();
            }
            Op::Attr(_) => return Err(Error::Graph("a compile-time value is no result".into())),
            Op::Row(op) => {
                let row = table().row(*op);
                emitted.op = row.name;
                emitted.keeps_layout = row.keeps_layout();
                if matches!(row.meaning, Meaning::Defined(_)) {
                    emitted.kind = Kind::Fused;
                    let tensors = node.children.iter().filter(|c| !self.is_attr(**c));
                    emitted.args = tensors.map(|c| self.arg(*c)).collect();
                    emitted.body = Some(self.body(*op, &node.children)?);
                } else {
                    emitted.kind = Kind::Call;
                    let call = self.call(row, &node.children).ok_or_else(|| Error::Type {
                        op: row.name.into(),
                        message: "has no torch call for these operands".into(),
                    })?;
                    emitted.target.clone_from(&call.target);
                    emitted.args = self.call_args(row, call, &node.children)?;
                }
            }
        }
        Ok(emitted)
    }

    /// The first direct call whose operands can be these.
    fn call<'r>(&self, row: &'r Row, children: &[Id]) -> Option<&'r AtenCall> {
        row.aten.iter().filter(|c| c.meaning.is_none()).find(|call| {
            call.operands.iter().all(|operand| match operand {
                AtenOperand::Number(name) => position(row, name).is_some_and(|i| self.is_attr(children[i])),
                AtenOperand::Any => false,
                _ => true,
            })
        })
    }

    fn call_args(&self, row: &Row, call: &AtenCall, children: &[Id]) -> Result<Vec<CapturedArg>> {
        let lookup =
            |name: &str| position(row, name).ok_or_else(|| Error::Graph(format!("{}: no operand {name}", row.name)));
        call.operands
            .iter()
            .map(|operand| match operand {
                AtenOperand::Literal(a) => Ok(attr_arg(a)),
                AtenOperand::Flags(all) => Ok(CapturedArg::List(all.iter().map(|b| CapturedArg::Bool(*b)).collect())),
                AtenOperand::Any => Ok(CapturedArg::None),
                AtenOperand::Name(name) | AtenOperand::Number(name) => Ok(self.arg(children[lookup(name)?])),
                AtenOperand::List(name) => Ok(CapturedArg::List(
                    children[lookup(name)?..].iter().map(|c| self.arg(*c)).collect(),
                )),
            })
            .collect()
    }

    /// The definition of a fused op as a graph over its tensor operands.
    fn body(&self, op: OpId, children: &[Id]) -> Result<Emission> {
        let mut program = Program::default();
        let mut operands = vec![];
        for (i, child) in children.iter().enumerate() {
            let id = match &self.program.node(*child).op {
                Op::Attr(a) => program.attr(a.clone()),
                _ => {
                    let ty: Ty = self.program.ty(*child).clone();
                    let id = program.input(Input {
                        name: format!("p{i}"),
                        ty,
                        weight: false,
                    })?;
                    let position = program.leaves.inputs.len() as u32 - 1;
                    program.origin.insert(id, position);
                    id
                }
            };
            operands.push(id);
        }
        let root = expand(op, &mut program, operands)?;
        program.set_outputs([root])?;
        emit(&program, 1, &|_| false)
    }
}

fn position(row: &Row, name: &str) -> Option<usize> {
    row.params.iter().position(|p| p.name == name)
}

fn attr_arg(attr: &Attr) -> CapturedArg {
    match attr {
        Attr::None => CapturedArg::None,
        Attr::Bool(b) => CapturedArg::Bool(*b),
        Attr::Int(d) => CapturedArg::Int(CapturedDim::of(d)),
        Attr::Float(bits) => CapturedArg::Float(f64::from_bits(*bits).to_string()),
        Attr::Str(s) => CapturedArg::Str(s.to_string()),
        Attr::DType(d) => CapturedArg::Dtype(d.torch_name().into()),
        Attr::Ints(v) => CapturedArg::List(v.iter().map(|d| CapturedArg::Int(CapturedDim::of(d))).collect()),
    }
}
