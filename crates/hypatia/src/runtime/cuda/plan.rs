//! Plans on a GPU: products by cuBLASLt, generated kernels, calls into torch; recorded as graphs.

use std::sync::{Arc, Mutex, PoisonError};

use super::codegen::{self, Operand as Lying};
use super::driver::{Device, Stream};
use super::gemm::{Budget, Epilogue, Gemm, Operands, Problem, Scratch, Tuned, record_key, scratch_bytes, tune};
use super::kernel::Loaded;
use super::replay::Replay;
use super::{Error, Result};
use crate::runtime::cpu::linear::Activation;
use crate::runtime::operand::dense_strides;
use crate::runtime::plan::{LinearStep, Machine, Operand, Place, Plan, Task, TorchStep, ValueId};
use crate::runtime::torch::{Call, Strided};
use crate::runtime::tuning::{Database, Entry, Key};
use crate::ty::DType;

/// Addresses that torch's allocator hands out are multiples of this.
const ALIGNMENT: usize = 16;
const WORKSPACE: usize = 256;
/// Graphs kept for sets of addresses.
const GRAPHS: usize = 8;

/// What binding a plan depends on beside its constants.
pub struct Setting<'a> {
    /// The stream on which candidates are measured.
    pub stream: Stream,
    /// What was measured before.
    pub database: &'a Database,
    /// What measuring one product may cost.
    pub budget: Budget,
    /// fp32 products may be rounded to 10 bits, as torch does where it is told to.
    pub tf32: bool,
    /// Gives device memory for measuring, which stays until the plan is bound.
    pub memory: &'a mut dyn FnMut(usize) -> Result<u64>,
}

