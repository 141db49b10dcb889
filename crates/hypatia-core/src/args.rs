//! What type rules and evaluations see of their operands.

use std::sync::Arc;

use crate::attr::Attr;
use crate::dim::Dim;
use crate::error::Check;
use crate::eval::{Arr, Mode, Val};
use crate::ty::{DType, TensorType, Ty};

/// Operand types.
pub struct Args<'a>(pub &'a [Ty]);

impl<'a> Args<'a> {
    fn get(&self, i: usize) -> Check<&'a Ty> {
        self.0.get(i).ok_or_else(|| format!("operand {i} is missing"))
    }

    /// The tensor at a position.
    pub fn t(&self, i: usize) -> Check<&'a TensorType> {
        let ty = self.get(i)?;
        ty.tensor()
            .ok_or_else(|| format!("operand {i} must be a tensor, not {ty}"))
    }

    /// The optional tensor at a position.
    pub fn opt(&self, i: usize) -> Check<Option<&'a TensorType>> {
        match self.get(i)? {
            Ty::Attr(Attr::None) => Ok(None),
            _ => self.t(i).map(Some),
        }
    }

    /// The compile-time value at a position.
    pub fn attr(&self, i: usize) -> Check<&'a Attr> {
        let ty = self.get(i)?;
        ty.attr()
            .ok_or_else(|| format!("operand {i} must be a compile-time value, not {ty}"))
    }

    /// The integer at a position.
    pub fn int(&self, i: usize) -> Check<i64> {
        self.attr(i)?
            .as_int()
            .ok_or_else(|| format!("operand {i} must be a known integer"))
    }

    /// The list of integers at a position.
    pub fn ints(&self, i: usize) -> Check<&'a [Dim]> {
        self.attr(i)?
            .as_ints()
            .ok_or_else(|| format!("operand {i} must be a list of integers"))
    }

    /// The list of known integers at a position.
    pub fn known(&self, i: usize) -> Check<Vec<i64>> {
        self.attr(i)?
            .known_ints()
            .ok_or_else(|| format!("operand {i} must be a list of known integers"))
    }

    /// The truth value at a position.
    pub fn flag(&self, i: usize) -> Check<bool> {
        match self.attr(i)? {
            Attr::Bool(b) => Ok(*b),
            other => Err(format!("operand {i} must be true or false, not {other}")),
        }
    }

    /// A dimension counted from the end, as an index into `t`'s shape.
    pub fn dim_of(&self, i: usize, t: &TensorType) -> Check<usize> {
        index_from_end(self.int(i)?, t.rank())
    }

    /// Dimensions counted from the end, as indices into `t`'s shape.
    pub fn dims_of(&self, i: usize, t: &TensorType) -> Check<Vec<usize>> {
        let dims = self.known(i)?;
        if dims.windows(2).any(|w| w[0] >= w[1]) {
            return Err(format!("dimensions {dims:?} are not ascending"));
        }
        dims.into_iter().map(|d| index_from_end(d, t.rank())).collect()
    }

    /// Number of operands.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn index_from_end(dim: i64, rank: usize) -> Check<usize> {
    let index = rank as i64 + dim;
    if dim < 0 && index >= 0 {
        Ok(index as usize)
    } else {
        Err(format!("dimension {dim} is not one of -{rank}..-1"))
    }
}

/// torch's promotion: tensors with dimensions outrank those without, which outrank numbers;
/// a lower rank only counts when its category (bool < int < float) is higher.
pub fn promote(operands: &[&Ty]) -> Check<DType> {
    let category = |d: DType| if d.is_float() { 2 } else { i32::from(d.is_int()) };
    let mut best: [Option<DType>; 3] = [None; 3];
    for ty in operands {
        let (level, dtype) = match ty {
            Ty::Tensor(t) => (usize::from(t.rank() == 0), t.dtype),
            Ty::Attr(Attr::Bool(_)) => (2, DType::Bool),
            Ty::Attr(Attr::Int(_)) => (2, DType::I64),
            Ty::Attr(Attr::Float(_)) => (2, DType::F32),
            other => return Err(format!("{other} is neither a tensor nor a number")),
        };
        best[level] = Some(best[level].map_or(dtype, |b| b.promote(dtype)));
    }
    best.into_iter()
        .flatten()
        .reduce(|high, low| if category(low) > category(high) { low } else { high })
        .ok_or_else(|| "no operands".to_string())
}

/// The shape that several shapes broadcast to. Symbolic sizes must be provably equal or one.
pub fn broadcast(shapes: &[&[Dim]]) -> Check<Arc<[Dim]>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    (0..rank)
        .map(|i| {
            let mut size = Dim::Const(1);
            for s in shapes {
                let Some(d) = (i + s.len()).checked_sub(rank).map(|k| &s[k]) else {
                    continue;
                };
                if size.is(1) {
                    size = d.clone();
                } else if !d.is(1) && *d != size {
                    return Err(format!("sizes {size} and {d} do not broadcast"));
                }
            }
            Ok(size)
        })
        .collect()
}

/// Operand values, and the type that the result has.
pub struct Vals<'a> {
    /// The operands.
    pub vals: &'a [Val],
    /// The operands' types.
    pub types: &'a [Ty],
    /// Type of the result.
    pub out: &'a Ty,
    /// How results are stored.
    pub mode: Mode,
}

impl<'a> Vals<'a> {
    /// The tensor at a position.
    pub fn a(&self, i: usize) -> Check<&'a Arr> {
        match self.vals.get(i) {
            Some(Val::Arr(a)) => Ok(a),
            _ => Err(format!("operand {i} has no tensor value")),
        }
    }

    /// The optional tensor at a position.
    pub fn opt(&self, i: usize) -> Check<Option<&'a Arr>> {
        match self.vals.get(i) {
            Some(Val::Attr(Attr::None)) => Ok(None),
            _ => self.a(i).map(Some),
        }
    }

    /// The tensor or number at a position; a number has no dimensions.
    pub fn scalar(&self, i: usize) -> Check<Arr> {
        match self.vals.get(i) {
            Some(Val::Arr(a)) => Ok((**a).clone()),
            Some(Val::Attr(attr)) => attr
                .number()
                .map(|v| Arr::new(vec![], vec![v]))
                .ok_or_else(|| format!("operand {i} is no number")),
            _ => Err(format!("operand {i} has no value")),
        }
    }

    /// The operand types, for the compile-time values among them.
    pub fn args(&self) -> Args<'a> {
        Args(self.types)
    }

    /// The known float at a position.
    pub fn num(&self, i: usize) -> Check<f64> {
        self.args()
            .attr(i)?
            .number()
            .ok_or_else(|| format!("operand {i} is no number"))
    }

    /// Type of the result, when it is a tensor.
    pub fn out_tensor(&self) -> Check<&'a TensorType> {
        self.out.tensor().ok_or_else(|| "the result is no tensor".to_string())
    }

    /// Shape of the result, in known integers.
    pub fn out_shape(&self) -> Check<Vec<usize>> {
        known_shape(&self.out_tensor()?.shape)
    }
}

/// A shape in known integers.
pub fn known_shape(shape: &[Dim]) -> Check<Vec<usize>> {
    shape
        .iter()
        .map(|d| {
            d.known()
                .and_then(|v| usize::try_from(v).ok())
                .ok_or_else(|| format!("size {d} is not known"))
        })
        .collect()
}
