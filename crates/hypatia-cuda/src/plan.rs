//! Plans on a GPU: products by cuBLASLt, generated kernels, calls into torch; recorded as graphs.

mod ahead;
mod apart;
mod batch;
mod calls;
mod cut;
mod device;
mod norm;
mod part;
mod product;
mod torch;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use hypatia_runtime::kernels::call::{Call, Handed};
use hypatia_runtime::plan::{Holding, LinearStep, Made, Operand, Place, Plan, Task, ValueId};

use crate::abilities::ABILITIES;
use crate::codegen::{self, ALIGNMENT};
use crate::driver::{Device, Stream};
use crate::gemm::Operands;
use crate::kernel::Loaded;
pub use crate::setting::Setting;
use crate::{Error, Result};
use batch::Batch;
use calls::Running;
pub use device::Cuda;
use norm::Norm;
pub use part::{Part, is_late, late};
use product::{Product, Sums};

const WORKSPACE: usize = 256;

enum Ready {
    Torch,
    Product(Box<Product>),
    Batch(Box<Batch>),
    Sums(Sums),
    Norm(Norm),
    /// A kernel, and what it takes: values, and bytes behind their starts.
    Kernel(Loaded, Vec<(ValueId, u64)>),
}

impl Ready {
    /// Whether the last that it launches is a kernel of ours, behind which others may begin early.
    fn ends_with_kernel(&self) -> bool {
        match self {
            Ready::Torch | Ready::Batch(_) | Ready::Sums(_) | Ready::Norm(_) => false,
            Ready::Product(product) => product.is_few(),
            Ready::Kernel(kernel, _) => !kernel.is_empty(),
        }
    }

    /// Whether nothing of it is torch's.
    fn is_native(&self) -> bool {
        match self {
            Ready::Torch => false,
            Ready::Product(product) => !product.calls_torch(),
            Ready::Batch(batch) => !batch.calls_torch(),
            Ready::Sums(_) | Ready::Norm(_) | Ready::Kernel(..) => true,
        }
    }
}

/// A plan with its constants, ready to run.
pub struct Bound {
    plan: Arc<Plan>,
    device: &'static Device,
    places: Vec<Place>,
    steps: Vec<Ready>,
    constants: Vec<u64>,
    calls: Vec<Box<dyn Call>>,
    values: usize,
    workspace: usize,
    whole: Part,
    /// Values that stay where torch makes them.
    made: Made,
    /// Launches of one call are not mixed with those of another, since they share memory.
    turn: Mutex<()>,
}

impl Bound {
    /// Chooses algorithms and compiles kernels.
    ///
    /// # Safety
    /// The constants are at these addresses of the device, densely, and outlive the result; `memory` gives memory of the
    /// device.
    pub unsafe fn new(
        plan: Arc<Plan>,
        constants: &[u64],
        calls: Vec<Box<dyn Call>>,
        mut setting: Setting<'_>,
    ) -> Result<Bound> {
        if plan.device != ABILITIES.name
            || constants.len() != plan.constants.len()
            || calls.len() != plan.calls()
            || constants.iter().any(|a| !(*a as usize).is_multiple_of(ALIGNMENT))
        {
            return Err(Error::malformed("a plan for other constants, calls or another device"));
        }
        let device = setting.stream.device();
        let _current = device.enter()?;
        let made = Made::all(&plan, &calls, late(&plan));
        let (places, values) = plan.places(&made)?;
        // cuBLASLt wants its room to start there.
        let values = values.next_multiple_of(WORKSPACE);
        let mut steps = vec![];
        let mut workspace = 0;
        let texts = plan.steps.iter().map(|s| codegen::kernels(device, &plan, s));
        let texts = texts.collect::<Result<Vec<_>>>()?;
        ahead::compile(device, &plan, &texts, &setting)?;
        for (step, texts) in plan.steps.iter().zip(texts) {
            let early = steps.last().is_some_and(Ready::ends_with_kernel);
            steps.push(match step {
                Task::Linear(l) => {
                    // SAFETY: promised by the caller.
                    let product = unsafe { Product::new(device, &plan, l, constants, early, &mut setting)? };
                    workspace = workspace.max(product.workspace());
                    Ready::Product(Box::new(product))
                }
                Task::Batch(b) => {
                    // SAFETY: promised by the caller.
                    let batch = unsafe { Batch::new(device, &plan, b, constants, &mut setting)? };
                    workspace = workspace.max(batch.workspace());
                    Ready::Batch(Box::new(batch))
                }
                Task::Columns(c) => {
                    let sums = Sums::new(device, &plan, c)?;
                    workspace = workspace.max(sums.workspace());
                    Ready::Sums(sums)
                }
                Task::Norm(n) => {
                    let norm = Norm::new(device, &plan, n)?;
                    workspace = workspace.max(norm.workspace());
                    Ready::Norm(norm)
                }
                Task::Torch(_) => Ready::Torch,
                _ => {
                    let kernel = texts.into_iter().next();
                    let kernel = kernel.ok_or_else(|| Error::malformed("a step without a kernel"))?;
                    let bytes =
                        |(id, elements): (ValueId, usize)| (id, (elements * plan.values[id].dtype.size()) as u64);
                    Ready::Kernel(kernel.load(device)?, step.operands().into_iter().map(bytes).collect())
                }
            });
        }
        Ok(Bound {
            device,
            places,
            whole: Part::new(0..steps.len(), steps.iter().all(Ready::is_native)),
            steps,
            constants: constants.to_vec(),
            calls,
            values,
            workspace,
            made,
            turn: Mutex::new(()),
            plan,
        })
    }

