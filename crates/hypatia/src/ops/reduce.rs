//! Reductions: the elements along some dimensions become one number each.

use std::sync::Arc;

use super::{Args, Check, Row, Vals, op};
use crate::attr::Attr;
use crate::cost::Cost;
use crate::dim::Dim;
use crate::eval::{Arr, Val};
use crate::ty::{DType, Ty};

/// The dimensions that an operand names, as indices into the first operand's shape.
fn dims_at(a: &Args, at: usize) -> Check<Vec<usize>> {
    let x = a.t(0)?;
    if let Attr::Int(_) = a.attr(at)? {
        return Ok(vec![a.dim_of(at, x)?]);
    }
    let dims = a.dims_of(at, x)?;
    // torch takes an empty list for all dimensions: only without any are the two the same.
    if dims.is_empty() && x.rank() > 0 {
        return Err("no dimension is given".into());
    }
    Ok(dims)
}

/// The first operand's type with some dimensions reduced.
fn reduced(a: &Args, dims: usize, keep: usize, dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let (x, keep) = (a.t(0)?, a.flag(keep)?);
    let dims = dims_at(a, dims)?;
    let left = x
        .shape
        .iter()
        .enumerate()
        .filter_map(|(i, size)| match (dims.contains(&i), keep) {
            (false, _) => Some(size.clone()),
            (true, true) => Some(Dim::Const(1)),
            (true, false) => None,
        });
    let shape: Arc<[Dim]> = left.collect();
    Ok(Ty::Tensor(x.with_shape(shape).with_dtype(dtype(x.dtype)?)))
}

/// Nothing can be chosen from nothing.
fn chosen(a: &Args, dims: usize, keep: usize, dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let x = a.t(0)?;
    match dims_at(a, dims)?.into_iter().find(|d| x.shape[*d].is(0)) {
        Some(d) => Err(format!("dimension {d} of {x} is empty")),
        None => reduced(a, dims, keep, dtype),
    }
}

fn same(d: DType) -> Check<DType> {
    Ok(d)
}

fn float(d: DType) -> Check<DType> {
    if d.is_float() {
        Ok(d)
    } else {
        Err(format!("not defined for {d}"))
    }
}

/// Sums and products of integers and truth values are wide.
fn wide(d: DType) -> Check<DType> {
    Ok(if d.is_float() { d } else { DType::I64 })
}

/// torch keeps bytes as bytes: they once were its truth values.
fn truth(d: DType) -> Check<DType> {
    Ok(if d == DType::U8 { d } else { DType::Bool })
}

fn place(d: DType) -> Check<DType> {
    if d == DType::Bool {
        Err("not defined for bool".into())
    } else {
        Ok(DType::I64)
    }
}

fn index(_: DType) -> Check<DType> {
    Ok(DType::I64)
}

fn pair(first: Ty, second: Ty) -> Ty {
    Ty::Tuple([first, second].into())
}

fn fold(v: &Vals, dims: usize, keep: usize, f: impl Fn(&[f64]) -> f64) -> Check<Arr> {
    let args = v.args();
    Ok(v.a(0)?.reduce(&dims_at(&args, dims)?, args.flag(keep)?, f))
}

/// From zero up, as torch does: the sum of negative zeros is zero.
fn total(xs: &[f64]) -> f64 {
    xs.iter().fold(0.0, |s, x| s + x)
}

fn mean(xs: &[f64]) -> f64 {
    total(xs) / xs.len() as f64
}

fn variance(xs: &[f64], correction: f64) -> f64 {
    let m = mean(xs);
    let squares = xs.iter().fold(0.0, |s, x| s + (x - m) * (x - m));
    squares / (xs.len() as f64 - correction).max(0.0)
}

/// Where the first best element stands; a NaN is better than any number.
fn best(xs: &[f64], better: fn(f64, f64) -> bool) -> usize {
    let mut at = 0;
    for (i, x) in xs.iter().enumerate() {
        if xs[at].is_nan() {
            break;
        }
        if x.is_nan() || better(*x, xs[at]) {
            at = i;
        }
    }
    at
}

fn larger(x: f64, y: f64) -> bool {
    x > y
}

