//! A plan: steps over planned buffers, run by one call. Shapes are known; constants are bound once.

mod address;
mod bind;
mod chunks;
mod device;
mod made;
mod product;
mod ready;
mod run;

use std::sync::Arc;
use std::time::Duration;

use crate::arena::Arenas;
use crate::cpu::linear::Packed;
use crate::error::Error;
use crate::kernels::call::{Call, Prepared};
pub use crate::step::*;
use crate::tuning::Database;
pub use device::Cpu;
pub use made::{Holding, Made};
use ready::{Ready, Weights};

/// Where a value is during a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// No step writes it.
    Nowhere,
    /// An input, by its place among them.
    Input(usize),
    /// An output, by its place among them.
    Output(usize),
    /// Bytes into the block of values in between.
    Arena(usize),
    /// Bound with the constants.
    Constant(usize),
}

/// What binding a plan depends on beside its constants.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// Threads that will be used.
    pub threads: usize,
    /// What was measured before.
    pub database: &'a Database,
    /// Time for measuring kernels.
    pub limit: Duration,
    /// Bytes that copies of weights may take.
    pub most: Option<usize>,
    /// Kinds of linear layers that are not to be used.
    pub without: &'a [String],
    /// The same plan at other sizes: what it packed is used again.
    pub like: Option<&'a Runnable>,
}

/// A plan with its constants, ready to run, from any number of threads at once.
pub struct Runnable {
    plan: Arc<Plan>,
    /// The steps, with all that does not change from call to call: for most chunks of rows, and for the last one if it
    /// is shorter.
    forms: Vec<Vec<Ready>>,
    /// The first rows of the chunks; one chunk where rows are not apart.
    starts: Vec<usize>,
    /// Bytes from row to row of inputs and results, as far as chunks need them.
    rows: Vec<usize>,
    /// Chunks that are run at the same time.
    together: usize,
    /// Runs on torch's threads: torch is called, or has just computed what is multiplied here.
    beside_torch: bool,
    constants: Vec<Memory>,
    /// What torch computes, by the number in the step.
    calls: Vec<Box<dyn Call>>,
    /// Constants in the forms that calls read.
    prepared: Vec<Prepared>,
    /// Which values stay where torch makes them.
    made: Made,
    arenas: Arenas,
}

/// Memory of a dense value, given by a caller who vouches for it.
#[derive(Debug, Clone, Copy)]
pub struct Memory(pub *mut u8);

// SAFETY: a pointer; whoever makes one answers for what is done with it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

pub(super) fn broken(message: impl Into<String>) -> Error {
    Error::Malformed(format!("plan: {}", message.into()))
}

impl Runnable {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of the values in between, and of what is packed during a call.
    pub fn arena_bytes(&self) -> usize {
        self.arenas.bytes() * self.together + self.steps().iter().map(Ready::scratch).sum::<usize>()
    }

    /// Bytes of constants in the forms that steps read.
    pub fn packed_bytes(&self) -> usize {
        let mut seen: Vec<*const Packed> = vec![];
        let mut total = 0;
        for (i, one) in self.prepared.iter().enumerate() {
            let again = self.prepared[..i].iter().any(|p| Arc::ptr_eq(&p.form, &one.form));
            total += if again { 0 } else { one.bytes };
        }
        for weights in self.weights() {
            let at = Arc::as_ptr(&weights.packed);
            if !seen.contains(&at) {
                seen.push(at);
                total += weights.packed.bytes();
            }
        }
        total
    }

    /// How each linear layer is computed, in the order of the steps.
    pub fn kinds(&self) -> Vec<&'static str> {
        self.weights().map(|w| w.packed.kind().name()).collect()
    }

    /// The steps of the first chunk.
    fn steps(&self) -> &[Ready] {
        self.forms.first().map_or(&[], |steps| steps)
    }

    fn weights(&self) -> impl Iterator<Item = &Weights> {
        self.steps().iter().filter_map(Ready::weights)
    }

    /// Which constants steps read as they are, by their place in the plan's `constants`.
    pub fn kept(&self) -> Vec<usize> {
        let mut read: Vec<ValueId> = self.plan.steps.iter().flat_map(Task::reads).collect();
        for (step, ready) in self.plan.steps.iter().zip(self.steps()) {
            if let Task::Linear(l) = step {
                read.extend(l.b);
                let in_place = ready.weights().is_some_and(|w| w.packed.kind().in_place());
                read.extend(in_place.then_some(l.w));
            }
        }
        (0..self.constants.len())
            .filter(|i| read.contains(&self.plan.constants[*i]))
            .collect()
    }

    /// What the weight at this place in memory was packed into.
    fn packed_for(&self, memory: Memory, l: &LinearStep, sizes: (usize, usize)) -> Option<Arc<Packed>> {
        let constant = |id: ValueId| self.plan.constants.iter().position(|c| *c == id);
        let steps = self.plan.steps.iter().zip(self.steps());
        steps
            .filter_map(|(step, ready)| match (step, ready.weights()) {
                (Task::Linear(other), Some(w)) if (other.transposed, &other.columns) == (l.transposed, &l.columns) => {
                    Some((other, w))
                }
                _ => None,
            })
            .find(|(other, w)| {
                w.packed.sizes() == sizes && constant(other.w).is_some_and(|at| self.constants[at].0 == memory.0)
            })
            .map(|(_, w)| w.packed.clone())
    }
}

/// # Safety
/// The memory holds so many elements.
unsafe fn slice<'a, T>(memory: Memory, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts(memory.0.cast(), count) }
}

/// # Safety
/// The memory holds so many elements, and nobody else uses it.
unsafe fn slice_mut<'a, T>(memory: Memory, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(memory.0.cast(), count) }
}
