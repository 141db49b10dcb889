//! Pointwise regions and ops along rows.

use egg::Id;
use rustc_hash::FxHashMap;

use super::{Lowering, no_plan};
use crate::attr::Attr;
use crate::error::Result;
use crate::ir::node::Op;
use crate::runtime::cpu::region::{Instruction, Op as Lane, Region, Rounding, Scalar};
use crate::runtime::cpu::rowwise::{RowOp, Rowwise};
use crate::runtime::plan::{RegionStep, RowStep, Task, ValueId};
use crate::ty::DType;

impl Lowering<'_> {
    pub(super) fn region(&mut self, root: Id) -> Result<()> {
        let (shape, _) = self.shape(root)?;
        let mut made = Making::over(&shape);
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

    /// What a node does along its last dimensions, and how many these are.
    pub(super) fn row_op(&self, id: Id) -> Option<(RowOp, usize)> {
        let children = &self.program.node(id).children;
        let attr = |i: usize| match &self.program.node(*children.get(i)?).op {
            Op::Attr(a) => Some(a),
            _ => None,
        };
        let last = |i: usize| attr(i).and_then(Attr::as_int) == Some(-1);
        let trailing = |i: usize| {
            let mut dims = attr(i)?.known_ints()?;
            dims.sort_unstable();
            let count = dims.len() as i64;
            (count > 0 && dims == (-count..0).collect::<Vec<_>>()).then_some(count as usize)
        };
        Some(match self.name(id) {
            "softmax" if last(1) => (RowOp::Softmax, 1),
            "log_softmax" if last(1) => (RowOp::LogSoftmax, 1),
            "layer_norm" => (
                RowOp::LayerNorm {
                    eps: attr(4)?.number()?,
                },
                attr(1)?.as_ints()?.len(),
            ),
            "rms_norm" => (
                RowOp::RmsNorm {
                    eps: attr(3)?.number()?,
                },
                attr(1)?.as_ints()?.len(),
            ),
            "sum" => (RowOp::Sum, trailing(1)?),
            "mean" => (RowOp::Mean, trailing(1)?),
            "amax" => (RowOp::Amax, trailing(1)?),
            _ => return None,
        })
    }

    pub(super) fn rows(&mut self, id: Id) -> Result<()> {
        let (op, reduced) = self.row_op(id).ok_or_else(|| no_plan("an op on other dimensions"))?;
        let children = self.program.node(id).children.clone();
        let x = children[0];
        let ((shape, from), (result, dtype)) = (self.shape(x)?, self.shape(id)?);
        if from != dtype || !dtype.is_float() {
            return Err(no_plan(format!("{} that changes the dtype", self.name(id))));
        }
        let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut rows = Rowwise::new(op, dtype)?;
        let mut made = Making::over(&shape);
        if self.inside[usize::from(x)] && !self.value.contains_key(&x) {
            self.leaves(x, &mut made)?;
            let mut last = self.code(x, &mut made)?;
            if dtype != compute {
                made.code.push(Instruction::new(Lane::Cast(compute), [last]));
                last = made.inputs.len() + made.code.len() - 1;
            }
            rows = rows.with_prologue(Region::new(&made.dtypes, made.code, &[last], Rounding::EveryOp)?)?;
        } else {
            let strides = strides(&shape, &shape).ok_or_else(|| no_plan("a shape without strides"))?;
            made.inputs.push((self.value_of(x)?, strides));
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
                let (small, kind) = self.shape(*operand)?;
                let strides = strides(&small, &shape).ok_or_else(|| no_plan("operands that do not broadcast"))?;
                inputs.push((self.value_of(*operand)?, strides));
                types.push(kind);
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
        let output = self.new_value(id)?;
        let after = if op.reduces() {
            shape[..shape.len() - reduced].to_vec()
        } else {
            result
        };
        let dense = strides(&after, &after).ok_or_else(|| no_plan("a shape without strides"))?;
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
    fn over(shape: &[usize]) -> Making {
        Making {
            shape: shape.to_vec(),
            inputs: vec![],
            dtypes: vec![],
            code: vec![],
            place: FxHashMap::default(),
        }
    }

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

/// The vector op of a pointwise row.
pub(super) fn lane(name: &str) -> Option<Lane> {
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
