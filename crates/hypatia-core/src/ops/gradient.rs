//! Gradients: of functions of one number, and of norms.

use super::norm::{by_channel, float, parameter};
use super::pointwise::sigmoid;
use super::{Args, Check, Eval, Infer, Row, Vals, op};
use crate::dim::Dim;
use crate::eval::{Arr, Val, zip};
use crate::ty::Ty;
use crate::work::Cost;

/// An op on a gradient and on what the function was given, or on what it gave.
fn gradient(name: &'static str, aten: &'static [&'static str], eval: Eval, flops: f64) -> Row {
    let alike: Infer = |a| {
        let (g, x) = (a.t(0)?, a.t(1)?);
        if g == x && g.dtype.is_float() {
            Ok(Ty::Tensor(g.clone()))
        } else {
            Err(format!("gradient {g} and input {x} must be alike"))
        }
    };
    op(name, "g:T x:T", aten, alike, eval, Cost::Map(flops))
}

/// A gradient times what a function makes of the other operand.
fn slope(v: &Vals, f: fn(f64) -> f64) -> Check<Val> {
    zip(&[v.a(0)?, v.a(1)?], v.out_shape()?, |r| r[0] * f(r[1]))
}

fn gelu_slope(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)) + x * density
}

fn gelu_tanh_slope(x: f64) -> f64 {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    let t = (scale * (x + 0.044715 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3.0 * 0.044715 * x * x)
}

/// Operands: gradient, `x`, its last dimensions, statistics, parameters; the gradients of `x` and of the parameters.
fn norm_backward(a: &Args, statistics: usize) -> Check<Ty> {
    let (g, x, last) = (a.t(0)?, float(a, 1)?, a.ints(2)?);
    if g != x || last.is_empty() || last.iter().any(|d| d.is(0)) || !x.shape.ends_with(last) {
        return Err(format!("gradient {g} of {x} over its last dimensions {}", a.attr(2)?));
    }
    let mut shape = x.shape.to_vec();
    let kept = shape.len() - last.len();
    shape[kept..].fill(Dim::Const(1));
    for i in 3..3 + statistics {
        if a.t(i)?.shape[..] != *shape {
            return Err(format!("statistics {} of {x}", a.t(i)?));
        }
    }
    let mut gradients = vec![Ty::Tensor(x.clone())];
    // There are as many parameters as statistics.
    for i in 3 + statistics..3 + 2 * statistics {
        parameter(a, i, x, last, x.dtype)?;
        gradients.push(Ty::Tensor(a.t(i)?.clone()));
    }
    Ok(Ty::Tuple(gradients.into()))
}

/// The gradients of a norm, about its mean or about zero.
fn eval_norm_backward(v: &Vals, centered: bool) -> Check<Val> {
    let (g, x) = (v.a(0)?, v.a(1)?);
    let n = v.args().known(2)?.iter().product::<i64>() as usize;
    let (factors, w) = if centered {
        (v.a(4)?, v.a(5)?)
    } else {
        (v.a(3)?, v.a(4)?)
    };
    let means = if centered { Some(v.a(3)?) } else { None };
    let (mut dx, mut dw, mut db) = (vec![], vec![0.0; n], vec![0.0; n]);
    for (row, (gs, xs)) in g.data.chunks(n).zip(x.data.chunks(n)).enumerate() {
        let (mean, factor) = (means.map_or(0.0, |m| m.data[row]), factors.data[row]);
        let normal: Vec<f64> = xs.iter().map(|x| (x - mean) * factor).collect();
        let scaled: Vec<f64> = gs.iter().zip(&w.data).map(|(g, w)| g * w).collect();
        let level = if centered {
            scaled.iter().sum::<f64>() / n as f64
        } else {
            0.0
        };
        let slope = scaled.iter().zip(&normal).map(|(s, x)| s * x).sum::<f64>() / n as f64;
        for i in 0..n {
            dx.push(factor * (scaled[i] - level - normal[i] * slope));
            dw[i] += gs[i] * normal[i];
            db[i] += gs[i];
        }
    }
    let shaped = |data: Vec<f64>| Val::arr(Arr::new(w.shape.clone(), data));
    let mut gradients = vec![Val::arr(Arr::new(x.shape.clone(), dx)), shaped(dw)];
    if centered {
        gradients.push(shaped(db));
    }
    Ok(Val::Tuple(gradients))
}

/// Operands: gradient, `x`, weight, two that have no meaning here, mean and factor of each channel; the gradients of
/// `x`, weight and bias.
fn batch_norm_backward(a: &Args) -> Check<Ty> {
    let (g, x) = (a.t(0)?, float(a, 1)?);
    let channels = x.shape.get(1).filter(|_| g == x);
    let Some(c) = channels.cloned() else {
        return Err(format!("gradient {g} of {x}"));
    };
    for i in [5, 6] {
        if a.t(i)?.shape[..] != [c.clone()] {
            return Err(format!("statistics {} of {x}", a.t(i)?));
        }
    }
    let w = a.t(2)?;
    parameter(a, 2, x, std::slice::from_ref(&c), w.dtype)?;
    Ok(Ty::Tuple([x, w, w].map(|t| Ty::Tensor(t.clone())).into()))
}

fn eval_batch_norm_backward(v: &Vals) -> Check<Val> {
    let (g, x, w, mean, factor) = (v.a(0)?, v.a(1)?, v.a(2)?, v.a(5)?, v.a(6)?);
    let (c, pixels) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let (gs, xs) = (by_channel(g), by_channel(x));
    let normal = |c: usize, x: f64| (x - mean.data[c]) * factor.data[c];
    let sums: Vec<f64> = gs.iter().map(|g| g.iter().sum()).collect();
    let products = (0..c).map(|c| gs[c].iter().zip(&xs[c]).map(|(g, x)| g * normal(c, *x)).sum());
    let products: Vec<f64> = products.collect();
    let one = |(i, (g, x)): (usize, (&f64, &f64))| {
        let c = i / pixels % c;
        let n = gs[c].len() as f64;
        w.data[c] * factor.data[c] * (g - (sums[c] + normal(c, *x) * products[c]) / n)
    };
    let dx = g.data.iter().zip(&x.data).enumerate().map(one).collect();
    let shaped = |data: Vec<f64>| Val::arr(Arr::new(w.shape.clone(), data));
    Ok(Val::Tuple(vec![
        Val::arr(Arr::new(x.shape.clone(), dx)),
        shaped(products),
        shaped(sums),
    ]))
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        gradient(
            "relu_backward",
            &["threshold_backward.default(g, x, 0)"],
            |v| {
                zip(&[v.a(0)?, v.a(1)?], v.out_shape()?, |r| {
                    if r[1] <= 0.0 { 0.0 } else { r[0] }
                })
            },
            1.0,
        ),
        gradient(
            "gelu_backward",
            &["gelu_backward.default(g, x)"],
            |v| slope(v, gelu_slope),
            30.0,
        ),
        gradient(
            "gelu_tanh_backward",
            &["gelu_backward.default(g, x, 'tanh)"],
            |v| slope(v, gelu_tanh_slope),
            30.0,
        ),
        gradient(
            "silu_backward",
            &["silu_backward.default(g, x)"],
            |v| slope(v, |x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
            18.0,
        ),
        gradient(
            "sigmoid_backward",
            &["sigmoid_backward.default(g, x)"],
            |v| slope(v, |y| (1.0 - y) * y),
            3.0,
        ),
        gradient(
            "tanh_backward",
            &["tanh_backward.default(g, x)"],
            |v| slope(v, |y| 1.0 - y * y),
            3.0,
        ),
        gradient(
            "hardswish_backward",
            &["hardswish_backward.default(g, x)"],
            |v| {
                zip(&[v.a(0)?, v.a(1)?], v.out_shape()?, |r| match r[1] {
                    x if x <= -3.0 => 0.0,
                    x if x < 3.0 => r[0] * (x / 3.0 + 0.5),
                    _ => r[0],
                })
            },
            4.0,
        ),
        gradient(
            "hardsigmoid_backward",
            &["hardsigmoid_backward.default(g, x)"],
            |v| {
                zip(&[v.a(0)?, v.a(1)?], v.out_shape()?, |r| {
                    if r[1] > -3.0 && r[1] < 3.0 { r[0] / 6.0 } else { 0.0 }
                })
            },
            3.0,
        ),
        op(
            "layer_norm_backward",
            "g:T x:T shape:ints mean:T factor:T w:T b:T",
            &["native_layer_norm_backward.default(g, x, shape, mean, factor, w, b, [true,true,true])"],
            |a| norm_backward(a, 2),
            |v| eval_norm_backward(v, true),
            Cost::Reduce(12.0),
        ),
        op(
            "batch_norm_backward",
            "g:T x:T w:T old_mean:T? old_var:T? mean:T factor:T eps:float",
            &[
                "native_batch_norm_backward.default(g, x, w, old_mean, old_var, mean, factor, true, eps, [true,true,true])",
            ],
            batch_norm_backward,
            eval_batch_norm_backward,
            Cost::Reduce(12.0),
        ),
        op(
            "rms_norm_backward",
            "g:T x:T shape:ints factor:T w:T",
            &["_fused_rms_norm_backward.default(g, x, shape, factor, w, [true,true])"],
            |a| norm_backward(a, 1),
            |v| eval_norm_backward(v, false),
            Cost::Reduce(10.0),
        ),
    ]
}
