//! Normalisation by mean and spread.
//!
//! An op that torch runs as a kernel with several results stands beside the op on the first of
//! them (`native_layer_norm` and `layer_norm`), so that rules need only know the latter.

use super::{Args, Check, Row, Vals, known_shape, op};
use crate::attr::Attr;
use crate::dim::{Dim, product};
use crate::eval::{Arr, Val};
use crate::ty::{DType, Device, TensorType, Ty};
use crate::work::Cost;

pub(super) fn float<'a>(a: &Args<'a>, i: usize) -> Check<&'a TensorType> {
    let x = a.t(i)?;
    if x.dtype.is_float() {
        Ok(x)
    } else {
        Err(format!("not defined for {x}"))
    }
}

fn number(a: &Args, i: usize) -> Check<()> {
    a.attr(i)?
        .number()
        .map(|_| ())
        .ok_or_else(|| format!("operand {i} must be a number"))
}

/// A parameter, if there is one: of this shape and dtype, on the device of `x`.
pub(super) fn parameter(a: &Args, i: usize, x: &TensorType, shape: &[Dim], dtype: DType) -> Check<()> {
    match a.opt(i)? {
        Some(w) if w.shape[..] != *shape || w.dtype != dtype || w.device != x.device => {
            Err(format!("parameter {w} does not fit {x}"))
        }
        _ => Ok(()),
    }
}

/// The dtype in which kernels hold sums of this one.
fn accumulated(d: DType) -> DType {
    if d == DType::F64 { d } else { DType::F32 }
}

/// Checks the operands `x shape` of a norm over the last dimensions; says how many they are.
fn trailing<'a>(a: &Args<'a>) -> Check<(&'a TensorType, usize)> {
    let (x, shape) = (float(a, 0)?, a.ints(1)?);
    if shape.is_empty() || shape.iter().any(|d| d.is(0)) || !x.shape.ends_with(shape) {
        return Err(format!("{} is no ending of {x}", a.attr(1)?));
    }
    Ok((x, shape.len()))
}

fn layer_norm(a: &Args) -> Check<Ty> {
    let (x, _) = trailing(a)?;
    parameter(a, 2, x, a.ints(1)?, x.dtype)?;
    parameter(a, 3, x, a.ints(1)?, x.dtype)?;
    number(a, 4)?;
    Ok(Ty::Tensor(x.clone()))
}

fn rms_norm(a: &Args) -> Check<Ty> {
    let (x, _) = trailing(a)?;
    parameter(a, 2, x, a.ints(1)?, x.dtype)?;
    if *a.attr(3)? != Attr::None {
        number(a, 3)?;
    }
    Ok(Ty::Tensor(x.clone()))
}

/// Type of a norm's statistics: the last dimensions shrunk to one.
fn statistics(a: &Args, dtype: DType) -> Check<Ty> {
    let (x, k) = trailing(a)?;
    let mut shape = x.shape.to_vec();
    let kept = shape.len() - k;
    shape[kept..].fill(Dim::Const(1));
    Ok(Ty::Tensor(x.with_shape(shape).with_dtype(dtype)))
}

fn native_layer_norm(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    // Only the CPU's kernel stores its statistics in the dtype of the input.
    let dtype = if x.device == Device::default() {
        x.dtype
    } else {
        accumulated(x.dtype)
    };
    let s = statistics(a, dtype)?;
    Ok(Ty::Tuple([layer_norm(a)?, s.clone(), s].into()))
}

fn native_rms_norm(a: &Args) -> Check<Ty> {
    Ok(Ty::Tuple(
        [rms_norm(a)?, statistics(a, accumulated(a.t(0)?.dtype))?].into(),
    ))
}

/// Checks `x` of a norm over channels; gives their number.
fn channels<'a>(a: &Args<'a>) -> Check<(&'a TensorType, &'a Dim)> {
    let x = float(a, 0)?;
    match x.shape.get(1) {
        Some(c) => Ok((x, c)),
        None => Err(format!("{x} has no channels")),
    }
}

