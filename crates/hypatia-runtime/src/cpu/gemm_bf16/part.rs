//! A part of a result: its activations packed, its sums made, and what follows them applied.

use super::format::{Blocking, Format, SIDE, STEP, TILE};
#[cfg(target_arch = "x86_64")]
use super::rows::PackedRows;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{GROUP, Tiles, wide};
use crate::cpu::aligned::with_scratch;
use crate::cpu::lanes::{self, Level};
use crate::cpu::linear::{Rows, Sink, StoreBlock};
use std::marker::PhantomData;
use std::ops::Range;

/// A call of a layer.
pub struct Call<'a, F: Format> {
    pub weights: &'a Tiles<F>,
    pub x: Rows<'a, F::Value>,
    pub sink: Sink<'a, F::Value>,
    /// The result is in no cache of a core when it is written.
    pub far: bool,
    pub blocking: Blocking,
    /// Tells calls apart.
    #[cfg(target_arch = "x86_64")]
    pub serial: u64,
}

impl<F: Format> Call<'_, F> {
    pub fn row(&self, row: usize) -> &[F::Value] {
        &self.x.data[row * self.x.stride..][..self.weights.k]
    }

    /// # Safety
    /// The rows and columns lie in the result, and no other thread uses their elements now.
    pub unsafe fn wide_part(&self, level: Level, rows: Range<usize>, columns: Range<usize>) {
        let weights = self.weights;
        let terms = weights.steps() * STEP;
        with_scratch(rows.len() * (terms + GROUP), |scratch| {
            let (x, sums) = scratch.split_at_mut(rows.len() * terms);
            for (row, to) in rows.clone().zip(x.chunks_mut(terms.max(1))) {
                lanes::dispatch_at(
                    level,
                    wide::Widen {
                        from: self.row(row),
                        to,
                    },
                );
            }
            for column in columns.clone().step_by(GROUP) {
                let columns = GROUP.min(columns.end - column);
                for row in (0..rows.len()).step_by(wide::ROWS) {
                    let block = wide::Multiply::<F> {
                        format: PhantomData,
                        x: &x[row * terms..],
                        w: &weights.data[column / SIDE * weights.panel()..],
                        sums: &mut sums[row * GROUP..],
                        rows: wide::ROWS.min(rows.len() - row),
                        panels: columns.div_ceil(SIDE),
                        steps: weights.steps(),
                    };
                    lanes::dispatch_at(level, block);
                }
                let block = StoreBlock {
                    row: rows.start,
                    rows: rows.len(),
                    column,
                    columns,
                    stride: GROUP,
                };
                // SAFETY: the caller's obligation.
                unsafe { self.sink.store(level, sums, &block) };
            }
        });
    }

    /// # Safety
    /// As for [`Call::wide_part`], and tiles are available.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn tile_part(&self, rows: Range<usize>, columns: Range<usize>) {
        let weights = self.weights;
        let steps = weights.steps();
        let blocks = rows.len().div_ceil(2 * SIDE);
        // With one block of rows there is nothing to keep a part of a panel for.
        let passes = match blocks == 1 && F::PIECES == 1 {
            true => 1,
            false => steps.div_ceil(self.blocking.depth).max(1),
        };
        // Sums that are finished before the next ones are made stay in the nearest cache.
        let kept = passes > 1 || !self.sink.is_direct();
        let (width, height) = match kept {
            false => (2 * SIDE, 2 * SIDE),
            true => (
                self.blocking.group.min(columns.len().next_multiple_of(2 * SIDE)),
                blocks * 2 * SIDE,
            ),
        };
        let run = |packed: &PackedRows| {
            if 2 * packed.odd.len() > rows.len() {
                // SAFETY: the caller's obligation.
                unsafe { self.mend(&rows.clone().collect::<Vec<_>>(), columns.clone()) };
                return;
            }
            with_scratch(width * height, |sums| {
                let mut part = Part {
                    call: self,
                    rows: rows.clone(),
                    end: columns.end,
                    x: packed.tiles.as_ptr(),
                    sums,
                    width,
                    depth: steps.div_ceil(passes).max(1),
                    kept,
                };
                let mut groups = || {
                    let size = self.blocking.group;
                    for column in columns.clone().step_by(size) {
                        let group = column..(column + size).min(columns.end);
                        // SAFETY: tiles are configured below; the caller's obligation.
                        unsafe { part.group(&group) };
                    }
                };
                // SAFETY: the caller's obligation.
                unsafe { tiles::configured(&mut groups) };
            });
            if !packed.odd.is_empty() {
                // SAFETY: the caller's obligation.
                unsafe { self.mend(&packed.odd, columns.clone()) };
            }
        };
        // SAFETY: the caller's obligation.
        unsafe { PackedRows::with(self, rows.clone(), run) };
    }

    /// Packs up to 16 rows into their tiles, in the order of the tiles: writes cost more than reads. Answers which
    /// rows have values that pieces cannot stand for.
    ///
    /// # Safety
    /// The machine has AVX-512 F and BW, and `x` holds the tiles of as many rows as come before `at`, and of these.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn pack_rows(&self, row: usize, rows: usize, at: usize, x: *mut u16) -> u16 {
        let (k, steps) = (self.weights.k, self.weights.steps());
        let from = &self.x.data[row * self.x.stride..];
        let block = at / (2 * SIDE) * steps * F::PIECES * 2 * TILE;
        let mut special = 0;
        for step in 0..steps {
            let terms = STEP.min(k - step * STEP);
            for r in 0..rows {
                // SAFETY: the operand was checked for this row, and the tiles for the rest.
                let whole = unsafe {
                    let from = from.as_ptr().add(r * self.x.stride + step * STEP);
                    let to = x.add(block + step * F::PIECES * 2 * TILE + at / SIDE % 2 * TILE + r * STEP);
                    F::write(from, terms, to, 2 * TILE, self.weights.range)
                };
                special |= u16::from(!whole) << r;
            }
        }
        special
    }
}

