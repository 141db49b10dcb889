//! Lookups: rows taken by number (embedding, gather), or all of them by weight (softmax,
//! attention).

use super::{Args, Check, Row, Vals, op};
use crate::args::broadcast;
use crate::attr::Attr;
use crate::dim::{Dim, product};
use crate::eval::{Arr, Val};
use crate::ty::{DType, TensorType, Ty};
use crate::work::Cost;

/// Checks an operand that holds places in `x`.
fn places<'a>(a: &Args<'a>, i: usize, x: &TensorType, dtypes: &[DType]) -> Check<&'a TensorType> {
    let index = a.t(i)?;
    if !dtypes.contains(&index.dtype) || index.device != x.device {
        return Err(format!("{index} holds no places in {x}"));
    }
    Ok(index)
}

/// A place that a lookup names; torch counts none from the end here.
fn inside(place: f64, size: usize) -> Check<usize> {
    if place >= 0.0 && place < size as f64 {
        Ok(place as usize)
    } else {
        Err(format!("no place {place} in size {size}"))
    }
}

fn embedding(a: &Args) -> Check<Ty> {
    let w = a.t(0)?;
    let index = places(a, 1, w, &[DType::I64, DType::I32])?;
    a.int(2)?;
    if w.rank() != 2 {
        return Err(format!("{w} is no table"));
    }
    let shape: Vec<Dim> = index.shape.iter().chain([&w.shape[1]]).cloned().collect();
    Ok(Ty::Tensor(w.with_shape(shape)))
}

fn eval_embedding(v: &Vals) -> Check<Val> {
    let (w, index, shape) = (v.a(0)?, v.a(1)?, v.out_shape()?);
    let width = w.shape[1];
    let mut data = Vec::with_capacity(index.data.len() * width);
    for place in &index.data {
        let row = inside(*place, w.shape[0])?;
        data.extend_from_slice(&w.data[row * width..(row + 1) * width]);
    }
    Ok(Val::arr(Arr::new(shape, data)))
}

fn gather(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let (d, index) = (a.dim_of(1, x)?, places(a, 2, x, &[DType::I64])?);
    let fits = |i: usize| {
        let (want, have) = (&index.shape[i], &x.shape[i]);
        i == d || want == have || matches!((want.known(), have.known()), (Some(w), Some(h)) if w <= h)
    };
    if index.rank() != x.rank() || !(0..x.rank()).all(fits) {
        return Err(format!("{index} does not fit into {x}"));
    }
    Ok(Ty::Tensor(x.with_shape(index.shape.clone())))
}

fn index_select(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let (d, index) = (a.dim_of(1, x)?, places(a, 2, x, &[DType::I64, DType::I32])?);
    if index.rank() != 1 {
        return Err(format!("{index} is no list"));
    }
    let mut shape = x.shape.to_vec();
    shape[d] = index.shape[0].clone();
    Ok(Ty::Tensor(x.with_shape(shape)))
}

