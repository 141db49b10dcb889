//! Views and copies of memory: the same elements in another order, shape or dtype.

use std::sync::Arc;

use super::{Args, Check, Row, Vals, op};
use crate::args::broadcast;
use crate::attr::Attr;
use crate::dim::{Dim, product};
use crate::eval::{Arr, Val};
use crate::ty::{TensorType, Ty};
use crate::work::Cost;

fn tensor(t: TensorType) -> Check<Ty> {
    Ok(Ty::Tensor(t))
}

fn reshape(a: &Args) -> Check<Ty> {
    let (x, shape) = (a.t(0)?, a.ints(1)?);
    let (from, to) = (x.numel(), product(shape));
    if from != to {
        return Err(format!("{x} has {from} elements, the new shape {to}"));
    }
    if shape.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
        return Err("a size is negative".into());
    }
    tensor(x.with_shape(shape))
}

fn permute(a: &Args) -> Check<Ty> {
    let (x, perm) = (a.t(0)?, a.known(1)?);
    let mut seen = perm.clone();
    seen.sort_unstable();
    if seen != (0..x.rank() as i64).collect::<Vec<_>>() {
        return Err(format!(
            "{perm:?} is no permutation of the {} dimensions of {x}",
            x.rank()
        ));
    }
    tensor(
        x.with_shape(
            perm.iter()
                .map(|d| x.shape[*d as usize].clone())
                .collect::<Arc<[Dim]>>(),
        ),
    )
}

fn expand(a: &Args) -> Check<Ty> {
    let (x, shape) = (a.t(0)?, a.ints(1)?);
    if broadcast(&[&x.shape, shape])?.as_ref() != shape {
        return Err(format!("{x} does not expand to the new shape"));
    }
    tensor(x.with_shape(shape))
}

/// Start and end of a slice, clamped as torch does, when that can be decided.
fn bounds(size: &Dim, start: &Attr, end: &Attr) -> Check<(Dim, Dim)> {
    let place = |a: &Attr, default: Dim| -> Check<Dim> {
        match a {
            Attr::None => Ok(default),
            Attr::Int(d) => match (d.known(), size.known()) {
                (Some(v), Some(n)) => Ok(Dim::Const(if v < 0 { (v + n).max(0) } else { v.min(n) })),
                (Some(0), None) => Ok(Dim::Const(0)),
                (Some(i64::MAX), None) => Ok(size.clone()),
                _ if d == size => Ok(size.clone()),
                _ => Err(format!("cannot place {d} in a dimension of size {size}")),
            },
            other => Err(format!("{other} is no place in a dimension")),
        }
    };
    Ok((place(start, Dim::Const(0))?, place(end, size.clone())?))
}

fn slice(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let (d, step) = (a.dim_of(1, x)?, a.int(4)?);
    let (start, end) = bounds(&x.shape[d], a.attr(2)?, a.attr(3)?)?;
    if step < 1 {
        return Err("the step must be positive".into());
    }
    let length = end.sub(&start);
    let length = match length.known() {
        Some(n) => Dim::Const((n.max(0) + step - 1) / step),
        None if step == 1 && start.is(0) => length,
        None => return Err("the length of the slice is not known".into()),
    };
    let mut shape = x.shape.to_vec();
    shape[d] = length;
    tensor(x.with_shape(shape))
}

fn eval_slice(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let t = args.t(0)?;
    let d = args.dim_of(1, t)?;
    let (start, _) = bounds(&t.shape[d], args.attr(2)?, args.attr(3)?)?;
    let (start, step) = (start.known().unwrap_or(0) as usize, args.int(4)? as usize);
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        i[d] = start + i[d] * step;
        x.at(&i)
    })))
}

fn select(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let d = a.dim_of(1, x)?;
    let (i, n) = (a.int(2)?, x.shape[d].known());
    if n.is_none_or(|n| i < -n || i >= n) {
        return Err(format!("index {i} is not known to be inside size {}", x.shape[d]));
    }
    let mut shape = x.shape.to_vec();
    shape.remove(d);
    tensor(x.with_shape(shape))
}

fn eval_select(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let at = args.int(2)?.rem_euclid(x.shape[d] as i64) as usize;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        i.insert(d, at);
        x.at(&i)
    })))
}

fn unfold(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let d = a.dim_of(1, x)?;
    let (size, step) = (a.int(2)?, a.int(3)?);
    let whole = x.shape[d].known().ok_or("a size that is not known")?;
    if size < 1 || step < 1 || size > whole {
        return Err(format!("windows of {size} by steps of {step} over size {whole}"));
    }
    let mut shape = x.shape.to_vec();
    shape[d] = Dim::Const((whole - size) / step + 1);
    shape.push(Dim::Const(size));
    tensor(x.with_shape(shape))
}

