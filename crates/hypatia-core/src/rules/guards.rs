//! Guards: what must be proved before a rule fires. What is not known counts as not true.

use crate::attr::Attr;
use crate::dim::Dim;
use crate::egraph::Facts;
use crate::ty::{DType, TensorType, Ty};

/// A condition on facts.
pub type Guard = fn(&[Facts]) -> bool;

fn tensor(f: &[Facts], i: usize) -> Option<&TensorType> {
    f.get(i)?.ty.tensor()
}

fn attr(f: &[Facts], i: usize) -> Option<&Attr> {
    f.get(i)?.ty.attr()
}

fn number(f: &[Facts], i: usize) -> Option<f64> {
    attr(f, i)?.number()
}

/// Strictly wider: casting there and on loses nothing.
fn widens(from: DType, to: DType) -> bool {
    use DType::{BF16, Bool, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8};
    match from {
        Bool => !to.is_complex(),
        U8 => matches!(to, I16 | I32 | I64 | F16 | F32 | F64),
        I8 => matches!(to, I16 | I32 | I64 | F16 | BF16 | F32 | F64),
        I16 => matches!(to, I32 | I64 | F32 | F64),
        I32 => matches!(to, I64 | F64),
        F16 | BF16 => matches!(to, F32 | F64),
        F32 => to == F64,
        I64 | F64 | C64 | C128 => false,
    }
}

/// The one number that all elements are, if it is one of their dtype: a bool is never two.
fn constant(f: &Facts) -> Option<f64> {
    let v = f.constant.map(f64::from_bits)?;
    f.ty.tensor().is_none_or(|t| t.dtype.round(v) == v).then_some(v)
}

fn holds(condition: Option<bool>) -> bool {
    condition == Some(true)
}

