//! A kernel as text, and on a device.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Device, Function, Module, Stream};
use crate::nvrtc::{self, Arch};
use crate::{Error, Result};

/// A kernel as CUDA C++ text, with how it is launched: its parameters are addresses, then numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// What it is called in its source.
    pub name: String,
    /// All of its source.
    pub source: String,
    /// Blocks of the launch.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// What must divide each address that it takes.
    pub alignments: Vec<usize>,
    /// The numbers that follow them.
    pub numbers: Vec<u64>,
}

impl Kernel {
    /// Brings it to a device; compiled only if neither this process nor the cache has it.
    pub fn load(&self, device: &'static Device) -> Result<Loaded> {
        Ok(Loaded {
            function: function(device, &self.name, &self.source)?,
            blocks: self.blocks,
            threads: self.threads,
            alignments: self.alignments.clone(),
            numbers: self.numbers.clone(),
        })
    }
}

/// A kernel that is ready to run.
#[derive(Debug, Clone)]
pub struct Loaded {
    function: Function,
    blocks: [u32; 3],
    threads: u32,
    alignments: Vec<usize>,
    numbers: Vec<u64>,
}

impl Loaded {
    /// Whether a launch does nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }

    /// Launches it, within [`Device::enter`].
    ///
    /// # Safety
    /// The addresses must be those of the operands that the kernel was made for, in order, and live until it is done.
    pub unsafe fn launch(&self, stream: Stream, addresses: &[u64]) -> Result<()> {
        // Nothing to do; tensors without elements have no address.
        if self.is_empty() {
            return Ok(());
        }
        // A fault on the device would make it useless for the rest of the process.
        let fits = |(address, alignment): (&u64, &usize)| address.is_multiple_of(*alignment as u64) && *address != 0;
        if addresses.len() != self.alignments.len() || !addresses.iter().zip(&self.alignments).all(fits) {
            return Err(Error::malformed(format!(
                "a kernel whose operands are multiples of {:?}, given {addresses:x?}",
                self.alignments
            )));
        }
        let arguments = self.arguments(addresses);
        // SAFETY: promised by the caller.
        unsafe { self.function.launch(stream, self.blocks, self.threads, &arguments) }
    }

    /// All arguments, for the node of a graph.
    pub fn arguments(&self, addresses: &[u64]) -> smallvec::SmallVec<[u64; 16]> {
        addresses.iter().chain(&self.numbers).copied().collect()
    }
}

static PLANTED: Mutex<Option<(String, String)>> = Mutex::new(None);

/// From now on every kernel that is loaded has one text in place of another: a fault, for tests that must find it. With
/// none, kernels are what they are again.
pub fn plant(texts: Option<(String, String)>) {
    *PLANTED.lock().unwrap_or_else(PoisonError::into_inner) = texts;
}

fn planted(source: &str) -> Cow<'_, str> {
    match &*PLANTED.lock().unwrap_or_else(PoisonError::into_inner) {
        Some((old, new)) if source.contains(old.as_str()) => Cow::Owned(source.replace(old.as_str(), new)),
        _ => Cow::Borrowed(source),
    }
}

/// The kernel of a source that has one.
pub(super) fn function(device: &'static Device, name: &str, source: &str) -> Result<Function> {
    Ok(module(device, name, source)?.function(name)?.of_source(source))
}

/// Modules by device and source.
type Modules = HashMap<(u32, String), Arc<Module>>;

static MODULES: Mutex<Option<Modules>> = Mutex::new(None);

/// Whether a source needs no compiler any more in this process.
pub(super) fn is_loaded(device: &'static Device, source: &str) -> bool {
    let modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device.ordinal(), planted(source).into_owned());
    modules.as_ref().is_some_and(|m| m.contains_key(&key))
}

/// The module of a source on a device, kept for the life of the process.
pub(super) fn module(device: &'static Device, name: &str, source: &str) -> Result<Arc<Module>> {
    if device.arch() < Arch::OLDEST {
        let message = format!(
            "{} is {}, and kernels are for {} and newer",
            device.name(),
            device.arch(),
            Arch::OLDEST
        );
        return Err(Error::unsupported(message));
    }
    let source = &*planted(source);
    let key = (device.ordinal(), source.to_owned());
    let known = |modules: &Option<Modules>| modules.as_ref().and_then(|m| m.get(&key).cloned());
    if let Some(module) = known(&MODULES.lock().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(module);
    }
    let code = nvrtc::machine_code(name, source, device.arch())?;
    let module = match Module::load(device, &code) {
        Ok(module) => module,
        // What the cache kept may be damaged in a way that only the driver sees.
        Err(_) => Module::load(device, &nvrtc::compile(name, source, device.arch())?)?,
    };
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(modules.get_or_insert_default().entry(key).or_insert(module).clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_fault_is_there_until_it_is_taken_out() {
        plant(Some(("x + y".into(), "x - y".into())));
        assert_eq!(planted("z = x + y;"), "z = x - y;");
        assert_eq!(planted("z = x;"), "z = x;");
        plant(None);
        assert_eq!(planted("z = x + y;"), "z = x + y;");
    }
}
