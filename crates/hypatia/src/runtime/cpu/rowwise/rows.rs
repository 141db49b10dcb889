//! The arithmetic of rows, in vector lanes.
//!
//! Sums are taken in lanes over blocks, and over blocks in f64, so that their error does not grow with the row. A pass
//! goes over chunks of a fixed size, which the compiler turns into vectors that stay in registers; between chunks it
//! asks for memory that is needed next.

use std::ops::{Add, Div, Mul, Sub};

use super::RowOp;
use super::ahead::Ahead;
use crate::runtime::cpu::lanes::Kernel;
use crate::runtime::cpu::math::real::{self, Real};

/// A type that rows are computed in.
pub(super) trait Number:
    Real + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
}

impl Number for f32 {}
impl Number for f64 {}

/// Independent sums: four of the widest vectors, as many as an addition takes cycles.
const LANES: usize = 64;
/// Elements that are summed before the sum goes to f64.
const BLOCK: usize = 4096;

/// Some rows and room for what becomes of them.
pub(super) struct Rows<'a, T> {
    pub(super) op: RowOp,
    pub(super) source: &'a [T],
    pub(super) target: &'a mut [T],
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) ahead: Ahead,
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
            mut ahead,
        } = self;
        for row in 0..count {
            let x = &source[row * width..(row + 1) * width];
            if op.reduces() {
                target[row] = reduce(op, x, &mut ahead);
            } else {
                normalise::<T, FMA>(op, x, &mut target[row * width..(row + 1) * width], &mut ahead);
            }
        }
    }
}

#[inline(always)]
fn reduce<T: Number>(op: RowOp, x: &[T], ahead: &mut Ahead) -> T {
    match op {
        RowOp::Amax => greatest(x, ahead, real::maximum),
        RowOp::Mean => T::from_f64(sums(x, ahead, |v| [v])[0] / x.len() as f64),
        _ => T::from_f64(sums(x, ahead, |v| [v])[0]),
    }
}

#[inline(always)]
fn normalise<T: Number, const FMA: bool>(op: RowOp, x: &[T], y: &mut [T], ahead: &mut Ahead) {
    if x.is_empty() {
        return;
    }
    let n = x.len() as f64;
    match op {
        RowOp::Softmax => {
            // A NaN that the comparison passes over comes back in the exponentials.
            let most = greatest(x, ahead, |a, b| if b > a { b } else { a });
            let scale = T::from_f64(1.0 / exponentials::<T, FMA>(x, y, most, ahead));
            y.iter_mut().for_each(|v| *v = *v * scale);
        }
        RowOp::LogSoftmax => {
            let most = greatest(x, ahead, |a, b| if b > a { b } else { a });
            let log = T::from_f64(exponentials::<T, FMA>(x, y, most, ahead).ln());
            map(x, y, ahead, |v| (v - most) - log);
        }
        RowOp::LayerNorm { eps } => {
            // A mean far from zero is summed with an error that matters beside the spread: sum what is left, too.
            let rough = T::from_f64(sums(x, ahead, |v| [v])[0] / n);
            let [left, squares] = sums(x, ahead, |v| [v - rough, square(v - rough)]);
            let left = left / n;
            let variance = (squares / n - left * left).max(0.0);
            let mean = rough.to_f64() + left;
            // The mean in two parts, since its rounding would matter as well.
            let high = T::from_f64(mean);
            let low = T::from_f64(mean - high.to_f64());
            let scale = T::from_f64(1.0 / (variance + eps).sqrt());
            map(x, y, ahead, |v| ((v - high) - low) * scale);
        }
        RowOp::RmsNorm { eps } => {
            let scale = T::from_f64(1.0 / (sums(x, ahead, |v| [square(v)])[0] / n + eps).sqrt());
            map(x, y, ahead, |v| v * scale);
        }
        RowOp::Sum | RowOp::Mean | RowOp::Amax => {}
    }
}

#[inline(always)]
fn square<T: Number>(x: T) -> T {
    x * x
}

#[inline(always)]
fn map<T: Number>(x: &[T], y: &mut [T], ahead: &mut Ahead, f: impl Fn(T) -> T) {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks_mut::<LANES>());
    for (y, x) in y.iter_mut().zip(x) {
        ahead.fetch(size_of_val(x));
        for i in 0..LANES {
            y[i] = f(x[i]);
        }
    }
    for (y, x) in y_rest.iter_mut().zip(x_rest) {
        *y = f(*x);
    }
}

/// Writes the exponentials of what is left of a row without its greatest element, and sums them.
#[inline(always)]
fn exponentials<T: Number, const FMA: bool>(x: &[T], y: &mut [T], most: T, ahead: &mut Ahead) -> f64 {
    /// One vector: its additions take less time than its exponentials.
    const NARROW: usize = 16;
    let zero = T::from_f64(0.0);
    let mut total = 0.0;
    for (x, y) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)) {
        let mut lanes = [zero; NARROW];
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<NARROW>(), y.as_chunks_mut::<NARROW>());
        for (y, x) in y.iter_mut().zip(x) {
            ahead.fetch(size_of_val(x));
            for i in 0..NARROW {
                y[i] = (x[i] - most).exp_below::<FMA>();
                lanes[i] = lanes[i] + y[i];
            }
        }
        for ((lane, y), x) in lanes.iter_mut().zip(y_rest).zip(x_rest) {
            *y = (*x - most).exp_below::<FMA>();
            *lane = *lane + *y;
        }
        total += join(lanes, |a, b| a + b).to_f64();
    }
    total
}

/// The sums over a row of the numbers that `f` makes of an element.
#[inline(always)]
fn sums<T: Number, const N: usize>(x: &[T], ahead: &mut Ahead, f: impl Fn(T) -> [T; N]) -> [f64; N] {
    let mut totals = [0.0; N];
    for block in x.chunks(BLOCK) {
        let mut lanes = [[T::from_f64(0.0); LANES]; N];
        let (chunks, rest) = block.as_chunks::<LANES>();
        for chunk in chunks {
            ahead.fetch(size_of_val(chunk));
            for i in 0..LANES {
                let terms = f(chunk[i]);
                for k in 0..N {
                    lanes[k][i] = lanes[k][i] + terms[k];
                }
            }
        }
        for (i, v) in rest.iter().enumerate() {
            let terms = f(*v);
            for k in 0..N {
                lanes[k][i] = lanes[k][i] + terms[k];
            }
        }
        for k in 0..N {
            totals[k] += join(lanes[k], |a, b| a + b).to_f64();
        }
    }
    totals
}

/// The greatest element by `f`, minus infinity if there is none.
#[inline(always)]
fn greatest<T: Number>(x: &[T], ahead: &mut Ahead, f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::from_f64(f64::NEG_INFINITY); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        ahead.fetch(size_of_val(chunk));
        for i in 0..LANES {
            lanes[i] = f(lanes[i], chunk[i]);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, *v);
    }
    join(lanes, f)
}

/// One number of all lanes, by halves.
#[inline(always)]
fn join<T: Number, const L: usize>(mut lanes: [T; L], f: impl Fn(T, T) -> T) -> T {
    let mut half = L / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
