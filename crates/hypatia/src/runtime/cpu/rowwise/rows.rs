//! The arithmetic of rows, in vector lanes.
//!
//! Sums are taken in lanes over blocks, and over blocks in f64, so that their error does not grow with the row. A pass
//! goes over chunks of a fixed size, which the compiler turns into vectors that stay in registers; between chunks it
//! asks for memory that is needed next.

use std::ops::{Add, Div, Mul, Sub};

use super::RowOp;
use crate::runtime::cpu::lanes::{Ahead, Kernel};
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
/// Independent sums of rows that are shorter than that: one vector.
const NARROW: usize = 16;
/// Rows that go through a pass together.
const BATCH: usize = 8;
/// Elements that are summed before the sum goes to f64.
const BLOCK: usize = 4096;

/// Factors and summands, one for each column.
#[derive(Clone, Copy)]
pub(super) enum Finish<'a, T> {
    Nothing,
    Scale(&'a [T]),
    ScaleShift(&'a [T], &'a [T]),
}

/// Some rows and room for what becomes of them.
pub(super) struct Rows<'a, T> {
    pub(super) op: RowOp,
    pub(super) source: &'a [T],
    pub(super) target: &'a mut [T],
    pub(super) count: usize,
    pub(super) width: usize,
    /// What is done to the results of norms.
    pub(super) finish: Finish<'a, T>,
    /// Memory that the next rows come from and go to.
    pub(super) from: &'a mut Ahead,
    pub(super) to: &'a mut Ahead,
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
            finish,
            from,
            to,
        } = self;
        if op.reduces() {
            for row in 0..count {
                let x = &source[row * width..(row + 1) * width];
                target[row] = match width < LANES {
                    true => reduce::<T, NARROW>(op, x, from),
                    false => reduce::<T, LANES>(op, x, from),
                };
            }
        } else if width > 0 {
            for first in (0..count).step_by(BATCH) {
                let rows = BATCH.min(count - first);
                let (start, end) = (first * width, (first + rows) * width);
                let (x, y) = (&source[start..end], &mut target[start..end]);
                match width < LANES {
                    true => normalise::<T, NARROW, FMA>(op, (rows, width), finish, x, y, from, to),
                    false => normalise::<T, LANES, FMA>(op, (rows, width), finish, x, y, from, to),
                }
            }
        }
    }
}

#[inline(always)]
fn reduce<T: Number, const L: usize>(op: RowOp, x: &[T], from: &mut Ahead) -> T {
    match op {
        RowOp::Amax => greatest::<T, L>(x, from, real::maximum),
        RowOp::Mean => T::from_f64(sums::<T, L, 1>(x, from, |v| [v])[0] / x.len() as f64),
        _ => T::from_f64(sums::<T, L, 1>(x, from, |v| [v])[0]),
    }
}

