//! Matrices as the engine that copies tensors sees them.

use std::ffi::c_uint;

use super::driver;
use crate::Result;
use crate::sys::{MAP_BF16, MAP_F16, MAP_FETCHES_128, MAP_SWIZZLE_128};

/// What the driver makes of a matrix; kernels take it by value.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Map([u64; 16]);

/// A matrix of 16-bit numbers whose rows lie some distance apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    /// Where it begins, a multiple of 16.
    pub(crate) address: u64,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from one row to the next, a multiple of eight.
    pub(crate) row: usize,
}

impl Map {
    /// Of a matrix of f16, else bf16. A copy has so many rows of 64 numbers, swizzled in shared memory. Outside of the
    /// matrix zeros are read and nothing is written; writing must not begin before the first column.
    pub(crate) fn new(half: bool, matrix: Matrix, rows: usize) -> Result<Map> {
        let mut map = Map::default();
        let sizes = [matrix.columns as u64, matrix.rows as u64];
        let stride = 2 * matrix.row as u64;
        let (part, steps): ([c_uint; 2], [c_uint; 2]) = ([64, rows as c_uint], [1, 1]);
        // SAFETY: places for 128 bytes and for two numbers of each kind; the driver reads nothing of the matrix.
        unsafe {
            driver()?.cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                if half { MAP_F16 } else { MAP_BF16 },
                2,
                matrix.address,
                sizes.as_ptr(),
                &raw const stride,
                part.as_ptr(),
                steps.as_ptr(),
                0,
                MAP_SWIZZLE_128,
                MAP_FETCHES_128,
                0,
            )?;
        }
        Ok(map)
    }
}