fn smaller(x: f64, y: f64) -> bool {
    x < y
}

fn extreme(xs: &[f64], better: fn(f64, f64) -> bool) -> f64 {
    xs.get(best(xs, better)).copied().unwrap_or(f64::NAN)
}

fn eval_extreme(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    fold(v, 1, 2, |xs| extreme(xs, better)).map(Val::arr)
}

fn eval_place(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    fold(v, 1, 2, |xs| best(xs, better) as f64).map(Val::arr)
}

fn eval_both(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    Ok(Val::Tuple(vec![eval_extreme(v, better)?, eval_place(v, better)?]))
}

fn with_place(a: &Args) -> Check<Ty> {
    Ok(pair(chosen(a, 1, 2, same)?, chosen(a, 1, 2, index)?))
}

/// A variance: operands are dimensions, correction, keep.
fn moment(a: &Args) -> Check<Ty> {
    a.attr(2)?.number().ok_or("the correction must be a number")?;
    reduced(a, 1, 3, float)
}

fn eval_variance(v: &Vals, f: fn(f64) -> f64) -> Check<Val> {
    let correction = v.num(2)?;
    fold(v, 1, 3, |xs| f(variance(xs, correction))).map(Val::arr)
}

fn log_sum_exp(xs: &[f64]) -> f64 {
    let max = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shift = if max.is_finite() { max } else { 0.0 };
    total(&xs.iter().map(|x| (x - shift).exp()).collect::<Vec<_>>()).ln() + shift
}

/// A vector norm: operands are order, dimensions, keep.
fn vector_norm(a: &Args) -> Check<Ty> {
    let order = a.attr(1)?.number().ok_or("the order must be a number")?;
    if order.is_nan() {
        return Err("the order is not a number".into());
    }
    if order < 0.0 || order.is_infinite() {
        chosen(a, 2, 3, float)
    } else {
        reduced(a, 2, 3, float)
    }
}

fn norm(xs: &[f64], order: f64) -> f64 {
    let sizes: Vec<f64> = xs.iter().map(|x| x.abs()).collect();
    match order {
        f64::INFINITY => extreme(&sizes, larger),
        f64::NEG_INFINITY => extreme(&sizes, smaller),
        0.0 => sizes.iter().filter(|x| **x != 0.0).count() as f64,
        1.0 => total(&sizes),
        2.0 => total(&sizes.iter().map(|x| x * x).collect::<Vec<_>>()).sqrt(),
        p => total(&sizes.iter().map(|x| x.powf(p)).collect::<Vec<_>>()).powf(1.0 / p),
    }
}

fn cumsum(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    a.dim_of(1, x)?;
    Ok(Ty::Tensor(x.with_dtype(wide(x.dtype)?)))
}

fn eval_cumsum(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let mut out = x.clone();
    let (stride, size) = (x.strides()[d], x.shape[d]);
    // Row-major order visits the element before in a dimension first.
    for i in 0..out.data.len() {
        out.data[i] += if i / stride % size == 0 {
            0.0
        } else {
            out.data[i - stride]
        };
    }
    Ok(Val::arr(out))
}

/// Calls that may leave out what is last, and all dimensions if need be.
macro_rules! over {
    ($op:literal, $call:literal $(, $all:literal)*) => {
        &[
            concat!($call, "(x, dims, keep)"),
            concat!($call, "(x, dims) => (", $op, " x ($dims x dims) false)"),
            $(concat!($all, "(x) => (", $op, " x ($dims x none) false)"),)*
        ]
    };
}

/// The same for one dimension.
macro_rules! along {
    ($op:literal, $call:literal) => {
        &[
            concat!($call, "(x, dim, keep)"),
            concat!($call, "(x, dim) => (", $op, " x ($dim x dim) false)"),
        ]
    };
}

