//! Elementwise ops: arithmetic with type promotion and broadcasting, comparisons, activations.

use super::{Args, Check, Eval, Infer, Row, Vals, op, promote};
use crate::args::broadcast;
use crate::dim::Dim;
use crate::eval::{Arr, Mode, Val, zip};
use crate::ty::{DType, TensorType, Ty};
use crate::work::Cost;

/// Broadcast shape, dtype chosen from the promoted one.
fn elementwise(a: &Args, operands: &[usize], dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let all: Vec<&Ty> = operands.iter().map(|i| &a.0[*i]).collect();
    let tensors: Vec<&TensorType> = all.iter().filter_map(|t| t.tensor()).collect();
    let first = tensors.first().ok_or("no operand is a tensor")?;
    if tensors.iter().any(|t| t.device != first.device) {
        return Err("operands live on different devices".into());
    }
    let shapes: Vec<&[Dim]> = tensors.iter().map(|t| &*t.shape).collect();
    let shape = broadcast(&shapes)?;
    Ok(Ty::Tensor(first.with_shape(shape).with_dtype(dtype(promote(&all)?)?)))
}

fn keep(d: DType) -> Check<DType> {
    Ok(d)
}

fn number(d: DType) -> Check<DType> {
    if d == DType::Bool {
        Err("not defined for bool".into())
    } else {
        Ok(d)
    }
}

fn float(d: DType) -> Check<DType> {
    if d.is_float() {
        Ok(d)
    } else {
        Err(format!("not defined for {d}"))
    }
}

fn to_float(d: DType) -> Check<DType> {
    Ok(if d.is_float() { d } else { DType::F32 })
}

fn to_bool(_: DType) -> Check<DType> {
    Ok(DType::Bool)
}

fn one(a: &Args, dtype: fn(DType) -> Check<DType>) -> Check<Ty> {
    let x = a.t(0)?;
    Ok(Ty::Tensor(x.with_dtype(dtype(x.dtype)?)))
}

/// First operand is the tensor, the rest are numbers.
fn map(v: &Vals, f: impl Fn(f64) -> f64) -> Check<Val> {
    Ok(Val::arr(v.a(0)?.map(f)))
}

/// The operand at a position as one of the dtype that the op computes in. A number beside 16-bit types is rounded to
/// them, but stays in f32 where `single` says so.
fn operand(v: &Vals, i: usize, dtype: DType, single: bool) -> Check<Arr> {
    let x = v.scalar(i)?;
    let own = v.args().0[i].tensor();
    // A tensor without dimensions is a number too.
    let dtype = match own.is_none_or(|t| t.rank() == 0) {
        true if single && dtype.is_float() && dtype != DType::F64 => DType::F32,
        _ => dtype,
    };
    Ok(match own.map(|t| t.dtype) == Some(dtype) {
        true => x,
        false => x.map(|v| dtype.round(v)),
    })
}

/// Sums, differences, products: whole numbers wrap.
fn arithmetic_of(v: &Vals, single: bool, float: fn(f64, f64) -> f64, whole: fn(i64, i64) -> i64) -> Check<Val> {
    let dtype = v.out_tensor()?.dtype;
    if dtype.is_int() {
        let (x, y) = (operand(v, 0, dtype, false)?, operand(v, 1, dtype, false)?);
        return zip(&[&x, &y], v.out_shape()?, |r| whole(r[0] as i64, r[1] as i64) as f64);
    }
    match v.mode {
        Mode::Real => two(v, float),
        Mode::Rounded => {
            let (x, y) = (operand(v, 0, dtype, single)?, operand(v, 1, dtype, single)?);
            zip(&[&x, &y], v.out_shape()?, |r| float(r[0], r[1]))
        }
    }
}

/// Comparisons: both operands are of one dtype, whatever is compared.
fn compared(v: &Vals, f: fn(f64, f64) -> bool) -> Check<Val> {
    let all: Vec<&Ty> = v.types.iter().collect();
    let dtype = promote(&all)?;
    let alike = v.mode == Mode::Real && dtype.is_float() && all.iter().all(|t| t.tensor().is_some());
    if alike {
        return two(v, |x, y| truth(f(x, y)));
    }
    let (x, y) = (operand(v, 0, dtype, false)?, operand(v, 1, dtype, false)?);
    zip(&[&x, &y], v.out_shape()?, |r| truth(f(r[0], r[1])))
}

