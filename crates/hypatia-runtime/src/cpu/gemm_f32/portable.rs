//! The kernel for machines without AVX-512, vectorised by the compiler.

use super::{Block, LANES};
use crate::cpu::lanes::Kernel;

/// Rows whose sums fit into registers together.
const STRIP: usize = 4;

/// Computes a block.
pub struct Multiply<'a>(pub &'a Block);

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let block = self.0;
        for row in (0..block.rows).step_by(STRIP) {
            for column in (0..block.columns).step_by(LANES) {
                match block.rows - row {
                    1 => strip::<1, FMA>(block, row, column),
                    2 => strip::<2, FMA>(block, row, column),
                    3 => strip::<3, FMA>(block, row, column),
                    _ => strip::<STRIP, FMA>(block, row, column),
                }
            }
        }
    }
}

#[inline(always)]
fn strip<const R: usize, const FMA: bool>(block: &Block, row: usize, column: usize) {
    let width = block.columns.next_multiple_of(LANES);
    let mut sums = [[0f32; LANES]; R];
    for term in 0..block.terms {
        // SAFETY: the block's pointers reach its rows, columns and terms; panels are whole vectors wide.
        let weights = unsafe { &*block.w.add(term * width + column).cast::<[f32; LANES]>() };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let x = unsafe { *block.x.add((row + r) * block.x_stride + term) };
            for (sum, w) in sums.iter_mut().zip(weights) {
                *sum = if FMA { x.mul_add(*w, *sum) } else { *sum + x * w };
            }
        }
    }
    let columns = LANES.min(block.columns - column);
    for (r, sums) in sums.iter().enumerate() {
        for (c, &sum) in sums.iter().enumerate().take(columns) {
            // SAFETY: as above; only the block's own elements are written.
            unsafe {
                let y = block.y.add((row + r) * block.y_stride + column + c);
                let mut sum = if block.adds { *y + sum } else { sum };
                if !block.bias.is_null() {
                    sum += *block.bias.add(column + c);
                }
                *y = if block.relu && sum < 0.0 { 0.0 } else { sum };
            }
        }
    }
}
