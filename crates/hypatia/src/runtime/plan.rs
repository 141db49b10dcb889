//! A plan: steps over planned buffers, run by one call. Shapes are known; constants are bound once.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;

use super::arena::{Arenas, Life, place};
use super::cpu::linear::{Epilogue, ErrorClass, Kind, LinearElement, Packed, Rows, RowsMut};
use super::cpu::linear::{Problem, rank};
use super::cpu::region::{View, ViewMut};
use super::operand::dense_strides;
use super::pool::on_borrowed;
pub use super::step::{LinearStep, Operand, Plan, RegionStep, RowStep, Task, TorchStep, Value, ValueId};
use super::torch::{Call, Strided};
use super::tuning::Database;
use crate::error::{Error, Result};
use crate::ty::DType;

/// Where a value is during a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Input(usize),
    Output(usize),
    Arena(usize),
    /// Bound with the constants.
    Constant(usize),
}

/// Weights in the form that a step likes best.
struct Weights {
    packed: Arc<Packed>,
    bias: Option<Memory>,
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
    /// The same plan at other sizes: what it packed is used again.
    pub like: Option<&'a Runnable>,
}

/// A plan with its constants, ready to run, from any number of threads at once.
pub struct Runnable {
    plan: Arc<Plan>,
    places: Vec<Place>,
    /// By step.
    weights: Vec<Option<Weights>>,
    /// Constants that steps read as they are.
    constants: Vec<Memory>,
    /// What torch computes, by the number in the step.
    calls: Vec<Box<dyn Call>>,
    arenas: Arenas,
}

/// Memory of a dense value, given by a caller who vouches for it.
#[derive(Debug, Clone, Copy)]
pub struct Memory(pub *mut u8);

// SAFETY: a pointer; whoever makes one answers for what is done with it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

fn broken(message: impl Into<String>) -> Error {
    Error::Graph(format!("plan: {}", message.into()))
}

impl Plan {
    /// Binds the constants, in the order of `constants`, and the calls into torch; plans memory.
    ///
    /// # Safety
    /// Each memory holds its constant's bytes, densely. Those that [`Runnable::kept`] names are read at every call
    /// and must outlive the result; the others are packed here.
    pub unsafe fn bind(
        self: Arc<Plan>,
        constants: &[Memory],
        calls: Vec<Box<dyn Call>>,
        setting: Setting<'_>,
    ) -> Result<Runnable> {
        if constants.len() != self.constants.len() || calls.len() != self.calls() {
            return Err(broken(format!(
                "{} constants and {} calls instead of {} and {}",
                constants.len(),
                calls.len(),
                self.constants.len(),
                self.calls()
            )));
        }
        let given = |id: ValueId| {
            let at = self.constants.iter().position(|c| *c == id);
            at.map(|i| constants[i])
                .ok_or_else(|| broken(format!("value {id} is no constant")))
        };
        let mut weights = vec![];
        let mut copies = 0;
        let start = Instant::now();
        for step in &self.steps {
            weights.push(match step {
                Task::Linear(l) => {
                    let left = Setting {
                        limit: setting.limit.saturating_sub(start.elapsed()),
                        most: setting.most.map(|most| most.saturating_sub(copies)),
                        ..setting
                    };
                    // SAFETY: the caller vouches for the memory; sizes and dtype are the value's.
                    let packed = unsafe { self.packed(l, given(l.w)?, left)? };
                    copies += packed.bytes();
                    Some(Weights {
                        packed,
                        bias: l.b.map(given).transpose()?,
                    })
                }
                Task::Region(_) | Task::Rows(_) | Task::Torch(_) => None,
            });
        }
        let (mut places, bytes) = self.places()?;
        for (at, id) in self.constants.iter().enumerate() {
            places[*id] = Place::Constant(at);
        }
        Ok(Runnable {
            places,
            weights,
            constants: constants.to_vec(),
            calls,
            arenas: Arenas::new(bytes),
            plan: self,
        })
    }

