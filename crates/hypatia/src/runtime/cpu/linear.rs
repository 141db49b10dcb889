//! Linear layers with weights packed ahead: `y = act(x · wᵀ + bias) + residual`.
//!
//! [`PackedF32`], [`PackedBf16`] and [`PackedSplit`] hold the weights in the order in which their kernels read them.
//! What they share is here: rows in memory, what follows a product, and how a product is cut into parts.

mod finish;
#[cfg(test)]
pub(super) mod testing;

use half::bf16;

pub use super::gemm_bf16::{PackedBf16, PackedSplit, Precision};
pub use super::gemm_f32::PackedF32;
use super::lanes::{bf16_to_f32, f32_to_bf16};
pub(super) use finish::{Block as StoreBlock, Sink};

/// Values in memory that are rounded from the fp32 in which sums are made.
pub trait Element: super::aligned::Plain {
    /// The value as fp32, exactly.
    fn widen(self) -> f32;
    /// The nearest value, ties to even.
    fn narrow(value: f32) -> Self;
    /// What is left of a sum when it has been stored as an element.
    #[inline(always)]
    fn rounded(value: f32) -> f32 {
        Self::narrow(value).widen()
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        bf16::from_bits(f32_to_bf16(value))
    }
}

/// Rows to read, each `stride` elements after the one before.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    /// All elements from the first row's first on.
    pub data: &'a [T],
    /// From row to row; 0 repeats one row.
    pub stride: usize,
}

/// Rows to write, which do not overlap.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    /// All elements from the first row's first on.
    pub data: &'a mut [T],
    /// From row to row: at least the length of a row.
    pub stride: usize,
}

/// An operand that is shorter than its sizes say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("linear: {rows} rows of {columns}, {stride} apart, do not fit the {len} elements of the {operand}")]
pub struct Mismatch {
    operand: &'static str,
    rows: usize,
    columns: usize,
    stride: usize,
    len: usize,
}

fn check(operand: &'static str, len: usize, stride: usize, rows: usize, columns: usize) -> Result<(), Mismatch> {
    let end = match rows {
        0 => Some(0),
        _ => (rows - 1)
            .checked_mul(stride)
            .and_then(|start| start.checked_add(columns)),
    };
    match end {
        Some(end) if end <= len => Ok(()),
        _ => Err(Mismatch {
            operand,
            rows,
            columns,
            stride,
            len,
        }),
    }
}

impl<'a, T> Rows<'a, T> {
    /// Rows that follow each other without gaps.
    pub fn dense(data: &'a [T], columns: usize) -> Rows<'a, T> {
        Rows { data, stride: columns }
    }

    pub(super) fn check(&self, operand: &'static str, rows: usize, columns: usize) -> Result<(), Mismatch> {
        check(operand, self.data.len(), self.stride, rows, columns)
    }
}

impl<'a, T> RowsMut<'a, T> {
    /// Rows that follow each other without gaps.
    pub fn dense(data: &'a mut [T], columns: usize) -> RowsMut<'a, T> {
        RowsMut { data, stride: columns }
    }

    pub(super) fn check(&self, rows: usize, columns: usize) -> Result<(), Mismatch> {
        // Rows that overlap would be written by two threads.
        let stride = if self.stride < columns && rows > 1 {
            usize::MAX
        } else {
            self.stride
        };
        check("result", self.data.len(), stride, rows, columns)
    }
}

/// A function applied to every element of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// The product itself.
    #[default]
    None,
    /// `max(x, 0)`; NaN stays.
    Relu,
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// `x · sigmoid(x)`.
    Silu,
    /// The logistic function.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

/// What follows the product, in this order: bias, activation, residual.
#[derive(Debug, Clone, Copy)]
pub struct Epilogue<'a, T> {
    /// One value for each column.
    pub bias: Option<&'a [T]>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Added last; as many rows as the result.
    pub residual: Option<Rows<'a, T>>,
    /// Rounds to the element type after the bias and after the activation, as eager does where they are separate
    /// ops. Without it the result is rounded once, at the end. It means nothing in fp32.
    pub round_before_activation: bool,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue {
            bias: None,
            activation: Activation::None,
            residual: None,
            round_before_activation: false,
        }
    }
}

