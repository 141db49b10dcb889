//! Streams.

use super::{Device, driver};
use crate::Result;
use crate::sys::{self, Handle};

/// A stream that somebody else owns.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    device: &'static Device,
    handle: usize,
    early: bool,
}

impl Stream {
    pub(super) fn new(device: &'static Device, handle: usize) -> Stream {
        Stream {
            device,
            handle,
            early: false,
        }
    }

    /// The same, on which kernels that wait by themselves may begin before the kernel that was launched last is done.
    /// That one must be of the same call: what these read before they wait, nobody may still be writing.
    #[must_use]
    pub(crate) fn beginning_early(self, early: bool) -> Stream {
        Stream { early, ..self }
    }

    /// Whether they may.
    pub(crate) fn begins_early(&self) -> bool {
        self.early
    }

    /// Its device.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    pub(crate) fn raw(&self) -> Handle {
        self.handle as Handle
    }

    /// Waits until everything is done.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: a stream of this context.
        unsafe { driver()?.cuStreamSynchronize(self.raw()) }
    }

    /// True while launches are recorded into somebody's graph instead of being run.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = 0;
        // SAFETY: a stream of this context, and a place to write to.
        unsafe { driver()?.cuStreamIsCapturing(self.raw(), &mut status)? };
        Ok(status != 0)
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// The memory must be the device's, and nobody may use it at that time.
    pub unsafe fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { driver()?.cuMemsetD8Async(address, value, bytes, self.raw()) }
    }
}

impl Stream {
    /// Waits for the stream and reads four bytes.
    ///
    /// # Safety
    /// The memory must be the device's.
    pub(crate) unsafe fn read_u32(&self, address: u64) -> Result<u32> {
        let mut value = 0u32;
        self.synchronize()?;
        // SAFETY: promised by the caller, and a place to write to.
        unsafe { driver()?.cuMemcpyDtoH_v2(std::ptr::from_mut(&mut value).cast(), address, 4)? };
        Ok(value)
    }
}

impl Device {
    /// A stream of our own for recording, made at the first call.
    pub(super) fn recorder(&'static self) -> Result<Stream> {
        let handle = match self.recorder.get() {
            Some(handle) => *handle,
            None => {
                let _current = self.enter()?;
                let mut made: Handle = std::ptr::null_mut();
                // SAFETY: a place to write to.
                unsafe { driver()?.cuStreamCreate(&mut made, sys::STREAM_NON_BLOCKING)? };
                *self.recorder.get_or_init(|| made as usize)
            }
        };
        Ok(self.stream(handle))
    }
}
