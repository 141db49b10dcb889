//! The slow reference device: every op on f64 arrays. It defines what ops mean.

use std::sync::Arc;

use crate::attr::Attr;
use crate::error::Check;
use crate::ty::{DType, Ty};

/// A dense row-major array of real numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Arr {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Vec<f64>,
}

/// A value.
#[derive(Debug, Clone)]
pub enum Val {
    /// A tensor.
    Arr(Arc<Arr>),
    /// A compile-time value.
    Attr(Attr),
    /// Several values.
    Tuple(Vec<Val>),
}

/// How results of floating-point ops are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As real numbers: only casts to integers and bools change a value.
    Real,
    /// Rounded to the dtype after every op, as eager kernels do.
    Rounded,
}

impl Val {
    /// A tensor value.
    pub fn arr(a: Arr) -> Val {
        Val::Arr(Arc::new(a))
    }

    /// Stored in the given type.
    pub fn stored(self, ty: &Ty, mode: Mode) -> Val {
        match (self, ty) {
            (Val::Arr(a), Ty::Tensor(t)) => {
                if mode == Mode::Real && t.dtype.is_float() || t.dtype == DType::F64 {
                    return Val::Arr(a);
                }
                let mut a = Arc::try_unwrap(a).unwrap_or_else(|a| (*a).clone());
                a.data.iter_mut().for_each(|v| *v = t.dtype.round(*v));
                Val::arr(a)
            }
            (Val::Tuple(vals), Ty::Tuple(tys)) => Val::Tuple(
                vals.into_iter()
                    .zip(tys.iter())
                    .map(|(v, t)| v.stored(t, mode))
                    .collect(),
            ),
            (v, _) => v,
        }
    }
}

impl Arr {
    /// An array; the number of elements must fit the shape.
    pub fn new(shape: Vec<usize>, data: Vec<f64>) -> Arr {
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        Arr { shape, data }
    }

    /// An array filled by a function of the index.
    pub fn from_fn(shape: Vec<usize>, mut f: impl FnMut(&[usize]) -> f64) -> Arr {
        let mut data = Vec::with_capacity(shape.iter().product());
        let mut index = vec![0; shape.len()];
        for_each_index(&shape, &mut index, &mut |i| data.push(f(i)));
        Arr { shape, data }
    }

    /// Row-major strides.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.shape.len()];
        for i in (0..self.shape.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * self.shape[i + 1];
        }
        strides
    }

    /// The element at an index.
    pub fn at(&self, index: &[usize]) -> f64 {
        let mut flat = 0;
        for (i, s) in index.iter().zip(&self.shape) {
            flat = flat * s + i;
        }
        self.data[flat]
    }

    /// The element at an index of a shape that this array broadcasts to.
    pub fn at_broadcast(&self, index: &[usize]) -> f64 {
        let skip = index.len() - self.shape.len();
        let mut flat = 0;
        for (i, s) in index[skip..].iter().zip(&self.shape) {
            flat = flat * s + if *s == 1 { 0 } else { *i };
        }
        self.data[flat]
    }

    /// Elementwise function.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Arr {
        Arr {
            shape: self.shape.clone(),
            data: self.data.iter().map(|v| f(*v)).collect(),
        }
    }

    /// The same elements in another shape.
    pub fn reshaped(&self, shape: Vec<usize>) -> Arr {
        Arr::new(shape, self.data.clone())
    }

    /// Reduces the given dimensions; `f` gets the elements in order.
    pub fn reduce(&self, dims: &[usize], keep: bool, f: impl Fn(&[f64]) -> f64) -> Arr {
        let kept: Vec<usize> = (0..self.shape.len())
            .map(|d| if dims.contains(&d) { 1 } else { self.shape[d] })
            .collect();
        let inner: Vec<usize> = dims.iter().map(|d| self.shape[*d]).collect();
        let mut buffer = Vec::new();
        let out = Arr::from_fn(kept.clone(), |i| {
            buffer.clear();
            let mut full = i.to_vec();
            let mut k = vec![0; inner.len()];
            for_each_index(&inner, &mut k, &mut |k| {
                for (d, v) in dims.iter().zip(k) {
                    full[*d] = *v;
                }
                buffer.push(self.at(&full));
            });
            f(&buffer)
        });
        if keep {
            return out;
        }
        let shape = (0..self.shape.len())
            .filter(|d| !dims.contains(d))
            .map(|d| self.shape[d])
            .collect();
        Arr::new(shape, out.data)
    }
}

/// Calls `f` with every index of a shape, row-major.
pub fn for_each_index(shape: &[usize], index: &mut [usize], f: &mut dyn FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    loop {
        f(index);
        let mut d = shape.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
}

/// Elementwise function of broadcast operands.
pub fn zip(operands: &[&Arr], shape: Vec<usize>, f: impl Fn(&[f64]) -> f64) -> Check<Val> {
    let mut row = vec![0.0; operands.len()];
    Ok(Val::arr(Arr::from_fn(shape, |i| {
        for (r, a) in row.iter_mut().zip(operands) {
            *r = a.at_broadcast(i);
        }
        f(&row)
    })))
}

/// The largest difference relative to the largest element; NaNs must be in the same places.
pub fn difference(a: &Val, b: &Val) -> f64 {
    match (a, b) {
        (Val::Arr(a), Val::Arr(b)) => {
            if a.shape != b.shape {
                return f64::NAN;
            }
            let scale = a
                .data
                .iter()
                .filter(|v| v.is_finite())
                .fold(1.0f64, |m, v| m.max(v.abs()));
            a.data.iter().zip(&b.data).fold(0.0, |worst: f64, (x, y)| {
                if x == y || x.is_nan() && y.is_nan() {
                    return worst;
                }
                let d = (x - y).abs() / scale;
                if d.is_nan() || worst.is_nan() {
                    f64::NAN
                } else {
                    worst.max(d)
                }
            })
        }
        (Val::Tuple(a), Val::Tuple(b)) if a.len() == b.len() => {
            a.iter().zip(b).map(|(x, y)| difference(x, y)).fold(0.0, f64::max)
        }
        (Val::Attr(a), Val::Attr(b)) if a == b => 0.0,
        _ => f64::NAN,
    }
}