fn eval_unfold(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let step = args.int(3)? as usize;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let (within, rest) = i.split_last().map_or((0, i), |(last, rest)| (*last, rest));
        let mut i = rest.to_vec();
        i[d] = i[d] * step + within;
        x.at(&i)
    })))
}

fn cat(a: &Args) -> Check<Ty> {
    let first = a.t(1)?;
    let d = a.dim_of(0, first)?;
    let mut shape = first.shape.to_vec();
    for k in 2..a.len() {
        let x = a.t(k)?;
        let same = x.rank() == first.rank() && (0..x.rank()).all(|i| i == d || x.shape[i] == first.shape[i]);
        if !same || x.dtype != first.dtype || x.device != first.device {
            return Err(format!("{first} and {x} cannot be concatenated"));
        }
        shape[d] = shape[d].add(&x.shape[d]);
    }
    tensor(first.with_shape(shape))
}

fn eval_cat(v: &Vals) -> Check<Val> {
    let d = v.args().dim_of(0, v.args().t(1)?)?;
    let parts = (1..v.vals.len()).map(|i| v.a(i)).collect::<Check<Vec<_>>>()?;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        for p in &parts {
            if i[d] < p.shape[d] {
                return p.at(&i);
            }
            i[d] -= p.shape[d];
        }
        f64::NAN
    })))
}

fn stack(a: &Args) -> Check<Ty> {
    let first = a.t(1)?;
    let dim = a.int(0)? + first.rank() as i64 + 1;
    if !(0..=first.rank() as i64).contains(&dim) {
        return Err("no such dimension".into());
    }
    for k in 2..a.len() {
        if a.t(k)? != first {
            return Err(format!("{first} and {} cannot be stacked", a.t(k)?));
        }
    }
    let mut shape = first.shape.to_vec();
    shape.insert(dim as usize, Dim::Const(a.len() as i64 - 1));
    tensor(first.with_shape(shape))
}

fn eval_stack(v: &Vals) -> Check<Val> {
    let parts = (1..v.vals.len()).map(|i| v.a(i)).collect::<Check<Vec<_>>>()?;
    let d = (v.args().int(0)? + parts[0].shape.len() as i64 + 1) as usize;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        let k = i.remove(d);
        parts[k].at(&i)
    })))
}

fn split(a: &Args) -> Check<Ty> {
    let (x, sizes) = (a.t(0)?, a.ints(1)?);
    let d = a.dim_of(2, x)?;
    let total = sizes.iter().fold(Dim::Const(0), |s, d| s.add(d));
    if total != x.shape[d] {
        return Err(format!("parts of {total} do not make up size {}", x.shape[d]));
    }
    let part = |size: &Dim| {
        let mut shape = x.shape.to_vec();
        shape[d] = size.clone();
        Ty::Tensor(x.with_shape(shape))
    };
    Ok(Ty::Tuple(sizes.iter().map(part).collect()))
}

fn eval_split(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(2, args.t(0)?)?;
    let mut start = 0;
    let mut parts = vec![];
    for size in args.known(1)? {
        let mut shape = x.shape.clone();
        shape[d] = size as usize;
        parts.push(Val::arr(Arr::from_fn(shape, |i| {
            let mut i = i.to_vec();
            i[d] += start;
            x.at(&i)
        })));
        start += size as usize;
    }
    Ok(Val::Tuple(parts))
}

fn unbind(a: &Args) -> Check<Ty> {
    let x = a.t(0)?;
    let d = a.dim_of(1, x)?;
    let parts = x.shape[d].known().ok_or("a size that is not known")?;
    let mut shape = x.shape.to_vec();
    shape.remove(d);
    let part = Ty::Tensor(x.with_shape(shape));
    Ok(Ty::Tuple((0..parts).map(|_| part.clone()).collect()))
}

fn eval_unbind(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let d = args.dim_of(1, args.t(0)?)?;
    let part = |at: usize| {
        let mut shape = x.shape.clone();
        shape.remove(d);
        Val::arr(Arr::from_fn(shape, |i| {
            let mut i = i.to_vec();
            i.insert(d, at);
            x.at(&i)
        }))
    };
    Ok(Val::Tuple((0..x.shape[d]).map(part).collect()))
}

fn pad(a: &Args) -> Check<Ty> {
    let (x, pads) = (a.t(0)?, a.known(1)?);
    if pads.len() % 2 != 0 || pads.len() / 2 > x.rank() {
        return Err("pads come in pairs, at most one for each dimension".into());
    }
    let mut shape = x.shape.to_vec();
    for (k, pair) in pads.chunks(2).enumerate() {
        let d = x.rank() - 1 - k;
        shape[d] = shape[d].add(&Dim::Const(pair[0] + pair[1]));
        if shape[d].known().is_none_or(|n| n < 0) {
            return Err("the padded size is not known or negative".into());
        }
    }
    tensor(x.with_shape(shape))
}

