//! The chosen program as a plan: linear layers with what follows them, fused pointwise regions, views
//! as names. A program with anything else has no plan and runs on torch.

use std::collections::BTreeMap;

use egg::{Id, Language};
use rustc_hash::FxHashMap;

use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::ir::build::Sink;
use crate::ir::define::{self, Operands, operand_index};
use crate::ir::node::{Node, Op};
use crate::ir::program::Program;
use crate::ir::sexp::Pos;
use crate::ops::{Meaning, OpId, Row, table};
use crate::optimize::Optimized;
use crate::runtime::cpu::linear::Activation;
use crate::runtime::cpu::region::{Instruction, Op as Lane, Region, Rounding, Scalar};
use crate::runtime::plan::{LinearStep, Plan, RegionStep, Task, Value, ValueId};
use crate::ty::{DType, Device, Ty};

/// A plan, and what its inputs and constants are in the program that it came from.
#[derive(Debug)]
pub struct Lowered {
    /// The plan.
    pub plan: Plan,
    /// Inputs of the program that are inputs of the plan, in its order.
    pub inputs: Vec<Id>,
    /// Weight-only nodes of the program that are constants of the plan, in its order.
    pub constants: Vec<Id>,
}

fn no_plan(why: impl Into<String>) -> Error {
    Error::Graph(format!("no native plan: {}", why.into()))
}

/// Lowers an optimized program with so many results.
pub fn lower(optimized: &Optimized, results: usize) -> Result<Lowered> {
    let output = &optimized.output;
    let roots = &output.node(output.root).children;
    if roots.len() != results {
        return Err(no_plan("calls with effects"));
    }
    let inlined = Inlined::new(output, &|id| optimized.weights[usize::from(id)])?;
    Lowering::new(&inlined).lower()
}

/// A program without fused ops, and which of its nodes are made of weights only.
struct Inlined {
    program: Program,
    /// The node of the original program that a weight-only node or an input stands for.
    origin: BTreeMap<Id, Id>,
    weight: Vec<bool>,
}

impl Inlined {
    fn new(source: &Program, weight: &dyn Fn(Id) -> bool) -> Result<Inlined> {
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

/// A linear layer and the nodes that its step takes over.
struct Tail {
    last: Id,
    activation: Activation,
    residual: Option<Id>,
}

struct Lowering<'a> {
    source: &'a Inlined,
    program: &'a Program,
    uses: Vec<usize>,
    plan: Plan,
    inputs: Vec<Id>,
    constants: Vec<Id>,
    value: FxHashMap<Id, ValueId>,
    /// Linear nodes by the last node that their step takes over.
    tails: FxHashMap<Id, (Id, Tail)>,
    /// Nodes that are computed inside a step of another.
    inside: Vec<bool>,
}

impl<'a> Lowering<'a> {
    fn new(source: &'a Inlined) -> Lowering<'a> {
        let program = &source.program;
        let mut uses = vec![0; program.nodes().len()];
        for id in program.reachable() {
            if !source.weight[usize::from(id)] {
                program.node(id).for_each(|c| uses[usize::from(c)] += 1);
            }
        }
        Lowering {
            source,
            program,
            inside: vec![false; program.nodes().len()],
            uses,
            plan: Plan::default(),
            inputs: vec![],
            constants: vec![],
            value: FxHashMap::default(),
            tails: FxHashMap::default(),
        }
    }

    fn lower(mut self) -> Result<Lowered> {
        let order: Vec<Id> = self
            .program
            .reachable()
            .into_iter()
            .filter(|id| !self.source.weight[usize::from(*id)] && !self.is_attr(*id) && *id != self.program.root)
            .collect();
        for id in &order {
            if self.name(*id) == "linear" {
                self.follow(*id);
            }
        }
        for id in order.iter().rev() {
            if !self.inside[usize::from(*id)] && !self.tails.contains_key(id) && lane(self.name(*id)).is_some() {
                self.absorb(*id);
            }
        }
        for id in &order {
            if !self.inside[usize::from(*id)] {
                self.step(*id)?;
            }
        }
        for id in self.program.node(self.program.root).children.clone() {
            let value = self.value_of(id)?;
            let written = self.plan.steps.iter().any(|s| s.writes().contains(&value));
            if !written || self.plan.outputs.contains(&value) {
                return Err(no_plan("a result that no step writes, or that is returned twice"));
            }
            self.plan.outputs.push(value);
        }
        Ok(Lowered {
            plan: self.plan,
            inputs: self.inputs,
            constants: self.constants,
        })
    }

    fn is_attr(&self, id: Id) -> bool {
        matches!(self.program.node(id).op, Op::Attr(_))
    }

    fn name(&self, id: Id) -> &'static str {
        match &self.program.node(id).op {
            Op::Row(op) => table().row(*op).name,
            _ => "",
        }
    }