    /// Some of its steps, to be run by [`Bound::run_part`].
    pub fn part(&self, steps: Range<usize>) -> Part {
        let end = steps.end.min(self.steps.len());
        let steps = steps.start.min(end)..end;
        let is_native = self.steps[steps.clone()].iter().all(Ready::is_native);
        Part::new(steps, is_native)
    }

    /// Bytes of device memory that a call needs beside inputs and outputs.
    pub fn arena_bytes(&self) -> usize {
        self.values + self.workspace
    }

    /// Whether an output, by its place among them, may be without an address: torch makes it.
    pub fn makes(&self, output: usize) -> bool {
        self.made.is_output(output)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether all steps are our own.
    pub fn is_native(&self) -> bool {
        self.whole.replay.is_some()
    }

    /// How each linear layer is computed, in the order of the steps.
    pub fn kinds(&self) -> Vec<&'static str> {
        let kind = |ready: &Ready| match ready {
            Ready::Product(product) => Some(product.kind()),
            _ => None,
        };
        self.steps.iter().filter_map(kind).collect()
    }

    /// Runs all steps on a stream. Outputs that torch makes may have the address zero; they are returned.
    ///
    /// # Safety
    /// Every other address is that of its value, dense and aligned, on the device; outputs and the arena overlap nothing
    /// else, and all of it lives until the stream is done. The stream is torch's current one, on which its ops run: memory
    /// that torch made goes back to its allocator once the last reader is launched.
    pub unsafe fn run(&self, stream: Stream, inputs: &[u64], outputs: &[u64], arena: u64) -> Result<Handed> {
        // SAFETY: promised by the caller.
        unsafe { self.run_part(&self.whole, stream, inputs, outputs, arena) }
    }

