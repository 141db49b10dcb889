//! Linear layers over bf16 tiles: in bf16, and in fp32 split into bf16 pieces.
//!
//! Weights lie in panels of 16 columns, each a row of tiles, one for each step of 32 terms. AMX multiplies them with
//! tiles of activations that every thread packs for itself. Without AMX, for a few rows and for small products, the same
//! tiles are widened to fp32 as they are read.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "tiles are of x86-64"))]

mod format;
#[cfg(target_arch = "x86_64")]
mod odd;
mod part;
#[cfg(target_arch = "x86_64")]
mod rows;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod wide;

use super::aligned::Aligned;
use super::lanes::{self, Level};
#[cfg(test)]
use super::linear::testing::{Form, levels};
use super::linear::{Element, Grid, Layer, Rows, Sink, share};
use crate::pool::Pool;
use format::{Format, Magnitudes, SIDE, STEP, Six, TILE, Three, Whole};
use half::bf16;
use part::Call;
use std::marker::PhantomData;

/// Columns that vector kernels finish together, and of which parts are whole numbers.
const GROUP: usize = 64;
/// Columns of a part where there are few rows, since every part widens them.
const STRIP: usize = 4 * GROUP;
/// Bytes of packed activations of a part: half of a second-level cache.
const PART: usize = 1 << 20;
/// Columns of a part where there are many.
const PART_COLUMNS: usize = 512;
/// Rows and columns below which parts are not halved to get more of them.
const LEAST: (usize, usize) = (128, 128);
/// Bytes of a result above which it is fetched before it is written.
const FAR: usize = 1 << 20;
/// Up to so many rows weights come from memory no faster than vectors multiply them.
const FEW: usize = 3;
/// So many multiplications torch does not leave to tiles, which take denormal numbers for zero.
const SMALL: usize = 16 * 16 * 16;
/// Multiplications, and weights to read, that are over before a second thread is of much use.
const ALONE: (usize, usize) = (1 << 20, 1 << 17);

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// AMX tiles.
    #[cfg(target_arch = "x86_64")]
    Tiles,
    /// Vectors of fp32.
    Wide(Level),
}

/// True if products of pieces are made by tiles. By vectors they would take longer than products in fp32.
pub(super) fn has_tiles() -> bool {
    !matches!(engine(), Engine::Wide(_))
}

fn engine() -> Engine {
    #[cfg(target_arch = "x86_64")]
    if lanes::level() == Level::Avx512 && tiles::available() {
        return Engine::Tiles;
    }
    Engine::Wide(lanes::level())
}

/// Weights in tiles: panel by panel, step by step, piece by piece.
struct Tiles<F: Format> {
    data: Aligned<u16>,
    n: usize,
    k: usize,
    engine: Engine,
    /// Activations that need no second look.
    range: Magnitudes,
    format: PhantomData<F>,
}

impl<F: Format> Tiles<F> {
    /// None if the pieces cannot stand for some of the weights, or there is no memory for them.
    fn pack(engine: Engine, weight: Rows<F::Value>, n: usize, k: usize) -> Option<Tiles<F>> {
        let rows: Vec<_> = (0..n).map(|row| &weight.data[row * weight.stride..][..k]).collect();
        let range = F::range(&rows)?;
        let steps = k.div_ceil(STEP);
        // A panel more than there are, if their number is odd: kernels take two at once.
        let panels = n.div_ceil(SIDE).next_multiple_of(2);
        let mut data = Aligned::<u16>::try_zeroed(panels * steps * F::PIECES * TILE)?;
        let panel = (steps * F::PIECES * TILE).max(1);
        for (rows, to) in rows.chunks(SIDE).zip(data.chunks_mut(panel)) {
            lanes::dispatch(format::PackPanel::<F> { rows, to });
        }
        Some(Tiles {
            data,
            n,
            k,
            engine,
            range,
            format: PhantomData,
        })
    }

    fn steps(&self) -> usize {
        self.k.div_ceil(STEP)
    }

    /// Elements of a panel.
    fn panel(&self) -> usize {
        self.steps() * F::PIECES * TILE
    }
}

