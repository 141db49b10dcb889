//! A part of a result: its activations packed, its sums made, and what follows them applied.

use super::format::{Format, SIDE, STEP, TILE};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{GROUP, Tiles, wide};
use crate::runtime::cpu::aligned::with_scratch;
use crate::runtime::cpu::lanes::{self, Level};
use crate::runtime::cpu::linear::{Rows, Sink, StoreBlock};
use std::marker::PhantomData;
use std::ops::Range;

/// A call of a layer.
pub struct Call<'a, F: Format> {
    pub weights: &'a Tiles<F>,
    pub x: Rows<'a, F::Value>,
    pub sink: Sink<'a, F::Value>,
}

impl<F: Format> Call<'_, F> {
    fn row(&self, row: usize) -> &[F::Value] {
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
        let blocks = rows.len().div_ceil(2 * SIDE);
        let width = F::GROUP.min(columns.len().next_multiple_of(2 * SIDE));
        let sums_len = blocks * 2 * SIDE * width;
        let block = weights.steps() * F::PIECES * 2 * TILE;
        let mut odd = vec![];
        with_scratch(sums_len + blocks * block / 2, |scratch| {
            let (sums, x) = scratch.split_at_mut(sums_len);
            for row in rows.clone().step_by(SIDE) {
                let height = SIDE.min(rows.end - row);
                // SAFETY: the scratch holds the tiles of all rows; tiles come with AVX-512.
                let special = unsafe { self.pack_rows(row, height, row - rows.start, x.as_mut_ptr().cast()) };
                odd.extend((0..height).filter(|r| special >> r & 1 == 1).map(|r| row + r));
            }
            let mut groups = || {
                for column in columns.clone().step_by(width) {
                    let group = column..(column + width).min(columns.end);
                    // SAFETY: tiles are configured below; as above.
                    unsafe { self.group(rows.len(), &group, columns.end, x.as_ptr().cast(), sums, width) };
                    self.mend(&odd, rows.start, &group, sums, width);
                    let block = StoreBlock {
                        row: rows.start,
                        rows: rows.len(),
                        column,
                        columns: group.len(),
                        stride: width,
                    };
                    // SAFETY: the caller's obligation.
                    unsafe { self.sink.store(Level::Avx512, sums, &block) };
                }
            };
            // SAFETY: the caller's obligation.
            unsafe { tiles::configured(&mut groups) };
        });
    }

    /// The sums of all rows for a group of columns.
    ///
    /// # Safety
    /// Tiles are configured; `x` holds the packed rows, and `sums` is as long as they need.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn group(
        &self,
        rows: usize,
        group: &Range<usize>,
        end: usize,
        x: *const u16,
        sums: &mut [f32],
        width: usize,
    ) {
        let weights = self.weights;
        let (steps, panel) = (weights.steps(), weights.panel());
        let (tall, single) = (rows / (2 * SIDE), rows % (2 * SIDE));
        let (tall, single) = if single > SIDE {
            (tall + 1, false)
        } else {
            (tall, single > 0)
        };
        // With one block of rows there is nothing to keep a part of a panel for.
        let passes = if tall + usize::from(single) > 1 || F::PIECES > 1 {
            steps.div_ceil(F::DEPTH)
        } else {
            1
        };
        let depth = steps.div_ceil(passes.max(1)).max(1);
        let sums = sums.as_mut_ptr();
        for step in (0..steps.max(1)).step_by(depth) {
            let depth = depth.min(steps - step);
            let product = |block: usize, column: usize| {
                let w = &weights.data[column / SIDE * panel + step * F::PIECES * TILE..];
                tiles::Product {
                    x: x.wrapping_add((block * steps + step) * F::PIECES * 2 * TILE),
                    w: w.as_ptr(),
                    panel,
                    steps: depth,
                    sums: sums.wrapping_add(block * 2 * SIDE * width + column - group.start),
                    stride: width,
                    adds: step > 0,
                    soon: w.as_ptr(),
                    lines: 0,
                }
            };
            for column in group.clone().step_by(2 * SIDE) {
                // While a panel is used, the next one comes nearer, a share of it in each row block.
                let wide = group.end - column > SIDE;
                let lines = (2 * F::PIECES * SIDE).div_ceil(tall.max(1));
                for block in 0..tall {
                    let mut product = product(block, column);
                    if column + 2 * SIDE < end {
                        product.soon = product.soon.wrapping_add(2 * panel + block * lines * depth * STEP);
                        product.lines = lines;
                    }
                    // SAFETY: the caller's obligation; the pointers stay within the weights and the scratch.
                    unsafe {
                        if wide {
                            tiles::multiply::<F, true, true>(&product)
                        } else {
                            tiles::multiply::<F, true, false>(&product)
                        }
                    };
                }
            }
            if single {
                for column in group.clone().step_by(2 * SIDE) {
                    // SAFETY: as above; the number of panels is even.
                    unsafe { tiles::multiply::<F, false, true>(&product(tall, column)) };
                }
            }
        }
    }

    /// Packs up to 16 rows into their tiles, in the order of the tiles: writes cost more than reads. Answers which
    /// rows have values that pieces cannot stand for.
    ///
    /// # Safety
    /// The machine has AVX-512 F and BW, and `x` holds the tiles of as many rows as come before `at`, and of these.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pack_rows(&self, row: usize, rows: usize, at: usize, x: *mut u16) -> u16 {
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

    /// Sums of rows with values that pieces cannot stand for, in fp32.
    fn mend(&self, odd: &[usize], first: usize, group: &Range<usize>, sums: &mut [f32], width: usize) {
        let weights = self.weights;
        let terms = weights.steps() * STEP;
        for rows in odd.chunks(wide::ROWS) {
            with_scratch(rows.len() * (terms + GROUP), |scratch| {
                let (x, few) = scratch.split_at_mut(rows.len() * terms);
                for (&row, to) in rows.iter().zip(x.chunks_mut(terms.max(1))) {
                    lanes::dispatch(wide::Widen {
                        from: self.row(row),
                        to,
                    });
                }
                for column in group.clone().step_by(GROUP) {
                    let columns = GROUP.min(group.end - column);
                    lanes::dispatch(wide::Multiply::<F> {
                        format: PhantomData,
                        x,
                        w: &weights.data[column / SIDE * weights.panel()..],
                        sums: few,
                        rows: rows.len(),
                        panels: columns.div_ceil(SIDE),
                        steps: weights.steps(),
                    });
                    for (row, few) in rows.iter().zip(few.chunks(GROUP)) {
                        let at = (row - first) * width + column - group.start;
                        sums[at..at + columns].copy_from_slice(&few[..columns]);
                    }
                }
            });
        }
    }
}