impl<T> Epilogue<'_, T> {
    pub(super) fn check(&self, m: usize, n: usize) -> Result<(), Mismatch> {
        if let Some(bias) = self.bias {
            check("bias", bias.len(), n, 1, n)?;
        }
        self.residual.as_ref().map_or(Ok(()), |r| r.check("residual", m, n))
    }
}

/// How many of `threads` to use for `m`×`n` sums of `k` terms: one, unless multiplications or weights exceed `alone`.
pub(super) fn share(threads: usize, (m, n, k): (usize, usize, usize), alone: (usize, usize)) -> usize {
    let weights = n.saturating_mul(k);
    match weights.saturating_mul(m) <= alone.0 && weights <= alone.1 {
        true => 1,
        false => threads.max(1),
    }
}

/// Rectangles of a result that threads claim one at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    m: usize,
    n: usize,
    rows: usize,
    columns: usize,
    across: usize,
    down: usize,
}

/// What it costs to fetch an element of an operand, in multiplications that could be made meanwhile.
const FETCH: usize = 32;

impl Grid {
    /// Cuts `m`×`n` into parts of at most `max_rows` rows; cuts fall on multiples of `units`.
    pub fn new(threads: usize, (m, n): (usize, usize), units: (usize, usize), max_rows: usize) -> Grid {
        let (row_units, column_units) = (m.div_ceil(units.0).max(1), n.div_ceil(units.1).max(1));
        let least = m.div_ceil(max_rows.max(units.0)).max(1);
        let mut best: Option<(usize, Grid)> = None;
        for down in (least..least + threads.min(16)).take_while(|&d| d <= row_units) {
            for rounds in 1..4 {
                let rows = row_units.div_ceil(down) * units.0;
                let wanted = (threads * rounds).div_ceil(down).min(column_units);
                let columns = column_units.div_ceil(wanted) * units.1;
                let (down, across) = (m.div_ceil(rows).max(1), n.div_ceil(columns).max(1));
                let part = rows.min(m) * columns.min(n) + FETCH * (rows.min(m) + columns.min(n));
                let cost = (down * across).div_ceil(threads) * part;
                if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                    best = Some((
                        cost,
                        Grid {
                            m,
                            n,
                            rows,
                            columns,
                            across,
                            down,
                        },
                    ));
                }
            }
        }
        best.map_or(
            Grid {
                m,
                n,
                rows: m.max(1),
                columns: n.max(1),
                across: 1,
                down: 1,
            },
            |(_, grid)| grid,
        )
    }

    pub fn parts(&self) -> usize {
        self.across * self.down
    }

    /// The rows and the columns of a part.
    pub fn part(&self, part: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (row, column) = (part / self.across * self.rows, part % self.across * self.columns);
        (
            row..(row + self.rows).min(self.m),
            column..(column + self.columns).min(self.n),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_every_element_once(
            m in 0usize..300, n in 0usize..300, threads in 1usize..9, mu in 1usize..40, nu in 1usize..40, most in 1usize..300
        ) {
            let grid = Grid::new(threads, (m, n), (mu, nu), most);
            let mut seen = vec![0u8; m * n];
            for part in 0..grid.parts() {
                let (rows, columns) = grid.part(part);
                prop_assert!(rows.start % mu == 0 && columns.start % nu == 0);
                prop_assert!(rows.len() <= most.max(mu).next_multiple_of(mu));
                for r in rows {
                    columns.clone().for_each(|c| seen[r * n + c] += 1);
                }
            }
            prop_assert!(seen.iter().all(|&s| s == 1));
        }
    }

    #[test]
    fn operands_are_measured_without_overflow() {
        let data = [0f32; 10];
        let rows = |stride| Rows { data: &data, stride };
        assert!(rows(3).check("x", 3, 4).is_ok());
        assert!(rows(4).check("x", 3, 3).is_err());
        assert!(rows(0).check("x", 1000, 10).is_ok());
        assert!(rows(usize::MAX).check("x", 3, 1).is_err());
        assert!(rows(5).check("x", 0, usize::MAX).is_ok());
        let mut data = [0f32; 10];
        assert!(
            RowsMut {
                data: &mut data,
                stride: 3
            }
            .check(3, 4)
            .is_err()
        );
        assert!(
            RowsMut {
                data: &mut data,
                stride: 3
            }
            .check(1, 4)
            .is_ok()
        );
    }
}