    /// # Safety
    /// The memory holds the weight, for as long as the result is used.
    unsafe fn packed(&self, l: &LinearStep, w: Memory, setting: Setting<'_>) -> Result<Arc<Packed>> {
        let weight = self.value(l.w)?;
        let Some((n, k)) = l.sizes(&weight.shape) else {
            return Err(broken("a weight that is no matrix"));
        };
        if let Some(known) = setting.like.and_then(|other| other.packed_for(w, l, (n, k))) {
            return Ok(known);
        }
        let mut kinds = Kind::candidates(weight.dtype, l.m, ErrorClass::Fp32, !l.transposed);
        if setting.most.is_some_and(|most| most < weight.bytes()) {
            kinds.retain(|kind| kind.in_place());
            if kinds.is_empty() {
                return Err(broken("copies of weights would take more memory than they may"));
            }
        }
        let problem = Problem {
            m: l.m,
            n,
            k,
            dtype: weight.dtype,
            activation: l.activation,
            residual: l.r.is_some(),
            threads: setting.threads,
        };
        let kinds = rank(setting.database, &problem, &kinds, setting.limit);
        // SAFETY: by the caller.
        let packed = unsafe {
            match weight.dtype {
                DType::F32 => Packed::first(&kinds, Rows::dense(&rows::<f32>(l, slice(w, n * k), n, k), k), n, k),
                DType::BF16 => Packed::first(&kinds, Rows::dense(&rows::<bf16>(l, slice(w, n * k), n, k), k), n, k),
                other => return Err(broken(format!("no linear layer for {}", other.name()))),
            }
        };
        packed.map(Arc::new).map_err(|e| broken(e.to_string()))
    }

    /// How many calls into torch there are.
    pub fn calls(&self) -> usize {
        self.steps.iter().filter(|s| matches!(s, Task::Torch(_))).count()
    }

    fn value(&self, id: ValueId) -> Result<&Value> {
        self.values
            .get(id)
            .ok_or_else(|| broken(format!("there is no value {id}")))
    }

    /// Where each value is, and the bytes of the values in between.
    fn places(&self) -> Result<(Vec<Place>, usize)> {
        let mut places = vec![Place::Nowhere; self.values.len()];
        for (i, id) in self.inputs.iter().enumerate() {
            places[*id] = Place::Input(i);
        }
        for (i, id) in self.outputs.iter().enumerate() {
            if places[*id] != Place::Nowhere {
                return Err(broken("a result that is an input or is returned twice"));
            }
            places[*id] = Place::Output(i);
        }
        let mut last_read = vec![0; self.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            step.reads().into_iter().for_each(|id| last_read[id] = at);
        }
        let mut inner = vec![];
        let mut lives = vec![];
        for (first, step) in self.steps.iter().enumerate() {
            for id in step.writes() {
                if places[id] == Place::Nowhere {
                    inner.push(id);
                    lives.push(Life {
                        bytes: self.value(id)?.bytes(),
                        first,
                        last: last_read[id].max(first),
                    });
                }
            }
        }
        let (offsets, bytes) = place(&lives);
        for (id, offset) in inner.into_iter().zip(offsets) {
            places[id] = Place::Arena(offset);
        }
        Ok((places, bytes))
    }
}

/// What follows a product, rounded where eager rounds.
///
/// # Safety
/// The bias has `n` elements, and the rest is as for `rows_of`.
unsafe fn epilogue<'a, T>(
    l: &LinearStep,
    bias: Option<Memory>,
    memory: &dyn Fn(ValueId) -> Result<Memory>,
    n: usize,
) -> Result<Epilogue<'a, T>> {
    let residual = match &l.r {
        // SAFETY: by the caller.
        Some((operand, stride)) => Some(unsafe { rows_of(memory(operand.value)?, operand, l.m, n, *stride) }),
        None => None,
    };
    Ok(Epilogue {
        // SAFETY: by the caller.
        bias: bias.map(|b| unsafe { slice(b, n) }),
        activation: l.activation,
        residual,
        round_before_activation: true,
    })
}

/// A weight with a row for each column of the result.
fn rows<'a, T: Copy>(l: &LinearStep, weight: &'a [T], n: usize, k: usize) -> Cow<'a, [T]> {
    if !l.transposed {
        return Cow::Borrowed(weight);
    }
    Cow::Owned((0..n * k).map(|i| weight[i % k * n + i / k]).collect())
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

impl Runnable {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of the values in between.
    pub fn arena_bytes(&self) -> usize {
        self.arenas.bytes()
    }

