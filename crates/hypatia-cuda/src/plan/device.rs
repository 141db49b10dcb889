//! GPUs as a device.

use std::sync::Arc;

use hypatia_runtime::device::{Abilities, Device};
use hypatia_runtime::kernels::call::Call;
use hypatia_runtime::plan::Plan;

use super::{Bound, Setting};
use crate::abilities::ABILITIES;
use crate::driver::Stream;
use crate::{Error, Result};

/// GPUs of NVIDIA's. A run needs a stream and as many bytes as [`Bound::arena_bytes`] says, and is done when the stream
/// is.
#[derive(Debug, Clone, Copy)]
pub struct Cuda;

impl Device for Cuda {
    type Address = u64;
    type Setting<'a> = Setting<'a>;
    type Queue = (Stream, u64);
    type Bound = Bound;
    type Error = Error;

    fn abilities(&self) -> &'static Abilities {
        &ABILITIES
    }

    unsafe fn bind(
        &self,
        plan: Arc<Plan>,
        constants: &[u64],
        calls: Vec<Box<dyn Call>>,
        setting: Setting<'_>,
    ) -> Result<Bound> {
        // SAFETY: promised by the caller.
        unsafe { Bound::new(plan, constants, calls, setting) }
    }

    unsafe fn run(&self, bound: &Bound, (stream, arena): (Stream, u64), inputs: &[u64], outputs: &[u64]) -> Result<()> {
        // SAFETY: promised by the caller; all outputs have addresses.
        unsafe { bound.run(stream, inputs, outputs, arena) }.map(|_| ())
    }
}