    fn shape(&self, id: Id) -> Result<(Vec<usize>, DType)> {
        let Ty::Tensor(t) = self.program.ty(id) else {
            return Err(no_plan(format!("{} is no tensor", self.program.ty(id))));
        };
        if t.device != Device::default() {
            return Err(no_plan("a value that is not in the CPU's memory"));
        }
        let shape: Option<Vec<usize>> = t.shape.iter().map(|d| d.known().map(|v| v as usize)).collect();
        Ok((shape.ok_or_else(|| no_plan("sizes that are not known"))?, t.dtype))
    }

    /// The only user of a node, if there is one.
    fn user(&self, id: Id) -> Option<Id> {
        if self.uses[usize::from(id)] != 1 {
            return None;
        }
        let reads = |u: &Id| self.program.node(*u).children.contains(&id) && *u != self.program.root;
        self.program.reachable().into_iter().find(reads)
    }

    /// What a linear layer's step takes over: an activation, then an addition of the same shape.
    fn follow(&mut self, linear: Id) {
        let mut tail = Tail {
            last: linear,
            activation: Activation::None,
            residual: None,
        };
        if let Some(user) = self.user(tail.last)
            && let Some(activation) = activation(self.name(user))
        {
            tail = Tail {
                last: user,
                activation,
                residual: None,
            };
        }
        if let Some(user) = self.user(tail.last)
            && self.name(user) == "add"
            && let [a, b] = self.program.node(user).children[..]
        {
            let other = if a == tail.last { b } else { a };
            let alike = self.program.ty(other) == self.program.ty(tail.last);
            if alike && !self.is_attr(other) && other != tail.last {
                tail.residual = Some(other);
                tail.last = user;
            }
        }
        let mut at = linear;
        while at != tail.last {
            self.inside[usize::from(at)] = true;
            match self.user(at) {
                Some(user) => at = user,
                None => break,
            }
        }
        self.tails.insert(tail.last, (linear, tail));
    }

    /// Marks the pointwise nodes that are computed inside the region of a node.
    fn absorb(&mut self, root: Id) {
        for child in self.program.node(root).children.clone() {
            let single = self.uses[usize::from(child)] == 1;
            let alike = self.shape(child).map(|s| s.0).ok() == self.shape(root).map(|s| s.0).ok();
            let free = !self.inside[usize::from(child)] && !self.tails.contains_key(&child);
            if single && alike && free && lane(self.name(child)).is_some() && !self.source.weight[usize::from(child)] {
                self.inside[usize::from(child)] = true;
                self.absorb(child);
            }
        }
    }

    fn new_value(&mut self, id: Id) -> Result<ValueId> {
        let (shape, dtype) = self.shape(id)?;
        self.plan.values.push(Value { shape, dtype });
        self.value.insert(id, self.plan.values.len() - 1);
        Ok(self.plan.values.len() - 1)
    }

    /// The value of a node that some step reads.
    fn value_of(&mut self, id: Id) -> Result<ValueId> {
        if let Some(known) = self.value.get(&id) {
            return Ok(*known);
        }
        if self.source.weight[usize::from(id)] {
            let origin = self
                .source
                .origin
                .get(&id)
                .ok_or_else(|| no_plan("a weight without a name"))?;
            let value = self.new_value(id)?;
            self.constants.push(*origin);
            self.plan.constants.push(value);
            return Ok(value);
        }
        Err(no_plan(format!("{} is read before it is computed", self.name(id))))
    }

