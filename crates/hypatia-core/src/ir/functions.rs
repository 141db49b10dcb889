//! Functions on compile-time values, written `($name …)` in rules and in the meaning of torch
//! calls. They see types, so they know shapes; no answer means that the rule does not apply.

use std::sync::Arc;

use crate::attr::Attr;
use crate::dim::{Dim, product};
use crate::ty::{DType, TensorType, Ty};

/// A function on compile-time values and types.
pub type Function = fn(&[Ty]) -> Option<Attr>;

fn tensor(a: &[Ty], i: usize) -> Option<&TensorType> {
    a.get(i)?.tensor()
}

fn attr(a: &[Ty], i: usize) -> Option<&Attr> {
    a.get(i)?.attr()
}

fn int(a: &[Ty], i: usize) -> Option<i64> {
    attr(a, i)?.as_int()
}

fn dim(a: &[Ty], i: usize) -> Option<&Dim> {
    match attr(a, i)? {
        Attr::Int(d) => Some(d),
        _ => None,
    }
}

fn number(a: &[Ty], i: usize) -> Option<f64> {
    attr(a, i)?.number()
}

fn shape(dims: impl IntoIterator<Item = Dim>) -> Option<Attr> {
    Some(Attr::Ints(dims.into_iter().collect::<Vec<_>>().into()))
}

/// A dimension given either way, as an index from the front.
fn index(d: i64, rank: usize) -> Option<usize> {
    let i = if d < 0 { d + rank as i64 } else { d };
    (0..rank as i64).contains(&i).then_some(i as usize)
}

/// An index from the front as the canonical count from the end.
fn from_end(i: usize, rank: usize) -> Attr {
    Attr::int(i as i64 - rank as i64)
}

/// The dimensions of an integer, a list, or all of them for `none` and the empty list.
fn dim_list(a: &[Ty], i: usize, rank: usize) -> Option<Vec<usize>> {
    let mut dims: Vec<usize> = match attr(a, i)? {
        Attr::None => (0..rank).collect(),
        Attr::Int(d) => vec![index(d.known()?, rank)?],
        list @ Attr::Ints(_) => match list.known_ints()? {
            v if v.is_empty() => (0..rank).collect(),
            v => v.into_iter().map(|d| index(d, rank)).collect::<Option<_>>()?,
        },
        _ => return None,
    };
    dims.sort_unstable();
    dims.dedup();
    Some(dims)
}

fn resolve(a: &[Ty]) -> Option<Attr> {
    let (x, want) = (tensor(a, 0)?, attr(a, 1)?.as_ints()?);
    let Some(hole) = want.iter().position(|d| d.is(-1)) else {
        return shape(want.iter().cloned());
    };
    let rest: Vec<Dim> = want
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != hole)
        .map(|(_, d)| d.clone())
        .collect();
    let size = quotient(&x.shape, &rest)?;
    shape(
        want.iter()
            .enumerate()
            .map(|(i, d)| if i == hole { size.clone() } else { d.clone() }),
    )
}

/// Product of `all` divided by the product of `by`, when exact: equal sizes cancel first.
fn quotient(all: &[Dim], by: &[Dim]) -> Option<Dim> {
    let mut top = all.to_vec();
    let mut bottom = Dim::Const(1);
    for d in by {
        match top.iter().position(|t| t == d && t.known().is_none_or(|v| v != 0)) {
            Some(i) if d.known().is_none() => {
                top.remove(i);
            }
            _ => bottom = bottom.mul(d),
        }
    }
    product(&top).div(&bottom)
}

fn parts_of(size: &Dim, step: i64) -> Option<Attr> {
    let n = size.known()?;
    if step <= 0 {
        return None;
    }
    let sizes: Vec<i64> = (0..n).step_by(step as usize).map(|s| step.min(n - s)).collect();
    Some(Attr::ints(if sizes.is_empty() { &[0] } else { &sizes }))
}

fn compose(a: &[Ty]) -> Option<Attr> {
    let (first, second) = (attr(a, 0)?.known_ints()?, attr(a, 1)?.known_ints()?);
    let all: Option<Vec<i64>> = second.iter().map(|d| first.get(*d as usize).copied()).collect();
    all.map(|v| Attr::ints(&v))
}

fn inverse(perm: &[i64]) -> Vec<i64> {
    let mut out = vec![0; perm.len()];
    for (i, d) in perm.iter().enumerate() {
        out[*d as usize] = i as i64;
    }
    out
}

