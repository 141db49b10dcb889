//! Pointwise regions and ops along rows.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use hypatia_core::ops::promote;
use hypatia_core::ty::{DType, Ty};
use rustc_hash::FxHashMap;

use super::activations::is_activation;
use super::reads::some_reads;
use super::slopes::is_gradient;
use super::{Lowering, no_plan, numbers};
use crate::error::Result;
use crate::kernels::region::{Instruction, Op as Lane, Read, Region, Rounding, Scalar};
use crate::kernels::rowwise::{RowOp, Rowwise};
use crate::operand::dense_strides;
use crate::step::{Operand, RegionStep, RowStep, Task, Value, ValueId};

/// Ops that are computed again for each element of a larger region, at most, and how many times larger that is.
const REPEATED: usize = 4;
const LESS: usize = 4;

impl Lowering<'_> {
    pub(super) fn region(&mut self, root: Id) -> Result<()> {
        if let Some(join) = self.joined_in(root) {
            return self.joined_region(root, join);
        }
        let (shape, _) = self.shape(root)?;
        let mut made = Making::over(&shape);
        made.reads_all = true;
        self.leaves(root, &mut made)?;
        let result = self.code(root, &mut made)?;
        let region = Region::new(&made.dtypes, made.code, &[result], Rounding::EveryOp)?;
        let order = self
            .order_in_memory(&made.inputs, &made.reads)
            .or_else(|| self.order_for_product(root, &made.inputs, &made.reads));
        let (y, shape, inputs) = match order {
            Some(order) => {
                let lying: Vec<usize> = order.iter().map(|d| shape[*d]).collect();
                let y = self.new_value_lying(root, &order, &lying)?;
                (y, lying, made.inputs.iter().map(|o| o.permuted(&order)).collect())
            }
            None => (self.new_value(root)?, shape, made.inputs),
        };
        self.note_gate(root, y, &inputs);
        let dense = dense_strides(&shape);
        self.plan.steps.push(Task::Region(Box::new(RegionStep {
            region,
            shape,
            inputs,
            reads: some_reads(made.reads),
            outputs: vec![y],
            slices: vec![],
            dense,
            placed: vec![],
        })));
        Ok(())
    }

    /// The order of dimensions in which most of what a region of a training step reads lies in memory, if that is not
    /// the usual one: its result lies so, too, as eager's does.
    fn order_in_memory(&self, inputs: &[Operand], reads: &[Read]) -> Option<Vec<usize>> {
        if !self.wish.saved || reads.iter().any(|r| *r != Read::Plain) {
            return None;
        }
        let order = |o: &Operand| {
            let mut dims: Vec<usize> = (0..o.shape.len()).collect();
            dims.sort_by_key(|d| (o.shape[*d] > 1, -o.strides[*d]));
            let lying: Vec<usize> = dims.iter().map(|d| o.shape[*d]).collect();
            (o.permuted(&dims).strides == dense_strides(&lying) || o.permuted(&dims).is_dense()).then_some(dims)
        };
        let found: Vec<Vec<usize>> = inputs.iter().filter_map(order).collect();
        let votes = |dims: &Vec<usize>| found.iter().filter(|f| *f == dims).count();
        let best = found.iter().rev().max_by_key(|dims| votes(dims))?;
        let moved = (0..best.len())
            .filter(|d| inputs[0].shape[best[*d]] > 1)
            .map(|d| best[d]);
        (!moved.is_sorted()).then(|| best.clone())
    }

    /// The same for a region that only a product of batches reads, which takes matrices swapped, too.
    fn order_for_product(&self, root: Id, inputs: &[Operand], reads: &[Read]) -> Option<Vec<usize>> {
        let mut user = self.user(root)?;
        if self.name(user) == "permute" {
            user = self.user(user)?;
        }
        let taken = self.name(user) == "matmul" && self.batch(user).is_none() && !self.can.batches.is_empty();
        let rank = self.shape(root).ok()?.0.len();
        if !taken || rank < 3 || reads.iter().any(|r| *r != Read::Plain) {
            return None;
        }
        let lies_swapped = |o: &Operand| o.strides[rank - 2] == 1 && o.strides[rank - 1] > 1;
        let whole = |o: &&Operand| o.strides[rank - 2..].iter().all(|s| *s != 0);
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        inputs.iter().find(whole).is_some_and(lies_swapped).then_some(order)
    }

    /// A value for a node whose dimensions lie in this order.
    fn new_value_lying(&mut self, id: Id, order: &[usize], lying: &[usize]) -> Result<ValueId> {
        let (_, dtype) = self.shape(id)?;
        self.plan.values.push(Value {
            shape: lying.to_vec(),
            dtype,
        });
        let value = self.plan.values.len() - 1;
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, d)| back[*d] = at);
        self.place.insert(id, Operand::dense(value, lying).permuted(&back));
        Ok(value)
    }

    /// Whether a node can be computed inside a region: its op on its dtypes.
    pub(super) fn is_pointwise(&self, id: Id) -> bool {
        let Ok((shape, _)) = self.shape(id) else {
            return false;
        };
        if !has_code(self.name(id)) {
            return false;
        }
        let mut made = Making::over(&shape);
        for child in self.program.node(id).children.iter().filter(|c| !self.is_attr(**c)) {
            let Ok((_, dtype)) = self.shape(*child) else {
                return false;
            };
            if !made.place.contains_key(child) {
                made.place.insert(*child, made.dtypes.len());
                made.dtypes.push(dtype);
            }
        }
        self.code(id, &mut made)
            .and_then(|result| Region::new(&made.dtypes, made.code, &[result], Rounding::EveryOp))
            .is_ok_and(|region| self.shape(id).is_ok_and(|(_, dtype)| region.outputs() == [dtype]))
    }

    /// Casts that only make numbers wider are computed in every region and op on rows that reads them, if nobody
    /// else does: what they are made of is half as long.
    pub(super) fn widen_where_read(&mut self, order: &[Id]) {
        let mut readers: FxHashMap<Id, Vec<Id>> = FxHashMap::default();
        for id in order.iter().chain([&self.program.root]) {
            for child in &self.program.node(*id).children {
                readers.entry(*child).or_default().push(*id);
            }
        }
        for cast in order.iter().copied() {
            let readers = readers.get(&cast).map_or(&[][..], Vec::as_slice);
            let shape = self.shape(cast).ok();
            let of_shape = |id: Id| self.shape(id).ok().map(|s| s.0) == shape.as_ref().map(|s| s.0.clone());
            let takes = |reader: &Id| {
                let children = &self.program.node(*reader).children;
                let reduces = self.row_op(*reader).is_some() || self.reductions.contains(reader);
                let rows = reduces && !children[1..].contains(&cast);
                let region = self.pointwise[usize::from(*reader)] && !self.tails.contains_key(reader);
                rows || region && of_shape(*reader)
            };
            let free = !self.inside[usize::from(cast)] && !self.tails.contains_key(&cast);
            if self.widens(cast) && readers.len() > 1 && free && readers.iter().all(takes) {
                self.inside[usize::from(cast)] = true;
            }
        }
    }

    /// A node and the pointwise nodes that it alone is made of, if that is so little work, and so much smaller than the
    /// region that reads it, that the region computes it for each of its elements: a step of its own would take longer.
    /// What else it is made of is read as it lies.
    pub(super) fn repeated(&self, id: Id, reader: Id) -> Option<Vec<Id>> {
        let size = |id: Id| self.shape(id).map_or(0, |(shape, _)| shape.iter().product::<usize>());
        if !self.can.computes_repeated || LESS * size(id) > size(reader) {
            return None;
        }
        let (mut ops, mut at) = (vec![id], 0);
        while at < ops.len() && ops.len() <= REPEATED {
            let children = self.program.node(ops[at]).children.iter().copied();
            ops.extend(children.filter(|c| self.uses[usize::from(*c)] == 1 && self.is_free_pointwise(*c)));
            at += 1;
        }
        (ops.len() <= REPEATED).then_some(ops)
    }

    /// Whether a region may compute a node.
    pub(super) fn is_free_pointwise(&self, id: Id) -> bool {
        let at = usize::from(id);
        self.pointwise[at] && !self.inside[at] && !self.source.weight[at] && !self.tails.contains_key(&id)
    }

    /// Whether a node casts numbers of 16 bits to wider ones.
    fn widens(&self, id: Id) -> bool {
        let from = || self.program.node(id).children.first().and_then(|c| self.shape(*c).ok());
        self.name(id) == "cast"
            && self.pointwise[usize::from(id)]
            && !self.source.weight[usize::from(id)]
            && self.shape(id).is_ok_and(|(_, dtype)| dtype == DType::F32)
            && from().is_some_and(|(_, dtype)| matches!(dtype, DType::BF16 | DType::F16))
    }

    /// What a node does along its last dimensions, and how many these are.
    pub(super) fn row_op(&self, id: Id) -> Option<(RowOp, usize)> {
        let children = &self.program.node(id).children;
        let attr = |i: usize| self.attr(*children.get(i)?);
        let last = |i: usize| attr(i).and_then(Attr::as_int) == Some(-1);
        let trailing = |i: usize| {
            let mut dims = attr(i)?.known_ints()?;
            dims.sort_unstable();
            let count = dims.len() as i64;
            (count > 0 && dims == (-count..0).collect::<Vec<_>>()).then_some(count as usize)
        };
        let (from, to) = (self.shape(*children.first()?).ok()?.1, self.shape(id).ok()?.1);
        let widens = matches!(self.name(id), "softmax_f32" | "log_softmax_f32") && from.is_float();
        if from != to && !widens || !to.is_float() {
            return None;
        }
        Some(match self.name(id) {
            "softmax" | "softmax_f32" if last(1) => {
                let flushes = self.is_for_products(id);
                (RowOp::Softmax { flushes }, 1)
            }
            "log_softmax" | "log_softmax_f32" if last(1) => (RowOp::LogSoftmax, 1),
            "layer_norm" => (
                RowOp::LayerNorm {
                    eps: attr(4)?.number()?,
                },
                attr(1)?.as_ints()?.len(),
            ),
            "rms_norm" => (
                RowOp::RmsNorm {
                    eps: match (attr(3)?, to) {
                        // The type that is computed in says, not the one that is read.
                        (Attr::None, DType::F32 | DType::BF16 | DType::F16) => f64::from(f32::EPSILON),
                        (Attr::None, DType::F64) => f64::EPSILON,
                        (given, _) => given.number()?,
                    },
                },
                attr(1)?.as_ints()?.len(),
            ),
            "sum" => (RowOp::Sum, trailing(1)?),
            "mean" => (RowOp::Mean, trailing(1)?),
            "amax" => (RowOp::Amax, trailing(1)?),
            _ => return None,
        })
    }

    /// Whether products alone read a node, in this or another shape or dtype: what is below the normal numbers adds
    /// nothing to their sums.
    fn is_for_products(&self, id: Id) -> bool {
        let users = self.users_of(id);
        let product = |user: &Id| match self.name(*user) {
            "matmul" | "bmm" | "mm" | "linear" | "addmm" | "baddbmm" => true,
            "reshape" | "permute" | "expand" | "contiguous" | "detach" | "cast" => self.is_for_products(*user),
            _ => false,
        };
        !users.is_empty() && users.iter().all(product)
    }

    /// A row op; with a node that multiplies its rows by a weight, the step is that of this node.
    pub(super) fn rows(&mut self, id: Id, scale: Option<(Id, Id)>) -> Result<()> {
        let (op, reduced) = self.row_op(id).ok_or_else(|| no_plan("an op on other dimensions"))?;
        let children = self.program.node(id).children.clone();
        let x = children[0];
        let ((shape, from), (result, dtype)) = (self.shape(x)?, self.shape(id)?);
        let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut rows = Rowwise::new(op, dtype)?;
        let mut made = Making::over(&shape);
        if self.inside[usize::from(x)] && !self.place.contains_key(&x) {
            self.leaves(x, &mut made)?;
            let mut last = self.code(x, &mut made)?;
            if from != compute {
                made.code.push(Instruction::new(Lane::Cast(compute), [last]));
                last = made.dtypes.len() + made.code.len() - 1;
            }
            rows = rows.with_prologue(Region::new(&made.dtypes, made.code, &[last], Rounding::EveryOp)?)?;
        } else {
            made.inputs.push(self.operand(x)?);
            if from != dtype {
                let widened = vec![Instruction::new(Lane::Cast(compute), [0])];
                rows = rows.with_prologue(Region::new(&[from], widened, &[1], Rounding::EveryOp)?)?;
            }
        }
        let mut inputs = made.inputs;
        let affine: Vec<Id> = match self.name(id) {
            "layer_norm" => children[2..4].to_vec(),
            "rms_norm" => children[2..3].to_vec(),
            _ => vec![],
        };
        if affine.iter().any(|a| !self.is_attr(*a)) {
            let mut types = vec![compute];
            let mut code = vec![];
            let given: Vec<Id> = affine.iter().copied().filter(|a| !self.is_attr(*a)).collect();
            for operand in &given {
                inputs.push(self.broadcast(*operand, &shape)?);
                types.push(self.shape(*operand)?.1);
            }
            let (mut at, mut place) = (0, 1);
            let mut next = types.len();
            for (i, operand) in affine.iter().enumerate() {
                if self.is_attr(*operand) {
                    continue;
                }
                let mut with = place;
                if types[place] != compute {
                    code.push(Instruction::new(Lane::Cast(compute), [place]));
                    with = next;
                    next += 1;
                }
                code.push(Instruction::new(if i == 0 { Lane::Mul } else { Lane::Add }, [at, with]));
                at = next;
                next += 1;
                place += 1;
            }
            if dtype != compute {
                code.push(Instruction::new(Lane::Cast(dtype), [at]));
                at = next;
            }
            rows = rows.with_epilogue(Region::new(&types, code, &[at], Rounding::AtStores)?)?;
        }
        if let Some((_, weight)) = scale {
            let (scaled, operand) = self.with_scale(rows, weight, &shape)?;
            rows = scaled;
            inputs.push(operand);
        }
        let output = self.new_value(scale.map_or(id, |(product, _)| product))?;
        let after = if op.reduces() {
            shape[..shape.len() - reduced].to_vec()
        } else {
            result
        };
        let dense = dense_strides(&after);
        self.plan.steps.push(Task::Rows(Box::new(RowStep {
            rows,
            shape,
            reduced,
            inputs,
            output,
            dense,
        })));
        Ok(())
    }

    /// A copy without gaps of what an operand sees; its value.
    pub(super) fn copied(&mut self, id: Id, operand: &Operand) -> Result<ValueId> {
        let dtype = self.plan.values[operand.value].dtype;
        debug_assert_eq!(Some(dtype), self.shape(id).ok().map(|s| s.1));
        if dtype.is_complex() {
            return Err(no_plan("complex numbers that lie otherwise than in eager"));
        }
        let region = Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?;
        self.plan.values.push(Value {
            shape: operand.shape.clone(),
            dtype,
        });
        let value = self.plan.values.len() - 1;
        self.plan.steps.push(Task::Region(Box::new(RegionStep {
            region,
            shape: operand.shape.clone(),
            inputs: vec![operand.clone()],
            reads: vec![],
            outputs: vec![value],
            slices: vec![],
            dense: dense_strides(&operand.shape),
            placed: vec![],
        })));
        Ok(value)
    }

    pub(super) fn broadcast(&mut self, id: Id, shape: &[usize]) -> Result<Operand> {
        self.operand(id)?
            .broadcast(shape)
            .ok_or_else(|| no_plan("operands that do not broadcast"))
    }

    fn is_inner(&self, id: Id, root: Id) -> bool {
        id == root || (self.inside[usize::from(id)] && self.pointwise[usize::from(id)])
    }

    /// Inputs come first in a region.
    pub(super) fn leaves(&mut self, root: Id, made: &mut Making) -> Result<()> {
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            for child in self.program.node(id).children.clone() {
                if self.is_attr(child) || made.place.contains_key(&child) {
                    continue;
                }
                if self.is_inner(child, root) && !self.place.contains_key(&child) {
                    stack.push(child);
                    continue;
                }
                if self.is_inner_read(child) {
                    if made.reads_all {
                        let reading = self.reading(child)?;
                        made.read_as(child, reading);
                        continue;
                    }
                    self.read_apart(child)?;
                }
                let operand = self.broadcast(child, &made.shape)?;
                made.read(child, operand, self.shape(child)?.1);
            }
        }
        Ok(())
    }

    /// The dtype that an op on tensors of one dtype computes in: a number beside them may be of a higher kind.
    fn computed_in(&self, id: Id, of: DType) -> Result<DType> {
        let types: Vec<&Ty> = self
            .program
            .node(id)
            .children
            .iter()
            .map(|c| self.program.ty(*c))
            .collect();
        let number = |t: &&Ty| t.attr().is_some_and(|a| a.number().is_some());
        match self.name(id) {
            "clamp" | "masked_fill" | "where" | "cast" => Ok(of),
            "div" if types.iter().any(number) => Ok(self.shape(id)?.1),
            _ if types.iter().any(number) => promote(&types).map_err(no_plan),
            _ => Ok(of),
        }
    }

    pub(super) fn code(&self, id: Id, made: &mut Making) -> Result<usize> {
        if let Some(place) = made.place.get(&id) {
            return Ok(*place);
        }
        let (_, dtype) = self.shape(id)?;
        let name = self.name(id);
        let children = self.program.node(id).children.clone();
        if is_gradient(name)
            && let &[g, x] = &children[..]
        {
            return self.slope(id, g, x, made);
        }
        if is_activation(name) {
            return self.activation(id, made);
        }
        let op = match name {
            "cast" => Lane::Cast(dtype),
            _ => lane(name).ok_or_else(|| no_plan(format!("the op {name}")))?,
        };
        let tensors: Vec<Id> = children.iter().copied().filter(|c| !self.is_attr(*c)).collect();
        // Conditions come first, masks last.
        let tensor = if name == "masked_fill" {
            tensors.first()
        } else {
            tensors.last()
        };
        let of = self.shape(*tensor.ok_or_else(|| no_plan("an op on numbers alone"))?)?.1;
        let promoted = self.is_promoted(name, &tensors, dtype);
        let of = if promoted { dtype } else { of };
        let within = self.computed_in(id, of)?;
        let mut args = vec![];
        for (i, child) in children.iter().enumerate() {
            match &self.program.node(*child).op {
                Op::Attr(Attr::DType(_)) => {}
                Op::Attr(Attr::None) if name == "clamp" => {
                    let bound = if i == 1 { f64::NEG_INFINITY } else { f64::INFINITY };
                    args.push(made.constant(bound, of)?);
                }
                Op::Attr(a) => {
                    let number = numbers::as_eager(name, a, within, self.can.whole_addends)
                        .ok_or_else(|| no_plan(format!("{name} of {within} with {a}")))?;
                    args.push(made.push(Instruction::new(Lane::Constant(number, within), [])));
                }
                _ => {
                    let mask = i == 0 && name == "where" || i == 1 && name == "masked_fill";
                    let from = self.shape(*child)?.1;
                    if !mask && name != "cast" && from != of && !promoted {
                        return Err(no_plan(format!("{name} of mixed dtypes")));
                    }
                    let mut value = self.code(*child, made)?;
                    if promoted && from != of {
                        value = made.push(Instruction::new(Lane::Cast(of), [value]));
                    }
                    args.push(match mask || name == "cast" || within == of {
                        true => value,
                        false => made.push(Instruction::new(Lane::Cast(within), [value])),
                    });
                }
            }
        }
        let place = made.push(Instruction::new(op, args));
        made.place.insert(id, place);
        Ok(place)
    }

    /// Whether torch widens an operand before it computes. A number in a tensor without dimensions widens nothing.
    fn is_promoted(&self, name: &str, tensors: &[Id], to: DType) -> bool {
        let narrow =
            |d: DType| matches!(d, DType::F16 | DType::BF16) && to == DType::F32 || d == DType::F32 && to == DType::F64;
        let dtypes: Vec<DType> = tensors
            .iter()
            .filter_map(|t| self.shape(*t).ok())
            .map(|s| s.1)
            .collect();
        matches!(name, "add" | "sub" | "mul" | "div")
            && dtypes.len() == tensors.len()
            && dtypes.iter().any(|d| *d != to)
            && dtypes.iter().all(|d| *d == to || narrow(*d))
    }
}

