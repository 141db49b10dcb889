//! Device memory that we own: for tests and tools without torch, whose allocator serves plans.

use super::{Device, driver};
use crate::Result;
use crate::sys::Address;

/// Bytes on a device.
#[derive(Debug)]
pub struct Buffer {
    device: &'static Device,
    address: Address,
    bytes: usize,
}

impl Buffer {
    /// Room for as many bytes, with any content.
    pub fn new(device: &'static Device, bytes: usize) -> Result<Buffer> {
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: a place to write to.
        unsafe { driver()?.cuMemAlloc_v2(&mut address, bytes.max(1))? };
        Ok(Buffer { device, address, bytes })
    }

    /// A copy of these bytes.
    pub fn of(device: &'static Device, content: &[u8]) -> Result<Buffer> {
        let buffer = Buffer::new(device, content.len())?;
        let _current = device.enter()?;
        // SAFETY: both have this many bytes.
        unsafe { driver()?.cuMemcpyHtoD_v2(buffer.address, content.as_ptr().cast(), content.len())? };
        Ok(buffer)
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// A copy of its content.
    pub fn read(&self) -> Result<Vec<u8>> {
        let _current = self.device.enter()?;
        let mut content = vec![0u8; self.bytes];
        // SAFETY: both have this many bytes.
        unsafe { driver()?.cuMemcpyDtoH_v2(content.as_mut_ptr().cast(), self.address, self.bytes)? };
        Ok(content)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(_current)) = (driver(), self.device.enter()) {
            // SAFETY: ours, and nobody has kept the address by the rules of launching.
            let _ = unsafe { driver.cuMemFree_v2(self.address) };
        }
    }
}
