//! From a captured graph to a program. A call that the op table does not know, or knows with
//! another result type than torch reports, becomes an opaque node.

use std::collections::BTreeMap;
use std::sync::Arc;

use egg::Id;

use super::build::{Sink, build};
use super::captured::{Captured, CapturedArg, CapturedDim, Record};
use super::functions::{canonical, function};
use super::node::{Node, Op};
use super::program::{Input, Opaque, Program};
use crate::attr::Attr;
use crate::dim::Dim;
use crate::error::{Error, Result};
use crate::ops::{AtenCall, AtenOperand, Kind, OpId, table};
use crate::sexp::Pos;
use crate::ty::{DType, Ty};

/// An argument bound to a name: values, or compile-time values.
#[derive(Debug, Clone)]
enum Bound {
    Value(Id),
    Attr(Attr),
    List(Vec<Bound>),
    Other,
}

/// Reads a captured graph.
pub fn import(captured: &Captured) -> Result<Program> {
    let mut program = Program::default();
    program.leaves.hints = captured.hints.clone();
    let mut ids: Vec<Id> = Vec::with_capacity(captured.records.len());
    let items = items_read(captured);
    for (i, record) in captured.records.iter().enumerate() {
        let ty = program.leaves.devices.ty(&record.ty);
        let id = if record.input {
            program.input(Input {
                name: record.name.clone(),
                ty,
                weight: record.weight,
            })?
        } else {
            match known_call(&mut program, record, &ty, &ids, captured.autograd) {
                Some(id) if describes(program.ty(id), items.get(&(i as u32))) => id,
                Some(_) => opaque(&mut program, i as u32, record, ty, &ids)?,
                None => opaque(&mut program, i as u32, record, ty, &ids)?,
            }
        };
        program.origin.entry(id).or_insert(i as u32);
        ids.push(id);
    }
    let place = |i: &u32| {
        ids.get(*i as usize)
            .copied()
            .ok_or_else(|| Error::Graph(format!("no record {i}")))
    };
    let mut outputs = captured.outputs.iter().map(place).collect::<Result<Vec<Id>>>()?;
    let stays = |id: &Id| matches!(program.node(*id).op, Op::Opaque(_));
    for (record, id) in captured.records.iter().zip(&ids) {
        if record.effect && stays(id) {
            outputs.push(*id);
        }
    }
    program.set_outputs(outputs)?;
    Ok(program)
}

/// Which items of several results are read, by the record of the call.
fn items_read(captured: &Captured) -> BTreeMap<u32, Vec<usize>> {
    let mut found: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for record in captured.records.iter().filter(|r| r.target == "_operator.getitem") {
        if let Some([CapturedArg::Node(call), CapturedArg::Int(CapturedDim::Known(item))]) = record.args.as_deref() {
            found.entry(*call).or_default().push(*item as usize);
        }
    }
    found
}

/// Whether a row says what the items are that are read: torch alone knows the others.
fn describes(row: &Ty, read: Option<&Vec<usize>>) -> bool {
    let Ty::Tuple(items) = row else {
        return true;
    };
    read.is_none_or(|read| read.iter().all(|i| items.get(*i).is_some_and(|t| *t != Ty::Unknown)))
}

fn opaque(program: &mut Program, index: u32, record: &Record, ty: Ty, ids: &[Id]) -> Result<Id> {
    let children = record
        .reads
        .iter()
        .map(|r| {
            ids.get(*r as usize)
                .copied()
                .ok_or_else(|| Error::Graph(format!("{} reads a later node", record.name)))
        })
        .collect::<Result<_>>()?;
    let call = Opaque {
        name: record.name.clone(),
        target: record.target.clone(),
        ty,
        effect: record.effect,
        mutates: record.mutates,
        changes: record.changes.clone(),
    };
    program.leaves.opaques.insert(index, call);
    program.add(Node {
        op: Op::Opaque(index),
        children,
    })
}

/// Calls whose gradient at their bounds is not that of the op that they compute.
const HAS_OWN_GRADIENT: &[&str] = &["hardtanh", "relu6"];

