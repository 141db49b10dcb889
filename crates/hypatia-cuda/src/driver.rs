//! Devices and what lives on them: streams, events, modules, memory for tests, graphs.
//!
//! A [`Device`] stands for the primary context, which is the one that torch uses. Launches need it to be current:
//! [`Device::enter`] sees to that and costs next to nothing where torch has made it current already.

mod event;
mod graph;
mod map;
mod memory;
mod module;
mod stream;

pub use event::Event;
pub use graph::{Executable, Graph, Node};
pub(crate) use map::{Map, Matrix};
pub use memory::Buffer;
pub use module::{Function, Module};
pub use stream::Stream;

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::nvrtc::Arch;
use crate::sys::{self, Driver, Handle};
use crate::{Error, Result};

/// A GPU, with its primary context.
#[derive(Debug)]
pub struct Device {
    ordinal: u32,
    context: Handle,
    name: String,
    arch: Arch,
    multiprocessors: u32,
    /// Where launches are recorded; one recording at a time.
    recording: Mutex<()>,
    recorder: OnceLock<usize>,
    /// cuBLASLt's state.
    pub(super) blas: OnceLock<usize>,
}

// SAFETY: a context may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The driver, made ready.
pub(super) fn driver() -> Result<&'static Driver> {
    static READY: OnceLock<()> = OnceLock::new();
    let driver = Driver::get()?;
    if READY.get().is_none() {
        // SAFETY: takes no memory; calling it twice is allowed.
        unsafe { driver.cuInit(0)? };
        let _ = READY.set(());
    }
    Ok(driver)
}

/// The newest CUDA that the driver serves, as major and minor number.
pub fn version() -> Result<(u32, u32)> {
    let mut number: c_int = 0;
    // SAFETY: a place to write to.
    unsafe { Driver::get()?.cuDriverGetVersion(&mut number)? };
    Ok((number.unsigned_abs() / 1000, number.unsigned_abs() % 1000 / 10))
}

/// How the driver was found.
pub fn origin() -> Result<&'static str> {
    Ok(&Driver::get()?.origin)
}

impl Device {
    /// The device of this number, as torch counts them.
    pub fn get(ordinal: u32) -> Result<&'static Device> {
        static DEVICES: Mutex<Vec<Option<&'static Device>>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ordinal as usize;
        if let Some(Some(device)) = devices.get(at) {
            return Ok(device);
        }
        // A context lives as long as the process, as torch's does.
        let device: &'static Device = Box::leak(Box::new(Device::open(ordinal)?));
        if devices.len() <= at {
            devices.resize(at + 1, None);
        }
        devices[at] = Some(device);
        Ok(device)
    }

    /// How many there are.
    pub fn count() -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: a place to write to.
        unsafe { driver()?.cuDeviceGetCount(&mut count)? };
        Ok(count.unsigned_abs())
    }

    fn open(ordinal: u32) -> Result<Device> {
        let count = Device::count()?;
        if ordinal >= count {
            return Err(Error::unsupported(format!(
                "there is no device {ordinal} among the {count} that the driver shows"
            )));
        }
        let driver = driver()?;
        let (mut id, mut context) = (0, std::ptr::null_mut());
        let mut name = [0u8; 128];
        // SAFETY: places to write to, with their sizes.
        unsafe {
            driver.cuDeviceGet(&mut id, ordinal as c_int)?;
            driver.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, id)?;
            driver.cuDevicePrimaryCtxRetain(&mut context, id)?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a place to write to.
            unsafe { driver.cuDeviceGetAttribute(&mut value, which, id)? };
            Ok::<u32, Error>(value.unsigned_abs())
        };
        Ok(Device {
            ordinal,
            context,
            name: CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |n| n.to_string_lossy().into()),
            arch: Arch::new(attribute(sys::ATTRIBUTE_MAJOR)?, attribute(sys::ATTRIBUTE_MINOR)?),
            multiprocessors: attribute(sys::ATTRIBUTE_MULTIPROCESSORS)?,
            recording: Mutex::new(()),
            recorder: OnceLock::new(),
            blas: OnceLock::new(),
        })
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// How many blocks it runs at a time, at least.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Makes this the device of the calling thread until the guard is dropped.
    pub fn enter(&self) -> Result<Entered> {
        let driver = driver()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: a place to write to, and a context that lives.
        unsafe {
            driver.cuCtxGetCurrent(&mut current)?;
            let pushed = current != self.context;
            if pushed {
                driver.cuCtxPushCurrent_v2(self.context)?;
            }
            Ok(Entered {
                pushed,
                thread: PhantomData,
            })
        }
    }

    /// A stream given by its handle, such as torch's current one; 0 is the default stream.
    pub fn stream(&'static self, handle: usize) -> Stream {
        Stream::new(self, handle)
    }
}

/// A device is current while this lives.
#[derive(Debug)]
#[must_use]
pub struct Entered {
    pushed: bool,
    /// What is current is a matter of the thread.
    thread: PhantomData<*mut ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed
            && let Ok(driver) = driver()
        {
            let mut popped = std::ptr::null_mut();
            // SAFETY: a place to write to. Nobody could do anything about a failure.
            let _ = unsafe { driver.cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