    /// Bytes of packed constants.
    pub fn packed_bytes(&self) -> usize {
        let mut seen: Vec<*const Packed> = vec![];
        let mut total = 0;
        for weights in self.weights.iter().flatten() {
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
        self.weights.iter().flatten().map(|w| w.packed.kind().name()).collect()
    }

    /// Which constants steps read as they are, by their place in the plan's `constants`.
    pub fn kept(&self) -> Vec<usize> {
        let mut read: Vec<ValueId> = self.plan.steps.iter().flat_map(Task::reads).collect();
        for (step, weights) in self.plan.steps.iter().zip(&self.weights) {
            if let (Task::Linear(l), Some(w)) = (step, weights) {
                read.extend(l.b);
                read.extend(w.packed.kind().in_place().then_some(l.w));
            }
        }
        (0..self.constants.len())
            .filter(|i| read.contains(&self.plan.constants[*i]))
            .collect()
    }

    /// What the weight at this place in memory was packed into.
    fn packed_for(&self, memory: Memory, l: &LinearStep, sizes: (usize, usize)) -> Option<Arc<Packed>> {
        let constant = |id: ValueId| self.plan.constants.iter().position(|c| *c == id);
        let steps = self.plan.steps.iter().zip(&self.weights);
        steps
            .filter_map(|(step, weights)| match (step, weights) {
                (Task::Linear(other), Some(w)) if other.transposed == l.transposed => Some((other, w)),
                _ => None,
            })
            .find(|(other, w)| {
                w.packed.sizes() == sizes && constant(other.w).is_some_and(|at| self.constants[at].0 == memory.0)
            })
            .map(|(_, w)| w.packed.clone())
    }

    /// Runs all steps.
    ///
    /// # Safety
    /// Each memory holds its value's bytes, densely; outputs overlap nothing else.
    pub unsafe fn run(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(broken("another number of inputs or outputs"));
        }
        if self.calls.is_empty() {
            // SAFETY: by the caller.
            return unsafe { self.run_steps(threads, inputs, outputs) };
        }
        // SAFETY: by the caller.
        on_borrowed(|| unsafe { self.run_steps(threads, inputs, outputs) })
    }

    /// # Safety
    /// As for `run`.
    unsafe fn run_steps(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        self.arenas.with(|arena| {
            let base = arena.as_mut_ptr();
            let memory = |id: ValueId| match self.places[id] {
                Place::Input(i) => Ok(inputs[i]),
                Place::Output(i) => Ok(outputs[i]),
                // SAFETY: offsets were planned within the block.
                Place::Arena(offset) => Ok(Memory(unsafe { base.add(offset) })),
                Place::Constant(i) => Ok(self.constants[i]),
                Place::Nowhere => Err(broken(format!("value {id} is nowhere"))),
            };
            for (at, (step, weights)) in self.plan.steps.iter().zip(&self.weights).enumerate() {
                // SAFETY: values that live at the same time do not overlap, and sizes are the values'.
                let done = match step {
                    Task::Linear(l) => unsafe { self.linear(threads, l, weights.as_ref(), &memory) },
                    Task::Region(r) => unsafe { self.region(threads, r, &memory) },
                    Task::Rows(r) => unsafe { self.rows(threads, r, &memory) },
                    Task::Torch(t) => unsafe { self.torch(t, &memory) },
                };
                done.map_err(|e| broken(format!("step {at} ({}): {e}", step.name())))?;
            }
            Ok(())
        })
    }

    /// # Safety
    /// `memory` gives memory of the values' sizes, that of `y` apart from the others'.
    unsafe fn linear(
        &self,
        threads: usize,
        l: &LinearStep,
        weights: Option<&Weights>,
        memory: &dyn Fn(ValueId) -> Result<Memory>,
    ) -> Result<()> {
        let weights = weights.ok_or_else(|| broken("a linear layer without weights"))?;
        // SAFETY: by the caller.
        unsafe {
            match weights.packed.kind().dtype() {
                DType::F32 => self.linear_of::<f32>(threads, l, weights, memory),
                _ => self.linear_of::<bf16>(threads, l, weights, memory),
            }
        }
    }

