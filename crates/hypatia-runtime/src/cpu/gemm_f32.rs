//! Linear layers in fp32.
//!
//! Weights lie in panels of a few vectors of columns: all of `k` for the first panel, then for the next. A kernel holds
//! a block of rows × one panel in registers and reads the activations where they are, so that nothing but weights is
//! ever packed.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod fresh;
mod portable;

use super::aligned::Aligned;
use super::lanes::{self, Level};
use super::linear::{Grid, Layer, Rows, Sink, share};
use crate::kernels::product::Activation;
use crate::pool::Pool;
pub use fresh::{Factor, Right};
use std::ops::Range;

/// Floats in a vector.
const LANES: usize = 16;
/// Vectors in a panel; the last panel may have fewer.
const VECTORS: usize = 4;
const PANEL: usize = VECTORS * LANES;
/// Rows that a kernel takes at once.
const ROWS: usize = 6;
/// Terms summed in registers before they are added to the result: a panel's part stays in the second-level cache,
/// and short chains round less.
const DEPTH: usize = 384;
/// Rows of a part: their part of `DEPTH` columns stays in the second-level cache.
const PART_ROWS: usize = 144;
/// Columns of a part where there are many.
const PART_COLUMNS: usize = 8 * PANEL;
/// Rows and columns below which parts are not halved to get more of them.
const LEAST: (usize, usize) = (PART_ROWS / 2, 2 * PANEL);
/// Terms for which a kernel fetches weights of the next panel together.
const FETCH: usize = 8;
/// Multiplications, and weights to read, that are over before a second thread is of much use.
const ALONE: (usize, usize) = (1 << 18, 1 << 16);

/// Panels that are read side by side where there is one row.
const STREAMS: usize = 4;

/// A block of the result and what a kernel needs to compute it.
#[derive(Clone, Copy)]
struct Block {
    x: *const f32,
    x_stride: usize,
    /// The panel, from the first term on.
    w: *const f32,
    terms: usize,
    y: *mut f32,
    y_stride: usize,
    rows: usize,
    columns: usize,
    /// Adds to what is in the result already.
    adds: bool,
    /// Values for the columns, or null.
    bias: *const f32,
    relu: bool,
    /// Weights that are needed soon, and how many cache lines of them to fetch with every [`FETCH`] terms.
    soon: *const f32,
    lines: usize,
}

/// Weights in panels, which start at a cache line.
#[derive(Clone, Copy)]
struct Panels<D> {
    data: D,
    n: usize,
    k: usize,
    level: Level,
}

/// Packs `n` rows of `k` weights for this machine.
pub(super) fn pack(weight: Rows<f32>, n: usize, k: usize) -> Option<Box<dyn Layer<f32>>> {
    pack_for(lanes::level(), weight, n, k)
}

/// As [`pack`], for a level that the machine has.
pub(super) fn pack_for(level: Level, weight: Rows<f32>, n: usize, k: usize) -> Option<Box<dyn Layer<f32>>> {
    let mut data = Aligned::try_zeroed(n.next_multiple_of(LANES) * k)?;
    for column in (0..n).step_by(PANEL) {
        let columns = PANEL.min(n - column);
        let width = columns.next_multiple_of(LANES);
        let panel = &mut data[column * k..][..width * k];
        // A few terms of all columns at a time, so that the lines written stay in cache until they are full.
        for (block, panel) in panel.chunks_mut(LANES * width).enumerate() {
            for c in 0..columns {
                let row = &weight.data[(column + c) * weight.stride..][..k];
                let terms = row.iter().skip(block * LANES).zip(panel.chunks_mut(width));
                terms.for_each(|(&w, to)| to[c] = w);
            }
        }
    }
    Some(Box::new(Panels { data, n, k, level }))
}

impl Layer<f32> for Panels<Aligned<f32>> {
    fn bytes(&self) -> usize {
        self.data.bytes()
    }

    unsafe fn run(&self, threads: usize, m: usize, x: Rows<f32>, sink: Sink<f32>) {
        let Panels { ref data, n, k, level } = *self;
        // SAFETY: handed on.
        unsafe {
            Panels {
                data: &data[..],
                n,
                k,
                level,
            }
            .multiply(threads, m, x, sink)
        }
    }
}