fn two(v: &Vals, f: impl Fn(f64, f64) -> f64) -> Check<Val> {
    let (x, y) = (v.scalar(0)?, v.scalar(1)?);
    zip(&[&x, &y], v.out_shape()?, |r| f(r[0], r[1]))
}

fn truth(b: bool) -> f64 {
    f64::from(u8::from(b))
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

fn softplus(x: f64) -> f64 {
    if x > 0.0 {
        x + (-x).exp().ln_1p()
    } else {
        x.exp().ln_1p()
    }
}

/// As torch's, which bounds from below: a negative zero stays.
fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// NaN wins, as in torch's `maximum` and `clamp`.
pub(crate) fn max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

pub(crate) fn min(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) }
}

/// As torch bounds numbers: one that equals its bound stays as it is, be it `-0` beside `0`.
fn at_least(x: f64, low: f64) -> f64 {
    if low.is_nan() || x < low { low } else { x }
}

fn at_most(x: f64, high: f64) -> f64 {
    if high.is_nan() || x > high { high } else { x }
}

/// Integer power wraps; the table stays with floats.
fn power(a: &Args) -> Check<Ty> {
    elementwise(a, &[0, 1], float)
}

fn unary(name: &'static str, aten: &'static [&'static str], infer: Infer, eval: Eval, flops: f64) -> Row {
    op(name, "x:T", aten, infer, eval, Cost::Map(flops))
}

fn binary(name: &'static str, aten: &'static [&'static str], infer: Infer, eval: Eval, flops: f64) -> Row {
    op(name, "x:S y:S", aten, infer, eval, Cost::Map(flops))
}

fn arithmetic() -> Vec<Row> {
    let n: Infer = |a| elementwise(a, &[0, 1], keep);
    vec![
        binary(
            "add",
            &[
                "add.Tensor(x, y)",
                "add.Scalar(x, y#)",
                // Rounded once, as torch does it.
                "addcmul.default(x, y, z) => (cast (add (cast x ($wide x)) (mul (cast y ($wide y)) (cast z ($wide z)))) ($dtype x))",
            ],
            n,
            |v| arithmetic_of(v, false, |x, y| x + y, i64::wrapping_add),
            1.0,
        ),
        binary(
            "sub",
            &[
                "sub.Tensor(x, y)",
                "sub.Scalar(x, y#)",
                "rsub.Scalar(x, y#) => (sub y x)",
                "rsub.Tensor(x, y) => (sub y x)",
            ],
            |a| elementwise(a, &[0, 1], number),
            |v| arithmetic_of(v, false, |x, y| x - y, i64::wrapping_sub),
            1.0,
        ),
        binary(
            "mul",
            &["mul.Tensor(x, y)", "mul.Scalar(x, y#)"],
            n,
            |v| arithmetic_of(v, true, |x, y| x * y, i64::wrapping_mul),
            1.0,
        ),
        binary(
            "div",
            &["div.Tensor(x, y)", "div.Scalar(x, y#)"],
            |a| elementwise(a, &[0, 1], to_float),
            |v| arithmetic_of(v, true, |x, y| x / y, |x, _| x),
            4.0,
        ),
        binary(
            "pow",
            &[
                "pow.Tensor_Scalar(x, y#)",
                "pow.Scalar(x#, y)",
                "pow.Tensor_Tensor(x, y)",
            ],
            power,
            // torch squares by multiplying.
            |v| arithmetic_of(v, false, |x, y| if y == 2.0 { x * x } else { x.powf(y) }, |x, _| x),
            20.0,
        ),
        binary("maximum", &["maximum.default(x, y)"], n, |v| two(v, max), 1.0),
        binary("minimum", &["minimum.default(x, y)"], n, |v| two(v, min), 1.0),
    ]
}

/// `eq.Scalar(x, y#)` and `eq.Tensor(x, y)`, and so on.
macro_rules! comparisons {
    ($($name:literal $sign:tt)*) => {
        vec![$(binary(
            $name,
            &[concat!($name, ".Scalar(x, y#)"), concat!($name, ".Tensor(x, y)")],
            |a| elementwise(a, &[0, 1], to_bool),
            |v| compared(v, |x, y| x $sign y),
            1.0,
        )),*]
    };
}

fn choices() -> Vec<Row> {
    let any: Infer = |a| elementwise(a, &[0, 1], to_bool);
    vec![
        binary(
            "logical_and",
            &["logical_and.default(x, y)"],
            any,
            |v| two(v, |x, y| truth(x != 0.0 && y != 0.0)),
            1.0,
        ),
        binary(
            "logical_or",
            &["logical_or.default(x, y)"],
            any,
            |v| two(v, |x, y| truth(x != 0.0 || y != 0.0)),
            1.0,
        ),
        unary(
            "logical_not",
            &["logical_not.default(x)"],
            |a| one(a, to_bool),
            |v| map(v, |x| truth(x == 0.0)),
            1.0,
        ),
        op(
            "where",
            "c:T x:S y:S",
            &["where.self(c, x, y)"],
            |a| {
                if a.t(0)?.dtype != DType::Bool {
                    return Err("the condition must be bool".into());
                }
                let value = elementwise(a, &[1, 2], keep)?;
                let dtype = value.tensor().map_or(DType::F32, |t| t.dtype);
                let all = elementwise(a, &[0, 1, 2], keep)?;
                Ok(Ty::Tensor(all.tensor().ok_or("no tensor")?.with_dtype(dtype)))
            },
            |v| {
                let (c, x, y) = (v.a(0)?, v.scalar(1)?, v.scalar(2)?);
                zip(&[c, &x, &y], v.out_shape()?, |r| if r[0] != 0.0 { r[1] } else { r[2] })
            },
            Cost::Map(1.0),
        ),
        op(
            "masked_fill",
            "x:T mask:T value:S",
            &["masked_fill.Scalar(x, mask, value#)"],
            |a| {
                let (x, mask) = (a.t(0)?, a.t(1)?);
                if mask.dtype != DType::Bool || !x.dtype.is_float() || x.device != mask.device {
                    return Err("needs a float tensor and a bool mask on one device".into());
                }
                Ok(Ty::Tensor(x.with_shape(broadcast(&[&x.shape, &mask.shape])?)))
            },
            |v| {
                let (x, m, value) = (v.a(0)?, v.a(1)?, v.num(2)?);
                zip(&[x, m], v.out_shape()?, |r| if r[1] != 0.0 { value } else { r[0] })
            },
            Cost::Map(1.0),
        ),
        op(
            "clamp",
            "x:T low:float? high:float?",
            &[
                "clamp.default(x, low, high)",
                "clamp.default(x, low) => (clamp x low none)",
                "clamp_min.default(x, low#) => (clamp x ($float low) none)",
                "clamp_max.default(x, high#) => (clamp x none ($float high))",
                "hardtanh.default(x, low, high) => (clamp x ($float low) ($float high))",
                "hardtanh.default(x) => (clamp x -1.0 1.0)",
                "relu6.default(x) => (clamp x 0.0 6.0)",
            ],
            |a| {
                if a.attr(1)?.number().or(a.attr(2)?.number()).is_none() {
                    return Err("no bound".into());
                }
                one(a, float)
            },
            |v| {
                let (low, high) = (v.args().attr(1)?.number(), v.args().attr(2)?.number());
                let bound = |b: f64| match v.mode {
                    Mode::Real => b,
                    Mode::Rounded => v.types[0].tensor().map_or(b, |t| t.dtype.round(b)),
                };
                let (low, high) = (low.map(bound), high.map(bound));
                map(v, |x| {
                    let x = low.map_or(x, |l| at_least(x, l));
                    high.map_or(x, |h| at_most(x, h))
                })
            },
            Cost::Map(2.0),
        ),
    ]
}

/// Functions of one operand that torch has under the same name: the dtypes that they take, what they compute, what that costs.
macro_rules! functions {
    ($($name:literal $dtype:ident, $f:expr, $cost:literal;)*) => {
        vec![$(unary(
            $name,
            &[concat!($name, ".default(x)")],
            |a| one(a, $dtype),
            |v| map(v, $f),
            $cost,
        )),*]
    };
}

fn functions() -> Vec<Row> {
    functions! {
        "neg" number, |x| -x, 1.0;
        "abs" number, f64::abs, 1.0;
        "sign" number, |x| if x.is_nan() || x == 0.0 { 0.0 } else { x.signum() }, 1.0;
        "exp" to_float, f64::exp, 10.0;
        "expm1" to_float, f64::exp_m1, 10.0;
        "log" to_float, f64::ln, 10.0;
        "log1p" to_float, f64::ln_1p, 10.0;
        "sqrt" to_float, f64::sqrt, 4.0;
        "rsqrt" to_float, |x| 1.0 / x.sqrt(), 5.0;
        "reciprocal" to_float, |x| 1.0 / x, 4.0;
        "square" float, |x| x * x, 1.0;
        "sin" to_float, f64::sin, 10.0;
        "cos" to_float, f64::cos, 10.0;
        "erf" to_float, libm::erf, 12.0;
        "floor" float, f64::floor, 1.0;
        "ceil" float, f64::ceil, 1.0;
        "round" float, f64::round_ties_even, 1.0;
    }
}

fn activations() -> Vec<Row> {
    let f: Infer = |a| one(a, float);
    vec![
        unary("relu", &["relu.default(x)"], |a| one(a, number), |v| map(v, relu), 1.0),
        unary(
            "gelu",
            &["gelu.default(x)"],
            f,
            |v| map(v, |x| 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))),
            20.0,
        ),
        unary("gelu_tanh", &["gelu.default(x, 'tanh)"], f, |v| map(v, gelu_tanh), 20.0),
        unary("silu", &["silu.default(x)"], f, |v| map(v, |x| x * sigmoid(x)), 15.0),
        unary(
            "sigmoid",
            &["sigmoid.default(x)"],
            |a| one(a, to_float),
            |v| map(v, sigmoid),
            12.0,
        ),
        unary(
            "tanh",
            &["tanh.default(x)"],
            |a| one(a, to_float),
            |v| map(v, f64::tanh),
            12.0,
        ),
        unary(
            "mish",
            &["mish.default(x)"],
            f,
            |v| map(v, |x| x * softplus(x).tanh()),
            30.0,
        ),
        unary(
            "hardswish",
            &["hardswish.default(x)"],
            f,
            |v| {
                // The product is stored before it is divided, and may overflow.
                let wide = match (v.mode, v.out_tensor()?.dtype) {
                    (Mode::Rounded, d) if d != DType::F64 => DType::F32,
                    _ => DType::F64,
                };
                map(v, |x| wide.round(x * min(max(x + 3.0, 0.0), 6.0)) / 6.0)
            },
            4.0,
        ),
        unary(
            "hardsigmoid",
            &["hardsigmoid.default(x)"],
            f,
            |v| map(v, |x| min(max(x + 3.0, 0.0), 6.0) / 6.0),
            3.0,
        ),
        op(
            "leaky_relu",
            "x:T slope:float",
            &[
                "leaky_relu.default(x, slope)",
                "leaky_relu.default(x) => (leaky_relu x 0.01)",
            ],
            f,
            |v| {
                let slope = v.num(1)?;
                map(v, |x| if x > 0.0 { x } else { x * slope })
            },
            Cost::Map(2.0),
        ),
        op(
            "elu",
            "x:T alpha:float",
            &["elu.default(x, alpha)", "elu.default(x) => (elu x 1.0)"],
            f,
            |v| {
                let alpha = v.num(1)?;
                map(v, |x| if x > 0.0 { x } else { alpha * x.exp_m1() })
            },
            Cost::Map(12.0),
        ),
        op(
            "softplus",
            "x:T beta:float threshold:float",
            &[
                "softplus.default(x, beta, threshold)",
                "softplus.default(x) => (softplus x 1.0 20.0)",
            ],
            f,
            |v| {
                let (beta, threshold) = (v.num(1)?, v.num(2)?);
                map(v, |x| {
                    if x * beta > threshold {
                        x
                    } else {
                        (x * beta).exp().ln_1p() / beta
                    }
                })
            },
            Cost::Map(20.0),
        ),
    ]
}

pub(super) fn rows() -> Vec<Row> {
    let comparisons = comparisons!("eq" == "ne" != "lt" < "le" <= "gt" > "ge" >=);
    [arithmetic(), comparisons, choices(), functions(), activations()]
        .into_iter()
        .flatten()
        .collect()
}
