//! Reductions: the elements along some dimensions become one number each.
//!
//! The first operand is reduced, the second says along which dimensions, the last whether they
//! stay as dimensions of size one.

use super::{Args, Check, Row, Vals, op};
use crate::attr::Attr;
use crate::dim::Dim;
use crate::eval::{Arr, Val};
use crate::ty::{DType, Ty};
use crate::work::Cost;

/// The reduced dimensions, as indices into the first operand's shape.
fn dims_of(a: &Args) -> Check<Vec<usize>> {
    let x = a.t(0)?;
    if let Attr::Int(_) = a.attr(1)? {
        return Ok(vec![a.dim_of(1, x)?]);
    }
    let dims = a.dims_of(1, x)?;
    // torch takes an empty list for all dimensions: only without any are the two the same.
    if dims.is_empty() && x.rank() > 0 {
        return Err("no dimension is given".into());
    }
    Ok(dims)
}

fn reduced(a: &Args, dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let (x, dims, keep) = (a.t(0)?, dims_of(a)?, a.flag(a.len() - 1)?);
    let mut shape = Vec::with_capacity(x.rank());
    for (i, size) in x.shape.iter().enumerate() {
        if !dims.contains(&i) {
            shape.push(size.clone());
        } else if keep {
            shape.push(Dim::Const(1));
        }
    }
    Ok(Ty::Tensor(x.with_shape(shape).with_dtype(dtype(x.dtype)?)))
}

/// The same where nothing can be chosen from nothing.
fn chosen(a: &Args, dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let x = a.t(0)?;
    match dims_of(a)?.into_iter().find(|d| x.shape[*d].is(0)) {
        Some(d) => Err(format!("dimension {d} of {x} is empty")),
        None => reduced(a, dtype),
    }
}

fn same(d: DType) -> Check<DType> {
    Ok(d)
}

fn float(d: DType) -> Check<DType> {
    d.is_float().then_some(d).ok_or_else(|| format!("not defined for {d}"))
}

/// Sums and products of integers and truth values are wide.
fn wide(d: DType) -> Check<DType> {
    Ok(if d.is_float() { d } else { DType::I64 })
}

/// torch keeps bytes as bytes: they once were its truth values.
fn truth(d: DType) -> Check<DType> {
    Ok(if d == DType::U8 { d } else { DType::Bool })
}

fn place(_: DType) -> Check<DType> {
    Ok(DType::I64)
}

fn place_of_number(d: DType) -> Check<DType> {
    if d == DType::Bool {
        Err("not defined for bool".into())
    } else {
        place(d)
    }
}

fn pair(first: Ty, second: Ty) -> Ty {
    Ty::Tuple([first, second].into())
}

fn fold(v: &Vals, f: impl Fn(&[f64]) -> f64) -> Check<Val> {
    let args = v.args();
    Ok(Val::arr(v.a(0)?.reduce(
        &dims_of(&args)?,
        args.flag(args.len() - 1)?,
        f,
    )))
}

/// From zero up, as torch does: the sum of negative zeros is zero.
fn total(xs: &[f64]) -> f64 {
    xs.iter().fold(0.0, |s, x| s + x)
}

fn total_of(xs: &[f64], f: impl Fn(f64) -> f64) -> f64 {
    xs.iter().fold(0.0, |s, x| s + f(*x))
}

fn mean(xs: &[f64]) -> f64 {
    total(xs) / xs.len() as f64
}

fn product(xs: &[f64]) -> f64 {
    xs.iter().product()
}

fn any(xs: &[f64]) -> f64 {
    f64::from(xs.iter().any(|x| *x != 0.0))
}

