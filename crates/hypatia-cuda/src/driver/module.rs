//! Machine code on a device.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use super::{Device, Stream, driver};
use crate::nvrtc::Arch;
use crate::sys::{FUNCTION_MOST_SHARED, Handle, LAUNCH_EARLY, LaunchAttribute, LaunchConfig};
use crate::{Error, Result};

/// The first that lets a kernel begin before the one in front of it is done.
const WAITING: Arch = Arch::new(9, 0);

/// How the source of a kernel says that it waits by itself.
const WAITS: &str = "    begin();\n";

/// Loaded machine code.
#[derive(Debug)]
pub struct Module {
    device: &'static Device,
    handle: Handle,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code for the device's architecture.
    pub fn load(device: &'static Device, code: &[u8]) -> Result<Arc<Module>> {
        if !code.starts_with(b"\x7fELF") {
            return Err(Error::malformed("a module that is no machine code"));
        }
        let _current = device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image says how long it is, and the driver copies it.
        unsafe { driver()?.cuModuleLoadData(&mut handle, code.as_ptr().cast())? };
        Ok(Arc::new(Module { device, handle }))
    }

    /// The kernel of this name.
    pub fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|e| Error::malformed(format!("kernel {name}: {e}")))?;
        let _current = self.device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a module that lives, a C string and a place to write to.
        unsafe { driver()?.cuModuleGetFunction(&mut handle, self.handle, text.as_ptr())? };
        Ok(Function {
            module: self.clone(),
            handle,
            waits: false,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(_current)) = (driver(), self.device.enter()) {
            // SAFETY: ours; the driver waits for kernels that still run.
            let _ = unsafe { driver.cuModuleUnload(self.handle) };
        }
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Function {
    module: Arc<Module>,
    handle: Handle,
    /// It waits by itself for the kernels before, in all of its threads and before it reads what they write.
    waits: bool,
}

// SAFETY: as of modules.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The device that it is on.
    pub fn device(&self) -> &'static Device {
        self.module.device
    }

    /// The same kernel, known to wait by itself if its source says so.
    #[must_use]
    pub(crate) fn of_source(self, source: &str) -> Function {
        let waits = source.contains(WAITS) && self.device().arch() >= WAITING;
        Function { waits, ..self }
    }

    /// Lets launches give it this much shared memory, which without asking is 48 KiB at most.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let _current = self.module.device.enter()?;
        // SAFETY: a function that lives; the driver refuses what the device does not have.
        unsafe { driver()?.cuFuncSetAttribute(self.handle, FUNCTION_MOST_SHARED, bytes as i32) }
    }

    /// Launches it, within [`Device::enter`], with arguments of eight bytes each.
    ///
    /// # Safety
    /// The kernel must take these arguments, and stay within memory that lives until it is done.
    pub unsafe fn launch(&self, stream: Stream, blocks: [u32; 3], threads: u32, arguments: &[u64]) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.launch_with(stream, blocks, threads, 0, arguments) }
    }

    /// The same with so many bytes of shared memory.
    ///
    /// # Safety
    /// As of [`Function::launch`].
    pub unsafe fn launch_with(
        &self,
        stream: Stream,
        blocks: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &[u64],
    ) -> Result<()> {
        let pointers = arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast());
        let mut pointers: smallvec::SmallVec<[*mut c_void; 16]> = pointers.collect();
        // SAFETY: promised by the caller.
        unsafe { self.launch_given(stream, blocks, threads, shared, &mut pointers) }
    }

    /// The same with arguments of any size, by their addresses.
    ///
    /// # Safety
    /// As of [`Function::launch`]; the arguments live through the call and have the sizes of the kernel's parameters.
    pub(crate) unsafe fn launch_given(
        &self,
        stream: Stream,
        blocks: [u32; 3],
        threads: u32,
        shared: u32,
        pointers: &mut [*mut c_void],
    ) -> Result<()> {
        let [x, y, z] = blocks;
        if self.waits && stream.begins_early() {
            let mut attribute = LaunchAttribute {
                id: LAUNCH_EARLY,
                pad: 0,
                value: [0; 16],
            };
            attribute.value[0] = 1;
            let config = LaunchConfig {
                grid: blocks,
                block: [threads, 1, 1],
                shared,
                stream: stream.raw(),
                attributes: &raw mut attribute,
                count: 1,
            };
            // SAFETY: promised by the caller; the driver copies all of it before it returns.
            return unsafe {
                driver()?.cuLaunchKernelEx(&config, self.handle, pointers.as_mut_ptr(), std::ptr::null_mut())
            };
        }
        // SAFETY: promised by the caller; the driver copies the arguments before it returns.
        unsafe {
            driver()?.cuLaunchKernel(
                self.handle,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}