/// At most `BATCH` rows. Every pass goes over all of them before the next one starts: what is left to do with the sums
/// of a row takes long and happens beside the sums of the next.
#[inline(always)]
fn normalise<T: Number, const L: usize, const FMA: bool>(
    op: RowOp,
    (rows, width): (usize, usize),
    finish: Finish<T>,
    x: &[T],
    y: &mut [T],
    from: &mut Ahead,
    to: &mut Ahead,
) {
    let zero = T::from_f64(0.0);
    let (mut most, mut scale) = ([zero; BATCH], [zero; BATCH]);
    // By numbers, since pairs of chunks are counted by divisions, which take longer than a short row.
    let span = |row: usize| row * width..(row + 1) * width;
    match op {
        RowOp::Softmax | RowOp::LogSoftmax => {
            for row in 0..rows {
                // A NaN that the comparison passes over comes back in the exponentials.
                let more = |a, b| if b > a { b } else { a };
                most[row] = greatest::<T, L>(&x[span(row)], &mut Ahead::new(), more);
            }
            for row in 0..rows {
                let total = exponentials::<T, FMA>(&x[span(row)], &mut y[span(row)], most[row], from, to);
                scale[row] = T::from_f64(if op == RowOp::Softmax { 1.0 / total } else { total.ln() });
            }
            for row in 0..rows {
                let (x, y, most, scale) = (&x[span(row)], &mut y[span(row)], most[row], scale[row]);
                if op == RowOp::Softmax {
                    y.iter_mut().for_each(|v| *v = *v * scale);
                } else {
                    map::<T, L>(x, y, Finish::Nothing, &mut Ahead::new(), |v| (v - most) - scale);
                }
            }
        }
        RowOp::LayerNorm { eps } => {
            // The mean in two parts, since its rounding would matter.
            let mut low = [zero; BATCH];
            for row in 0..rows {
                let (mean, variance) = moments::<T, L>(&x[span(row)], to);
                most[row] = T::from_f64(mean);
                low[row] = T::from_f64(mean - most[row].to_f64());
                scale[row] = T::from_f64(1.0 / (variance + eps).sqrt());
            }
            for row in 0..rows {
                let (high, low, scale) = (most[row], low[row], scale[row]);
                map::<T, L>(&x[span(row)], &mut y[span(row)], finish, from, |v| {
                    ((v - high) - low) * scale
                });
            }
        }
        RowOp::RmsNorm { eps } => {
            for row in 0..rows {
                let squares = sums::<T, L, 1>(&x[span(row)], to, |v| [square(v)])[0];
                scale[row] = T::from_f64(1.0 / (squares / width as f64 + eps).sqrt());
            }
            for row in 0..rows {
                let scale = scale[row];
                map::<T, L>(&x[span(row)], &mut y[span(row)], finish, from, |v| v * scale);
            }
        }
        RowOp::Sum | RowOp::Mean | RowOp::Amax => {}
    }
}

/// The mean and the variance of a row.
#[inline(always)]
fn moments<T: Number, const L: usize>(x: &[T], ahead: &mut Ahead) -> (f64, f64) {
    let n = x.len() as f64;
    // Sums of what is left of a mean are exact enough where it is within the spread. The first elements mostly know one.
    let first = &x[..x.len().min(L)];
    let mut rough = T::from_f64(sums::<T, L, 1>(first, &mut Ahead::new(), |v| [v])[0] / first.len() as f64);
    let mut result = (0.0, 0.0);
    for _ in 0..3 {
        let [left, squares] = sums::<T, L, 2>(x, ahead, |v| [v - rough, square(v - rough)]);
        let left = left / n;
        result = (rough.to_f64() + left, (squares / n - left * left).max(0.0));
        let better = T::from_f64(result.0);
        // Never true of NaN.
        let too_far = left * left > result.1;
        if !too_far || better == rough {
            break;
        }
        rough = better;
    }
    result
}

#[inline(always)]
fn square<T: Number>(x: T) -> T {
    x * x
}

/// Writes `f` of a row, and what `finish` makes of it.
#[inline(always)]
fn map<T: Number, const L: usize>(x: &[T], y: &mut [T], finish: Finish<T>, ahead: &mut Ahead, f: impl Fn(T) -> T) {
    match finish {
        Finish::Nothing => zip::<T, L>(x, x, x, y, ahead, |v, _, _| f(v)),
        Finish::Scale(scale) => zip::<T, L>(x, scale, scale, y, ahead, |v, scale, _| f(v) * scale),
        Finish::ScaleShift(scale, shift) => {
            zip::<T, L>(x, scale, shift, y, ahead, |v, scale, shift| f(v) * scale + shift)
        }
    }
}

#[inline(always)]
fn zip<T: Number, const L: usize>(a: &[T], b: &[T], c: &[T], y: &mut [T], ahead: &mut Ahead, f: impl Fn(T, T, T) -> T) {
    let (a, a_rest) = a.as_chunks::<L>();
    let (b, b_rest) = b.as_chunks::<L>();
    let (c, c_rest) = c.as_chunks::<L>();
    let (y, y_rest) = y.as_chunks_mut::<L>();
    for (((y, a), b), c) in y.iter_mut().zip(a).zip(b).zip(c) {
        fetch(ahead, a);
        for i in 0..L {
            y[i] = f(a[i], b[i], c[i]);
        }
    }
    for (((y, a), b), c) in y_rest.iter_mut().zip(a_rest).zip(b_rest).zip(c_rest) {
        *y = f(*a, *b, *c);
    }
}

