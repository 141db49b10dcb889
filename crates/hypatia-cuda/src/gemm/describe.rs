//! The library's descriptors of a problem. They need no device.

use std::ffi::c_uint;

use hypatia_core::ty::DType;

use super::{Operands, Problem};
use crate::sys::{self, Blas, Handle};
use crate::{Error, Result};

/// A problem as the library sees it.
///
/// It thinks in columns: our `out[m,n]`, row by row, is its `D[n,m]`, column by column, and so our right factor is
/// its A, our left factor its B, and its bias, one number for each row of D, is one for each of our columns.
#[derive(Debug)]
pub(super) struct Described {
    desc: Desc,
    a: Layout,
    b: Layout,
    c: Layout,
    d: Layout,
    /// The addresses that were set, where the epilogue has any: the library refuses one that it does not need.
    bias: Option<u64>,
    aux: Option<u64>,
}

impl Described {
    pub(super) fn new(problem: &Problem) -> Result<Described> {
        problem.check()?;
        let Problem { m, n, k, batch, .. } = *problem;
        let compute = if problem.tf32 && problem.input == DType::F32 {
            77
        } else {
            68
        };
        let desc = Desc::new(compute)?;
        desc.set(sys::DESC_TRANSA, i32::from(problem.right.transposed))?;
        desc.set(sys::DESC_TRANSB, i32::from(problem.left.transposed))?;
        desc.set(sys::DESC_EPILOGUE, problem.epilogue.number())?;
        if problem.epilogue.has_aux() {
            desc.set(sys::DESC_AUX_LD, problem.aux_ld() as i64)?;
            desc.set(sys::DESC_AUX_BATCH_STRIDE, 0i64)?;
        }
        let factor = |f: &super::Factor, rows: usize, columns: usize| {
            let (rows, columns) = if f.transposed { (columns, rows) } else { (rows, columns) };
            Layout::new(problem.input, columns, rows, f.ld, batch, f.batch)
        };
        let slab = |s: super::Slab| Layout::new(problem.output, n, m, s.ld, batch, s.batch);
        Ok(Described {
            desc,
            a: factor(&problem.right, k, n)?,
            b: factor(&problem.left, m, k)?,
            c: slab(problem.residual.unwrap_or(problem.out))?,
            d: slab(problem.out)?,
            bias: (problem.bias_len() > 0).then_some(0),
            aux: problem.epilogue.has_aux().then_some(0),
        })
    }

    pub(super) fn desc(&self) -> Handle {
        self.desc.0
    }

    /// A, B, C and D.
    pub(super) fn layouts(&self) -> [Handle; 4] {
        [self.a.0, self.b.0, self.c.0, self.d.0]
    }

    /// Sets the addresses that are part of the description.
    pub(super) fn point(&mut self, operands: &Operands) -> Result<()> {
        let wanted = [
            (sys::DESC_BIAS_POINTER, &mut self.bias, operands.bias),
            (sys::DESC_AUX_POINTER, &mut self.aux, operands.aux),
        ];
        for (attribute, set, address) in wanted {
            if let Some(set) = set
                && *set != address
            {
                self.desc.set(attribute, address)?;
                *set = address;
            }
        }
        Ok(())
    }
}

// SAFETY: descriptors are plain memory of the library's.
unsafe impl Send for Described {}

/// The number of a dtype in the library's headers.
fn number(dtype: DType) -> Result<c_uint> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::BF16 => 14,
        _ => return Err(Error::unsupported(format!("products of {dtype}"))),
    })
}

#[derive(Debug)]
struct Desc(Handle);

impl Desc {
    fn new(compute: c_uint) -> Result<Desc> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { Blas::get()?.cublasLtMatmulDescCreate(&mut handle, compute, number(DType::F32)?)? };
        Ok(Desc(handle))
    }

    fn set<T: Copy>(&self, attribute: c_uint, value: T) -> Result<()> {
        let value: *const T = &value;
        // SAFETY: ours, and a value with its size.
        unsafe { Blas::get()?.cublasLtMatmulDescSetAttribute(self.0, attribute, value.cast(), size_of::<T>()) }
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        if let Ok(blas) = Blas::get() {
            // SAFETY: ours; a failure could not be handled.
            let _ = unsafe { blas.cublasLtMatmulDescDestroy(self.0) };
        }
    }
}

#[derive(Debug)]
struct Layout(Handle);

impl Layout {
    fn new(dtype: DType, rows: usize, columns: usize, ld: usize, batch: usize, stride: usize) -> Result<Layout> {
        let blas = Blas::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe {
            blas.cublasLtMatrixLayoutCreate(&mut handle, number(dtype)?, rows as u64, columns as u64, ld as i64)?;
        }
        let layout = Layout(handle);
        if batch > 1 {
            let (count, stride) = (batch as i32, stride as i64);
            // SAFETY: ours, and values with their sizes.
            unsafe {
                let (count, stride) = (std::ptr::from_ref(&count).cast(), std::ptr::from_ref(&stride).cast());
                blas.cublasLtMatrixLayoutSetAttribute(layout.0, sys::LAYOUT_BATCH_COUNT, count, 4)?;
                blas.cublasLtMatrixLayoutSetAttribute(layout.0, sys::LAYOUT_BATCH_STRIDE, stride, 8)?;
            }
        }
        Ok(layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        if let Ok(blas) = Blas::get() {
            // SAFETY: ours; a failure could not be handled.
            let _ = unsafe { blas.cublasLtMatrixLayoutDestroy(self.0) };
        }
    }
}

/// What is asked of the heuristic.
#[derive(Debug)]
pub(super) struct Preference(pub(super) Handle);

impl Preference {
    /// At most this workspace, the problem's alignment, split sums in f32.
    pub(super) fn new(problem: &Problem, workspace: usize) -> Result<Preference> {
        let blas = Blas::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to, then ours, and values with their sizes.
        unsafe {
            blas.cublasLtMatmulPreferenceCreate(&mut handle)?;
            let preference = Preference(handle);
            let bytes = std::ptr::from_ref(&workspace).cast();
            blas.cublasLtMatmulPreferenceSetAttribute(handle, sys::PREFER_WORKSPACE, bytes, 8)?;
            let f32_result = problem.output == DType::F32;
            let mask = if f32_result {
                sys::REDUCE_ANYHOW
            } else {
                sys::REDUCE_IN_COMPUTE_TYPE
            };
            let mask = std::ptr::from_ref(&mask).cast();
            blas.cublasLtMatmulPreferenceSetAttribute(handle, sys::PREFER_REDUCTIONS, mask, 4)?;
            for operand in 0..4 {
                let bytes = std::ptr::from_ref(&problem.alignment).cast();
                blas.cublasLtMatmulPreferenceSetAttribute(handle, sys::PREFER_ALIGNMENT_A + operand, bytes, 4)?;
            }
            Ok(preference)
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if let Ok(blas) = Blas::get() {
            // SAFETY: ours; a failure could not be handled.
            let _ = unsafe { blas.cublasLtMatmulPreferenceDestroy(self.0) };
        }
    }
}