impl Panels<&[f32]> {
    /// # Safety
    /// As for [`Layer::run`].
    unsafe fn multiply(self, threads: usize, m: usize, x: Rows<f32>, sink: Sink<f32>) {
        let threads = share(threads, (m, self.n, self.k), ALONE);
        let strips = self.n >= 2 * threads * STREAMS * PANEL && m == 1;
        // All parts read the one panel that there may be, again for every few rows.
        let bands = self.n <= PANEL && self.k * PANEL * size_of::<f32>() <= RESIDENT;
        let grid = match (strips, bands) {
            (true, _) => Grid::strips(threads, (m, self.n), STREAMS * PANEL),
            (_, true) => Grid::bands(threads, (m, self.n), ROWS, PART_ROWS),
            _ => Grid::tiles(threads, (m, self.n), (ROWS, PANEL), (PART_ROWS, PART_COLUMNS), LEAST)
                .unwrap_or_else(|| Grid::new(threads, (m, self.n), (ROWS, PANEL), PART_ROWS)),
        };
        let call = Call { weights: self, x, sink };
        Pool::global().run(threads, grid.parts(), &|part| {
            let (rows, columns) = grid.part(part);
            // SAFETY: the caller vouches for the operands, and parts do not overlap.
            unsafe { call.part(rows, columns) }
        });
    }
}

/// Sums of `m` dense rows of `k` terms for a panel of `n` columns at most, in rows of a full panel. The panel starts at
/// a cache line.
pub(super) fn sums(level: Level, x: &[f32], panel: &[f32], (m, n, k): (usize, usize, usize), y: &mut [f32]) {
    let width = n.next_multiple_of(LANES);
    assert!(n <= PANEL && x.len() >= m * k && panel.len() >= width * k && y.len() >= m * PANEL);
    assert!(panel.as_ptr().addr().is_multiple_of(LANES * size_of::<f32>()));
    let depth = k.div_ceil(k.div_ceil(DEPTH).max(1)).max(1);
    for term in (0..k.max(1)).step_by(depth) {
        for row in (0..m).step_by(ROWS) {
            let block = Block {
                x: x[row * k..].as_ptr().wrapping_add(term),
                x_stride: k,
                w: panel[term * width..].as_ptr(),
                terms: depth.min(k - term),
                y: y[row * PANEL..].as_mut_ptr(),
                y_stride: PANEL,
                rows: ROWS.min(m - row),
                columns: n,
                adds: term > 0,
                bias: std::ptr::null(),
                relu: false,
                soon: panel.as_ptr(),
                lines: 0,
            };
            // SAFETY: the level was detected; the lengths were checked above.
            unsafe { multiply(level, &block) };
        }
    }
}

/// # Safety
/// The machine has the level; the block's pointers reach its rows, columns and terms; nothing else uses the result's
/// elements.
unsafe fn multiply(level: Level, block: &Block) {
    match level {
        // SAFETY: the caller's obligation.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512::multiply(block) },
        _ => lanes::dispatch_at(level, portable::Multiply(block)),
    }
}

/// One row times [`STREAMS`] whole panels, so many elements apart.
///
/// # Safety
/// As of [`multiply`], with the columns of all panels; the level is AVX-512.
unsafe fn multiply_streams(block: &Block, apart: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's obligation.
    unsafe {
        avx512::streams(block, apart)
    };
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no such level: {block:p}, {apart}");
}

struct Call<'a> {
    weights: Panels<&'a [f32]>,
    x: Rows<'a, f32>,
    sink: Sink<'a, f32>,
}

/// Columns after which the rest of an epilogue is applied: enough to call it seldom, few enough to be in cache.
const FINISH: usize = 8 * PANEL;
/// Bytes that stay in the second-level cache: of activations, up to which a panel is taken to its last term before the
/// next one, or of a panel.
const RESIDENT: usize = 512 << 10;