    /// Runs the steps of a part on a stream.
    ///
    /// # Safety
    /// As of [`Bound::run`], but for outputs that these steps do not use. The part is of this plan, and the steps before
    /// it have run on the same inputs, outputs and arena, and are done before these on the stream. Outputs that torch
    /// made for those have their addresses.
    pub unsafe fn run_part(
        &self,
        part: &Part,
        stream: Stream,
        inputs: &[u64],
        outputs: &[u64],
        arena: u64,
    ) -> Result<Handed> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(Error::malformed("another number of inputs or outputs"));
        }
        if part.steps.is_empty() {
            return Ok(vec![]);
        }
        let _current = self.device.enter()?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let launch = |stream: Stream| {
            let run = Running {
                stream,
                inputs,
                outputs,
                arena,
            };
            // SAFETY: promised by the caller.
            unsafe { self.launch(&run, part.steps.clone(), None) }
        };
        let Some(replay) = &part.replay else {
            return launch(stream);
        };
        let addresses: smallvec::SmallVec<[u64; 8]> = inputs.iter().chain(outputs).chain([&arena]).copied().collect();
        // SAFETY: promised by the caller; constants and kernels live as long as this. Torch makes nothing here.
        unsafe { replay.run(stream, &addresses, |stream| launch(stream).map(|_| ()))? };
        Ok(vec![])
    }

    /// Launches all steps, nothing recorded; `next` hears of each before it is launched.
    ///
    /// # Safety
    /// As of [`Bound::run`].
    pub unsafe fn run_told(
        &self,
        stream: Stream,
        inputs: &[u64],
        outputs: &[u64],
        arena: u64,
        mut next: impl FnMut(usize),
    ) -> Result<Handed> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(Error::malformed("another number of inputs or outputs"));
        }
        let _current = self.device.enter()?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let run = Running {
            stream,
            inputs,
            outputs,
            arena,
        };
        // SAFETY: promised by the caller.
        unsafe { self.launch(&run, 0..self.steps.len(), Some(&mut next)) }
    }

    /// Launches steps. Each may begin before the one in front of it is done, if nobody is told about them.
    ///
    /// # Safety
    /// As of `run`.
    unsafe fn launch(
        &self,
        run: &Running<'_>,
        steps: Range<usize>,
        mut told: Option<&mut dyn FnMut(usize)>,
    ) -> Result<Handed> {
        let mut holding = Holding::new(&self.made);
        let mut early = false;
        for at in steps {
            if let Some(next) = &mut told {
                next(at);
            }
            let stream = run.stream.beginning_early(early && told.is_none());
            // SAFETY: promised by the caller.
            unsafe { self.step(&Running { stream, ..*run }, at, &mut holding) }
                .map_err(|cause| self.failed(at, cause))?;
            // Torch's allocator hands memory out again to work on the same stream, which waits for all that is
            // launched so far.
            holding.leave(at);
            early = self.steps[at].ends_with_kernel();
        }
        Ok(holding.outputs())
    }

    fn failed(&self, at: usize, cause: Error) -> Error {
        Error::Step {
            at,
            name: self.plan.steps[at].name(),
            cause: Box::new(cause),
        }
    }

    /// # Safety
    /// As of `run`.
    unsafe fn step(&self, run: &Running<'_>, at: usize, holding: &mut Holding<'_>) -> Result<()> {
        let Running { stream, arena, .. } = *run;
        let (step, ready) = (&self.plan.steps[at], &self.steps[at]);
        if let Task::Torch(t) = step {
            for (i, kept) in self.torch(t, run, holding)? {
                holding.hold(t.writes[i], kept);
            }
            return Ok(());
        }
        let value = |id: ValueId| self.address(id, run, holding);
        let operand = |o: &Operand| Ok(value(o.value)? + (o.offset * self.plan.values[o.value].dtype.size()) as u64);
        match (step, ready) {
            (Task::Linear(l), Ready::Product(product)) => {
                let operands = self.operands(l, &value, &operand, arena)?;
                // SAFETY: promised by the caller.
                unsafe { product.launch(stream, operands, l.gradient.sums.map(value).transpose()?) }
            }
            (Task::Batch(b), Ready::Batch(batch)) => {
                let operands = Operands {
                    left: operand(&b.left)?,
                    right: operand(&b.right)?,
                    out: value(b.y)?,
                    workspace: arena + self.values as u64,
                    ..Operands::default()
                };
                // SAFETY: promised by the caller.
                unsafe { batch.launch(stream, &operands) }
            }
            (Task::Columns(c), Ready::Sums(sums)) => {
                let reads = c.inputs.iter().map(operand).collect::<Result<Vec<_>>>()?;
                let writes = c.outputs.iter().map(|id| value(*id)).collect::<Result<Vec<_>>>()?;
                // SAFETY: promised by the caller.
                unsafe { sums.launch(stream, &reads, arena + self.values as u64, &writes) }
            }
            (Task::Norm(n), Ready::Norm(norm)) => {
                let reads = n.reads.iter().map(|id| value(*id)).collect::<Result<Vec<_>>>()?;
                let writes = n.writes.iter().map(|id| value(*id)).collect::<Result<Vec<_>>>()?;
                // SAFETY: promised by the caller.
                unsafe { norm.launch(stream, &reads, &writes, arena + self.values as u64) }
            }
            (_, Ready::Kernel(kernel, operands)) => {
                let address = |(id, bytes): &(ValueId, u64)| Ok(value(*id)? + bytes);
                let addresses = operands
                    .iter()
                    .map(address)
                    .collect::<Result<smallvec::SmallVec<[u64; 8]>>>()?;
                // SAFETY: promised by the caller.
                unsafe { kernel.launch(stream, &addresses) }
            }
            _ => Err(Error::malformed("a step without a kernel")),
        }
    }

    /// Where the operands of a product are; sums are not among them.
    fn operands(
        &self,
        l: &LinearStep,
        value: &dyn Fn(ValueId) -> Result<u64>,
        operand: &dyn Fn(&Operand) -> Result<u64>,
        arena: u64,
    ) -> Result<Operands> {
        let given = |id: Option<ValueId>| id.map_or(Ok(0), value);
        Ok(Operands {
            left: operand(&l.x)?,
            right: value(l.w)?,
            residual: l.r.as_ref().map_or(Ok(0), |(r, _)| operand(r))?,
            bias: given(l.b)?,
            aux: given(l.gradient.keeps.or(l.gradient.masked))?,
            out: value(l.y)?,
            workspace: arena + self.values as u64,
        })
    }
}