/// Truth: one dimension has its own call, and an empty list reduces nothing, which the result's
/// type tells apart.
macro_rules! truth {
    ($op:literal) => {
        &[
            concat!($op, ".dims(x, dims, keep)"),
            concat!($op, ".dims(x, dims) => (", $op, " x ($dims x dims) false)"),
            concat!($op, ".dims(x) => (", $op, " x ($dims x none) false)"),
            concat!($op, ".dim(x, dim, keep) => (", $op, " x ($dims x dim) keep)"),
            concat!($op, ".dim(x, dim) => (", $op, " x ($dims x dim) false)"),
            concat!($op, ".default(x) => (", $op, " x ($dims x none) false)"),
        ]
    };
}

/// Variances: without a correction it is one, and `unbiased` is an older name for it.
macro_rules! moment {
    ($op:literal) => {
        &[
            concat!(
                $op,
                ".correction(x, dims, none, keep) => (",
                $op,
                " x ($dims x dims) 1.0 keep)"
            ),
            concat!($op, ".correction(x, dims, correction, keep)"),
            concat!(
                $op,
                ".correction(x, dims, correction) => (",
                $op,
                " x ($dims x dims) ($float correction) false)"
            ),
            concat!($op, ".correction(x, dims) => (", $op, " x ($dims x dims) 1.0 false)"),
            concat!($op, ".correction(x) => (", $op, " x ($dims x none) 1.0 false)"),
            concat!(
                $op,
                ".dim(x, dims, true, keep) => (",
                $op,
                " x ($dims x dims) 1.0 keep)"
            ),
            concat!(
                $op,
                ".dim(x, dims, false, keep) => (",
                $op,
                " x ($dims x dims) 0.0 keep)"
            ),
            concat!($op, ".dim(x, dims, false) => (", $op, " x ($dims x dims) 0.0 false)"),
            concat!($op, ".dim(x, dims) => (", $op, " x ($dims x dims) 1.0 false)"),
            concat!($op, ".default(x, false) => (", $op, " x ($dims x none) 0.0 false)"),
            concat!($op, ".default(x) => (", $op, " x ($dims x none) 1.0 false)"),
        ]
    };
}

