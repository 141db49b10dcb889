//! Activations in tiles, kept by their thread for the next part of the same rows.

use super::format::{Format, SIDE, TILE};
use super::part::Call;
use crate::cpu::aligned::{Aligned, KEPT};
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Some rows of a call's activations, packed.
pub struct PackedRows {
    /// The call that they belong to.
    serial: u64,
    rows: Range<usize>,
    pub tiles: Aligned<u16>,
    /// Rows with values that pieces cannot stand for.
    pub odd: Vec<usize>,
}

/// A number that no other call has.
pub fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl PackedRows {
    /// Rows of a call for `f`: those that this thread packed last, or packed now.
    ///
    /// # Safety
    /// Tiles are available, and the rows lie in the activations.
    pub unsafe fn with<F: Format>(call: &Call<'_, F>, rows: Range<usize>, f: impl FnOnce(&PackedRows)) {
        thread_local! {
            static LAST: Cell<Option<PackedRows>> = const { Cell::new(None) };
        }
        let last = LAST.take();
        let packed = match last {
            Some(last) if last.serial == call.serial && last.rows == rows => last,
            // SAFETY: handed on.
            last => unsafe { PackedRows::pack(call, rows, last) },
        };
        f(&packed);
        if packed.tiles.bytes() <= KEPT {
            LAST.set(Some(packed));
        }
    }

    /// # Safety
    /// As for [`PackedRows::with`].
    unsafe fn pack<F: Format>(call: &Call<'_, F>, rows: Range<usize>, last: Option<PackedRows>) -> PackedRows {
        let len = rows.len().div_ceil(2 * SIDE) * call.weights.steps() * F::PIECES * 2 * TILE;
        let (mut tiles, mut odd) = match last {
            Some(last) if last.tiles.len() >= len => (last.tiles, last.odd),
            _ => (Aligned::zeroed(len), vec![]),
        };
        odd.clear();
        for row in rows.clone().step_by(SIDE) {
            let height = SIDE.min(rows.end - row);
            // SAFETY: the memory holds the tiles of all rows; tiles come with AVX-512.
            let special = unsafe { call.pack_rows(row, height, row - rows.start, tiles.as_mut_ptr()) };
            odd.extend((0..height).filter(|r| special >> r & 1 == 1).map(|r| row + r));
        }
        PackedRows {
            serial: call.serial,
            rows,
            tiles,
            odd,
        }
    }
}
