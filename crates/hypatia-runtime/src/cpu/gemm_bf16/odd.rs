//! Rows with numbers that pieces cannot stand for: computed in fp32, from weights put together again.

use super::format::{Format, SIDE};
use super::part::Call;
use super::{GROUP, wide};
use crate::cpu::aligned::with_scratch;
use crate::cpu::gemm_f32;
use crate::cpu::lanes::{self, Level};
use crate::cpu::linear::StoreBlock;
use std::marker::PhantomData;
use std::ops::Range;

impl<F: Format> Call<'_, F> {
    /// Computes some rows again.
    ///
    /// # Safety
    /// The rows and columns lie in the result, and no other thread uses their elements now.
    #[cold]
    pub unsafe fn mend(&self, odd: &[usize], columns: Range<usize>) {
        let (weights, level) = (self.weights, lanes::level());
        let k = weights.k;
        with_scratch(odd.len() * (k + GROUP) + k * GROUP, |scratch| {
            // First what must start at a cache line.
            let (panel, rest) = scratch.split_at_mut(k * GROUP);
            let (sums, x) = rest.split_at_mut(odd.len() * GROUP);
            for (&row, to) in odd.iter().zip(x.chunks_mut(k.max(1))) {
                let from = self.row(row);
                lanes::dispatch(wide::Widen { from, to });
            }
            for column in columns.clone().step_by(GROUP) {
                let columns = GROUP.min(columns.end - column);
                let panels = columns.div_ceil(SIDE);
                let panel = &mut panel[..k * panels * SIDE];
                lanes::dispatch(wide::Unpack::<F> {
                    format: PhantomData,
                    w: &weights.data[column / SIDE * weights.panel()..],
                    panels,
                    steps: weights.steps(),
                    to: panel,
                });
                gemm_f32::sums(level, x, panel, (odd.len(), columns, k), sums);
                for (&row, sums) in odd.iter().zip(sums.chunks_mut(GROUP)) {
                    let block = StoreBlock {
                        row,
                        rows: 1,
                        column,
                        columns,
                        stride: GROUP,
                    };
                    // SAFETY: the caller's obligation.
                    unsafe { self.sink.store(Level::Avx512.min(level), sums, &block) };
                }
            }
        });
    }
}
