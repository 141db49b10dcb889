//! The CPU as a device.

use std::sync::Arc;

use super::{Memory, Plan, Runnable, Setting};
use crate::cpu::ABILITIES;
use crate::device::{Abilities, Device};
use crate::error::{Error, Result};
use crate::kernels::call::Call;

/// The CPU. A run needs the number of its threads, and is done when it returns.
#[derive(Debug, Clone, Copy)]
pub struct Cpu;

impl Device for Cpu {
    type Address = Memory;
    type Setting<'a> = Setting<'a>;
    type Queue = usize;
    type Bound = Runnable;
    type Error = Error;

    fn abilities(&self) -> &'static Abilities {
        &ABILITIES
    }

    /// Only constants that [`Runnable::kept`] names are needed later.
    unsafe fn bind(
        &self,
        plan: Arc<Plan>,
        constants: &[Memory],
        calls: Vec<Box<dyn Call>>,
        setting: Setting<'_>,
    ) -> Result<Runnable> {
        // SAFETY: promised by the caller.
        unsafe { plan.bind(constants, calls, setting) }
    }

    unsafe fn run(&self, bound: &Runnable, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { bound.run(threads, inputs, outputs) }
    }
}
