//! Linear layers with weights packed ahead: `y = act(x · wᵀ + bias) + residual`.
//!
//! [`Packed`] holds the weights in the order in which a kernel reads them; [`KINDS`] lists the kernels. What they share
//! is here: rows in memory, what follows a product, and how a product is cut into parts.

mod choice;
#[cfg(target_arch = "x86_64")]
mod direct;
mod finish;
mod grid;
mod kind;
mod packed;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

use half::bf16;

use super::lanes::{bf16_to_f32, f32_to_bf16};
use crate::kernels::product::Activation;
pub use choice::{Problem, rank};
pub(super) use finish::{Block as StoreBlock, Sink};
pub(super) use grid::{Grid, share};
pub use kind::{ErrorClass, KINDS, Kind};
pub(super) use packed::Layer;
pub use packed::{LinearElement, LinearError, Packed};

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

    /// Stores `max(sums + bias, least)` by AVX-512, or answers false if the machine lacks what that needs.
    ///
    /// # Safety
    /// The machine has AVX-512; `sums` and `y` reach the block's rows and columns, and nobody else uses them.
    #[doc(hidden)]
    #[cfg(target_arch = "x86_64")]
    unsafe fn store(
        sums: *const f32,
        block: &StoreBlock,
        y: *mut Self,
        y_stride: usize,
        bias: Option<&[Self]>,
        least: f32,
    ) -> bool;
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
    #[cfg(target_arch = "x86_64")]
    unsafe fn store(
        sums: *const f32,
        block: &StoreBlock,
        y: *mut f32,
        y_stride: usize,
        bias: Option<&[f32]>,
        least: f32,
    ) -> bool {
        // SAFETY: handed on.
        unsafe { direct::store_f32(sums, block, y, y_stride, bias, least) };
        true
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
    #[cfg(target_arch = "x86_64")]
    unsafe fn store(
        sums: *const f32,
        block: &StoreBlock,
        y: *mut bf16,
        y_stride: usize,
        bias: Option<&[bf16]>,
        least: f32,
    ) -> bool {
        if direct::narrows() {
            // SAFETY: handed on.
            unsafe { direct::store_bf16(sums, block, y, y_stride, bias, least) };
        }
        direct::narrows()
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