/// All guards, by name.
pub const GUARDS: &[(&str, Guard)] = &[
    // Made of frozen weights and constants only; `none` counts too.
    ("weight", |f| f.iter().all(|f| f.weight)),
    // Not known when the program is compiled.
    ("live", |f| f.iter().all(|f| !f.weight)),
    // A compile-time number.
    ("number", |f| {
        f.iter().all(|f| f.ty.attr().is_some_and(|a| a.number().is_some()))
    }),
    // A sum with it keeps all but the last digits.
    ("small", |f| holds(number(f, 0).map(|v| v.abs() <= 16.0))),
    ("positive", |f| holds(number(f, 0).map(|v| v > 0.0))),
    ("tensor", |f| f.iter().all(|f| f.ty.tensor().is_some())),
    ("none", |f| f.iter().all(|f| f.ty == Ty::Attr(Attr::None))),
    ("some", |f| f.iter().all(|f| f.ty.tensor().is_some())),
    ("float", |f| {
        f.iter().all(|f| f.ty.tensor().is_some_and(|t| t.dtype.is_float()))
    }),
    // Integers.
    ("whole", |f| {
        let whole = |t: &TensorType| !t.dtype.is_float() && t.dtype != DType::Bool;
        f.iter().all(|f| f.ty.tensor().is_some_and(whole))
    }),
    // Numbers that have negative ones.
    ("signed", |f| {
        let signed = |d: DType| d.is_float() || d.is_int() && d != DType::U8;
        f.iter().all(|f| f.ty.tensor().is_some_and(|t| signed(t.dtype)))
    }),
    // Not of float64, for which some kernels of torch's have constants of fp32.
    ("narrow", |f| {
        f.iter().all(|f| f.ty.tensor().is_some_and(|t| t.dtype != DType::F64))
    }),
    // Tensors of one dtype; beside one, a number that promotes nothing.
    ("one_dtype", |f| {
        let mut dtypes = f.iter().filter_map(|f| f.ty.tensor()).map(|t| t.dtype);
        let first = dtypes.next();
        let numbers = f.iter().any(|f| f.ty.attr().is_some());
        first.is_some_and(|d| (!numbers || d.is_float()) && dtypes.all(|other| other == d))
    }),
    // Equal compile-time values.
    ("eq", |f| holds(attr(f, 0).zip(attr(f, 1)).map(|(a, b)| a == b))),
    ("le", |f| holds(number(f, 0).zip(number(f, 1)).map(|(a, b)| a <= b))),
    ("lt", |f| holds(number(f, 0).zip(number(f, 1)).map(|(a, b)| a < b))),
    // Equal types.
    ("same", |f| {
        f.windows(2).all(|w| w[0].ty == w[1].ty && w[0].ty.tensor().is_some())
    }),
    ("rank", |f| {
        holds(
            tensor(f, 0)
                .zip(attr(f, 1))
                .map(|(t, a)| a.as_int() == Some(t.rank() as i64)),
        )
    }),
    ("dtype", |f| {
        holds(tensor(f, 0).zip(attr(f, 1)).map(|(t, a)| *a == Attr::DType(t.dtype)))
    }),
    // Every element is this number.
    ("const", |f| holds(number(f, 1).map(|v| constant(&f[0]) == Some(v)))),
    // The sizes of the first are those of the second but for the last.
    ("batch_of", |f| {
        holds(
            tensor(f, 0)
                .zip(tensor(f, 1))
                .map(|(a, b)| a.rank() >= 1 && b.rank() >= 1 && a.shape[..a.rank() - 1] == b.shape[..b.rank() - 1]),
        )
    }),
    // The dims do not contain the last dimension.
    ("not_last", |f| {
        holds(
            attr(f, 0)
                .and_then(Attr::known_ints)
                .map(|d| !d.is_empty() && !d.contains(&-1)),
        )
    }),
    // A list of zeros.
    ("zeros", |f| {
        holds(attr(f, 0).and_then(Attr::known_ints).map(|v| v.iter().all(|n| *n == 0)))
    }),
    ("only_last", |f| {
        holds(attr(f, 0).and_then(Attr::known_ints).map(|d| d == [-1]))
    }),
    // Every element is this number, bit for bit: `-0.0` is not `0.0`.
    ("is", |f| {
        holds(number(f, 1).map(|v| constant(&f[0]).map(f64::to_bits) == Some(v.to_bits())))
    }),
    // Neither it nor its reciprocal leaves the range of fp32.
    ("moderate", |f| {
        holds(number(f, 0).map(|v| (1e-30..=1e30).contains(&v.abs())))
    }),
    // It does not leave the range of fp32.
    ("within", |f| holds(number(f, 0).map(|v| v.abs() <= 1e30))),
    // Multiplying by its reciprocal is dividing by it, bit for bit, in every floating dtype.
    ("power_of_two", |f| {
        holds(number(f, 0).map(|v| (-14..=14).any(|k| v.abs() == 2f64.powi(k))))
    }),
    ("wide", |f| {
        f.iter()
            .all(|f| matches!(f.ty.tensor(), Some(t) if matches!(t.dtype, DType::F32 | DType::F64)))
    }),
    // Every number of the tensor's dtype is one of the other dtype too.
    ("widens", |f| {
        holds(tensor(f, 0).zip(attr(f, 1)).map(|(t, a)| match (t.dtype, a) {
            (from, Attr::DType(to)) => from == *to || widens(from, *to),
            _ => false,
        }))
    }),
    // Permutations: none at all; of the last two dimensions; of dimensions of size one only.
    ("identity", |f| {
        holds(
            attr(f, 0)
                .and_then(Attr::known_ints)
                .map(|p| p.iter().copied().eq(0..p.len() as i64)),
        )
    }),
    ("swaps_last", |f| {
        holds(attr(f, 0).and_then(Attr::known_ints).map(|mut p| {
            let r = p.len();
            r >= 2 && {
                p.swap(r - 2, r - 1);
                p.into_iter().eq(0..r as i64)
            }
        }))
    }),
    ("moves_units", |f| {
        holds(
            tensor(f, 0)
                .zip(attr(f, 1).and_then(Attr::known_ints))
                .map(|(x, mut p)| {
                    p.retain(|d| !x.shape[*d as usize].is(1));
                    p.is_sorted()
                }),
        )
    }),
    ("ends_with", |f| {
        let lists = attr(f, 0)
            .and_then(Attr::as_ints)
            .zip(attr(f, 1).and_then(Attr::as_ints));
        holds(lists.map(|(all, end)| all.ends_with(end)))
    }),
    // The last dimension of each is not empty.
    ("has_columns", |f| {
        f.iter().all(|f| {
            let last = f.ty.tensor().and_then(|t| t.dim(-1)?.known());
            last.is_some_and(|n| n > 0)
        })
    }),
    // None of these dimensions is empty.
    ("nonempty", |f| {
        holds(
            tensor(f, 0)
                .zip(attr(f, 1).and_then(Attr::known_ints))
                .map(|(x, dims)| {
                    dims.iter()
                        .all(|d| x.dim(*d).and_then(Dim::known).is_some_and(|n| n > 0))
                }),
        )
    }),
    // Two slices, one of the other, both of which leave something out: of those that keep all there would be no end.
    ("cuts_twice", |f| {
        let place = |i: usize| attr(f, i).and_then(Attr::as_int);
        let length = |n: i64, from: usize| {
            let (start, end, step) = (place(from)?, place(from + 1)?.min(n), place(from + 2)?);
            (step > 0).then(|| ((end - start).max(0) + step - 1) / step)
        };
        let whole = tensor(f, 0)
            .zip(place(1))
            .and_then(|(x, d)| x.dim(d))
            .and_then(Dim::known);
        match whole.and_then(|n| length(n, 2).map(|m| (n, m))) {
            Some((n, m)) => holds(length(m, 5).map(|l| m < n && l < m)),
            None => place(4) == Some(1) && place(7) == Some(1),
        }
    }),
    ("zeros", |f| {
        holds(attr(f, 0).and_then(Attr::as_ints).map(|v| v.iter().all(|d| d.is(0))))
    }),
];

/// Looks a guard up.
pub fn guard(name: &str) -> Option<Guard> {
    GUARDS.iter().find(|(n, _)| *n == name).map(|(_, g)| *g)
}
