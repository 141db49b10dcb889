//! The arithmetic of rows, in vector lanes.
//!
//! Sums are taken in lanes over blocks, and over blocks in f64, so that their error does not grow with the row. A pass
//! goes over chunks of a fixed size, which the compiler turns into vectors that stay in registers.

#![expect(
    clippy::needless_range_loop,
    reason = "several arrays are counted through together, and iterators over one of them become slower code"
)]

use std::ops::{Add, Div, Mul, Range, Sub};

use crate::cpu::lanes::Kernel;
use crate::cpu::math::real::{self, Real};
use crate::kernels::rowwise::RowOp;

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

/// Numbers that rows are made of.
pub(super) trait Source<T>: Copy {
    fn len(self) -> usize;
    /// Some of them; there are as many.
    fn part(self, span: Range<usize>) -> Self;
    /// The elements of the chunk of this number, for what is written at once.
    fn chunk<const L: usize>(self, number: usize) -> impl Fn(usize) -> T;
    /// Calls `f` with the places and the elements of the chunk of this number, for sums that stay in registers.
    fn each<const L: usize>(self, number: usize, f: impl FnMut(usize, T));
    /// One of them.
    fn at(self, index: usize) -> T;
    /// Where they are: in an array, or sums of two.
    fn arrays(self) -> (*const T, *const T);
}

impl<T: Number> Source<T> for &[T] {
    #[inline(always)]
    fn len(self) -> usize {
        <[T]>::len(self)
    }
    #[inline(always)]
    fn part(self, span: Range<usize>) -> Self {
        &self[span]
    }
    #[inline(always)]
    fn chunk<const L: usize>(self, number: usize) -> impl Fn(usize) -> T {
        let chunk = &self.as_chunks::<L>().0[number];
        |i| chunk[i]
    }
    #[inline(always)]
    fn each<const L: usize>(self, number: usize, mut f: impl FnMut(usize, T)) {
        // A copy: it stays in registers, whatever is written meanwhile.
        let chunk = self.as_chunks::<L>().0[number];
        for i in 0..L {
            f(i, chunk[i]);
        }
    }
    #[inline(always)]
    fn at(self, index: usize) -> T {
        self[index]
    }
    fn arrays(self) -> (*const T, *const T) {
        (self.as_ptr(), std::ptr::null())
    }
}

/// Sums of two arrays of one length, made again in every pass: what they are made of stays in the cache, and nothing
/// is stored in between.
#[derive(Clone, Copy)]
pub(super) struct SumOf<'a, T>(pub(super) &'a [T], pub(super) &'a [T]);

impl<T: Number> Source<T> for SumOf<'_, T> {
    #[inline(always)]
    fn len(self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    fn part(self, span: Range<usize>) -> Self {
        SumOf(&self.0[span.clone()], &self.1[span])
    }
    #[inline(always)]
    fn chunk<const L: usize>(self, number: usize) -> impl Fn(usize) -> T {
        let (a, b) = (&self.0.as_chunks::<L>().0[number], &self.1.as_chunks::<L>().0[number]);
        |i| a[i] + b[i]
    }
    #[inline(always)]
    fn each<const L: usize>(self, number: usize, mut f: impl FnMut(usize, T)) {
        // One by one: an array of sums would go through memory.
        let chunk = self.chunk::<L>(number);
        for i in 0..L {
            f(i, chunk(i));
        }
    }
    #[inline(always)]
    fn at(self, index: usize) -> T {
        self.0[index] + self.1[index]
    }
    fn arrays(self) -> (*const T, *const T) {
        (self.0.as_ptr(), self.1.as_ptr())
    }
}

/// Some rows and room for what becomes of them.
pub(super) struct Rows<'a, T, S> {
    pub(super) op: RowOp,
    pub(super) source: S,
    pub(super) target: &'a mut [T],
    pub(super) count: usize,
    pub(super) width: usize,
    /// What is done to the results of norms.
    pub(super) finish: Finish<'a, T>,
}

