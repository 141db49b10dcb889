//! The arithmetic of rows, in vector lanes.
//!
//! Sums are taken in lanes over blocks, and over blocks in f64, so that their error does not grow with the row.

use std::ops::{Add, Div, Mul, Sub};

use super::RowOp;
use crate::runtime::cpu::lanes::Kernel;
use crate::runtime::cpu::math::real::{self, Real};

/// A type that rows are computed in.
pub(super) trait Number:
    Real + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
}

impl Number for f32 {}
impl Number for f64 {}

/// Independent sums, 16 of the widest vectors.
const LANES: usize = 256;
/// Elements that are summed before the sum goes to f64.
const BLOCK: usize = 4096;

/// Some rows and room for what becomes of them.
pub(super) struct Rows<'a, T> {
    pub(super) op: RowOp,
    pub(super) source: &'a [T],
    pub(super) target: &'a mut [T],
    pub(super) count: usize,
    pub(super) width: usize,
}

impl<T: Number> Kernel for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Rows {
            op,
            source,
            target,
            count,
            width,
        } = self;
        for row in 0..count {
            let x = &source[row * width..(row + 1) * width];
            if op.reduces() {
                target[row] = reduce(op, x);
            } else {
                normalise::<T, FMA>(op, x, &mut target[row * width..(row + 1) * width]);
            }
        }
    }
}

#[inline(always)]
fn reduce<T: Number>(op: RowOp, x: &[T]) -> T {
    match op {
        RowOp::Amax => greatest(x, |a, b| real::maximum(a, b)),
        RowOp::Mean => T::from_f64(sum(x, |v| v) / x.len() as f64),
        _ => T::from_f64(sum(x, |v| v)),
    }
}

#[inline(always)]
fn normalise<T: Number, const FMA: bool>(op: RowOp, x: &[T], y: &mut [T]) {
    if x.is_empty() {
        return;
    }
    let n = x.len() as f64;
    match op {
        RowOp::Softmax => {
            // A NaN that the comparison passes over comes back in the exponentials.
            let most = greatest(x, |a, b| if b > a { b } else { a });
            map(x, y, |v| (v - most).exp::<FMA>());
            let scale = T::from_f64(1.0 / sum(y, |v| v));
            y.iter_mut().for_each(|v| *v = *v * scale);
        }
        RowOp::LogSoftmax => {
            let most = greatest(x, |a, b| if b > a { b } else { a });
            map(x, y, |v| (v - most).exp::<FMA>());
            let log = T::from_f64(sum(y, |v| v).ln());
            map(x, y, |v| (v - most) - log);
        }
        RowOp::LayerNorm { eps } => {
            // A mean far from zero is summed with an error that matters beside the spread: sum what is left, too.
            let rough = T::from_f64(sum(x, |v| v) / n);
            let left = sum(x, |v| v - rough) / n;
            let variance = (sum(x, |v| square(v - rough)) / n - left * left).max(0.0);
            let mean = rough.to_f64() + left;
            // The mean in two parts, since its rounding would matter as well.
            let high = T::from_f64(mean);
            let low = T::from_f64(mean - high.to_f64());
            let scale = T::from_f64(1.0 / (variance + eps).sqrt());
            map(x, y, |v| ((v - high) - low) * scale);
        }
        RowOp::RmsNorm { eps } => {
            let scale = T::from_f64(1.0 / (sum(x, square) / n + eps).sqrt());
            map(x, y, |v| v * scale);
        }
        RowOp::Sum | RowOp::Mean | RowOp::Amax => {}
    }
}

#[inline(always)]
fn square<T: Number>(x: T) -> T {
    x * x
}

#[inline(always)]
fn map<T: Number>(x: &[T], y: &mut [T], f: impl Fn(T) -> T) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = f(*x);
    }
}

/// Folds a row into lanes by `step`, starting from `neutral`, and those into one number by `join`. The lanes stay in
/// memory, where each is used again only after its last store has settled.
#[inline(always)]
fn accumulate<T: Number>(x: &[T], neutral: T, step: impl Fn(T, T) -> T, join: impl Fn(T, T) -> T) -> T {
    let mut lanes = [neutral; LANES];
    for chunk in x.chunks(LANES) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, *v);
        }
    }
    let mut half = LANES / 2;
    while half >= 8 {
        let (low, high) = lanes.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high) {
            *a = join(*a, *b);
        }
        half /= 2;
    }
    let [a, b, c, d, e, f, g, h, ..] = lanes;
    join(join(join(a, e), join(b, f)), join(join(c, g), join(d, h)))
}

/// The sum of `f` over a row.
#[inline(always)]
fn sum<T: Number>(x: &[T], f: impl Fn(T) -> T) -> f64 {
    // A plain loop, since adapters of iterators may stay calls, compiled for the baseline.
    let mut total = 0.0;
    for block in x.chunks(BLOCK) {
        total += accumulate(block, T::from_f64(0.0), |sum, v| sum + f(v), |a, b| a + b).to_f64();
    }
    total
}

/// The greatest element by `f`, minus infinity if there is none.
#[inline(always)]
fn greatest<T: Number>(x: &[T], f: impl Fn(T, T) -> T) -> T {
    accumulate(x, T::from_f64(f64::NEG_INFINITY), &f, &f)
}