/// The call as ops of the table, if one of them means exactly this.
fn known_call(program: &mut Program, record: &Record, ty: &Ty, ids: &[Id], autograd: bool) -> Option<Id> {
    let complex = |ty: &Ty| ty.tensor().is_some_and(|t| t.dtype.is_complex());
    let reads = record.reads.iter().filter_map(|r| ids.get(*r as usize));
    if record.effect && !record.random || complex(ty) || reads.into_iter().any(|id| complex(program.ty(*id))) {
        return None;
    }
    let args = record
        .args
        .as_ref()?
        .iter()
        .map(|a| bind(program, a, ids))
        .collect::<Option<Vec<_>>>()?;
    for (op, call) in table().by_target(&record.target) {
        if autograd && (table().row(op).name == "detach" || HAS_OWN_GRADIENT.iter().any(|n| record.target.contains(n)))
        {
            continue;
        }
        let root = program.root;
        if let Some(id) = try_call(program, op, call, &args)
            && agrees(program.ty(id), ty)
        {
            return Some(id);
        }
        program.root = root;
    }
    None
}

/// The row's type is torch's; an item of a tuple that the row does not describe may be anything.
fn agrees(row: &Ty, torch: &Ty) -> bool {
    match (row, torch) {
        (Ty::Tuple(a), Ty::Tuple(b)) => {
            a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| *a == Ty::Unknown || agrees(a, b))
        }
        (Ty::Unknown, _) => false,
        _ => row == torch,
    }
}

fn bind(program: &Program, arg: &CapturedArg, ids: &[Id]) -> Option<Bound> {
    Some(match arg {
        CapturedArg::Node(i) => {
            let id = *ids.get(*i as usize)?;
            match program.ty(id) {
                Ty::Attr(a) => Bound::Attr(a.clone()),
                _ => Bound::Value(id),
            }
        }
        CapturedArg::None => Bound::Attr(Attr::None),
        CapturedArg::Bool(b) => Bound::Attr(Attr::Bool(*b)),
        CapturedArg::Int(d) => Bound::Attr(Attr::Int(d.dim())),
        CapturedArg::Float(t) => Bound::Attr(Attr::float(t.parse().ok()?)),
        CapturedArg::Str(s) => Bound::Attr(Attr::Str(Arc::from(s.as_str()))),
        CapturedArg::Dtype(d) => Bound::Attr(Attr::DType(DType::parse(d)?)),
        CapturedArg::List(items) => {
            let items = items
                .iter()
                .map(|a| bind(program, a, ids))
                .collect::<Option<Vec<_>>>()?;
            let ints: Option<Vec<Dim>> = items
                .iter()
                .map(|b| match b {
                    Bound::Attr(Attr::Int(d)) => Some(d.clone()),
                    _ => None,
                })
                .collect();
            match ints {
                Some(d) => Bound::Attr(Attr::Ints(d.into())),
                None => Bound::List(items),
            }
        }
        CapturedArg::Other => Bound::Other,
    })
}

fn try_call(program: &mut Program, op: OpId, call: &AtenCall, args: &[Bound]) -> Option<Id> {
    if args.len() != call.operands.len() {
        return None;
    }
    let mut names: BTreeMap<&str, Bound> = BTreeMap::new();
    for (operand, arg) in call.operands.iter().zip(args) {
        match (operand, arg) {
            (AtenOperand::Any, _) => {}
            (AtenOperand::Literal(want), Bound::Attr(have)) if same(want, have) => {}
            (AtenOperand::Flags(want), Bound::List(have)) if flags(have).as_ref() == Some(want) => {}
            (AtenOperand::Number(name), Bound::Attr(a)) if a.number().is_some() || matches!(a, Attr::Int(_)) => {
                names.insert(name, arg.clone());
            }
            (AtenOperand::Name(name), Bound::Value(_) | Bound::Attr(_)) => {
                names.insert(name, arg.clone());
            }
            (AtenOperand::List(name), Bound::List(items)) if items.iter().all(|b| matches!(b, Bound::Value(_))) => {
                names.insert(name, arg.clone());
            }
            _ => return None,
        }
    }
    if let Some(meaning) = &call.meaning {
        return build(meaning, &mut Meaning { program, names: &names }).ok();
    }
    let row = table().row(op);
    // Kinds such as `dim` are relative to the first tensor among the operands.
    let reference = row.params.iter().find_map(|p| match names.get(p.name.as_str())? {
        Bound::Value(id) => Some(program.ty(*id).clone()),
        Bound::List(items) => match items.first()? {
            Bound::Value(id) => Some(program.ty(*id).clone()),
            _ => None,
        },
        Bound::Attr(_) | Bound::Other => None,
    });
    let mut children = vec![];
    for p in &row.params {
        match names.get(p.name.as_str())? {
            Bound::Value(id) if p.kind.is_tensor() => children.push(*id),
            Bound::List(items) if p.kind == Kind::Tensors => {
                for item in items {
                    let Bound::Value(id) = item else { return None };
                    children.push(*id);
                }
            }
            Bound::Attr(a) => {
                let a = canonical(p.kind, reference.as_ref(), a)?;
                children.push(program.attr(a));
            }
            _ => return None,
        }
    }
    program.op(op, children).ok()
}