fn group_norm(a: &Args) -> Check<Ty> {
    let ((x, c), groups) = (channels(a)?, a.int(1)?);
    if groups < 1 || c.div(&Dim::Const(groups)).is_none() {
        return Err(format!("{c} channels do not fall into {groups} groups"));
    }
    if x.shape[1..].iter().any(|d| d.is(0)) {
        return Err(format!("the groups of {x} are empty"));
    }
    parameter(a, 2, x, std::slice::from_ref(c), x.dtype)?;
    parameter(a, 3, x, std::slice::from_ref(c), x.dtype)?;
    number(a, 4)?;
    Ok(Ty::Tensor(x.clone()))
}

/// Operands: those of `group_norm`, then batch, channels and pixels, which must be those of `x`.
fn native_group_norm(a: &Args) -> Check<Ty> {
    let (out, x) = (group_norm(a)?, a.t(0)?);
    let sizes = [x.shape[0].clone(), x.shape[1].clone(), product(&x.shape[2..])];
    for (i, size) in sizes.into_iter().enumerate() {
        if *a.attr(5 + i)? != Attr::Int(size) {
            return Err(format!("operand {} is no size of {x}", 5 + i));
        }
    }
    let s = Ty::Tensor(x.with_shape([x.shape[0].clone(), Dim::Const(a.int(1)?)]));
    Ok(Ty::Tuple([out, s.clone(), s].into()))
}

fn batch_norm(a: &Args) -> Check<Ty> {
    let (x, c) = channels(a)?;
    let dtype = a.t(3)?.dtype;
    // Parameters may be wider than a half-precision input, but then all of them.
    if dtype != x.dtype && !(dtype == DType::F32 && matches!(x.dtype, DType::F16 | DType::BF16)) {
        return Err(format!("statistics in {dtype} do not fit {x}"));
    }
    a.t(4)?;
    (1..5).try_for_each(|i| parameter(a, i, x, std::slice::from_ref(c), dtype))?;
    number(a, 5)?;
    Ok(Ty::Tensor(x.clone()))
}

/// Operands: those of `batch_norm`, then a momentum without meaning here.
fn native_batch_norm(a: &Args) -> Check<Ty> {
    let (out, x) = (batch_norm(a)?, a.t(0)?);
    // Nothing is saved on the CPU; elsewhere it depends on the kernel, and no rule may look.
    let saved = match x.device == Device::default() {
        true => Ty::Tensor(x.with_shape([Dim::Const(0)])),
        false => Ty::Unknown,
    };
    Ok(Ty::Tuple([out, saved.clone(), saved].into()))
}

/// The same by cuDNN, which saves one thing more.
fn cudnn_batch_norm(a: &Args) -> Check<Ty> {
    let out = batch_norm(a)?;
    Ok(Ty::Tuple([out, Ty::Unknown, Ty::Unknown, Ty::Unknown].into()))
}

/// A batch norm by the statistics of its batch: the result, mean and factor, running statistics moved towards them.
fn batch_norm_train(a: &Args) -> Check<Ty> {
    let ((x, c), out) = (channels(a)?, batch_norm(a)?);
    number(a, 6)?;
    let each = x.with_shape([c.clone()]).with_dtype(accumulated(x.dtype));
    let mut items = vec![out];
    items.extend(std::iter::repeat_n(Ty::Tensor(each), 4));
    Ok(Ty::Tuple(items.into()))
}

/// Mean and reciprocal deviation of every `n` consecutive elements.
fn moments(x: &Arr, n: usize, eps: f64) -> Vec<(f64, f64)> {
    let one = |xs: &[f64]| {
        let mean = xs.iter().fold(0.0, |s, x| s + x) / n as f64;
        let var = xs.iter().fold(0.0, |s, x| s + (x - mean) * (x - mean)) / n as f64;
        (mean, 1.0 / (var + eps).sqrt())
    };
    x.data.chunks(n.max(1)).map(one).collect()
}

