//! Products of two activations: the right factor is packed at every call, into memory that is used again.

use super::super::linear::{Epilogue, Mismatch, RowsMut};
use super::*;

/// Terms of a panel that one thread packs at a time.
const TERMS: usize = 64;
/// Elements that are packed before a second thread is of much use.
const PACKED_ALONE: usize = 1 << 14;

/// Where a right factor of certain sizes is packed, if it has to be.
pub struct Factor {
    n: usize,
    k: usize,
    /// Made when it is first needed.
    packed: Option<Aligned<f32>>,
}

/// A right factor in memory.
#[derive(Debug, Clone, Copy)]
pub struct Right<'a> {
    /// Its rows, without gaps between columns.
    pub rows: Rows<'a, f32>,
    /// A row holds all columns for one term; else all terms of one column, as weights do.
    pub by_terms: bool,
}

impl Right<'_> {
    /// Whether it lies as it would be packed.
    fn is_panel(&self, n: usize) -> bool {
        let lines = self.rows.data.as_ptr().addr().is_multiple_of(LANES * size_of::<f32>());
        self.by_terms && n <= PANEL && n.is_multiple_of(LANES) && self.rows.stride == n && lines
    }
}

impl Factor {
    /// For `n` columns of `k` terms.
    pub fn new(n: usize, k: usize) -> Factor {
        Factor { n, k, packed: None }
    }

    /// The size in memory, as far as it was needed.
    pub fn bytes(&self) -> usize {
        self.packed.as_ref().map_or(0, Aligned::bytes)
    }

    /// Computes `m` rows of `x · w` and what follows, on at most `threads` threads.
    pub fn multiply(
        &mut self,
        threads: usize,
        (m, x): (usize, Rows<f32>),
        w: Right,
        y: RowsMut<f32>,
        epilogue: &Epilogue<f32>,
    ) -> Result<(), Mismatch> {
        let Factor { n, k, .. } = *self;
        let (rows, columns) = if w.by_terms { (k, n) } else { (n, k) };
        w.rows.check("right factor", rows, columns)?;
        x.check("operand", m, k)?;
        y.check(m, n)?;
        epilogue.check(m, n)?;
        if m > 0 && n > 0 {
            let data = match w.is_panel(n) {
                true => w.rows.data,
                false => self.pack(threads, w),
            };
            let level = lanes::level();
            // SAFETY: checked just now.
            unsafe { Panels { data, n, k, level }.multiply(threads, m, x, Sink::new(y, epilogue)) };
        }
        Ok(())
    }

    /// Packs a factor whose sizes were checked.
    fn pack(&mut self, threads: usize, w: Right) -> &[f32] {
        let Factor { n, k, .. } = *self;
        let packed = (self.packed).get_or_insert_with(|| Aligned::zeroed(n.next_multiple_of(LANES) * k));
        let threads = if n * k > PACKED_ALONE { threads } else { 1 };
        let (panels, blocks) = (n.div_ceil(PANEL), k.div_ceil(TERMS));
        let data = Shared(packed.as_mut_ptr());
        Pool::global().run(threads, panels * blocks, &|part| {
            let (column, first) = (part % panels * PANEL, part / panels * TERMS);
            let columns = PANEL.min(n - column);
            let width = columns.next_multiple_of(LANES);
            let terms = TERMS.min(k - first);
            // SAFETY: these terms of this panel are this part's own.
            let to = unsafe { std::slice::from_raw_parts_mut(data.at(column * k + first * width), terms * width) };
            match w.by_terms {
                true => {
                    for (term, to) in to.chunks_exact_mut(width).enumerate() {
                        let from = &w.rows.data[(first + term) * w.rows.stride + column..][..columns];
                        // Whole panels are copied by a few vectors, without a call.
                        match (<&mut [f32; PANEL]>::try_from(&mut *to), <&[f32; PANEL]>::try_from(from)) {
                            (Ok(to), Ok(from)) => *to = *from,
                            _ => to[..columns].copy_from_slice(from),
                        }
                    }
                }
                false => {
                    for (block, to) in to.chunks_mut(LANES * width).enumerate() {
                        for c in 0..columns {
                            let from = &w.rows.data[(column + c) * w.rows.stride + first..][..terms];
                            let terms = from.iter().skip(block * LANES).zip(to.chunks_exact_mut(width));
                            terms.for_each(|(&w, to)| to[c] = w);
                        }
                    }
                }
            }
        });
        packed
    }
}

/// Memory of which threads write parts that do not overlap.
struct Shared(*mut f32);

// SAFETY: who writes answers for the parts.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::product::Activation;

    fn numbers(len: usize) -> Vec<f32> {
        let value = |i: usize| (i.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 65536.0 - 0.5;
        (0..len).map(value).collect()
    }

    #[test]
    fn products_of_two_activations_in_both_layouts() {
        for (m, n, k) in [
            (1, 1, 1),
            (7, 70, 33),
            (64, 64, 400),
            (13, 200, 129),
            (40, 48, 70),
            (5, 16, 0),
            (0, 5, 3),
            (3, 0, 4),
        ] {
            let mut factor = Factor::new(n, k);
            for (by_terms, threads, gap) in [(true, 1, 2), (false, 2, 2), (true, 2, 2), (true, 2, 0), (false, 1, 0)] {
                let (rows, columns) = if by_terms { (k, n) } else { (n, k) };
                // Rows with gaps, on both sides, and without.
                let (x_stride, stride) = (k + 3, columns + gap);
                let (x, given) = (numbers(m * x_stride + k), numbers(rows * stride + columns));
                let mut w = Aligned::zeroed(given.len());
                w.copy_from_slice(&given);
                let mut y = vec![f32::NAN; m * n];
                let right = Right {
                    rows: Rows { data: &w, stride },
                    by_terms,
                };
                let epilogue = Epilogue {
                    activation: Activation::Relu,
                    ..Epilogue::default()
                };
                let left = Rows {
                    data: &x,
                    stride: x_stride,
                };
                let result = RowsMut::dense(&mut y[..], n);
                factor.multiply(threads, (m, left), right, result, &epilogue).unwrap();
                for (i, y) in y.iter().enumerate() {
                    let (row, column) = (i / n, i % n);
                    let at = |t: usize| {
                        if by_terms {
                            t * stride + column
                        } else {
                            column * stride + t
                        }
                    };
                    let term = |t: usize| f64::from(x[row * x_stride + t]) * f64::from(w[at(t)]);
                    let right: f64 = (0..k).map(term).sum::<f64>().max(0.0);
                    assert!(
                        (f64::from(*y) - right).abs() < 1e-4,
                        "{m} {n} {k} {by_terms}: {y} not {right}"
                    );
                }
            }
        }
    }

    #[test]
    fn short_operands_are_refused() {
        let (x, w) = (numbers(6), numbers(8));
        let mut y = vec![0.0; 4];
        let right = Right {
            rows: Rows::dense(&w, 2),
            by_terms: true,
        };
        let mut factor = Factor::new(2, 5);
        let done = factor.multiply(
            1,
            (2, Rows::dense(&x, 5)),
            right,
            RowsMut::dense(&mut y, 2),
            &Epilogue::default(),
        );
        assert!(done.is_err());
    }
}
