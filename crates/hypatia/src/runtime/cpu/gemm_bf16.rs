//! Linear layers over bf16 tiles: in bf16, and in fp32 split into bf16 pieces.
//!
//! Weights lie in panels of 16 columns, each a row of tiles, one for each step of 32 terms. AMX multiplies them with
//! tiles of activations that every part packs for itself. Without AMX, and for a few rows, the same tiles are widened
//! to fp32 as they are read.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "tiles are of x86-64"))]

mod format;
mod part;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod wide;

use super::aligned::Aligned;
use super::lanes::{self, Level};
use super::linear::{Element, Epilogue, Grid, Mismatch, Rows, RowsMut, Sink, share};
use crate::runtime::pool::Pool;
use format::{Format, SIDE, STEP, Six, TILE, Three, Whole};
use half::bf16;
use part::Call;
use std::marker::PhantomData;

/// Columns that vector kernels finish together, and of which parts are whole numbers.
const GROUP: usize = 64;
/// Bytes of packed activations of a part: half of a second-level cache.
const PART: usize = 1 << 20;
/// Up to so many rows weights come from memory no faster than vectors multiply them.
const FEW: usize = 3;
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
    format: PhantomData<F>,
}

impl<F: Format> Tiles<F> {
    fn pack(weight: Rows<F::Value>, n: usize, k: usize) -> Result<Tiles<F>, Mismatch> {
        weight.check("weight", n, k)?;
        let steps = k.div_ceil(STEP);
        // A panel more than there are, if their number is odd: kernels take two at once.
        let panels = n.div_ceil(SIDE).next_multiple_of(2);
        let mut data = Aligned::<u16>::zeroed(panels * steps * F::PIECES * TILE);
        for column in 0..n {
            let row = &weight.data[column * weight.stride..][..k];
            let panel = &mut data[column / SIDE * steps * F::PIECES * TILE..];
            for (term, &value) in row.iter().enumerate() {
                let place = F::place(term % STEP);
                let within = place / 2 * (2 * SIDE) + column % SIDE * 2 + place % 2;
                for (piece, bits) in F::split(value).into_iter().take(F::PIECES).enumerate() {
                    panel[(term / STEP * F::PIECES + piece) * TILE + within] = bits;
                }
            }
        }
        Ok(Tiles {
            data,
            n,
            k,
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

    fn run(
        &self,
        engine: Engine,
        threads: usize,
        x: Rows<F::Value>,
        m: usize,
        y: RowsMut<F::Value>,
        epilogue: &Epilogue<F::Value>,
    ) -> Result<(), Mismatch> {
        x.check("operand", m, self.k)?;
        y.check(m, self.n)?;
        epilogue.check(m, self.n)?;
        if m == 0 || self.n == 0 {
            return Ok(());
        }
        let threads = share(threads, (m, self.n, self.k), ALONE);
        let call = Call {
            weights: self,
            x,
            sink: Sink::new(y, epilogue),
        };
        let shape = (m, self.n);
        let wide = |level: Level| {
            let grid = Grid::new(threads, shape, (wide::ROWS, GROUP), wide::PART_ROWS);
            Pool::global().run(threads, grid.parts(), &|part| {
                let (rows, columns) = grid.part(part);
                // SAFETY: the operands were checked above, and parts do not overlap.
                unsafe { call.wide_part(level, rows, columns) }
            });
        };
        match engine {
            #[cfg(target_arch = "x86_64")]
            Engine::Tiles if m > FEW || F::PIECES > 1 => {
                let most = PART / (self.steps() * F::PIECES * STEP * size_of::<u16>()).max(1);
                let most = (most / (2 * SIDE) * 2 * SIDE).clamp(F::ROWS, 256);
                let grid = Grid::new(threads, shape, (2 * SIDE, GROUP), most);
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
        Ok(())
    }
}

/// Weights of a linear layer in bf16. Sums are made in fp32.
pub struct PackedBf16(Tiles<Whole>);

impl PackedBf16 {
    /// Packs `n` rows of `k` weights.
    pub fn pack(weight: Rows<bf16>, n: usize, k: usize) -> Result<PackedBf16, Mismatch> {
        Tiles::pack(weight, n, k).map(PackedBf16)
    }

    /// The size in memory.
    pub fn bytes(&self) -> usize {
        self.0.data.bytes()
    }

    /// The lengths of a row of the result and of a row of the operand.
    pub fn sizes(&self) -> (usize, usize) {
        (self.0.n, self.0.k)
    }

    /// Computes `m` rows of the layer on at most `threads` threads.
    pub fn run(
        &self,
        threads: usize,
        x: Rows<bf16>,
        m: usize,
        y: RowsMut<bf16>,
        epilogue: &Epilogue<bf16>,
    ) -> Result<(), Mismatch> {
        self.0.run(engine(), threads, x, m, y, epilogue)
    }
}

/// How fp32 is split into bf16 pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Two pieces, three products: about 16 bits.
    Bf16x3,
    /// Three pieces, six products: as good as fp32.
    Bf16x6,
}

enum Split {
    Three(Tiles<Three>),
    Six(Tiles<Six>),
}

/// Weights of a linear layer in fp32, split into bf16 pieces for AMX.
pub struct PackedSplit(Split);

impl PackedSplit {
    /// Packs `n` rows of `k` weights. None if the machine has no tiles, or if a weight is not finite.
    pub fn pack(weight: Rows<f32>, n: usize, k: usize, precision: Precision) -> Result<Option<PackedSplit>, Mismatch> {
        weight.check("weight", n, k)?;
        let finite = (0..n).all(|row| weight.data[row * weight.stride..][..k].iter().all(|w| w.is_finite()));
        if !finite || matches!(engine(), Engine::Wide(_)) {
            return Ok(None);
        }
        Ok(Some(PackedSplit(match precision {
            Precision::Bf16x3 => Split::Three(Tiles::pack(weight, n, k)?),
            Precision::Bf16x6 => Split::Six(Tiles::pack(weight, n, k)?),
        })))
    }

    /// The size in memory.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Split::Three(tiles) => tiles.data.bytes(),
            Split::Six(tiles) => tiles.data.bytes(),
        }
    }

    /// Computes `m` rows of the layer on at most `threads` threads.
    pub fn run(
        &self,
        threads: usize,
        x: Rows<f32>,
        m: usize,
        y: RowsMut<f32>,
        epilogue: &Epilogue<f32>,
    ) -> Result<(), Mismatch> {
        match &self.0 {
            Split::Three(tiles) => tiles.run(engine(), threads, x, m, y, epilogue),
            Split::Six(tiles) => tiles.run(engine(), threads, x, m, y, epilogue),
        }
    }
}