impl<T: Number, S: Source<T>> Kernel for Rows<'_, T, S> {
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
        } = self;
        if op.reduces() {
            for row in 0..count {
                let x = source.part(row * width..(row + 1) * width);
                target[row] = match width < LANES {
                    true => reduce::<T, S, NARROW>(op, x),
                    false => reduce::<T, S, LANES>(op, x),
                };
            }
        } else if width > 0 {
            for first in (0..count).step_by(BATCH) {
                let rows = BATCH.min(count - first);
                let (start, end) = (first * width, (first + rows) * width);
                let (x, y) = (source.part(start..end), &mut target[start..end]);
                match width < LANES {
                    true => normalise::<T, S, NARROW, FMA>(op, (rows, width), finish, x, y),
                    false => normalise::<T, S, LANES, FMA>(op, (rows, width), finish, x, y),
                }
            }
        }
    }
}

#[inline(always)]
fn reduce<T: Number, S: Source<T>, const L: usize>(op: RowOp, x: S) -> T {
    match op {
        RowOp::Amax => greatest::<T, S, L>(x, real::maximum),
        RowOp::Mean => T::from_f64(total::<T, S, L>(x) / x.len() as f64),
        _ => T::from_f64(total::<T, S, L>(x)),
    }
}

/// The sum of a row. One that the type has no number for is infinite, as is its mean in torch.
#[inline(always)]
fn total<T: Number, S: Source<T>, const L: usize>(x: S) -> f64 {
    let [sum] = sums::<T, S, L, 1>(x, |v| [v]);
    if sum.is_finite() {
        sum
    } else {
        T::from_f64(wide_sum(x)).to_f64()
    }
}

/// The sum of a row in f64: lanes of numbers near the greatest may overflow where the whole does not.
#[cold]
#[inline(never)]
fn wide_sum<T: Number, S: Source<T>>(x: S) -> f64 {
    (0..x.len()).fold(0.0, |sum, i| sum + x.at(i).to_f64())
}

/// A row whose moments overflow, in f64.
#[cold]
#[inline(never)]
fn wide_norm<T: Number, S: Source<T>>(x: S, y: &mut [T], finish: Finish<T>, eps: f64) {
    let n = x.len() as f64;
    let mean = wide_sum(x) / n;
    let apart = |i: usize| x.at(i).to_f64() - mean;
    let variance = (0..x.len()).fold(0.0, |sum, i| sum + apart(i) * apart(i)) / n;
    let scale = 1.0 / (variance + eps).sqrt();
    for i in 0..x.len() {
        let normal = T::from_f64(apart(i) * scale);
        y[i] = match finish {
            Finish::Nothing => normal,
            Finish::Scale(a) => normal * a[i],
            Finish::ScaleShift(a, b) => normal * a[i] + b[i],
        };
    }
}