enum Ready {
    Nothing,
    Product(Box<Gemm>),
    Kernel(Loaded),
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
    replay: Replay,
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
        if plan.machine != Machine::Cuda
            || constants.len() != plan.constants.len()
            || calls.len() != plan.calls()
            || constants.iter().any(|a| !(*a as usize).is_multiple_of(ALIGNMENT))
        {
            return Err(Error::unsupported(
                "a plan for other constants, calls or another machine",
            ));
        }
        let device = setting.stream.device();
        let _current = device.enter()?;
        let (places, values) = plan.places().map_err(|e| Error::unsupported(e.to_string()))?;
        // cuBLASLt wants its room to start there.
        let values = values.next_multiple_of(WORKSPACE);
        let mut steps = vec![];
        let mut workspace = 0;
        for step in &plan.steps {
            steps.push(match step {
                Task::Linear(l) => {
                    let problem = problem(&plan, l, setting.tf32)?;
                    // SAFETY: promised by the caller.
                    let gemm = unsafe { tuned(device, problem, &mut setting)? };
                    workspace = workspace.max(gemm.workspace());
                    Ready::Product(Box::new(gemm))
                }
                Task::Region(r) => {
                    let inputs: Vec<Lying> = r.inputs.iter().map(|o| lying(&plan, o)).collect();
                    let outputs: Vec<Lying> = r
                        .outputs
                        .iter()
                        .map(|id| Lying::dense(plan.values[*id].dtype, &r.shape))
                        .collect();
                    Ready::Kernel(codegen::pointwise(&r.region, &r.shape, &inputs, &outputs)?.load(device)?)
                }
                Task::Rows(r) => {
                    let inputs: Vec<Lying> = r.inputs.iter().map(|o| lying(&plan, o)).collect();
                    let output = Lying {
                        strides: r.dense.clone(),
                        ..Lying::dense(plan.values[r.output].dtype, &[])
                    };
                    Ready::Kernel(codegen::rows(&r.rows, &r.shape, r.reduced, &inputs, &[output])?.load(device)?)
                }
                Task::Torch(_) => Ready::Nothing,
            });
        }
        Ok(Bound {
            device,
            places,
            steps,
            constants: constants.to_vec(),
            calls,
            values,
            workspace,
            replay: Replay::new(GRAPHS),
            turn: Mutex::new(()),
            plan,
        })
    }

    /// Bytes of device memory that a call needs beside inputs and outputs.
    pub fn arena_bytes(&self) -> usize {
        self.values + self.workspace
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether all steps are our own.
    pub fn is_native(&self) -> bool {
        self.calls.is_empty()
    }

    /// Runs all steps on a stream.
    ///
    /// # Safety
    /// Every address is that of its value, dense and aligned, on the device; outputs and the arena overlap nothing else,
    /// and all of it lives until the stream is done.
    pub unsafe fn run(&self, stream: Stream, inputs: &[u64], outputs: &[u64], arena: u64) -> Result<()> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(Error::unsupported("another number of inputs or outputs"));
        }
        let _current = self.device.enter()?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let launch = |stream: Stream| {
            for (at, (step, ready)) in self.plan.steps.iter().zip(&self.steps).enumerate() {
                // SAFETY: promised by the caller.
                unsafe { self.step(stream, step, ready, inputs, outputs, arena) }
                    .map_err(|e| Error::unsupported(format!("step {at} ({}): {e}", step.name())))?;
            }
            Ok(())
        };
        if !self.is_native() {
            return launch(stream);
        }
        let addresses: smallvec::SmallVec<[u64; 8]> = inputs.iter().chain(outputs).chain([&arena]).copied().collect();
        // SAFETY: promised by the caller; constants and kernels live as long as this.
        unsafe { self.replay.run(stream, &addresses, launch) }
    }

    /// # Safety
    /// As of `run`.
    unsafe fn step(
        &self,
        stream: Stream,
        step: &Task,
        ready: &Ready,
        inputs: &[u64],
        outputs: &[u64],
        arena: u64,
    ) -> Result<()> {
        let value = |id: ValueId| match self.places[id] {
            Place::Input(i) => Ok(inputs[i]),
            Place::Output(i) => Ok(outputs[i]),
            Place::Arena(offset) => Ok(arena + offset as u64),
            Place::Constant(i) => Ok(self.constants[i]),
            Place::Nowhere => Err(Error::unsupported(format!("value {id} is nowhere"))),
        };
        let operand = |o: &Operand| Ok(value(o.value)? + (o.offset * self.plan.values[o.value].dtype.size()) as u64);
        match (step, ready) {
            (Task::Linear(l), Ready::Product(gemm)) => {
                let residual = l.r.as_ref().map(|(r, _)| operand(r)).transpose()?;
                let operands = Operands {
                    left: operand(&l.x)?,
                    right: value(l.w)?,
                    residual: residual.unwrap_or(0),
                    bias: l.b.map(value).transpose()?.unwrap_or(0),
                    aux: 0,
                    out: value(l.y)?,
                    workspace: arena + self.values as u64,
                };
                // SAFETY: promised by the caller.
                unsafe { gemm.launch(stream, &operands) }
            }
            (Task::Region(r), Ready::Kernel(kernel)) => {
                let mut addresses: smallvec::SmallVec<[u64; 8]> = smallvec::SmallVec::new();
                for o in &r.inputs {
                    addresses.push(operand(o)?);
                }
                for id in &r.outputs {
                    addresses.push(value(*id)?);
                }
                // SAFETY: promised by the caller.
                unsafe { kernel.launch(stream, &addresses) }
            }
            (Task::Rows(r), Ready::Kernel(kernel)) => {
                let mut addresses: smallvec::SmallVec<[u64; 8]> = smallvec::SmallVec::new();
                for o in &r.inputs {
                    addresses.push(operand(o)?);
                }
                addresses.push(value(r.output)?);
                // SAFETY: promised by the caller.
                unsafe { kernel.launch(stream, &addresses) }
            }
            (Task::Torch(t), _) => self.torch(t, &value),
            _ => Err(Error::unsupported("a step without a kernel")),
        }
    }

    fn torch(&self, t: &TorchStep, value: &dyn Fn(ValueId) -> Result<u64>) -> Result<()> {
        let gpu = Some(self.device.ordinal());
        let mut reads = Vec::with_capacity(t.reads.len());
        for o in &t.reads {
            let dtype = self.plan.values[o.value].dtype;
            reads.push(Strided {
                data: (value(o.value)? as usize + o.offset * dtype.size()) as *mut u8,
                dtype,
                shape: &o.shape,
                strides: &o.strides,
                gpu,
            });
        }
        let dense: Vec<Vec<isize>> = (t.writes.iter())
            .map(|id| dense_strides(&self.plan.values[*id].shape))
            .collect();
        let mut writes = Vec::with_capacity(t.writes.len());
        for (id, strides) in t.writes.iter().zip(&dense) {
            let v = &self.plan.values[*id];
            writes.push(Strided {
                data: value(*id)? as usize as *mut u8,
                dtype: v.dtype,
                shape: &v.shape,
                strides,
                gpu,
            });
        }
        let call = self.calls.get(t.call);
        let call = call.ok_or_else(|| Error::unsupported(format!("there is no call {}", t.call)))?;
        // SAFETY: the addresses are those of the values, as `run` promises.
        unsafe { call.call(&reads, &writes) }.map_err(|e| Error::unsupported(e.to_string()))
    }
}