/// A region that is being made.
pub(super) struct Making {
    pub(super) shape: Vec<usize>,
    pub(super) inputs: Vec<Operand>,
    /// How they are read.
    pub(super) reads: Vec<Read>,
    /// It may read its inputs in any way.
    pub(super) reads_all: bool,
    pub(super) dtypes: Vec<DType>,
    pub(super) code: Vec<Instruction>,
    pub(super) place: FxHashMap<Id, usize>,
}

impl Making {
    pub(super) fn over(shape: &[usize]) -> Making {
        Making {
            shape: shape.to_vec(),
            inputs: vec![],
            reads: vec![],
            reads_all: false,
            dtypes: vec![],
            code: vec![],
            place: FxHashMap::default(),
        }
    }

    /// Notes an input; all of them come before any code.
    pub(super) fn read(&mut self, id: Id, operand: Operand, dtype: DType) {
        self.place.insert(id, self.inputs.len());
        self.inputs.push(operand);
        self.dtypes.push(dtype);
        self.reads.push(Read::Plain);
    }

    /// Adds an instruction; its place.
    pub(super) fn push(&mut self, instruction: Instruction) -> usize {
        self.code.push(instruction);
        self.dtypes.len() + self.code.len() - 1
    }

    /// A number that takes part in arithmetic of our own.
    pub(super) fn constant(&mut self, number: f64, dtype: DType) -> Result<usize> {
        if !dtype.is_float() {
            return Err(no_plan("a float among integers"));
        }
        Ok(self.push(Instruction::new(Lane::Constant(Scalar::Float(number), dtype), [])))
    }
}

/// Whether a region can compute a row, on some dtypes at least.
pub(super) fn has_code(name: &str) -> bool {
    lane(name).is_some() || is_activation(name) || is_gradient(name)
}

/// The vector op of a pointwise row.
fn lane(name: &str) -> Option<Lane> {
    match name {
        "cast" => Some(Lane::Cast(DType::F32)),
        _ => Lane::named(name),
    }
}