    fn step(&mut self, id: Id) -> Result<()> {
        if let Some((linear, tail)) = self.tails.remove(&id) {
            return self.linear(id, linear, &tail);
        }
        match (&self.program.node(id).op, self.name(id)) {
            (Op::Input(_), _) => {
                let value = self.new_value(id)?;
                self.inputs.push(self.source.origin[&id]);
                self.plan.inputs.push(value);
                Ok(())
            }
            // Values are dense: another shape is another name.
            (_, "reshape") => {
                let from = self.program.node(id).children[0];
                let value = self.value_of(from)?;
                self.value.insert(id, value);
                Ok(())
            }
            (_, name) if lane(name).is_some() => self.region(id),
            (Op::Opaque(_), _) => Err(no_plan("a call that only torch knows")),
            (_, name) => Err(no_plan(format!("the op {name}"))),
        }
    }

    fn linear(&mut self, id: Id, linear: Id, tail: &Tail) -> Result<()> {
        let [w, b, x] = self.program.node(linear).children[..] else {
            return Err(no_plan("a linear layer of another form"));
        };
        let weights = &self.source.weight;
        let frozen = weights[usize::from(w)] && (self.is_attr(b) || weights[usize::from(b)]);
        let (_, dtype) = self.shape(w)?;
        if !frozen || !matches!(dtype, DType::F32 | DType::BF16) {
            return Err(no_plan("a linear layer with changing weights, or of another dtype"));
        }
        let (x, w) = (self.value_of(x)?, self.value_of(w)?);
        let b = if self.is_attr(b) { None } else { Some(self.value_of(b)?) };
        let r = tail.residual.map(|r| self.value_of(r)).transpose()?;
        let y = self.new_value(id)?;
        let activation = tail.activation;
        self.plan.steps.push(Task::Linear(LinearStep {
            x,
            w,
            b,
            r,
            activation,
            y,
        }));
        Ok(())
    }

    fn region(&mut self, root: Id) -> Result<()> {
        let (shape, _) = self.shape(root)?;
        let mut made = Making {
            shape: shape.clone(),
            inputs: vec![],
            dtypes: vec![],
            code: vec![],
            place: FxHashMap::default(),
        };
        self.leaves(root, &mut made)?;
        let result = self.code(root, &mut made)?;
        let region = Region::new(&made.dtypes, made.code, &[result], Rounding::EveryOp)?;
        let y = self.new_value(root)?;
        let dense = strides(&shape, &shape).ok_or_else(|| no_plan("a shape without strides"))?;
        self.plan.steps.push(Task::Region(Box::new(RegionStep {
            region,
            shape,
            inputs: made.inputs,
            outputs: vec![y],
            dense,
        })));
        Ok(())
    }

    fn is_inner(&self, id: Id, root: Id) -> bool {
        id == root || (self.inside[usize::from(id)] && lane(self.name(id)).is_some())
    }

    /// Inputs come first in a region.
    fn leaves(&mut self, root: Id, made: &mut Making) -> Result<()> {
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            for child in self.program.node(id).children.clone() {
                if self.is_attr(child) || made.place.contains_key(&child) {
                    continue;
                }
                if self.is_inner(child, root) && !self.value.contains_key(&child) {
                    stack.push(child);
                    continue;
                }
                let (from, dtype) = self.shape(child)?;
                let strides = strides(&from, &made.shape).ok_or_else(|| no_plan("operands that do not broadcast"))?;
                made.place.insert(child, made.inputs.len());
                made.inputs.push((self.value_of(child)?, strides));
                made.dtypes.push(dtype);
            }
        }
        Ok(())
    }