pub(super) fn rows() -> Vec<Row> {
    let (many, one, spread) = (
        "x:T dims:dims keep:bool",
        "x:T dim:dim keep:bool",
        "x:T dims:dims correction:float keep:bool",
    );
    vec![
        op(
            "sum",
            many,
            over!("sum", "sum.dim_IntList", "sum.default"),
            |a| reduced(a, 1, 2, wide),
            |v| fold(v, 1, 2, total).map(Val::arr),
            Cost::Reduce(1.0),
        ),
        op(
            "mean",
            many,
            over!("mean", "mean.dim", "mean.default"),
            |a| reduced(a, 1, 2, float),
            |v| fold(v, 1, 2, mean).map(Val::arr),
            Cost::Reduce(1.0),
        ),
        op(
            "amax",
            many,
            over!("amax", "amax.default", "amax.default", "max.default"),
            |a| chosen(a, 1, 2, same),
            |v| eval_extreme(v, larger),
            Cost::Reduce(1.0),
        ),
        op(
            "amin",
            many,
            over!("amin", "amin.default", "amin.default", "min.default"),
            |a| chosen(a, 1, 2, same),
            |v| eval_extreme(v, smaller),
            Cost::Reduce(1.0),
        ),
        // The largest elements and their places, as a tuple.
        op(
            "max_dim",
            one,
            along!("max_dim", "max.dim"),
            with_place,
            |v| eval_both(v, larger),
            Cost::Reduce(2.0),
        ),
        op(
            "min_dim",
            one,
            along!("min_dim", "min.dim"),
            with_place,
            |v| eval_both(v, smaller),
            Cost::Reduce(2.0),
        ),
        op(
            "argmax",
            one,
            along!("argmax", "argmax.default"),
            |a| chosen(a, 1, 2, place),
            |v| eval_place(v, larger),
            Cost::Reduce(2.0),
        ),
        op(
            "argmin",
            one,
            along!("argmin", "argmin.default"),
            |a| chosen(a, 1, 2, place),
            |v| eval_place(v, smaller),
            Cost::Reduce(2.0),
        ),
        op(
            "prod",
            one,
            along!("prod", "prod.dim_int"),
            |a| reduced(a, 1, 2, wide),
            |v| fold(v, 1, 2, |xs| xs.iter().product()).map(Val::arr),
            Cost::Reduce(1.0),
        ),
        op(
            "any",
            many,
            truth!("any"),
            |a| reduced(a, 1, 2, truth),
            |v| fold(v, 1, 2, |xs| f64::from(xs.iter().any(|x| *x != 0.0))).map(Val::arr),
            Cost::Reduce(1.0),
        ),
        op(
            "all",
            many,
            truth!("all"),
            |a| reduced(a, 1, 2, truth),
            |v| fold(v, 1, 2, |xs| f64::from(xs.iter().all(|x| *x != 0.0))).map(Val::arr),
            Cost::Reduce(1.0),
        ),
        op(
            "var",
            spread,
            moment!("var"),
            moment,
            |v| eval_variance(v, |x| x),
            Cost::Reduce(4.0),
        ),
        op(
            "std",
            spread,
            moment!("std"),
            moment,
            |v| eval_variance(v, f64::sqrt),
            Cost::Reduce(4.0),
        ),
        op(
            "var_mean",
            spread,
            moment!("var_mean"),
            |a| Ok(pair(moment(a)?, moment(a)?)),
            |v| {
                Ok(Val::Tuple(vec![
                    eval_variance(v, |x| x)?,
                    Val::arr(fold(v, 1, 3, mean)?),
                ]))
            },
            Cost::Reduce(4.0),
        ),
        op(
            "cumsum",
            "x:T dim:dim",
            &["cumsum.default(x, dim)"],
            cumsum,
            eval_cumsum,
            Cost::Reduce(1.0),
        ),
        op(
            "logsumexp",
            many,
            over!("logsumexp", "logsumexp.default"),
            |a| reduced(a, 1, 2, float),
            |v| fold(v, 1, 2, log_sum_exp).map(Val::arr),
            Cost::Reduce(8.0),
        ),
        op(
            "vector_norm",
            "x:T ord:float dims:dims keep:bool",
            &[
                "linalg_vector_norm.default(x, ord, dims, keep)",
                "linalg_vector_norm.default(x, ord, dims) => (vector_norm x ($float ord) ($dims x dims) false)",
                "linalg_vector_norm.default(x, ord) => (vector_norm x ($float ord) ($dims x none) false)",
                "linalg_vector_norm.default(x) => (vector_norm x 2.0 ($dims x none) false)",
                "norm.ScalarOpt_dim(x, ord, dims, keep) => (vector_norm x ($float ord) ($dims x dims) keep)",
                "norm.ScalarOpt_dim(x, ord, dims) => (vector_norm x ($float ord) ($dims x dims) false)",
                "norm.Scalar(x, ord) => (vector_norm x ($float ord) ($dims x none) false)",
                "norm.Scalar(x) => (vector_norm x 2.0 ($dims x none) false)",
            ],
            vector_norm,
            |v| {
                let order = v.num(1)?;
                fold(v, 2, 3, |xs| norm(xs, order)).map(Val::arr)
            },
            Cost::Reduce(2.0),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    #[test]
    fn a_nan_wins_and_the_first_of_equals() {
        assert!(extreme(&[1.0, NAN, INF], larger).is_nan());
        assert_eq!(best(&[1.0, NAN, NAN, INF], smaller), 1);
        assert_eq!(best(&[2.0, 5.0, 5.0], larger), 1);
    }

    #[test]
    fn infinities_and_emptiness() {
        assert_eq!(log_sum_exp(&[-INF, -INF]), -INF);
        assert_eq!(log_sum_exp(&[INF, 1.0]), INF);
        assert_eq!(log_sum_exp(&[]), -INF);
        assert!(log_sum_exp(&[NAN, 1.0]).is_nan());
        assert!(variance(&[1.0], 1.0).is_nan());
        assert_eq!(variance(&[1.0, 2.0], 3.0), INF);
        assert!(total(&[]).is_sign_positive() && total(&[-0.0]).is_sign_positive());
        assert_eq!(norm(&[3.0, 0.0], -1.0), 0.0);
        assert_eq!(norm(&[0.0, NAN, 2.0], 0.0), 2.0);
    }
}