fn eval_pad(v: &Vals) -> Check<Val> {
    let (x, pads, value) = (v.a(0)?, v.args().known(1)?, v.num(2)?);
    let rank = x.shape.len();
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        for (k, pair) in pads.chunks(2).enumerate() {
            let d = rank - 1 - k;
            let at = i[d] as i64 - pair[0];
            if at < 0 || at >= x.shape[d] as i64 {
                return value;
            }
            i[d] = at as usize;
        }
        x.at(&i)
    })))
}

fn roll(a: &Args) -> Check<Ty> {
    let (x, shifts, dims) = (a.t(0)?, a.known(1)?, a.known(2)?);
    let rank = x.rank() as i64;
    if shifts.len() != dims.len() || dims.is_empty() || dims.iter().any(|d| *d < -rank || *d >= rank) {
        return Err("a shift for each dimension is wanted".into());
    }
    tensor(x.clone())
}

fn eval_roll(v: &Vals) -> Check<Val> {
    let (x, shifts, dims) = (v.a(0)?, v.args().known(1)?, v.args().known(2)?);
    let rank = x.shape.len() as i64;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut i = i.to_vec();
        for (shift, d) in shifts.iter().zip(&dims) {
            let d = d.rem_euclid(rank) as usize;
            i[d] = (i[d] as i64 - shift).rem_euclid(x.shape[d] as i64) as usize;
        }
        x.at(&i)
    })))
}

fn full(a: &Args) -> Check<Ty> {
    tensor(a.t(0)?.with_shape(a.ints(1)?))
}

fn cast(a: &Args) -> Check<Ty> {
    match a.attr(1)? {
        Attr::DType(d) => tensor(a.t(0)?.with_dtype(*d)),
        other => Err(format!("{other} is no dtype")),
    }
}

fn eval_cast(v: &Vals) -> Check<Val> {
    let (x, from, to) = (v.a(0)?, v.args().t(0)?.dtype, v.out_tensor()?.dtype);
    // What is stored as a float is rounded by that.
    Ok(Val::arr(match to.is_float() {
        true => x.clone(),
        false => x.map(|v| to.convert(v, from)),
    }))
}

fn same(a: &Args) -> Check<Ty> {
    tensor(a.t(0)?.clone())
}

fn eval_same(v: &Vals) -> Check<Val> {
    Ok(v.vals[0].clone())
}

fn getitem(a: &Args) -> Check<Ty> {
    let i = a.int(1)?;
    match &a.0[0] {
        Ty::Tuple(ts) => {
            let ty = usize::try_from(i).ok().and_then(|i| ts.get(i)).cloned();
            ty.filter(|t| *t != Ty::Unknown).ok_or_else(|| format!("no item {i}"))
        }
        other => Err(format!("{other} has no items")),
    }
}