    fn code(&mut self, id: Id, made: &mut Making) -> Result<usize> {
        if let Some(place) = made.place.get(&id) {
            return Ok(*place);
        }
        let (_, dtype) = self.shape(id)?;
        let name = self.name(id);
        let children = self.program.node(id).children.clone();
        let op = match name {
            "cast" => Lane::Cast(dtype),
            _ => lane(name).ok_or_else(|| no_plan(format!("the op {name}")))?,
        };
        let tensors: Vec<Id> = children.iter().copied().filter(|c| !self.is_attr(*c)).collect();
        let of = self
            .shape(*tensors.last().ok_or_else(|| no_plan("an op on numbers alone"))?)?
            .1;
        let mut args = vec![];
        for (i, child) in children.iter().enumerate() {
            match &self.program.node(*child).op {
                Op::Attr(Attr::DType(_)) => {}
                Op::Attr(Attr::None) if name == "clamp" => {
                    let bound = if i == 1 { f64::NEG_INFINITY } else { f64::INFINITY };
                    args.push(made.constant(bound, of)?);
                }
                Op::Attr(a) => {
                    let number = a.number().ok_or_else(|| no_plan(format!("{name} with {a}")))?;
                    args.push(made.constant(number, of)?);
                }
                _ => {
                    let mask = i == 0 && name == "where" || i == 1 && name == "masked_fill";
                    if !mask && name != "cast" && self.shape(*child)?.1 != of {
                        return Err(no_plan(format!("{name} of mixed dtypes")));
                    }
                    args.push(self.code(*child, made)?);
                }
            }
        }
        made.code.push(Instruction::new(op, args));
        let place = made.inputs.len() + made.code.len() - 1;
        made.place.insert(id, place);
        Ok(place)
    }
}

struct Making {
    shape: Vec<usize>,
    inputs: Vec<(ValueId, Vec<isize>)>,
    dtypes: Vec<DType>,
    code: Vec<Instruction>,
    place: FxHashMap<Id, usize>,
}

impl Making {
    fn constant(&mut self, number: f64, dtype: DType) -> Result<usize> {
        let scalar = if dtype.is_float() {
            Scalar::Float(number)
        } else if number.fract() == 0.0 {
            Scalar::Int(number as i64)
        } else {
            return Err(no_plan("a fraction among integers"));
        };
        self.code.push(Instruction::new(Lane::Constant(scalar, dtype), []));
        Ok(self.inputs.len() + self.code.len() - 1)
    }
}

/// Strides of a dense value of shape `from`, broadcast to the shape `to`.
fn strides(from: &[usize], to: &[usize]) -> Option<Vec<isize>> {
    let extra = to.len().checked_sub(from.len())?;
    let mut strides = vec![0; to.len()];
    let mut step = 1isize;
    for i in (0..from.len()).rev() {
        if from[i] == to[i + extra] {
            strides[i + extra] = if from[i] == 1 { 0 } else { step };
        } else if from[i] != 1 {
            return None;
        }
        step *= from[i].max(1) as isize;
    }
    Some(strides)
}

fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        "silu" => Activation::Silu,
        "sigmoid" => Activation::Sigmoid,
        "tanh" => Activation::Tanh,
        _ => return None,
    })
}

/// The vector op of a pointwise row.
fn lane(name: &str) -> Option<Lane> {
    Some(match name {
        "cast" => Lane::Cast(DType::F32),
        "neg" => Lane::Neg,
        "abs" => Lane::Abs,
        "sign" => Lane::Sign,
        "exp" => Lane::Exp,
        "expm1" => Lane::Expm1,
        "log" => Lane::Log,
        "log1p" => Lane::Log1p,
        "sqrt" => Lane::Sqrt,
        "rsqrt" => Lane::Rsqrt,
        "reciprocal" => Lane::Reciprocal,
        "square" => Lane::Square,
        "sin" => Lane::Sin,
        "cos" => Lane::Cos,
        "erf" => Lane::Erf,
        "tanh" => Lane::Tanh,
        "sigmoid" => Lane::Sigmoid,
        "relu" => Lane::Relu,
        "gelu" => Lane::Gelu,
        "gelu_tanh" => Lane::GeluTanh,
        "silu" => Lane::Silu,
        "floor" => Lane::Floor,
        "ceil" => Lane::Ceil,
        "logical_not" => Lane::Not,
        "add" => Lane::Add,
        "sub" => Lane::Sub,
        "mul" => Lane::Mul,
        "div" => Lane::Div,
        "pow" => Lane::Pow,
        "maximum" => Lane::Maximum,
        "minimum" => Lane::Minimum,
        "eq" => Lane::Eq,
        "ne" => Lane::Ne,
        "lt" => Lane::Lt,
        "le" => Lane::Le,
        "gt" => Lane::Gt,
        "ge" => Lane::Ge,
        "logical_and" => Lane::And,
        "logical_or" => Lane::Or,
        "where" => Lane::Where,
        "masked_fill" => Lane::MaskedFill,
        "clamp" => Lane::Clamp,
        _ => return None,
    })
}