/// The same about zero.
fn magnitudes(x: &Arr, n: usize, eps: f64) -> Vec<(f64, f64)> {
    let one = |xs: &[f64]| {
        (
            0.0,
            1.0 / (xs.iter().fold(0.0, |s, x| s + x * x) / n as f64 + eps).sqrt(),
        )
    };
    x.data.chunks(n.max(1)).map(one).collect()
}

/// Every element less its mean, times its factor, through its channel's parameters.
fn normalised(
    x: &Arr,
    stats: impl Fn(usize) -> (f64, f64),
    channel: impl Fn(usize) -> usize,
    w: Option<&Arr>,
    b: Option<&Arr>,
) -> Val {
    let one = |(i, x): (usize, &f64)| {
        let ((mean, factor), c) = (stats(i), channel(i));
        (x - mean) * factor * w.map_or(1.0, |w| w.data[c]) + b.map_or(0.0, |b| b.data[c])
    };
    Val::arr(Arr::new(x.shape.clone(), x.data.iter().enumerate().map(one).collect()))
}

/// The values of a tuple's statistics: one column of `stats` in the shape of that item's type.
fn column(v: &Vals, item: usize, data: Vec<f64>) -> Check<Val> {
    let ty = match v.out {
        Ty::Tuple(items) => items.get(item).and_then(Ty::tensor),
        _ => None,
    };
    let shape = known_shape(&ty.ok_or("the result is no tuple of tensors")?.shape)?;
    Ok(Val::arr(Arr::new(shape, data)))
}

fn size(v: &Vals) -> Check<usize> {
    Ok(v.args().known(1)?.iter().product::<i64>() as usize)
}

fn eval_layer_norm(v: &Vals) -> Check<(Val, Vec<(f64, f64)>)> {
    let (x, n) = (v.a(0)?, size(v)?);
    let stats = moments(x, n, v.num(4)?);
    Ok((normalised(x, |i| stats[i / n], |i| i % n, v.opt(2)?, v.opt(3)?), stats))
}

fn eval_rms_norm(v: &Vals) -> Check<(Val, Vec<(f64, f64)>)> {
    let (x, n) = (v.a(0)?, size(v)?);
    let eps = match (v.args().attr(3)?, v.args().t(0)?.dtype) {
        // Without one, torch takes the distance from one to the next number.
        (Attr::None, d) => 2.0 * accumulated(d).epsilon(),
        _ => v.num(3)?,
    };
    let stats = magnitudes(x, n, eps);
    Ok((normalised(x, |i| stats[i / n], |i| i % n, v.opt(2)?, None), stats))
}

fn eval_group_norm(v: &Vals) -> Check<(Val, Vec<(f64, f64)>)> {
    let (x, groups) = (v.a(0)?, v.args().int(1)? as usize);
    let (c, pixels) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let n = c / groups * pixels;
    let stats = moments(x, n, v.num(4)?);
    Ok((
        normalised(x, |i| stats[i / n], |i| i / pixels % c, v.opt(2)?, v.opt(3)?),
        stats,
    ))
}

fn eval_batch_norm(v: &Vals) -> Check<Val> {
    let (x, mean, var, eps) = (v.a(0)?, v.a(3)?, v.a(4)?, v.num(5)?);
    let (c, pixels) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let channel = |i: usize| i / pixels % c;
    let stats = |i: usize| (mean.data[channel(i)], 1.0 / (var.data[channel(i)] + eps).sqrt());
    Ok(normalised(x, stats, channel, v.opt(1)?, v.opt(2)?))
}

/// The elements of each channel.
pub(super) fn by_channel(x: &Arr) -> Vec<Vec<f64>> {
    let (c, pixels) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let mut found = vec![vec![]; c];
    for (i, value) in x.data.iter().enumerate() {
        found[i / pixels % c].push(*value);
    }
    found
}