fn eval_getitem(v: &Vals) -> Check<Val> {
    match &v.vals[0] {
        Val::Tuple(items) => {
            let i = v.args().int(1)? as usize;
            items.get(i).cloned().ok_or_else(|| format!("no item {i}"))
        }
        _ => Err("no items".into()),
    }
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        op(
            "tuple",
            "items:T*",
            &[],
            |a| Ok(Ty::Tuple(a.0.into())),
            |v| Ok(Val::Tuple(v.vals.to_vec())),
            Cost::Free,
        ),
        op(
            "getitem",
            "x:T index:int",
            &["_operator::getitem(x, index)"],
            getitem,
            eval_getitem,
            Cost::Free,
        ),
        op(
            "reshape",
            "x:T shape:shape",
            &[
                "reshape.default(x, shape) => (reshape x ($resolve x shape))",
                "reshape.default(x, shape)",
                "view.default(x, shape) => (reshape x ($resolve x shape))",
                "_unsafe_view.default(x, shape) => (reshape x ($resolve x shape))",
                "unsqueeze.default(x, dim) => (reshape x ($unsqueezed x dim))",
                "squeeze.dim(x, dim) => (reshape x ($squeezed x dim))",
                "squeeze.dims(x, dim) => (reshape x ($squeezed x dim))",
                "flatten.using_ints(x, from, to) => (reshape x ($flattened x from to))",
            ],
            reshape,
            |v| Ok(Val::arr(v.a(0)?.reshaped(v.out_shape()?))),
            Cost::View,
        ),
        op(
            "permute",
            "x:T perm:perm",
            &[
                "permute.default(x, perm) => (permute x ($perm x perm))",
                "t.default(x) => (permute x ($transposed x))",
                "transpose.int(x, d0, d1) => (permute x ($swapped x d0 d1))",
                "permute.default(x, perm)",
            ],
            permute,
            |v| {
                let (x, perm) = (v.a(0)?, v.args().known(1)?);
                Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
                    let mut j = vec![0; i.len()];
                    for (k, d) in perm.iter().enumerate() {
                        j[*d as usize] = i[k];
                    }
                    x.at(&j)
                })))
            },
            Cost::View,
        ),
        op(
            "expand",
            "x:T shape:shape",
            &[
                "expand.default(x, shape) => (expand x ($expanded x shape))",
                "expand.default(x, shape)",
            ],
            expand,
            |v| {
                let x = v.a(0)?;
                Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| x.at_broadcast(i))))
            },
            Cost::View,
        ),
        op(
            "slice",
            "x:T dim:dim start:int? end:int? step:int",
            &[
                "slice.Tensor(x, dim, start, end, step)",
                "slice.Tensor(x, dim, start, end) => (slice x ($dim x dim) start end 1)",
                "slice.Tensor(x, dim, start) => (slice x ($dim x dim) start none 1)",
                "slice.Tensor(x) => (slice x ($dim x 0) none none 1)",
            ],
            slice,
            eval_slice,
            Cost::View,
        ),
        op(
            "select",
            "x:T dim:dim index:int",
            &["select.int(x, dim, index)"],
            select,
            eval_select,
            Cost::View,
        ),
        // Windows over a dimension, each a row of a new last one.
        op(
            "unfold",
            "x:T dim:dim size:int step:int",
            &["unfold.default(x, dim, size, step)"],
            unfold,
            eval_unfold,
            Cost::View,
        ),
        op(
            "cat",
            "dim:dim xs:T*",
            &["cat.default(*xs, dim)", "cat.default(*xs) => (cat ($dim xs 0) *xs)"],
            cat,
            eval_cat,
            Cost::Map(0.0),
        ),
        op(
            "stack",
            "dim:int xs:T*",
            &[
                "stack.default(*xs, dim) => (stack ($stack_dim xs dim) *xs)",
                "stack.default(*xs) => (stack ($stack_dim xs 0) *xs)",
                "stack.default(*xs, dim)",
            ],
            stack,
            eval_stack,
            Cost::Map(0.0),
        ),
        op(
            "split",
            "x:T sizes:ints dim:dim",
            &[
                "split_with_sizes.default(x, sizes, dim)",
                "split_with_sizes.default(x, sizes) => (split x sizes ($dim x 0))",
                "split.Tensor(x, size, dim) => (split x ($parts x size dim) ($dim x dim))",
                "split.Tensor(x, size) => (split x ($parts x size 0) ($dim x 0))",
                "chunk.default(x, chunks, dim) => (split x ($chunks x chunks dim) ($dim x dim))",
                "chunk.default(x, chunks) => (split x ($chunks x chunks 0) ($dim x 0))",
            ],
            split,
            eval_split,
            Cost::View,
        ),
        op(
            "unbind",
            "x:T dim:dim",
            &["unbind.int(x, dim)", "unbind.int(x) => (unbind x ($dim x 0))"],
            unbind,
            eval_unbind,
            Cost::View,
        ),
        op(
            "pad",
            "x:T pads:ints value:float",
            &[
                "constant_pad_nd.default(x, pads, value)",
                "constant_pad_nd.default(x, pads) => (pad x pads 0.0)",
            ],
            pad,
            eval_pad,
            Cost::Map(0.0),
        ),
        op(
            "roll",
            "x:T shifts:ints dims:ints",
            &["roll.default(x, shifts, dims)"],
            roll,
            eval_roll,
            Cost::Map(0.0),
        ),
        // Takes dtype and device from its first operand, so that rules can make constants.
        op(
            "full",
            "like:T shape:shape value:S",
            &["new_full.default(like, shape, value#)"],
            full,
            |v| {
                let shape = v.out_shape()?;
                let n = shape.iter().product();
                Ok(Val::arr(Arr::new(shape, vec![v.num(2)?; n])))
            },
            Cost::Map(0.0),
        ),
        op(
            "cast",
            "x:T dtype:dtype",
            &[
                "_to_copy.default(x, dtype)",
                "_to_copy.default(x, dtype, _, _)",
                "to.dtype(x, dtype)",
                "prims::convert_element_type.default(x, dtype) => (cast x dtype)",
            ],
            cast,
            eval_cast,
            Cost::Map(0.0),
        ),
        op(
            "copy",
            "x:T",
            &[
                "clone.default(x)",
                "clone.default(x, _)",
                "contiguous.default(x, _)",
                "contiguous.default(x)",
                "lift_fresh_copy.default(x)",
            ],
            same,
            eval_same,
            Cost::Map(0.0),
        ),
        op(
            "detach",
            "x:T",
            &["detach.default(x)", "alias.default(x)"],
            same,
            eval_same,
            Cost::View,
        ),
    ]
}
