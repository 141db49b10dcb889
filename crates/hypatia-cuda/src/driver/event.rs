//! Events, for timing.

use super::{Device, Stream, driver};
use crate::Result;
use crate::sys::Handle;

/// A moment on a stream.
#[derive(Debug)]
pub struct Event {
    handle: Handle,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event of this device that nothing has recorded yet.
    pub fn new(device: &Device) -> Result<Event> {
        let _current = device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { driver()?.cuEventCreate(&mut handle, 0)? };
        Ok(Event { handle })
    }

    /// Marks the moment at which all that the stream was given so far is done.
    pub fn record(&self, stream: Stream) -> Result<()> {
        // SAFETY: an event and a stream that live.
        unsafe { driver()?.cuEventRecord(self.handle, stream.raw()) }
    }

    /// Microseconds from an earlier event to this one, when both have come.
    pub fn since(&self, start: &Event) -> Result<f64> {
        let mut milliseconds = 0f32;
        // SAFETY: events that live, and a place to write to.
        unsafe {
            driver()?.cuEventSynchronize(self.handle)?;
            driver()?.cuEventElapsedTime(&mut milliseconds, start.handle, self.handle)?;
        }
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            // SAFETY: ours; a failure here could not be handled.
            let _ = unsafe { driver.cuEventDestroy_v2(self.handle) };
        }
    }
}