/// How an operand of a kernel lies in memory.
fn lying(plan: &Plan, o: &Operand) -> Lying {
    let dtype = plan.values[o.value].dtype;
    Lying {
        dtype,
        strides: o.strides.clone(),
        alignment: alignment(o.offset * dtype.size()),
    }
}

/// What divides an address this far behind an aligned one.
fn alignment(bytes: usize) -> usize {
    match bytes {
        0 => ALIGNMENT,
        _ => (1 << bytes.trailing_zeros()).min(ALIGNMENT),
    }
}

fn problem(plan: &Plan, l: &LinearStep, tf32: bool) -> Result<Problem> {
    let weight = &plan.values[l.w];
    let Some((n, k)) = l.sizes(&weight.shape) else {
        return Err(Error::unsupported("a weight that is no matrix"));
    };
    let mut problem = Problem::new(weight.dtype, [l.m, n, k], [false, !l.transposed]);
    problem.tf32 = tf32;
    problem.left.ld = if l.m > 1 { l.x_stride } else { k };
    let mut aligned = alignment(l.x.offset * weight.dtype.size());
    if let Some((r, stride)) = &l.r {
        problem = problem.with_residual();
        if let Some(residual) = &mut problem.residual {
            residual.ld = if l.m > 1 { *stride } else { n };
        }
        aligned = aligned.min(alignment(r.offset * weight.dtype.size()));
    }
    problem.alignment = aligned as u32;
    Ok(problem.with_epilogue(match (l.activation, l.b.is_some()) {
        (Activation::None, false) => Epilogue::None,
        (Activation::None, true) => Epilogue::Bias,
        (Activation::Relu, false) => Epilogue::Relu,
        (Activation::Relu, true) => Epilogue::ReluBias,
        (Activation::GeluTanh, false) if weight.dtype != DType::F32 => Epilogue::Gelu,
        (Activation::GeluTanh, true) if weight.dtype != DType::F32 => Epilogue::GeluBias,
        (other, _) => return Err(Error::unsupported(format!("a product with {other:?}"))),
    }))
}

/// A product by the algorithm that the database knows, or that is found now.
///
/// # Safety
/// `memory` gives memory of the device.
unsafe fn tuned(device: &'static Device, problem: Problem, setting: &mut Setting<'_>) -> Result<Gemm> {
    let key = Key {
        device: device.name().into(),
        libraries: record_key(device, &problem)?,
        op: "gemm".into(),
        shape: vec![problem.batch, problem.m, problem.n, problem.k],
        dtype: problem.input.name().into(),
        layout: String::new(),
        threads: 0,
    };
    let known = setting.database.get(&key);
    let known = known.and_then(|e| serde_json::from_slice::<Tuned>(&e.data).ok());
    if let Some(gemm) = known.and_then(|tuned| Gemm::new(device, problem, &tuned).ok()) {
        return Ok(gemm);
    }
    let bytes = scratch_bytes(&problem, &setting.budget);
    let scratch = Scratch {
        address: (setting.memory)(bytes)?,
        bytes,
    };
    // SAFETY: promised by the caller.
    let found = unsafe { tune(&problem, setting.stream, scratch, &setting.budget)? };
    let times = [("best".to_string(), found.best.microseconds)].into();
    let data = serde_json::to_vec(&found.best).unwrap_or_default();
    let chosen = format!("{:x?}", found.best.algorithm);
    setting.database.put(key, Entry { chosen, times, data });
    Gemm::new(device, problem, &found.best)
}