fn flags(items: &[Bound]) -> Option<Vec<bool>> {
    let flag = |item: &Bound| match item {
        Bound::Attr(Attr::Bool(b)) => Some(*b),
        _ => None,
    };
    items.iter().map(flag).collect()
}

/// Literals are equal as numbers too: torch writes 0 and 0.0 alike.
fn same(want: &Attr, have: &Attr) -> bool {
    want == have
        || want
            .number()
            .is_some_and(|w| have.number() == Some(w) && !matches!(have, Attr::Bool(_)))
}

/// Builds the meaning of a call from its arguments.
struct Meaning<'a> {
    program: &'a mut Program,
    names: &'a BTreeMap<&'a str, Bound>,
}

impl Sink for Meaning<'_> {
    type Ref = Id;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Id> {
        let first = |items: &Vec<Bound>| match items.first() {
            Some(Bound::Value(id)) => Some(*id),
            _ => None,
        };
        match self.names.get(word) {
            Some(Bound::Value(id)) => Ok(*id),
            Some(Bound::Attr(a)) => Ok(self.program.attr(a.clone())),
            Some(Bound::List(items)) => first(items).ok_or_else(|| pos.error(format!("{word} is empty"))),
            Some(Bound::Other) | None => Err(pos.error(format!("no argument {word}"))),
        }
    }

    fn attr(&mut self, attr: Attr) -> Result<Id> {
        Ok(self.program.attr(attr))
    }

    fn op(&mut self, op: OpId, operands: Vec<Id>, _: Pos) -> Result<Id> {
        // A number beside a floating tensor is a float here too.
        let reference = operands
            .iter()
            .map(|i| self.program.ty(*i).clone())
            .find(|t| t.tensor().is_some());
        let row = table().row(op);
        let mut children = Vec::with_capacity(operands.len());
        for (i, id) in operands.into_iter().enumerate() {
            let number = match self.program.ty(id) {
                Ty::Attr(a) if row.kind(i) == Kind::Scalar => canonical(Kind::Scalar, reference.as_ref(), a),
                _ => None,
            };
            children.push(number.map_or(id, |a| self.program.attr(a)));
        }
        self.program.op(op, children)
    }

    fn function(&mut self, name: &str, operands: Vec<Id>, pos: Pos) -> Result<Id> {
        let types: Vec<Ty> = operands.iter().map(|i| self.program.ty(*i).clone()).collect();
        let value = function(name)
            .and_then(|f| f(&types))
            .ok_or_else(|| pos.error(format!("${name} has no value")))?;
        Ok(self.program.attr(value))
    }

    fn list(&mut self, name: &str, pos: Pos) -> Result<Vec<Id>> {
        match self.names.get(name) {
            Some(Bound::List(items)) => items
                .iter()
                .map(|b| match b {
                    Bound::Value(id) => Ok(*id),
                    _ => Err(pos.error("a list of tensors is expected")),
                })
                .collect(),
            _ => Err(pos.error(format!("no list {name}"))),
        }
    }
}