impl Call<'_> {
    /// # Safety
    /// The rows and columns lie in the result, and no other thread uses their elements now.
    unsafe fn part(&self, rows: Range<usize>, columns: Range<usize>) {
        let (k, e) = (self.weights.k, self.sink.epilogue);
        let rest = !matches!(e.activation, Activation::None | Activation::Relu) || e.residual.is_some();
        let finish = |from: usize, to: usize| {
            if rest {
                // SAFETY: this part's own elements.
                unsafe {
                    self.sink
                        .finish(self.weights.level, rows.start, rows.len(), from, to - from)
                };
            }
        };
        // With one pass over the weights in order, memory is read at its full speed.
        let in_order = rows.len() * k * size_of::<f32>() <= RESIDENT;
        let streams = in_order && rows.len() == 1 && self.weights.level == Level::Avx512;
        let (chunk, most) = match (in_order, streams) {
            (_, true) => (STREAMS * PANEL, DEPTH / STREAMS),
            (true, _) => (PANEL, DEPTH),
            _ => (columns.len(), DEPTH),
        };
        // Passes of even length.
        let depth = k.div_ceil(k.div_ceil(most).max(1));
        for first in columns.clone().step_by(chunk) {
            let chunk = first..(first + chunk).min(columns.end);
            let wide = if streams && chunk.len() == STREAMS * PANEL {
                STREAMS
            } else {
                1
            };
            let mut term = 0;
            loop {
                let terms = depth.min(k - term);
                for column in chunk.clone().step_by(wide * PANEL) {
                    let next = if in_order { terms } else { k } * PANEL;
                    // SAFETY: as above.
                    unsafe { self.panel(&rows, column..column + wide * PANEL, term..term + terms, next) };
                    let end = (column + wide * PANEL).min(columns.end);
                    if term + terms == k && ((end - columns.start).is_multiple_of(FINISH) || end == columns.end) {
                        finish((end - 1 - columns.start) / FINISH * FINISH + columns.start, end);
                    }
                }
                term += terms;
                if term == k {
                    break;
                }
            }
        }
    }

    /// Some terms of all rows for one panel, or of one row for several; `next` weights later are those of the next call.
    ///
    /// # Safety
    /// As for [`Call::part`]. There is one row if there are several panels, and the level is AVX-512.
    unsafe fn panel(&self, rows: &Range<usize>, columns: Range<usize>, terms: Range<usize>, next: usize) {
        let Panels { data, n, k, level } = self.weights;
        let e = self.sink.epilogue;
        let (column, several) = (columns.start, columns.len() > PANEL);
        let (term, terms) = (terms.start, terms.len());
        let columns = PANEL.min(n - column);
        let width = columns.next_multiple_of(LANES);
        let last = term + terms == k;
        let w = &data[column * k + term * width..];
        let bias = e
            .bias
            .filter(|_| last)
            .map_or(std::ptr::null(), |b| b[column..].as_ptr());
        // Blocks of even height: a last block of one row would take as long as a full one.
        let blocks = rows.len().div_ceil(ROWS);
        let lines = (FETCH * VECTORS).div_ceil(blocks);
        let mut row = rows.start;
        for i in 0..blocks {
            let height = rows.len() / blocks + usize::from(i < rows.len() % blocks);
            let block = Block {
                x: self.x.data.as_ptr().wrapping_add(row * self.x.stride + term),
                x_stride: self.x.stride,
                w: w.as_ptr(),
                terms,
                y: self.sink.at(row, column),
                y_stride: self.sink.stride(),
                rows: height,
                columns,
                adds: term > 0,
                bias,
                relu: last && e.activation == Activation::Relu,
                soon: w.as_ptr().wrapping_add(next + i * lines * (terms / FETCH) * LANES),
                lines: if blocks > 1 && i * lines < FETCH * VECTORS {
                    lines
                } else {
                    0
                },
            };
            // SAFETY: the level was detected; the operands were checked against the sizes.
            unsafe {
                match several {
                    true => multiply_streams(&block, k * PANEL),
                    false => multiply(level, &block),
                }
            };
            row += height;
        }
    }
}