/// A part whose activations are packed.
#[cfg(target_arch = "x86_64")]
struct Part<'a, 'b, F: Format> {
    call: &'a Call<'b, F>,
    rows: Range<usize>,
    /// The end of its columns.
    end: usize,
    x: *const u16,
    sums: &'a mut [f32],
    /// From row to row of the sums.
    width: usize,
    /// Steps of a pass.
    depth: usize,
    /// Sums of a group are kept; else those of one block.
    kept: bool,
}

#[cfg(target_arch = "x86_64")]
impl<F: Format> Part<'_, '_, F> {
    /// A group of columns.
    ///
    /// # Safety
    /// Tiles are configured; `x` holds the packed rows, `sums` is as long as they need, and no other thread uses these
    /// elements of the result.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn group(&mut self, group: &Range<usize>) {
        let steps = self.call.weights.steps();
        let (tall, rest) = (self.rows.len() / (2 * SIDE), self.rows.len() % (2 * SIDE));
        let tall = tall + usize::from(rest > SIDE);
        let single = rest > 0 && rest <= SIDE;
        for step in (0..steps.max(1)).step_by(self.depth) {
            for column in group.clone().step_by(2 * SIDE) {
                // While a panel is used, the next one comes nearer, a share of it in each row block.
                let lines = match column + 2 * SIDE < self.end {
                    true => (2 * F::PIECES * SIDE).div_ceil(tall.max(1)),
                    false => 0,
                };
                for block in 0..tall {
                    // SAFETY: the caller's obligation.
                    unsafe { self.block::<true>(group, block, column, step, lines) };
                }
            }
            if single {
                for column in group.clone().step_by(2 * SIDE) {
                    // SAFETY: as above.
                    unsafe { self.block::<false>(group, tall, column, step, 0) };
                }
            }
        }
        if !self.call.sink.is_direct() {
            // SAFETY: as above.
            unsafe { self.finish(self.rows.clone(), group.clone(), 0) };
        }
    }

    /// Some steps of one or two row tiles by two panels, and what follows the last one.
    ///
    /// # Safety
    /// As for [`Part::group`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn block<const TALL: bool>(
        &mut self,
        group: &Range<usize>,
        block: usize,
        column: usize,
        step: usize,
        lines: usize,
    ) {
        let weights = self.call.weights;
        let (steps, panel) = (weights.steps(), weights.panel());
        let depth = self.depth.min(steps - step);
        let at = match self.kept {
            true => block * 2 * SIDE * self.width + column - group.start,
            false => 0,
        };
        let sums = &mut self.sums[at..];
        let w = weights.data[column / SIDE * panel + step * F::PIECES * TILE..].as_ptr();
        let product = tiles::Product {
            x: self.x.wrapping_add((block * steps + step) * F::PIECES * 2 * TILE),
            w,
            panel,
            steps: depth,
            sums: sums.as_mut_ptr(),
            stride: self.width,
            adds: step > 0,
            soon: w.wrapping_add(2 * panel + block * lines * depth * STEP),
            lines,
        };
        let finishes = step + depth == steps && self.call.sink.is_direct();
        let row = self.rows.start + block * 2 * SIDE;
        if finishes && self.call.far {
            for row in row..(row + 2 * SIDE).min(self.rows.end) {
                tiles::fetch(self.call.sink.at(row, column), 2 * SIDE);
            }
        }
        let (wide, stream) = (!TALL || group.end - column > SIDE, self.call.blocking.stream);
        // SAFETY: the caller's obligation; the number of panels is even.
        unsafe {
            match (wide, stream) {
                (true, true) => tiles::multiply::<F, TALL, true, true>(&product),
                (true, false) => tiles::multiply::<F, TALL, true, false>(&product),
                (false, _) => tiles::multiply::<F, TALL, false, false>(&product),
            }
        }
        if finishes {
            let rows = row..(row + 2 * SIDE).min(self.rows.end);
            let columns = column..(column + 2 * SIDE).min(group.end);
            // SAFETY: the caller's obligation.
            unsafe { self.finish(rows, columns, at) };
        }
    }

    /// What follows the sums that begin at `at`.
    ///
    /// # Safety
    /// As for [`Part::group`].
    unsafe fn finish(&mut self, rows: Range<usize>, columns: Range<usize>, at: usize) {
        let sums = &mut self.sums[at..];
        let block = StoreBlock {
            row: rows.start,
            rows: rows.len(),
            column: columns.start,
            columns: columns.len(),
            stride: self.width,
        };
        // SAFETY: the caller's obligation.
        unsafe { self.call.sink.store(Level::Avx512, sums, &block) };
    }
}