fn swapped(x: &TensorType, d0: usize, d1: usize) -> Attr {
    let mut perm: Vec<i64> = (0..x.rank() as i64).collect();
    perm.swap(d0, d1);
    Attr::ints(&perm)
}

fn arithmetic(a: &[Ty], f: fn(f64, f64) -> f64) -> Option<Attr> {
    Some(Attr::float(f(number(a, 0)?, number(a, 1)?)))
}

/// All functions, by name.
pub const FUNCTIONS: &[(&str, Function)] = &[
    // Canonical forms of torch's arguments.
    ("dim", |a| {
        let r = tensor(a, 0)?.rank();
        Some(from_end(index(int(a, 1)?, r)?, r))
    }),
    ("dims", |a| {
        let r = tensor(a, 0)?.rank();
        let dims: Vec<i64> = dim_list(a, 1, r)?.into_iter().map(|d| d as i64 - r as i64).collect();
        Some(Attr::ints(&dims))
    }),
    ("perm", |a| {
        let r = tensor(a, 0)?.rank();
        let perm: Option<Vec<i64>> = attr(a, 1)?
            .known_ints()?
            .into_iter()
            .map(|d| Some(index(d, r)? as i64))
            .collect();
        perm.map(|p| Attr::ints(&p))
    }),
    ("float", |a| match attr(a, 0)? {
        Attr::None => Some(Attr::None),
        _ => number(a, 0).map(Attr::float),
    }),
    ("resolve", resolve),
    ("unsqueezed", |a| {
        let x = tensor(a, 0)?;
        let d = index(int(a, 1)?, x.rank() + 1)?;
        let mut s = x.shape.to_vec();
        s.insert(d, Dim::Const(1));
        shape(s)
    }),
    ("squeezed", |a| {
        let x = tensor(a, 0)?;
        let dims = dim_list(a, 1, x.rank())?;
        if dims.iter().any(|d| x.shape[*d].known().is_none()) {
            return None;
        }
        shape(
            (0..x.rank())
                .filter(|d| !(dims.contains(d) && x.shape[*d].is(1)))
                .map(|d| x.shape[d].clone()),
        )
    }),
    ("flattened", |a| {
        let x = tensor(a, 0)?;
        let (from, to) = (index(int(a, 1)?, x.rank())?, index(int(a, 2)?, x.rank())?);
        let mut s = x.shape[..from].to_vec();
        s.push(product(x.shape.get(from..=to)?));
        s.extend_from_slice(&x.shape[to + 1..]);
        shape(s)
    }),
    ("transposed", |a| {
        let x = tensor(a, 0)?;
        match x.rank() {
            0 | 1 => Some(Attr::ints(&(0..x.rank() as i64).collect::<Vec<_>>())),
            2 => Some(Attr::ints(&[1, 0])),
            _ => None,
        }
    }),
    ("swapped", |a| {
        let x = tensor(a, 0)?;
        Some(swapped(x, index(int(a, 1)?, x.rank())?, index(int(a, 2)?, x.rank())?))
    }),
    ("expanded", |a| {
        let (x, want) = (tensor(a, 0)?, attr(a, 1)?.as_ints()?);
        let new = want.len().checked_sub(x.rank())?;
        want.iter()
            .enumerate()
            .map(|(i, d)| {
                if d.is(-1) {
                    i.checked_sub(new).map(|k| x.shape[k].clone())
                } else {
                    Some(d.clone())
                }
            })
            .collect::<Option<Vec<Dim>>>()
            .and_then(shape)
    }),
    ("parts", |a| {
        let x = tensor(a, 0)?;
        parts_of(&x.shape[index(int(a, 2)?, x.rank())?], int(a, 1)?)
    }),
    ("chunks", |a| {
        let x = tensor(a, 0)?;
        let (size, n) = (&x.shape[index(int(a, 2)?, x.rank())?], int(a, 1)?);
        parts_of(size, (size.known()? + n - 1) / n.max(1))
    }),
    ("stack_dim", |a| {
        let r = tensor(a, 0)?.rank() + 1;
        Some(from_end(index(int(a, 1)?, r)?, r))
    }),
    // Shapes and permutations, for rules.
    ("shape", |a| shape(tensor(a, 0)?.shape.iter().cloned())),
    ("size", |a| Some(Attr::Int(tensor(a, 0)?.dim(int(a, 1)?)?.clone()))),
    ("rank", |a| Some(Attr::int(tensor(a, 0)?.rank() as i64))),
    ("dtype", |a| Some(Attr::DType(tensor(a, 0)?.dtype))),
    // In which a weight is computed before it is rounded once.
    ("wide", |a| {
        Some(Attr::DType(match tensor(a, 0)?.dtype {
            DType::BF16 | DType::F16 => DType::F32,
            own => own,
        }))
    }),
    ("numel", |a| Some(Attr::Int(tensor(a, 0)?.numel()))),
    ("compose", compose),
    ("inverse", |a| Some(Attr::ints(&inverse(&attr(a, 0)?.known_ints()?)))),
    ("swap_last", |a| {
        let x = tensor(a, 0)?;
        let r = x.rank();
        (r >= 2).then(|| swapped(x, r - 2, r - 1))
    }),
    ("with_last", |a| {
        // The shape of the first operand with another last size.
        let x = tensor(a, 0)?;
        let mut s = x.shape.to_vec();
        *s.last_mut()? = dim(a, 1)?.clone();
        shape(s)
    }),
    ("perm_dim", |a| {
        // Where a dimension of the permuted tensor was before.
        let (x, perm) = (tensor(a, 0)?, attr(a, 1)?.known_ints()?);
        let r = x.rank();
        Some(from_end(*perm.get(index(int(a, 2)?, r)?)? as usize, r))
    }),
    ("unperm_dim", |a| {
        // Where a dimension goes when the tensor is permuted.
        let (x, perm) = (tensor(a, 0)?, attr(a, 1)?.known_ints()?);
        let r = x.rank();
        let d = index(int(a, 2)?, r)? as i64;
        Some(from_end(perm.iter().position(|p| *p == d)?, r))
    }),
    ("drop_last", |a| {
        let s = attr(a, 0)?.as_ints()?;
        shape(s[..s.len().checked_sub(1)?].iter().cloned())
    }),
    // Arithmetic on numbers.
    ("add", |a| arithmetic(a, |x, y| x + y)),
    ("sub", |a| arithmetic(a, |x, y| x - y)),
    ("mul", |a| arithmetic(a, |x, y| x * y)),
    ("div", |a| arithmetic(a, |x, y| x / y)),
    ("neg", |a| number(a, 0).map(|x| Attr::float(-x))),
    ("recip", |a| number(a, 0).map(|x| Attr::float(1.0 / x))),
    // Arithmetic on sizes and places.
    ("iadd", |a| Some(Attr::Int(dim(a, 0)?.add(dim(a, 1)?)))),
    ("isub", |a| Some(Attr::Int(dim(a, 0)?.sub(dim(a, 1)?)))),
    ("imul", |a| Some(Attr::Int(dim(a, 0)?.mul(dim(a, 1)?)))),
    ("part_start", |a| {
        // Where part `i` of a list of sizes starts.
        let (sizes, i) = (attr(a, 0)?.as_ints()?, int(a, 1)?);
        let before = sizes.get(..usize::try_from(i).ok()?)?;
        Some(Attr::Int(before.iter().fold(Dim::Const(0), |s, d| s.add(d))))
    }),
    ("part_end", |a| {
        let (sizes, i) = (attr(a, 0)?.as_ints()?, int(a, 1)?);
        let upto = sizes.get(..=usize::try_from(i).ok()?)?;
        Some(Attr::Int(upto.iter().fold(Dim::Const(0), |s, d| s.add(d))))
    }),
    ("start", |a| {
        // The start of a slice as a place from the front, `none` being zero.
        match attr(a, 0)? {
            Attr::None => Some(Attr::int(0)),
            Attr::Int(d) if d.known().is_none_or(|v| v >= 0) => Some(Attr::Int(d.clone())),
            _ => None,
        }
    }),
    // Views, for rules.
    ("permuted", |a| {
        let (x, perm) = (tensor(a, 0)?, attr(a, 1)?.known_ints()?);
        let sizes: Option<Vec<Dim>> = perm.iter().map(|d| x.shape.get(*d as usize).cloned()).collect();
        shape(sizes?)
    }),
    ("drop_first", |a| {
        shape(attr(a, 0)?.as_ints()?.get(1..)?.iter().cloned())
    }),
    ("rows", |a| {
        // Two sizes of what a linear with weight `w` makes: of `x`, which it is made of, the same number of rows.
        let (sizes, w, x) = (attr(a, 0)?.as_ints()?, tensor(a, 1)?, tensor(a, 2)?);
        match (sizes, &w.shape[..]) {
            ([rows, n], [columns, _]) if n == columns && !n.is(0) => shape([rows.clone(), x.shape.last()?.clone()]),
            _ => None,
        }
    }),
    ("last_two", |a| {
        let x = tensor(a, 0)?;
        shape(x.shape[x.rank().checked_sub(2)?..].iter().cloned())
    }),
    ("along", |a| {
        // A vector laid along dimension `i` of another tensor: ones elsewhere.
        let (v, w) = (tensor(a, 0)?, tensor(a, 1)?);
        let mut s = vec![Dim::Const(1); w.rank()];
        *s.get_mut(usize::try_from(int(a, 2)?).ok()?)? = v.shape.first()?.clone();
        if v.rank() == 1 { shape(s) } else { None }
    }),
    ("inner_dims", |a| {
        // All dimensions but the first.
        let r = tensor(a, 0)?.rank() as i64;
        Some(Attr::ints(&(1 - r..0).collect::<Vec<_>>()))
    }),
    ("tail", |a| {
        // The sizes of dimensions that must be the last ones.
        let (x, dims) = (tensor(a, 0)?, attr(a, 1)?.known_ints()?);
        let kept = x.rank().checked_sub(dims.len())?;
        let last = (1..=dims.len() as i64).rev().map(|d| -d);
        if dims.iter().copied().eq(last) {
            shape(x.shape[kept..].iter().cloned())
        } else {
            None
        }
    }),
    ("only", |a| match attr(a, 0)?.known_ints()?[..] {
        [d] => Some(Attr::int(d)),
        _ => None,
    }),
    ("place", |a| {
        // A bound of a slice as a place from the front, inside the dimension; `none` is the last operand.
        let n = tensor(a, 0)?.dim(int(a, 1)?)?.known()?;
        let v = match attr(a, 2)? {
            Attr::None => int(a, 3)?,
            _ => int(a, 2)?,
        };
        Some(Attr::int(if v < 0 { (v + n).max(0) } else { v.min(n) }))
    }),
    ("sub_place", |a| {
        // Where a place in a slice is in the whole: `start + step × place`.
        let known = [int(a, 0)?, int(a, 1)?, int(a, 2)?];
        let whole = known[1].checked_mul(known[2])?.checked_add(known[0])?;
        known.iter().all(|v| *v >= 0).then(|| Attr::int(whole))
    }),
];