impl<F: Format> Layer<F::Value> for Tiles<F> {
    fn bytes(&self) -> usize {
        self.data.bytes()
    }

    unsafe fn run(&self, threads: usize, m: usize, x: Rows<F::Value>, sink: Sink<F::Value>) {
        let threads = share(threads, (m, self.n, self.k), ALONE);
        let shape = (m, self.n);
        let far = m.saturating_mul(self.n) * size_of::<F::Value>() > FAR;
        let call = Call {
            weights: self,
            x,
            sink,
            far,
            blocking: F::blocking(self.steps(), m / threads),
            #[cfg(target_arch = "x86_64")]
            serial: rows::serial(),
        };
        let wide = |level: Level| {
            let strips = self.n >= 2 * threads * STRIP && m <= wide::ROWS;
            let grid = match strips {
                true => Grid::strips(threads, shape, STRIP),
                false => Grid::new(threads, shape, (wide::ROWS, GROUP), wide::PART_ROWS),
            };
            Pool::global().run(threads, grid.parts(), &|part| {
                let (rows, columns) = grid.part(part);
                // SAFETY: the caller vouches for the operands, and parts do not overlap.
                unsafe { call.wide_part(level, rows, columns) }
            });
        };
        match self.engine {
            #[cfg(target_arch = "x86_64")]
            Engine::Tiles if m > FEW && m * self.n * self.k > SMALL || F::PIECES > 1 => {
                let most = PART / (self.steps() * F::PIECES * STEP * size_of::<u16>()).max(1);
                let most = (most / (2 * SIDE) * 2 * SIDE).clamp(call.blocking.rows, 256);
                let units = (2 * SIDE, GROUP);
                let grid = Grid::tiles(threads, shape, units, (most, PART_COLUMNS), LEAST)
                    .unwrap_or_else(|| Grid::new(threads, shape, units, most));
                Pool::global().run(threads, grid.parts(), &|part| {
                    let (rows, columns) = grid.part(part);
                    // SAFETY: as above, and the engine was detected.
                    unsafe { call.tile_part(rows, columns) }
                });
            }
            #[cfg(target_arch = "x86_64")]
            Engine::Tiles => wide(Level::Avx512),
            Engine::Wide(level) => wide(level),
        }
    }
}

/// Packs `n` rows of `k` weights in bf16 for this machine.
pub(super) fn pack(weight: Rows<bf16>, n: usize, k: usize) -> Option<Box<dyn Layer<bf16>>> {
    Some(Box::new(Tiles::<Whole>::pack(engine(), weight, n, k)?))
}

/// Splits fp32 into three pieces, of which six products are made: as good as fp32.
pub(super) fn pack_six(weight: Rows<f32>, n: usize, k: usize) -> Option<Box<dyn Layer<f32>>> {
    Some(Box::new(Tiles::<Six>::pack(engine(), weight, n, k)?))
}

/// Splits fp32 into two pieces, of which three products are made: about 16 bits.
pub(super) fn pack_three(weight: Rows<f32>, n: usize, k: usize) -> Option<Box<dyn Layer<f32>>> {
    Some(Box::new(Tiles::<Three>::pack(engine(), weight, n, k)?))
}

/// bf16 on every engine of this machine.
#[cfg(test)]
pub(super) fn forms() -> Vec<Form<bf16>> {
    engines()
        .map(|engine| {
            Form::new(format!("bf16 {engine:?}"), 4.0, move |w, n, k| {
                Some(Box::new(Tiles::<Whole>::pack(engine, w, n, k)?))
            })
        })
        .collect()
}

/// Split precision, where it is available.
#[cfg(test)]
pub(super) fn split_forms() -> Vec<Form<f32>> {
    if !has_tiles() {
        return vec![];
    }
    vec![
        Form::new("bf16x6", 4.0, pack_six),
        Form::new("bf16x3", 128.0, pack_three),
    ]
}

#[cfg(test)]
fn engines() -> impl Iterator<Item = Engine> {
    let tiles = Some(engine()).filter(|_| has_tiles());
    levels().map(Engine::Wide).chain(tiles)
}
