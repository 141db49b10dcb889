//! Matrix products in all their spellings.

use std::sync::Arc;

use super::{Args, Check, Row, Vals, op};
use crate::args::broadcast;
use crate::dim::{Dim, product};
use crate::eval::{Arr, Val};
use crate::ty::{TensorType, Ty};
use crate::work::Cost;

/// Operands of a product: same float dtype, same device.
fn alike(a: &TensorType, b: &TensorType) -> Check<()> {
    if a.dtype == b.dtype && a.device == b.device && a.dtype.is_float() {
        Ok(())
    } else {
        Err(format!("{a} and {b} must have one floating dtype and one device"))
    }
}

fn contract(x: &Dim, y: &Dim) -> Check<()> {
    if x == y {
        Ok(())
    } else {
        Err(format!("inner sizes {x} and {y} differ"))
    }
}

fn mm(a: &Args) -> Check<Ty> {
    let (x, y) = (a.t(0)?, a.t(1)?);
    alike(x, y)?;
    if x.rank() != 2 || y.rank() != 2 {
        return Err(format!("{x} and {y} must be matrices"));
    }
    contract(&x.shape[1], &y.shape[0])?;
    Ok(Ty::Tensor(x.with_shape([x.shape[0].clone(), y.shape[1].clone()])))
}

fn bmm(a: &Args) -> Check<Ty> {
    let (x, y) = (a.t(0)?, a.t(1)?);
    alike(x, y)?;
    if x.rank() != 3 || y.rank() != 3 || x.shape[0] != y.shape[0] {
        return Err(format!("{x} and {y} must be equally many matrices"));
    }
    contract(&x.shape[2], &y.shape[1])?;
    Ok(Ty::Tensor(x.with_shape([
        x.shape[0].clone(),
        x.shape[1].clone(),
        y.shape[2].clone(),
    ])))
}

fn matmul(a: &Args) -> Check<Ty> {
    let (x, y) = (a.t(0)?, a.t(1)?);
    alike(x, y)?;
    let (rx, ry) = (x.rank(), y.rank());
    if rx < 2 || ry < 2 {
        return Err("vectors are left to torch".into());
    }
    contract(&x.shape[rx - 1], &y.shape[ry - 2])?;
    let mut shape = broadcast(&[&x.shape[..rx - 2], &y.shape[..ry - 2]])?.to_vec();
    shape.extend([x.shape[rx - 2].clone(), y.shape[ry - 1].clone()]);
    Ok(Ty::Tensor(x.with_shape(shape)))
}

/// `b + product`: the first operand broadcasts to the product.
fn added(a: &Args, product: fn(&Args) -> Check<Ty>) -> Check<Ty> {
    let out = product(&Args(&a.0[1..]))?;
    let (b, t) = (a.t(0)?, out.tensor().ok_or("no tensor")?);
    alike(b, t)?;
    if broadcast(&[&b.shape, &t.shape])? != t.shape {
        return Err(format!("{b} does not broadcast to {t}"));
    }
    Ok(out)
}

fn linear(a: &Args) -> Check<Ty> {
    let (w, b, x) = (a.t(0)?, a.opt(1)?, a.t(2)?);
    alike(w, x)?;
    if w.rank() != 2 || x.rank() < 1 {
        return Err(format!("weight {w} must be a matrix and {x} at least a vector"));
    }
    contract(&x.shape[x.rank() - 1], &w.shape[1])?;
    if let Some(b) = b {
        alike(b, w)?;
        if b.shape[..] != w.shape[..1] {
            return Err(format!("bias {b} does not fit weight {w}"));
        }
    }
    let mut shape = x.shape.to_vec();
    shape[x.rank() - 1] = w.shape[0].clone();
    Ok(Ty::Tensor(x.with_shape(shape)))
}

/// Product over the last two dimensions, the others broadcast.
fn product_of(x: &Arr, y: &Arr, shape: Vec<usize>) -> Arr {
    let k = x.shape[x.shape.len() - 1];
    let r = shape.len();
    Arr::from_fn(shape, |i| {
        let (mut ix, mut iy) = (i.to_vec(), i.to_vec());
        (0..k)
            .map(|j| {
                (ix[r - 1], iy[r - 2]) = (j, j);
                x.at_broadcast(&ix) * y.at_broadcast(&iy)
            })
            .fold(0.0, |sum, term| sum + term)
    })
}

fn eval_product(v: &Vals) -> Check<Val> {
    Ok(Val::arr(product_of(v.a(0)?, v.a(1)?, v.out_shape()?)))
}

fn eval_added(v: &Vals) -> Check<Val> {
    let b = v.a(0)?;
    let out = product_of(v.a(1)?, v.a(2)?, v.out_shape()?);
    Ok(Val::arr(Arr::from_fn(out.shape.clone(), |i| {
        out.at(i) + b.at_broadcast(i)
    })))
}

fn eval_linear(v: &Vals) -> Check<Val> {
    let (w, b, x) = (v.a(0)?, v.opt(1)?, v.a(2)?);
    let (n, k) = (w.shape[0], w.shape[1]);
    let rows = x
        .data
        .len()
        .checked_div(k)
        .unwrap_or_else(|| x.shape[..x.shape.len() - 1].iter().product());
    let mut data = Vec::with_capacity(rows * n);
    for r in 0..rows {
        for j in 0..n {
            // Sums start at +0, as kernels do; an iterator's `sum` starts at -0.
            let dot = (0..k).fold(0.0, |sum, i| sum + x.data[r * k + i] * w.data[j * k + i]);
            data.push(dot + b.map_or(0.0, |b| b.data[j]));
        }
    }
    Ok(Val::arr(Arr::new(v.out_shape()?, data)))
}

/// Multiply-adds: elements of the result times the inner size, the last of operand `i`.
fn inner(a: &Args, out: &Ty, i: usize) -> Check<Dim> {
    let x = a.t(i)?;
    let k = x.shape.last().cloned().unwrap_or(Dim::Const(1));
    Ok(product(&out.tensor().map_or(Arc::from([]), |t| t.shape.clone())).mul(&k))
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        op(
            "mm",
            "x:T y:T",
            &["mm.default(x, y)"],
            mm,
            eval_product,
            Cost::Matrix(|a, out| inner(a, out, 0)),
        ),
        op(
            "bmm",
            "x:T y:T",
            &["bmm.default(x, y)"],
            bmm,
            eval_product,
            Cost::Matrix(|a, out| inner(a, out, 0)),
        ),
        op(
            "matmul",
            "x:T y:T",
            &["matmul.default(x, y)"],
            matmul,
            eval_product,
            Cost::Matrix(|a, out| inner(a, out, 0)),
        ),
        op(
            "addmm",
            "b:T x:T y:T",
            &["addmm.default(b, x, y)"],
            |a| added(a, mm),
            eval_added,
            Cost::Matrix(|a, out| inner(a, out, 1)),
        ),
        op(
            "baddbmm",
            "b:T x:T y:T",
            &["baddbmm.default(b, x, y)"],
            |a| added(a, bmm),
            eval_added,
            Cost::Matrix(|a, out| inner(a, out, 1)),
        ),
        op(
            "linear",
            "w:T b:T? x:T",
            &["linear.default(x, w, b)", "linear.default(x, w) => (linear w none x)"],
            linear,
            eval_linear,
            Cost::Matrix(|a, out| inner(a, out, 0)),
        ),
    ]
}