/// Looks a function up.
pub fn function(name: &str) -> Option<Function> {
    FUNCTIONS.iter().find(|(n, _)| *n == name).map(|(_, f)| *f)
}

/// Brings an argument of torch into the canonical form of an operand's kind.
pub fn canonical(kind: crate::ops::Kind, x: Option<&Ty>, value: &Attr) -> Option<Attr> {
    use crate::ops::Kind;
    let with = |name: &str| function(name)?(&[x?.clone(), Ty::Attr(value.clone())]);
    match kind {
        Kind::Dim => with("dim"),
        Kind::Dims => with("dims"),
        Kind::Perm => with("perm"),
        Kind::Shape | Kind::Ints => match value {
            Attr::Ints(_) => Some(value.clone()),
            Attr::Int(d) => Some(Attr::Ints(Arc::from(vec![d.clone()]))),
            _ => None,
        },
        Kind::Float => value.number().map(Attr::float),
        Kind::OptFloat => match value {
            Attr::None => Some(Attr::None),
            _ => value.number().map(Attr::float),
        },
        Kind::Int => matches!(value, Attr::Int(_)).then(|| value.clone()),
        Kind::OptInt => matches!(value, Attr::Int(_) | Attr::None).then(|| value.clone()),
        Kind::Bool => match value {
            Attr::Bool(_) => Some(value.clone()),
            Attr::Int(d) => Some(Attr::Bool(d.known()? != 0)),
            _ => None,
        },
        Kind::DType => matches!(value, Attr::DType(_)).then(|| value.clone()),
        Kind::Str => matches!(value, Attr::Str(_)).then(|| value.clone()),
        Kind::OptTensor => matches!(value, Attr::None).then(|| value.clone()),
        // A number beside a floating tensor is a float, so that rules need one spelling only.
        Kind::Scalar => match (value, x.and_then(Ty::tensor)) {
            // One that is no float of 64 bits stays whole: torch rounds it once.
            (Attr::Int(d), Some(t)) if t.dtype.is_float() && d.known().is_some_and(|v| v.unsigned_abs() <= 1 << 53) => {
                value.number().map(Attr::float)
            }
            (Attr::Int(_) | Attr::Float(_) | Attr::Bool(_), _) => Some(value.clone()),
            _ => None,
        },
        Kind::Tensor | Kind::Tensors => None,
    }
}