/// At most `BATCH` rows. Every pass goes over all of them before the next one starts: what is left to do with the sums
/// of a row takes long and happens beside the sums of the next.
#[inline(always)]
fn normalise<T: Number, S: Source<T>, const L: usize, const FMA: bool>(
    op: RowOp,
    (rows, width): (usize, usize),
    finish: Finish<T>,
    x: S,
    y: &mut [T],
) {
    let zero = T::from_f64(0.0);
    let (mut most, mut scale) = ([zero; BATCH], [zero; BATCH]);
    // By numbers, since pairs of chunks are counted by divisions, which take longer than a short row.
    let span = |row: usize| row * width..(row + 1) * width;
    match op {
        RowOp::Softmax { .. } | RowOp::LogSoftmax => {
            let (logs, deep) = (op == RowOp::LogSoftmax, op == RowOp::Softmax { flushes: false });
            for row in 0..rows {
                // A NaN that the comparison passes over comes back in the exponentials.
                let more = |a, b| if b > a { b } else { a };
                most[row] = greatest::<T, S, L>(x.part(span(row)), more);
            }
            for row in 0..rows {
                let (x, y, most) = (x.part(span(row)), &mut y[span(row)], most[row]);
                let total = match deep {
                    true => exponentials::<T, S, FMA, true>(x, y, most),
                    false => exponentials::<T, S, FMA, false>(x, y, most),
                };
                scale[row] = T::from_f64(if logs { total.ln() } else { 1.0 / total });
            }
            for row in 0..rows {
                let (x, y, most, scale) = (x.part(span(row)), &mut y[span(row)], most[row], scale[row]);
                if logs {
                    map::<T, S, L>(x, y, Finish::Nothing, |v| (v - most) - scale);
                } else {
                    y.iter_mut().for_each(|v| *v = *v * scale);
                }
            }
        }
        RowOp::LayerNorm { eps } => {
            // The mean in two parts, since its rounding would matter.
            let (mut low, mut finite) = ([zero; BATCH], [true; BATCH]);
            for row in 0..rows {
                let (mean, variance) = moments::<T, S, L>(x.part(span(row)));
                finite[row] = (mean + variance).is_finite();
                most[row] = T::from_f64(mean);
                low[row] = T::from_f64(mean - most[row].to_f64());
                scale[row] = T::from_f64(1.0 / (variance + eps).sqrt());
            }
            for row in 0..rows {
                if !finite[row] {
                    wide_norm(x.part(span(row)), &mut y[span(row)], finish, eps);
                    continue;
                }
                let (high, low, scale) = (most[row], low[row], scale[row]);
                map::<T, S, L>(x.part(span(row)), &mut y[span(row)], finish, |v| {
                    ((v - high) - low) * scale
                });
            }
        }
        RowOp::RmsNorm { eps } => {
            for row in 0..rows {
                let squares = sums::<T, S, L, 1>(x.part(span(row)), |v| [square(v)])[0];
                scale[row] = T::from_f64(1.0 / (squares / width as f64 + eps).sqrt());
            }
            for row in 0..rows {
                let scale = scale[row];
                map::<T, S, L>(x.part(span(row)), &mut y[span(row)], finish, |v| v * scale);
            }
        }
        RowOp::Sum | RowOp::Mean | RowOp::Amax => {}
    }
}

