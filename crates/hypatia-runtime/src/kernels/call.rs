//! Calls: whatever computes tensors from tensors and is no kernel of ours.

use hypatia_core::ty::DType;

use crate::Result;

/// A tensor in memory, as a call sees it.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The first element.
    pub data: *mut u8,
    /// Its element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: &'a [usize],
    /// Elements from one index to the next.
    pub strides: &'a [isize],
    /// The GPU that has it, or none.
    pub gpu: Option<u32>,
}

/// Something that computes tensors from tensors.
pub trait Call: Send + Sync {
    /// Computes the results into memory that is there already.
    ///
    /// # Safety
    /// The tensors are where they say, and the results overlap nothing else.
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<()>;
}