fn all(xs: &[f64]) -> f64 {
    f64::from(xs.iter().all(|x| *x != 0.0))
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

/// Of all elements; an op of its own, since it has another gradient where there is a NaN.
fn of_all(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    match x.shape.iter().any(|n| n.is(0)) {
        true => Err(format!("{x} is empty")),
        false => Ok(Ty::Tensor(x.with_shape(vec![]))),
    }
}

fn eval_of_all(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    let x = v.a(0)?;
    Ok(Val::arr(Arr::new(vec![], vec![extreme(&x.data, better)])))
}

fn eval_extreme(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    fold(v, |xs| extreme(xs, better))
}

fn eval_place(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    fold(v, |xs| best(xs, better) as f64)
}

fn eval_both(v: &Vals, better: fn(f64, f64) -> bool) -> Check<Val> {
    Ok(Val::Tuple(vec![eval_extreme(v, better)?, eval_place(v, better)?]))
}

fn with_place(a: &Args) -> Check<Ty> {
    Ok(pair(chosen(a, same)?, chosen(a, place)?))
}

fn moment(a: &Args) -> Check<Ty> {
    a.attr(2)?.number().ok_or("the correction must be a number")?;
    reduced(a, float)
}

fn variance(xs: &[f64], correction: f64) -> f64 {
    let m = mean(xs);
    total_of(xs, |x| (x - m) * (x - m)) / (xs.len() as f64 - correction).max(0.0)
}

fn eval_variance(v: &Vals, f: fn(f64) -> f64) -> Check<Val> {
    let correction = v.num(2)?;
    fold(v, |xs| f(variance(xs, correction)))
}

/// As torch's kernel moves a mean from element to element: an infinity leaves NaN behind.
fn moved_mean(xs: &[f64]) -> f64 {
    let moved = xs
        .iter()
        .enumerate()
        .fold(0.0, |mean, (i, x)| mean + (x - mean) / (i + 1) as f64);
    if xs.is_empty() { f64::NAN } else { moved }
}

fn eval_var_mean(v: &Vals) -> Check<Val> {
    Ok(Val::Tuple(vec![eval_variance(v, |x| x)?, fold(v, moved_mean)?]))
}

fn log_sum_exp(xs: &[f64]) -> f64 {
    let max = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shift = if max.is_finite() { max } else { 0.0 };
    total_of(xs, |x| (x - shift).exp()).ln() + shift
}

fn vector_norm(a: &Args) -> Check<Ty> {
    match a.attr(2)?.number() {
        Some(order) if order < 0.0 || order.is_infinite() => chosen(a, float),
        Some(order) if order >= 0.0 => reduced(a, float),
        _ => Err("the order must be a number".into()),
    }
}

fn norm(xs: &[f64], order: f64) -> f64 {
    let sizes: Vec<f64> = xs.iter().map(|x| x.abs()).collect();
    match order {
        f64::INFINITY => extreme(&sizes, larger),
        f64::NEG_INFINITY => extreme(&sizes, smaller),
        0.0 => total_of(xs, |x| f64::from(x != 0.0)),
        1.0 => total(&sizes),
        2.0 => total_of(xs, |x| x * x).sqrt(),
        p => total_of(&sizes, |x| x.powf(p)).powf(1.0 / p),
    }
}

fn eval_norm(v: &Vals) -> Check<Val> {
    let order = v.num(2)?;
    fold(v, |xs| norm(xs, order))
}

fn cumsum(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    a.dim_of(1, x)?;
    Ok(Ty::Tensor(x.with_dtype(wide(x.dtype)?)))
}

fn eval_cumsum(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let (stride, size) = (x.strides()[d], x.shape[d]);
    let mut out = x.clone();
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

const MANY: &str = "x:T dims:dims keep:bool";
const ONE: &str = "x:T dim:dim keep:bool";
const MOMENT: &str = "x:T dims:dims correction:float keep:bool";
const NORM: &str = "x:T dims:dims ord:float keep:bool";

/// Calls that may leave out what is last, and calls over all dimensions.
macro_rules! over {
    ($op:literal, $call:literal $(, $all:literal)*) => {
        &[
            concat!($call, "(x, dims, keep)"),
            concat!($call, "(x, dims) => (", $op, " x ($dims x dims) false)"),
            $(concat!($all, "(x) => (", $op, " x ($dims x none) false)"),)*
        ]
    };
}

/// Pooling an image to one place is its mean, in torch, too: the kernel for other sizes adds one number after the
/// other, and has many times the roundings.
macro_rules! means {
    ($op:literal) => {
        &[
            "mean.dim(x, dims, keep)",
            "mean.dim(x, dims) => (mean x ($dims x dims) false)",
            "mean.default(x) => (mean x ($dims x none) false)",
            "adaptive_avg_pool2d.default(x, [1,1]) => (mean x [-2,-1] true)",
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

/// One dimension has its own call; an empty list reduces nothing, which the result's type tells.
macro_rules! truths {
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

/// Without a correction it is one; `unbiased` is an older name for it.
macro_rules! moments {
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

macro_rules! norms {
    ($op:literal) => {
        &[
            "linalg_vector_norm.default(x, ord, dims, keep)",
            "linalg_vector_norm.default(x, ord, dims) => (vector_norm x ($dims x dims) ($float ord) false)",
            "linalg_vector_norm.default(x, ord) => (vector_norm x ($dims x none) ($float ord) false)",
            "linalg_vector_norm.default(x) => (vector_norm x ($dims x none) 2.0 false)",
            "norm.ScalarOpt_dim(x, ord, dims, keep) => (vector_norm x ($dims x dims) ($float ord) keep)",
            "norm.ScalarOpt_dim(x, ord, dims) => (vector_norm x ($dims x dims) ($float ord) false)",
            "norm.Scalar(x, ord) => (vector_norm x ($dims x none) ($float ord) false)",
            "norm.Scalar(x) => (vector_norm x ($dims x none) 2.0 false)",
        ]
    };
}

/// A line for each row: name, operands and calls => type, value, operations for each element.
macro_rules! reductions {
    ($($name:literal $operands:ident $calls:ident($($call:literal),*) => $infer:expr, $eval:expr, $cost:expr;)*) => {
        vec![$(op($name, $operands, $calls!($name $(, $call)*), $infer, $eval, Cost::Reduce($cost))),*]
    };
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = reductions! {
        "sum" MANY over("sum.dim_IntList", "sum.default") => |a| reduced(a, wide), |v| fold(v, total), 1.0;
        "mean" MANY means() => |a| reduced(a, float), |v| fold(v, mean), 1.0;
        "amax" MANY over("amax.default", "amax.default") => |a| chosen(a, same), |v| eval_extreme(v, larger), 1.0;
        "amin" MANY over("amin.default", "amin.default") => |a| chosen(a, same), |v| eval_extreme(v, smaller), 1.0;
        "logsumexp" MANY over("logsumexp.default") => |a| reduced(a, float), |v| fold(v, log_sum_exp), 8.0;
        "any" MANY truths() => |a| reduced(a, truth), |v| fold(v, any), 1.0;
        "all" MANY truths() => |a| reduced(a, truth), |v| fold(v, all), 1.0;
        "prod" ONE along("prod.dim_int") => |a| reduced(a, wide), |v| fold(v, product), 1.0;
        // The best elements and their places, as a tuple.
        "max_dim" ONE along("max.dim") => with_place, |v| eval_both(v, larger), 2.0;
        "min_dim" ONE along("min.dim") => with_place, |v| eval_both(v, smaller), 2.0;
        "argmax" ONE along("argmax.default") => |a| chosen(a, place_of_number), |v| eval_place(v, larger), 2.0;
        "argmin" ONE along("argmin.default") => |a| chosen(a, place_of_number), |v| eval_place(v, smaller), 2.0;
        "var" MOMENT moments() => moment, |v| eval_variance(v, |x| x), 4.0;
        "std" MOMENT moments() => moment, |v| eval_variance(v, f64::sqrt), 4.0;
        "var_mean" MOMENT moments() => |a| Ok(pair(moment(a)?, moment(a)?)), eval_var_mean, 4.0;
        "vector_norm" NORM norms() => vector_norm, eval_norm, 2.0;
    };
    let calls = &["cumsum.default(x, dim)"];
    rows.push(op(
        "cumsum",
        "x:T dim:dim",
        calls,
        cumsum,
        eval_cumsum,
        Cost::Reduce(1.0),
    ));
    let all = |name, calls, eval| op(name, "x:T", calls, of_all, eval, Cost::Reduce(1.0));
    rows.push(all("max_all", &["max.default(x)"], |v| eval_of_all(v, larger)));
    rows.push(all("min_all", &["min.default(x)"], |v| eval_of_all(v, smaller)));
    rows
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