/// `place` says which element of the index decides for an element of the result.
fn eval_taken(v: &Vals, place: fn(&[usize], usize) -> Vec<usize>) -> Check<Val> {
    let (x, index, args) = (v.a(0)?, v.a(2)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let mut fault = None;
    let out = Arr::from_fn(v.out_shape()?, |i| {
        let mut at = i.to_vec();
        match inside(index.at(&place(i, d)), x.shape[d]) {
            Ok(p) => {
                at[d] = p;
                x.at(&at)
            }
            Err(e) => {
                fault = Some(e);
                f64::NAN
            }
        }
    });
    fault.map_or(Ok(Val::arr(out)), Err)
}

fn softmax(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    a.dim_of(1, x)?;
    let float = x.dtype.is_float().then(|| Ty::Tensor(x.clone()));
    float.ok_or_else(|| format!("not defined for {x}"))
}

/// Computed and returned in fp32 from half precision.
fn softmax_f32(a: &Args) -> Check<Ty> {
    match softmax(a)? {
        Ty::Tensor(t) if t.dtype != DType::F64 => Ok(Ty::Tensor(t.with_dtype(DType::F32))),
        other => Err(format!("not defined for {other}")),
    }
}

fn largest(xs: &[f64]) -> f64 {
    xs.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Sum of the exponentials of the distances from the largest. An infinite largest makes it NaN,
/// as it does in torch.
fn partition(xs: &[f64]) -> f64 {
    let m = largest(xs);
    xs.iter().fold(0.0, |s, x| s + (x - m).exp())
}

fn hidden(xs: &[f64]) -> bool {
    xs.iter().all(|x| *x == f64::NEG_INFINITY)
}

/// `f` gets an element's distance from the largest, and the partition sum.
fn shares(x: &Arr, dim: usize, f: fn(f64, f64) -> f64) -> Arr {
    let (m, sum) = (x.reduce(&[dim], true, largest), x.reduce(&[dim], true, partition));
    Arr::from_fn(x.shape.clone(), |i| f(x.at(i) - m.at_broadcast(i), sum.at_broadcast(i)))
}

fn share(distance: f64, sum: f64) -> f64 {
    distance.exp() / sum
}

fn log_share(distance: f64, sum: f64) -> f64 {
    distance - sum.ln()
}

fn eval_softmax(v: &Vals, f: fn(f64, f64) -> f64) -> Check<Val> {
    let dim = v.args().dim_of(1, v.args().t(0)?)?;
    Ok(Val::arr(shares(v.a(0)?, dim, f)))
}

/// Batch and heads, queries, keys, width and width of the values: the sizes of an attention.
fn sizes<'a>(a: &Args<'a>) -> Check<(&'a [Dim], &'a Dim, &'a Dim, &'a Dim, &'a Dim)> {
    let (q, k, v) = (a.t(0)?, a.t(1)?, a.t(2)?);
    let r = q.rank();
    let alike = |t: &TensorType| t.rank() == r && t.dtype == q.dtype && t.device == q.device;
    if r < 2 || !q.dtype.is_float() || !alike(k) || !alike(v) {
        return Err(format!("{q}, {k} and {v} do not attend"));
    }
    let (batch, [queries, width]) = (&q.shape[..r - 2], [&q.shape[r - 2], &q.shape[r - 1]]);
    let fits = &k.shape[..r - 2] == batch && k.shape[r - 1] == *width && v.shape[..r - 1] == k.shape[..r - 1];
    // Without width there is no scale.
    if !fits || width.is(0) {
        return Err(format!("{q}, {k} and {v} do not fit"));
    }
    Ok((batch, queries, &k.shape[r - 2], width, &v.shape[r - 1]))
}

/// Operands `q k v mask causal scale`, and more that have no influence on the first result.
fn attention(a: &Args) -> Check<Ty> {
    let (batch, queries, keys, _, width) = sizes(a)?;
    let q = a.t(0)?;
    if let Some(mask) = a.opt(3)? {
        let scores: Vec<Dim> = batch.iter().chain([queries, keys]).cloned().collect();
        let dtype = [DType::Bool, DType::F32, q.dtype].contains(&mask.dtype);
        if !dtype || mask.device != q.device || *broadcast(&[&mask.shape, &scores])? != *scores || a.flag(4)? {
            return Err(format!("mask {mask} does not fit {q}"));
        }
    }
    a.flag(4)?;
    if *a.attr(5)? != Attr::None {
        a.attr(5)?.number().ok_or("the scale must be a number")?;
    }
    let shape: Vec<Dim> = batch.iter().chain([queries, width]).cloned().collect();
    Ok(Ty::Tensor(q.with_shape(shape)))
}

/// A fused kernel's tuple: what follows the result is the kernel's own business.
fn several(a: &Args, rest: usize) -> Check<Ty> {
    let rest = std::iter::repeat_n(Ty::Unknown, rest);
    Ok(Ty::Tuple(std::iter::once(attention(a)?).chain(rest).collect()))
}

/// Kernels that end the causal triangle in the last corner agree with torch on squares only.
fn several_square(a: &Args, rest: usize) -> Check<Ty> {
    let (_, queries, keys, ..) = sizes(a)?;
    if a.flag(4)? && queries != keys {
        return Err("causal, and not as many queries as keys".into());
    }
    several(a, rest)
}

/// The operands of a kernel that takes no mask.
fn unmasked<T: Clone>(operands: &[T], none: T) -> Vec<T> {
    [&operands[..3], &[none], &operands[3..]].concat()
}

fn attention_flash(a: &Args) -> Check<Ty> {
    several_square(&Args(&unmasked(a.0, Ty::Attr(Attr::None))), 8)
}

fn eval_flash(v: &Vals) -> Check<Val> {
    let vals = unmasked(v.vals, Val::Attr(Attr::None));
    let types = unmasked(v.types, Ty::Attr(Attr::None));
    eval_several(
        &Vals {
            vals: &vals,
            types: &types,
            out: v.out,
            mode: v.mode,
        },
        8,
    )
}

fn attention_cpu(a: &Args) -> Check<Ty> {
    let (batch, queries, ..) = sizes(a)?;
    let q = a.t(0)?;
    let sums: Vec<Dim> = batch.iter().chain([queries]).cloned().collect();
    let dtype = if q.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let sums = Ty::Tensor(q.with_shape(sums).with_dtype(dtype));
    Ok(Ty::Tuple([attention(a)?, sums].into()))
}

/// Scores of every query and key, scaled and masked.
fn scores(v: &Vals) -> Check<Arr> {
    let (q, k, mask, args) = (v.a(0)?, v.a(1)?, v.opt(3)?, v.args());
    let r = q.shape.len();
    let (width, causal) = (q.shape[r - 1], args.flag(4)?);
    let scale = match args.attr(5)? {
        Attr::None => 1.0 / (width as f64).sqrt(),
        _ => v.num(5)?,
    };
    let truth = mask.is_some() && args.t(3)?.dtype == DType::Bool;
    let hide = |hidden: bool| if hidden { f64::NEG_INFINITY } else { 0.0 };
    let mut shape = q.shape.clone();
    shape[r - 1] = k.shape[r - 2];
    Ok(Arr::from_fn(shape, |i| {
        let (mut iq, mut ik) = (i.to_vec(), i.to_vec());
        ik[r - 2] = i[r - 1];
        let dot = (0..width).fold(0.0, |s, e| {
            (iq[r - 1], ik[r - 1]) = (e, e);
            s + q.at(&iq) * k.at(&ik)
        });
        let bias = match mask {
            Some(m) if truth => hide(m.at_broadcast(i) == 0.0),
            Some(m) => m.at_broadcast(i),
            None => hide(causal && i[r - 1] > i[r - 2]),
        };
        dot * scale + bias
    }))
}

fn eval_attention(v: &Vals) -> Check<Val> {
    let (scores, values) = (scores(v)?, v.a(2)?);
    let r = scores.shape.len();
    let weights = shares(&scores, r - 1, share);
    let nothing = scores.reduce(&[r - 1], true, |xs| f64::from(hidden(xs)));
    let mut shape = scores.shape.clone();
    shape[r - 1] = values.shape[r - 1];
    Ok(Val::arr(Arr::from_fn(shape, |i| {
        let (mut iw, mut iv) = (i.to_vec(), i.to_vec());
        iw[r - 1] = 0;
        // A query that sees no key gets nothing, where a softmax would say NaN.
        if nothing.at(&iw) == 1.0 {
            return 0.0;
        }
        (0..scores.shape[r - 1]).fold(0.0, |s, key| {
            (iw[r - 1], iv[r - 2]) = (key, key);
            s + weights.at(&iw) * values.at(&iv)
        })
    })))
}

fn eval_cpu(v: &Vals) -> Check<Val> {
    let scores = scores(v)?;
    let sums = scores.reduce(&[scores.shape.len() - 1], false, |xs| match hidden(xs) {
        true => 0.0,
        false => partition(xs).ln() + largest(xs),
    });
    Ok(Val::Tuple(vec![eval_attention(v)?, Val::arr(sums)]))
}

fn eval_several(v: &Vals, rest: usize) -> Check<Val> {
    let rest = std::iter::repeat_n(Val::Attr(Attr::None), rest);
    Ok(Val::Tuple(std::iter::once(eval_attention(v)?).chain(rest).collect()))
}

fn work(a: &Args, _: &Ty) -> Check<Dim> {
    let (batch, queries, keys, width, out) = sizes(a)?;
    Ok(product(batch).mul(queries).mul(keys).mul(&width.add(out)))
}

/// A paragraph for each row: name and operands => type, value, cost, calls.
macro_rules! lookups {
    ($($name:literal $operands:literal => $infer:expr, $eval:expr, $cost:expr, [$($call:literal,)*];)*) => {
        vec![$(op($name, $operands, &[$($call),*], $infer, $eval, $cost)),*]
    };
}

pub(super) fn rows() -> Vec<Row> {
    lookups! {
        // The padding counts in the gradient only.
        "embedding" "w:T index:T padding:int" => embedding, eval_embedding, Cost::Gather, [
            "embedding.default(w, index, padding)",
            "embedding.default(w, index) => (embedding w index -1)",
        ];
        "gather" "x:T dim:dim index:T" => gather, |v| eval_taken(v, |i, _| i.to_vec()), Cost::Gather, [
            "gather.default(x, dim, index)",
        ];
        "index_select" "x:T dim:dim index:T" => index_select, |v| eval_taken(v, |i, d| vec![i[d]]), Cost::Gather, [
            "index_select.default(x, dim, index)",
        ];
        "softmax" "x:T dim:dim" => softmax, |v| eval_softmax(v, share), Cost::Reduce(8.0), [
            "_softmax.default(x, dim, false)",
            "softmax.int(x, dim) => (softmax x ($dim x dim))",
        ];
        "softmax_f32" "x:T dim:dim" => softmax_f32, |v| eval_softmax(v, share), Cost::Reduce(8.0), [
            "softmax.int(x, dim, f32)",
            "_softmax.default(x, dim, true) => (softmax_f32 x ($dim x dim))",
        ];
        "log_softmax" "x:T dim:dim" => softmax, |v| eval_softmax(v, log_share), Cost::Reduce(8.0), [
            "_log_softmax.default(x, dim, false)",
            "log_softmax.int(x, dim) => (log_softmax x ($dim x dim))",
        ];
        "log_softmax_f32" "x:T dim:dim" => softmax_f32, |v| eval_softmax(v, log_share), Cost::Reduce(8.0), [
            "log_softmax.int(x, dim, f32)",
            "_log_softmax.default(x, dim, true) => (log_softmax_f32 x ($dim x dim))",
        ];
        "attention" "q:T k:T v:T mask:T? causal:bool scale:float?" => attention, eval_attention, Cost::Matrix(work), [
            "scaled_dot_product_attention.default(q, k, v, mask, 0.0, causal, scale)",
            "scaled_dot_product_attention.default(q, k, v, mask, 0.0, causal) => (attention q k v mask causal none)",
            "scaled_dot_product_attention.default(q, k, v, mask) => (attention q k v mask false none)",
            "scaled_dot_product_attention.default(q, k, v) => (attention q k v none false none)",
        ];
        "attention_cpu" "q:T k:T v:T mask:T? causal:bool scale:float?" => attention_cpu, eval_cpu, Cost::Matrix(work), [
            "_scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, mask, scale)",
            "_scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, mask) => (attention_cpu q k v mask causal none)",
            "_scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal) => (attention_cpu q k v none causal none)",
            "_scaled_dot_product_flash_attention_for_cpu.default(q, k, v) => (attention_cpu q k v none false none)",
        ];
        "attention_efficient" "q:T k:T v:T mask:T? causal:bool scale:float? sums:bool" => |a| several(a, 3), |v| eval_several(v, 3), Cost::Matrix(work), [
            "_scaled_dot_product_efficient_attention.default(q, k, v, mask, sums, 0.0, causal, scale)",
            "_scaled_dot_product_efficient_attention.default(q, k, v, mask, sums, 0.0, causal) => (attention_efficient q k v mask causal none sums)",
            "_scaled_dot_product_efficient_attention.default(q, k, v, mask, sums) => (attention_efficient q k v mask false none sums)",
        ];
        "attention_cudnn" "q:T k:T v:T mask:T? causal:bool scale:float? sums:bool" => |a| several_square(a, 8), |v| eval_several(v, 8), Cost::Matrix(work), [
            "_scaled_dot_product_cudnn_attention.default(q, k, v, mask, sums, 0.0, causal, false, scale)",
            "_scaled_dot_product_cudnn_attention.default(q, k, v, mask, sums, 0.0, causal) => (attention_cudnn q k v mask causal none sums)",
            "_scaled_dot_product_cudnn_attention.default(q, k, v, mask, sums) => (attention_cudnn q k v mask false none sums)",
        ];
        "attention_flash" "q:T k:T v:T causal:bool scale:float?" => attention_flash, eval_flash, Cost::Matrix(work), [
            "_scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, false, scale)",
            "_scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal) => (attention_flash q k v causal none)",
            "_scaled_dot_product_flash_attention.default(q, k, v) => (attention_flash q k v false none)",
        ];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_all_is_hidden_a_softmax_is_nan() {
        let x = Arr::new(
            vec![2, 2],
            vec![f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY, 1.0],
        );
        let out = shares(&x, 1, share);
        assert!(out.data[0].is_nan() && out.data[1].is_nan());
        assert_eq!(out.data[2..], [0.0, 1.0]);
        assert!(hidden(&x.data[..2]) && !hidden(&x.data[2..]));
    }
}