    /// # Safety
    /// As for `linear`.
    unsafe fn linear_of<T: LinearElement>(
        &self,
        threads: usize,
        l: &LinearStep,
        weights: &Weights,
        memory: &dyn Fn(ValueId) -> Result<Memory>,
    ) -> Result<()> {
        let (n, k) = weights.packed.sizes();
        // SAFETY: by the caller; rows were planned within their values.
        let done = unsafe {
            weights.packed.run::<T>(
                threads,
                rows_of(memory(l.x.value)?, &l.x, l.m, k, l.x_stride),
                l.m,
                RowsMut::dense(slice_mut(memory(l.y)?, l.m * n), n),
                &epilogue(l, weights.bias, memory, n)?,
            )
        };
        done.map_err(|e| broken(e.to_string()))
    }

    /// # Safety
    /// As for `linear`.
    unsafe fn region(&self, threads: usize, r: &RegionStep, memory: &dyn Fn(ValueId) -> Result<Memory>) -> Result<()> {
        // SAFETY: by the caller.
        let inputs = unsafe { self.views(&r.inputs, memory)? };
        let mut outputs = Vec::with_capacity(r.outputs.len());
        for id in &r.outputs {
            // SAFETY: by the caller.
            outputs.push(unsafe { ViewMut::from_raw(memory(*id)?.0, self.plan.values[*id].dtype, &r.dense) });
        }
        r.region.run(threads, &r.shape, &inputs, &mut outputs)
    }

    /// # Safety
    /// As for `linear`.
    unsafe fn rows(&self, threads: usize, r: &RowStep, memory: &dyn Fn(ValueId) -> Result<Memory>) -> Result<()> {
        // SAFETY: by the caller.
        let inputs = unsafe { self.views(&r.inputs, memory)? };
        let dtype = self.plan.values[r.output].dtype;
        // SAFETY: by the caller.
        let output = unsafe { ViewMut::from_raw(memory(r.output)?.0, dtype, &r.dense) };
        r.rows.run(threads, &r.shape, r.reduced, &inputs, &mut [output])
    }

    /// # Safety
    /// As for `linear`.
    unsafe fn torch(&self, t: &TorchStep, memory: &dyn Fn(ValueId) -> Result<Memory>) -> Result<()> {
        let mut reads = Vec::with_capacity(t.reads.len());
        for operand in &t.reads {
            let dtype = self.plan.values[operand.value].dtype;
            reads.push(Strided {
                data: at(memory(operand.value)?, operand.offset * dtype.size()),
                dtype,
                shape: &operand.shape,
                strides: &operand.strides,
            });
        }
        let dense: Vec<Vec<isize>> = (t.writes.iter())
            .map(|id| dense_strides(&self.plan.values[*id].shape))
            .collect();
        let mut writes = Vec::with_capacity(t.writes.len());
        for (id, strides) in t.writes.iter().zip(&dense) {
            let value = &self.plan.values[*id];
            writes.push(Strided {
                data: memory(*id)?.0,
                dtype: value.dtype,
                shape: &value.shape,
                strides,
            });
        }
        let call = (self.calls.get(t.call)).ok_or_else(|| broken(format!("there is no call {}", t.call)))?;
        // SAFETY: by the caller.
        unsafe { call.call(&reads, &writes) }
    }

    /// # Safety
    /// As for `linear`.
    unsafe fn views<'a>(
        &self,
        inputs: &'a [Operand],
        memory: &dyn Fn(ValueId) -> Result<Memory>,
    ) -> Result<Vec<View<'a>>> {
        let view = |operand: &'a Operand| {
            let dtype = self.plan.values[operand.value].dtype;
            let data = at(memory(operand.value)?, operand.offset * dtype.size());
            // SAFETY: by the caller.
            Ok(unsafe { View::from_raw(data, dtype, &operand.strides) })
        };
        inputs.iter().map(view).collect()
    }
}

/// So many bytes further on.
fn at(memory: Memory, bytes: usize) -> *mut u8 {
    memory.0.wrapping_add(bytes)
}

/// # Safety
/// The rows are within their value.
unsafe fn rows_of<'a, T>(
    memory: Memory,
    operand: &Operand,
    count: usize,
    columns: usize,
    stride: usize,
) -> Rows<'a, T> {
    let length = if count == 0 { 0 } else { (count - 1) * stride + columns };
    let data = Memory(at(memory, operand.offset * size_of::<T>()));
    Rows {
        // SAFETY: by the caller.
        data: unsafe { slice(data, length) },
        stride,
    }
}
