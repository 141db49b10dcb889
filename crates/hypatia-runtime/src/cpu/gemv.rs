//! A few rows times weights where they are: dot products along the rows of the weight matrix.
//!
//! Nothing is copied. Each weight is read once for up to four rows, so that memory sets the pace.

use super::lanes::{self, Kernel, Level};
use super::linear::{Element, Grid, Layer, Rows, Sink, StoreBlock, share};
use crate::pool::Pool;
use std::ops::Range;

/// Rows that are multiplied with weights as these go by.
pub(super) const ROWS: usize = 4;
/// Floats in the widest vector.
const LANES: usize = 16;
/// Columns that are finished together.
const GROUP: usize = 64;
/// Multiplications, and weights to read, that are over before a second thread is of much use.
const ALONE: (usize, usize) = (1 << 18, 1 << 16);

/// Weights that somebody else keeps.
struct InPlace<T> {
    start: *const T,
    len: usize,
    stride: usize,
    n: usize,
    k: usize,
    level: Level,
}

// SAFETY: shared memory of plain data that is only read.
unsafe impl<T: Element> Send for InPlace<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for InPlace<T> {}

/// Remembers where `n` rows of `k` weights are.
pub(super) fn pack<T: Element>(weight: Rows<T>, n: usize, k: usize) -> Option<Box<dyn Layer<T>>> {
    Some(pack_for(lanes::level(), weight, n, k))
}

/// As [`pack`], for a level that the machine has.
pub(super) fn pack_for<T: Element>(level: Level, weight: Rows<T>, n: usize, k: usize) -> Box<dyn Layer<T>> {
    Box::new(InPlace {
        start: weight.data.as_ptr(),
        len: weight.data.len(),
        stride: weight.stride,
        n,
        k,
        level,
    })
}

impl<T: Element> Layer<T> for InPlace<T> {
    fn bytes(&self) -> usize {
        0
    }

    unsafe fn run(&self, threads: usize, m: usize, x: Rows<T>, sink: Sink<T>) {
        let threads = share(threads, (m, self.n, self.k), ALONE);
        let grid = Grid::strips(threads, (m, self.n), GROUP);
        // SAFETY: the caller vouches for the weights.
        let data = unsafe { std::slice::from_raw_parts(self.start, self.len) };
        let w = Rows {
            data,
            stride: self.stride,
        };
        Pool::global().run(threads, grid.parts(), &|part| {
            let (rows, columns) = grid.part(part);
            let mut sums = [0f32; ROWS * GROUP];
            for column in columns.clone().step_by(GROUP) {
                let columns = column..(column + GROUP).min(columns.end);
                for row in rows.clone().step_by(ROWS) {
                    let rows = row..(row + ROWS).min(rows.end);
                    let block = StoreBlock {
                        row,
                        rows: rows.len(),
                        column,
                        columns: columns.len(),
                        stride: GROUP,
                    };
                    let multiply = Multiply {
                        x,
                        w,
                        k: self.k,
                        rows,
                        columns: columns.clone(),
                        sums: &mut sums,
                    };
                    lanes::dispatch_at(self.level, multiply);
                    // SAFETY: parts do not overlap.
                    unsafe { sink.store(self.level, &mut sums, &block) };
                }
            }
        });
    }
}

/// Sums of some rows and columns, in rows of [`GROUP`].
struct Multiply<'a, T> {
    x: Rows<'a, T>,
    w: Rows<'a, T>,
    k: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    sums: &'a mut [f32; ROWS * GROUP],
}

impl<T: Element> Kernel for Multiply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        match self.rows.len() {
            1 => self.strips::<1, 8, 1, FMA>(),
            2 => self.strips::<2, 8, 1, FMA>(),
            3 => self.strips::<3, 4, 1, FMA>(),
            _ => self.strips::<ROWS, 4, 1, FMA>(),
        }
    }
}

impl<T: Element> Multiply<'_, T> {
    #[inline(always)]
    fn strips<const R: usize, const C: usize, const CHAINS: usize, const FMA: bool>(&mut self) {
        let mut column = self.columns.start;
        while column + C <= self.columns.end {
            self.strip::<R, C, CHAINS, FMA>(column);
            column += C;
        }
        for column in column..self.columns.end {
            self.strip::<R, 1, CHAINS, FMA>(column);
        }
    }

    /// The latency of additions shows where rows and columns are few, unless terms are summed in several chains.
    #[inline(always)]
    fn strip<const R: usize, const C: usize, const CHAINS: usize, const FMA: bool>(&mut self, column: usize) {
        let k = self.k;
        let x: [&[T]; R] = std::array::from_fn(|r| &self.x.data[(self.rows.start + r) * self.x.stride..][..k]);
        let w: [&[T]; C] = std::array::from_fn(|c| &self.w.data[(column + c) * self.w.stride..][..k]);
        let mut sums = [[[[0f32; LANES]; CHAINS]; C]; R];
        let whole = k / (LANES * CHAINS) * (LANES * CHAINS);
        for term in (0..whole).step_by(LANES * CHAINS) {
            for chain in 0..CHAINS {
                let term = term + chain * LANES;
                let x: [[f32; LANES]; R] = std::array::from_fn(|r| lanes_at(x[r], term));
                for c in 0..C {
                    let w = lanes_at(w[c], term);
                    for r in 0..R {
                        let sums = &mut sums[r][c][chain];
                        for lane in 0..LANES {
                            sums[lane] = multiply_add::<FMA>(x[r][lane], w[lane], sums[lane]);
                        }
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, chains) in sums.iter().enumerate() {
                let mut total = chains[0];
                for chain in &chains[1..] {
                    total.iter_mut().zip(chain).for_each(|(t, s)| *t += s);
                }
                let mut half = LANES / 2;
                while half > 0 {
                    (0..half).for_each(|lane| total[lane] += total[lane + half]);
                    half /= 2;
                }
                let rest = x[r][whole..].iter().zip(&w[c][whole..]);
                let rest = rest.fold(0f32, |sum, (x, w)| multiply_add::<FMA>(x.widen(), w.widen(), sum));
                self.sums[r * GROUP + column - self.columns.start + c] = total[0] + rest;
            }
        }
    }
}

#[inline(always)]
fn lanes_at<T: Element>(row: &[T], term: usize) -> [f32; LANES] {
    let row: &[T; LANES] = row[term..term + LANES].try_into().expect("a slice of as many");
    row.map(T::widen)
}

#[inline(always)]
fn multiply_add<const FMA: bool>(x: f32, w: f32, sum: f32) -> f32 {
    if FMA { x.mul_add(w, sum) } else { sum + x * w }
}