fn eval_batch_norm_train(v: &Vals) -> Check<Val> {
    let (x, eps, momentum) = (v.a(0)?, v.num(5)?, v.num(6)?);
    let (c, pixels) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let channel = |i: usize| i / pixels % c;
    let each = by_channel(x);
    let stats: Vec<(f64, f64)> = each.iter().flat_map(|xs| moments(&row(xs), xs.len(), eps)).collect();
    let out = normalised(x, |i| stats[channel(i)], channel, v.opt(1)?, v.opt(2)?);
    let spread = |i: usize| {
        let (n, mean) = (each[i].len() as f64, stats[i].0);
        each[i].iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0)
    };
    let moved = |old: &Arr, to: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let one = |(i, old): (usize, &f64)| momentum * to(i) + (1.0 - momentum) * old;
        old.data.iter().enumerate().map(one).collect()
    };
    Ok(Val::Tuple(vec![
        out,
        Val::arr(row(&stats.iter().map(|s| s.0).collect::<Vec<_>>())),
        Val::arr(row(&stats.iter().map(|s| s.1).collect::<Vec<_>>())),
        Val::arr(row(&moved(v.a(3)?, &|i| stats[i].0))),
        Val::arr(row(&moved(v.a(4)?, &spread))),
    ]))
}

fn row(xs: &[f64]) -> Arr {
    Arr::new(vec![xs.len()], xs.to_vec())
}

