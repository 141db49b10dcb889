//! Calls: whatever computes tensors from tensors and is no kernel of ours.

use std::any::Any;

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

impl Strided<'_> {
    /// Bytes from its first element to the end of the last.
    fn bytes(&self) -> usize {
        let steps = self.shape.iter().zip(self.strides);
        let last: isize = steps.map(|(n, s)| (*n as isize - 1).max(0) * s).sum();
        (last.max(0) as usize + 1) * self.dtype.size()
    }

    /// Whether an address is in its memory.
    pub fn holds(&self, address: *const u8) -> bool {
        (self.data as usize..self.data as usize + self.bytes()).contains(&(address as usize))
    }
}

/// A result in memory of whoever computed it.
pub struct Kept {
    /// The first element.
    pub data: *mut u8,
    /// What frees the memory when it is dropped.
    pub owner: Box<dyn Any>,
}

/// Something that computes tensors from tensors.
pub trait Call: Send + Sync {
    /// Computes the results into memory that is there already.
    ///
    /// # Safety
    /// The tensors are where they say, and the results overlap nothing else.
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<()>;

    /// The same, but results that may be anywhere can stay in the call's own memory, instead of being copied: for each of
    /// the first results where it is, if not where it was asked for. It lies as it was asked for.
    ///
    /// # Safety
    /// As of [`Call::call`].
    unsafe fn keep(
        &self,
        reads: &[Strided<'_>],
        writes: &[Strided<'_>],
        anywhere: &[bool],
    ) -> Result<Vec<Option<Kept>>> {
        let _ = anywhere;
        // SAFETY: promised by the caller.
        unsafe { self.call(reads, writes) }.map(|()| vec![])
    }
}
