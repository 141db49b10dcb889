//! Guards: what must be proved before a rule fires. What is not known counts as not true.

use crate::attr::Attr;
use crate::egraph::Facts;
use crate::ty::{TensorType, Ty};

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
    ("finite", |f| holds(number(f, 0).map(f64::is_finite))),
    ("positive", |f| holds(number(f, 0).map(|v| v > 0.0))),
    ("tensor", |f| f.iter().all(|f| f.ty.tensor().is_some())),
    ("none", |f| f.iter().all(|f| f.ty == Ty::Attr(Attr::None))),
    ("some", |f| f.iter().all(|f| f.ty.tensor().is_some())),
    ("float", |f| {
        f.iter().all(|f| f.ty.tensor().is_some_and(|t| t.dtype.is_float()))
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
    ("const", |f| {
        holds(number(f, 1).map(|v| f[0].constant.map(f64::from_bits) == Some(v)))
    }),
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
    ("only_last", |f| {
        holds(attr(f, 0).and_then(Attr::known_ints).map(|d| d == [-1]))
    }),
];

/// Looks a guard up.
pub fn guard(name: &str) -> Option<Guard> {
    GUARDS.iter().find(|(n, _)| *n == name).map(|(_, g)| *g)
}