fn with_moments(v: &Vals, (out, stats): (Val, Vec<(f64, f64)>)) -> Check<Val> {
    let (means, factors) = stats.into_iter().unzip();
    Ok(Val::Tuple(vec![out, column(v, 1, means)?, column(v, 2, factors)?]))
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        op(
            "layer_norm",
            "x:T shape:ints w:T? b:T? eps:float",
            &[
                "layer_norm.default(x, shape, w, b, eps)",
                // The last argument chooses a kernel, not a meaning.
                "layer_norm.default(x, shape, w, b, eps, cudnn) => (layer_norm x shape w b eps)",
                "layer_norm.default(x, shape, w, b) => (layer_norm x shape w b 1e-05)",
                "layer_norm.default(x, shape, w) => (layer_norm x shape w none 1e-05)",
                "layer_norm.default(x, shape) => (layer_norm x shape none none 1e-05)",
            ],
            layer_norm,
            |v| Ok(eval_layer_norm(v)?.0),
            Cost::Reduce(6.0),
        ),
        op(
            "native_layer_norm",
            "x:T shape:ints w:T? b:T? eps:float",
            &["native_layer_norm.default(x, shape, w, b, eps)"],
            native_layer_norm,
            |v| with_moments(v, eval_layer_norm(v)?),
            Cost::Reduce(6.0),
        ),
        op(
            "rms_norm",
            "x:T shape:ints w:T? eps:float?",
            &[
                "rms_norm.default(x, shape, w, eps)",
                "rms_norm.default(x, shape, w) => (rms_norm x shape w none)",
                "rms_norm.default(x, shape) => (rms_norm x shape none none)",
            ],
            rms_norm,
            |v| Ok(eval_rms_norm(v)?.0),
            Cost::Reduce(4.0),
        ),
        op(
            "native_rms_norm",
            "x:T shape:ints w:T? eps:float?",
            &["_fused_rms_norm.default(x, shape, w, eps)"],
            native_rms_norm,
            |v| {
                let (out, stats) = eval_rms_norm(v)?;
                Ok(Val::Tuple(vec![
                    out,
                    column(v, 1, stats.into_iter().map(|s| s.1).collect())?,
                ]))
            },
            Cost::Reduce(4.0),
        ),
        op(
            "group_norm",
            "x:T groups:int w:T? b:T? eps:float",
            &[
                "group_norm.default(x, groups, w, b, eps)",
                "group_norm.default(x, groups, w, b, eps, cudnn) => (group_norm x groups w b eps)",
                "group_norm.default(x, groups, w, b) => (group_norm x groups w b 1e-05)",
                "group_norm.default(x, groups, w) => (group_norm x groups w none 1e-05)",
                "group_norm.default(x, groups) => (group_norm x groups none none 1e-05)",
            ],
            group_norm,
            |v| Ok(eval_group_norm(v)?.0),
            Cost::Reduce(6.0),
        ),
        op(
            "native_group_norm",
            "x:T groups:int w:T? b:T? eps:float batch:int channels:int pixels:int",
            &["native_group_norm.default(x, w, b, batch, channels, pixels, groups, eps)"],
            native_group_norm,
            |v| with_moments(v, eval_group_norm(v)?),
            Cost::Reduce(6.0),
        ),
        op(
            "batch_norm",
            "x:T w:T? b:T? mean:T var:T eps:float",
            // With the statistics it is given: momentum has no meaning, the last chooses a kernel.
            &[
                "batch_norm.default(x, w, b, mean, var, false, 0.1, eps, true)",
                "batch_norm.default(x, w, b, mean, var, false, momentum, eps, cudnn) => (batch_norm x w b mean var eps)",
            ],
            batch_norm,
            eval_batch_norm,
            Cost::Reduce(3.0),
        ),
        op(
            "native_batch_norm",
            "x:T w:T? b:T? mean:T var:T eps:float momentum:float",
            &[
                "_native_batch_norm_legit_no_training.default(x, w, b, mean, var, momentum, eps)",
                "native_batch_norm.default(x, w, b, mean, var, false, momentum, eps) => (native_batch_norm x w b mean var eps momentum)",
            ],
            native_batch_norm,
            |v| {
                let empty = || Val::arr(Arr::new(vec![0], vec![]));
                Ok(Val::Tuple(vec![eval_batch_norm(v)?, empty(), empty()]))
            },
            Cost::Reduce(3.0),
        ),
        op(
            "cudnn_batch_norm",
            "x:T w:T b:T mean:T var:T eps:float momentum:float",
            &["cudnn_batch_norm.default(x, w, b, mean, var, false, momentum, eps)"],
            cudnn_batch_norm,
            |v| {
                let empty = || Val::arr(Arr::new(vec![0], vec![]));
                Ok(Val::Tuple(vec![eval_batch_norm(v)?, empty(), empty(), empty()]))
            },
            Cost::Reduce(3.0),
        ),
        op(
            "batch_norm_train",
            "x:T w:T? b:T? mean:T var:T eps:float momentum:float",
            &["_native_batch_norm_legit_functional.default(x, w, b, mean, var, true, momentum, eps)"],
            batch_norm_train,
            eval_batch_norm_train,
            Cost::Reduce(8.0),
        ),
        op(
            "dropout",
            "x:T p:float",
            // Only as the identity that it is outside training; what is drawn at random stays opaque.
            &[
                "dropout.default(x, p, false) => (copy x)",
                "dropout.default(x, 0.0, true) => (copy x)",
                "feature_dropout.default(x, p, false) => (copy x)",
                "alpha_dropout.default(x, p, false) => (copy x)",
                "dropout.default(x, p, false)",
            ],
            |a| Ok(Ty::Tensor(a.t(0)?.clone())),
            |v| Ok(Val::arr(v.a(0)?.clone())),
            Cost::View,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::dims;

    #[test]
    fn statistics_are_stored_as_the_device_does() {
        for (device, dtype) in [(0, DType::BF16), (1, DType::F32)] {
            let x = TensorType {
                shape: dims(&[2, 3, 4]),
                dtype: DType::BF16,
                device: Device(device),
            };
            let none = Ty::Attr(Attr::None);
            let operands = [
                Ty::Tensor(x.clone()),
                Ty::Attr(Attr::ints(&[4])),
                none.clone(),
                none,
                Ty::Attr(Attr::float(0.1)),
            ];
            let mean = Ty::Tensor(x.with_shape(dims(&[2, 3, 1])).with_dtype(dtype));
            let want = Ty::Tuple([Ty::Tensor(x), mean.clone(), mean].into());
            assert_eq!(native_layer_norm(&Args(&operands)), Ok(want));
        }
    }
}