/// The mean and the variance of a row.
#[inline(always)]
fn moments<T: Number, S: Source<T>, const L: usize>(x: S) -> (f64, f64) {
    let n = x.len() as f64;
    // Sums of what is left of a mean are exact enough where it is within the spread. The first elements mostly know one.
    let first = x.part(0..x.len().min(L));
    let mut rough = T::from_f64(sums::<T, S, L, 1>(first, |v| [v])[0] / first.len() as f64);
    let mut result = (0.0, 0.0);
    for _ in 0..3 {
        let [left, squares] = sums::<T, S, L, 2>(x, |v| [v - rough, square(v - rough)]);
        let left = left / n;
        let variance = squares / n - left * left;
        // Not `max`, which makes zero of NaN: where both overflow, nothing is known.
        result = (rough.to_f64() + left, if variance < 0.0 { 0.0 } else { variance });
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
fn map<T: Number, S: Source<T>, const L: usize>(x: S, y: &mut [T], finish: Finish<T>, f: impl Fn(T) -> T) {
    match finish {
        Finish::Nothing => {
            let (chunks, rest) = y.as_chunks_mut::<L>();
            let done = chunks.len() * L;
            for (number, y) in chunks.iter_mut().enumerate() {
                let x = x.chunk::<L>(number);
                for i in 0..L {
                    y[i] = f(x(i));
                }
            }
            for (i, y) in rest.iter_mut().enumerate() {
                *y = f(x.at(done + i));
            }
        }
        Finish::Scale(scale) => zip::<T, S, L>(x, scale, scale, y, |v, scale, _| f(v) * scale),
        Finish::ScaleShift(scale, shift) => zip::<T, S, L>(x, scale, shift, y, |v, scale, shift| f(v) * scale + shift),
    }
}

#[inline(always)]
fn zip<T: Number, S: Source<T>, const L: usize>(x: S, a: &[T], b: &[T], y: &mut [T], f: impl Fn(T, T, T) -> T) {
    let (a, a_rest) = a.as_chunks::<L>();
    let (b, b_rest) = b.as_chunks::<L>();
    let (y, y_rest) = y.as_chunks_mut::<L>();
    let done = y.len() * L;
    for (number, ((y, a), b)) in y.iter_mut().zip(a).zip(b).enumerate() {
        let x = x.chunk::<L>(number);
        for i in 0..L {
            y[i] = f(x(i), a[i], b[i]);
        }
    }
    for (i, ((y, a), b)) in y_rest.iter_mut().zip(a_rest).zip(b_rest).enumerate() {
        *y = f(x.at(done + i), *a, *b);
    }
}

/// Writes the exponentials of what is left of a row without its greatest element, and sums them.
#[inline(always)]
fn exponentials<T: Number, S: Source<T>, const FMA: bool, const DEEP: bool>(x: S, y: &mut [T], most: T) -> f64 {
    let zero = T::from_f64(0.0);
    let exp = |v: T| {
        if DEEP {
            v.exp_deep::<FMA>()
        } else {
            v.exp_below::<FMA>()
        }
    };
    let mut total = 0.0;
    for (block, y) in y.chunks_mut(BLOCK).enumerate() {
        let x = x.part(block * BLOCK..block * BLOCK + y.len());
        // One vector: its additions take less time than its exponentials.
        let mut lanes = [zero; NARROW];
        let (chunks, rest) = y.as_chunks_mut::<NARROW>();
        let done = chunks.len() * NARROW;
        for (number, y) in chunks.iter_mut().enumerate() {
            x.each::<NARROW>(number, |i, v| {
                y[i] = exp(v - most);
                lanes[i] = lanes[i] + y[i];
            });
        }
        for (i, (lane, y)) in lanes.iter_mut().zip(rest).enumerate() {
            *y = exp(x.at(done + i) - most);
            *lane = *lane + *y;
        }
        total += join(lanes, |a, b| a + b).to_f64();
    }
    total
}

/// The sums over a row of the numbers that `f` makes of an element.
#[inline(always)]
fn sums<T: Number, S: Source<T>, const L: usize, const N: usize>(x: S, f: impl Fn(T) -> [T; N]) -> [f64; N] {
    let mut totals = [0.0; N];
    for start in (0..x.len()).step_by(BLOCK) {
        let block = x.part(start..x.len().min(start + BLOCK));
        let lanes = fold::<T, S, L, N, false>(block, [[T::from_f64(0.0); L]; N], |sums, v| {
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
fn greatest<T: Number, S: Source<T>, const L: usize>(x: S, f: impl Fn(T, T) -> T) -> T {
    let least = [[T::from_f64(f64::NEG_INFINITY); L]];
    let [lanes] = fold::<T, S, L, 1, true>(x, least, |[most], v| [f(most, v)]);
    join(lanes, f)
}

/// Takes the elements of a row into lanes, `N` numbers in each.
#[inline(always)]
fn fold<T: Number, S: Source<T>, const L: usize, const N: usize, const COPIED: bool>(
    x: S,
    start: [[T; L]; N],
    step: impl Fn([T; N], T) -> [T; N],
) -> [[T; L]; N] {
    let whole = x.len() / L * L;
    let lanes = fold_chunks::<T, S, L, N, COPIED>(x, start, &step);
    if whole == x.len() {
        return lanes;
    }
    let mut lanes = lanes;
    for i in 0..x.len() - whole {
        let next = step(std::array::from_fn(|k| lanes[k][i]), x.at(whole + i));
        for k in 0..N {
            lanes[k][i] = next[k];
        }
    }
    lanes
}

/// The whole chunks of a row. By itself, since the lanes stay in registers only if nothing else refers to them.
/// Comparisons are fast on a copy of a chunk, sums without: 390 ns for 1024 elements of a softmax beside 510, and 300 for
/// an rms_norm beside 760.
#[inline(always)]
fn fold_chunks<T: Number, S: Source<T>, const L: usize, const N: usize, const COPIED: bool>(
    x: S,
    mut lanes: [[T; L]; N],
    step: impl Fn([T; N], T) -> [T; N],
) -> [[T; L]; N] {
    for number in 0..x.len() / L {
        let mut take = |i: usize, v: T| {
            let next = step(std::array::from_fn(|k| lanes[k][i]), v);
            for k in 0..N {
                lanes[k][i] = next[k];
            }
        };
        if COPIED {
            x.each::<L>(number, take);
        } else {
            let chunk = x.chunk::<L>(number);
            for i in 0..L {
                take(i, chunk(i));
            }
        }
    }
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
