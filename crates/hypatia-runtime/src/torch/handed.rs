//! Results that stay in the memory that torch made for them.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null_mut;

use libloading::Library;

use super::shim::{Handle, Shim, Status, find};
use crate::error::Result;
use crate::kernels::call::{Kept, Strided};

type Ask<T> = unsafe extern "C" fn(Handle, *mut T) -> Status;

/// The functions that tell how a tensor lies in memory, and the one that makes a new tensor.
pub(super) struct Looks {
    data: Ask<*mut c_void>,
    rank: Ask<i64>,
    sizes: Ask<*mut i64>,
    strides: Ask<*mut i64>,
    dtype: Ask<i32>,
    device: Ask<i32>,
    index: Ask<i32>,
    #[allow(clippy::type_complexity)]
    empty: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Status,
}

impl Looks {
    /// # Safety
    /// The library is libtorch.
    pub(super) unsafe fn load(library: &Library) -> Result<Looks> {
        // SAFETY: the types of the functions are those of torch's headers, which keep them stable.
        unsafe {
            Ok(Looks {
                data: find(library, "aoti_torch_get_data_ptr")?,
                rank: find(library, "aoti_torch_get_dim")?,
                sizes: find(library, "aoti_torch_get_sizes")?,
                strides: find(library, "aoti_torch_get_strides")?,
                dtype: find(library, "aoti_torch_get_dtype")?,
                device: find(library, "aoti_torch_get_device_type")?,
                index: find(library, "aoti_torch_get_device_index")?,
                empty: find(library, "aoti_torch_empty_strided")?,
            })
        }
    }
}

/// A tensor of torch's, which goes with this.
pub(super) struct Tensor {
    shim: &'static Shim,
    handle: Handle,
}

// SAFETY: torch's tensors may be used and freed on any thread.
unsafe impl Send for Tensor {}
// SAFETY: by a reference, tensors are only read, and their counts of owners are atomic.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: a handle that nobody else has; a failure could not be handled.
            unsafe { (self.shim.delete)(self.handle) };
        }
    }
}

fn asked<T>(ask: Ask<T>, handle: Handle, mut answer: T) -> Option<T> {
    // SAFETY: a tensor, and a place for the answer.
    (!handle.is_null() && unsafe { ask(handle, &mut answer) } == 0).then_some(answer)
}

impl Tensor {
    /// # Safety
    /// The handle is of a tensor or null, and nobody else has it.
    pub(super) unsafe fn new(shim: &'static Shim, handle: Handle) -> Tensor {
        Tensor { shim, handle }
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Whether it is in the memory of the CPU, or of some GPU; none if torch does not say.
    pub(super) fn is_on_gpu(&self) -> Option<bool> {
        let device = asked(self.shim.looks.device, self.handle, 0)?;
        [(self.shim.cpu, false), (self.shim.cuda, true)]
            .into_iter()
            .find_map(|(kind, gpu)| (device == kind).then_some(gpu))
    }

    /// Whether elements lie as planned in memory that torch was given: some ops give that memory other strides, where those
    /// of an operand suggest them and torch foretold others (`reflection_pad2d` with channels last, torch 2.11).
    pub(super) fn lies_as(&self, wanted: &Strided<'_>) -> bool {
        let looks = &self.shim.looks;
        let rank = asked(looks.rank, self.handle, 0).and_then(|r| usize::try_from(r).ok());
        let Some(first) = asked(looks.strides, self.handle, null_mut()).filter(|_| rank == Some(wanted.shape.len()))
        else {
            return false;
        };
        let mut dims = wanted.shape.iter().zip(wanted.strides).enumerate();
        // SAFETY: a stride for each dimension, which live as long as the tensor does.
        dims.all(|(i, (size, stride))| *size <= 1 || unsafe { *first.add(i) } == *stride as i64)
    }

    /// Where it is, if it can stand for an open result.
    fn standing_for(&self, wanted: &Strided<'_>, others: &[Range<usize>]) -> Option<*mut u8> {
        let looks = &self.shim.looks;
        let rank = usize::try_from(asked(looks.rank, self.handle, 0)?).ok()?;
        if rank != wanted.shape.len() || asked(looks.dtype, self.handle, 0)? != self.shim.dtype(wanted.dtype).ok()? {
            return None;
        }
        let index = asked(looks.index, self.handle, 0)?;
        let gpu = self.is_on_gpu()?.then_some(u32::try_from(index).unwrap_or(0));
        let numbers = |ask: Ask<*mut i64>| -> Option<smallvec::SmallVec<[i64; 6]>> {
            let first = asked(ask, self.handle, null_mut())?;
            // SAFETY: so many numbers, which live as long as the tensor does.
            Some((0..rank).map(|i| unsafe { *first.add(i) }).collect())
        };
        let shape: smallvec::SmallVec<[usize; 6]> = numbers(looks.sizes)?.iter().map(|n| *n as usize).collect();
        let strides: smallvec::SmallVec<[isize; 6]> = numbers(looks.strides)?.iter().map(|n| *n as isize).collect();
        let data: *mut u8 = asked(looks.data, self.handle, null_mut())?.cast();
        let found = Strided {
            data,
            dtype: wanted.dtype,
            shape: &shape,
            strides: &strides,
            gpu,
        };
        found.stands_for(wanted, others).then_some(data)
    }

    /// Hands a result over: the tensor itself if it can stand for the result, otherwise a copy that lies as it should.
    /// What is handed over is one of the `others` from then on.
    pub(super) fn handed(self, wanted: &Strided<'_>, others: &mut Vec<Range<usize>>) -> Result<Kept> {
        let taken = match self.standing_for(wanted, others) {
            Some(data) => Kept::new(data, self),
            None => {
                let copy = Tensor::empty(self.shim, wanted)?;
                let data = copy.data()?;
                // SAFETY: the memory was just made, and lives as long as the copy does.
                unsafe { self.shim.copied(&Strided { data, ..*wanted }, &self)? };
                Kept::new(data, copy)
            }
        };
        let data = taken.data();
        others.push(Strided { data, ..*wanted }.extent());
        Ok(taken)
    }

    fn data(&self) -> Result<*mut u8> {
        let mut data = null_mut();
        // SAFETY: a tensor, and a place for the answer.
        let status = unsafe { (self.shim.looks.data)(self.handle, &mut data) };
        self.shim.done(status, "an address")?;
        Ok(data.cast())
    }

    /// A new tensor that lies like an open result.
    pub(super) fn empty(shim: &'static Shim, like: &Strided<'_>) -> Result<Tensor> {
        let sizes: smallvec::SmallVec<[i64; 6]> = like.shape.iter().map(|s| *s as i64).collect();
        let strides: smallvec::SmallVec<[i64; 6]> = like.strides.iter().map(|s| *s as i64).collect();
        let (kind, index) = shim.device(like.gpu);
        let mut handle = null_mut();
        // SAFETY: sizes and strides have as many entries as dimensions.
        let status = unsafe {
            (shim.looks.empty)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                shim.dtype(like.dtype)?,
                kind,
                index,
                &mut handle,
            )
        };
        shim.done(status, "memory for a result")?;
        Ok(Tensor { shim, handle })
    }
}