/// Asks for what corresponds to a chunk.
#[inline(always)]
fn fetch<T: Number, const L: usize>(ahead: &mut Ahead, _chunk: &[T; L]) {
    match size_of::<[T; L]>() / 64 {
        1 => ahead.fetch::<1>(),
        2 => ahead.fetch::<2>(),
        4 => ahead.fetch::<4>(),
        _ => ahead.fetch::<8>(),
    }
}

/// Writes the exponentials of what is left of a row without its greatest element, and sums them.
#[inline(always)]
fn exponentials<T: Number, const FMA: bool>(x: &[T], y: &mut [T], most: T, from: &mut Ahead, to: &mut Ahead) -> f64 {
    let zero = T::from_f64(0.0);
    let mut total = 0.0;
    for (x, y) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)) {
        // One vector: its additions take less time than its exponentials.
        let mut lanes = [zero; NARROW];
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<NARROW>(), y.as_chunks_mut::<NARROW>());
        for (y, x) in y.iter_mut().zip(x) {
            from.fetch::<1>();
            to.fetch::<1>();
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
fn sums<T: Number, const L: usize, const N: usize>(x: &[T], ahead: &mut Ahead, f: impl Fn(T) -> [T; N]) -> [f64; N] {
    let mut totals = [0.0; N];
    for block in x.chunks(BLOCK) {
        let lanes = fold(block, [[T::from_f64(0.0); L]; N], ahead, |sums, v| {
            let terms = f(v);
            std::array::from_fn(|k| sums[k] + terms[k])
        });
        for (total, lanes) in totals.iter_mut().zip(lanes) {
            *total += join(lanes, |a, b| a + b).to_f64();
        }
    }
    totals
}

/// The greatest element by `f`, minus infinity if there is none.
#[inline(always)]
fn greatest<T: Number, const L: usize>(x: &[T], ahead: &mut Ahead, f: impl Fn(T, T) -> T) -> T {
    let least = [[T::from_f64(f64::NEG_INFINITY); L]];
    let [lanes] = fold(x, least, ahead, |[most], v| [f(most, v)]);
    join(lanes, f)
}

/// Takes the elements of a row into lanes, `N` numbers in each.
#[inline(always)]
fn fold<T: Number, const L: usize, const N: usize>(
    x: &[T],
    start: [[T; L]; N],
    ahead: &mut Ahead,
    step: impl Fn([T; N], T) -> [T; N],
) -> [[T; L]; N] {
    let (chunks, rest) = x.as_chunks::<L>();
    let lanes = fold_chunks(chunks, start, ahead, &step);
    if rest.is_empty() {
        return lanes;
    }
    let mut lanes = lanes;
    for (i, v) in rest.iter().enumerate() {
        let next = step(std::array::from_fn(|k| lanes[k][i]), *v);
        for k in 0..N {
            lanes[k][i] = next[k];
        }
    }
    lanes
}

/// The whole chunks of a row. By itself, since the lanes stay in registers only if nothing else refers to them.
#[inline(always)]
fn fold_chunks<T: Number, const L: usize, const N: usize>(
    chunks: &[[T; L]],
    mut lanes: [[T; L]; N],
    ahead: &mut Ahead,
    step: impl Fn([T; N], T) -> [T; N],
) -> [[T; L]; N] {
    let mut near = *ahead;
    for chunk in chunks {
        fetch(&mut near, chunk);
        for i in 0..L {
            let next = step(std::array::from_fn(|k| lanes[k][i]), chunk[i]);
            for k in 0..N {
                lanes[k][i] = next[k];
            }
        }
    }
    *ahead = near;
    lanes
}

/// One number of all lanes, by halves. The last ones are arrays of their own, which stay in registers.
#[inline(always)]
fn join<T: Number, const L: usize>(mut lanes: [T; L], f: impl Fn(T, T) -> T) -> T {
    let mut half = L / 2;
    while half >= NARROW {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    let eight: [T; 8] = std::array::from_fn(|i| f(lanes[i], lanes[i + 8]));
    let four: [T; 4] = std::array::from_fn(|i| f(eight[i], eight[i + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
}
