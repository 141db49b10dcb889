//! A plan: steps over planned buffers, run by one call. Shapes are known; constants are bound once.

use std::borrow::Cow;
use std::sync::Arc;

use half::bf16;

use super::arena::{Arenas, Life, place};
use super::cpu::linear::{Epilogue, PackedBf16, PackedF32, Rows, RowsMut};
use super::cpu::region::{View, ViewMut};
use super::operand::dense_strides;
use super::pool::on_borrowed;
pub use super::step::{LinearStep, Operand, Plan, RegionStep, RowStep, Task, TorchStep, Value, ValueId};
use super::torch::{Call, Strided};
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
enum Bound {
    Nothing,
    F32 {
        packed: PackedF32,
        bias: Option<Vec<f32>>,
    },
    Bf16 {
        packed: PackedBf16,
        bias: Option<Vec<bf16>>,
    },
}

/// A plan with its constants, ready to run, from any number of threads at once.
pub struct Runnable {
    plan: Arc<Plan>,
    places: Vec<Place>,
    bound: Vec<Bound>,
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
    /// Each memory holds its constant's bytes, densely. Those that [`Plan::kept`] names are read at every call
    /// and must outlive the result; the others are packed here.
    pub unsafe fn bind(self: Arc<Plan>, constants: &[Memory], calls: Vec<Box<dyn Call>>) -> Result<Runnable> {
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
        let mut bound = vec![];
        for step in &self.steps {
            bound.push(match step {
                Task::Linear(l) => {
                    let (w, b) = (given(l.w)?, l.b.map(given).transpose()?);
                    // SAFETY: the caller vouches for the memory; sizes and dtype are the value's.
                    unsafe { Bound::linear(l, self.value(l.w)?, w, b)? }
                }
                Task::Region(_) | Task::Rows(_) | Task::Torch(_) => Bound::Nothing,
            });
        }
        let (mut places, bytes) = self.places()?;
        for at in self.kept() {
            places[self.constants[at]] = Place::Constant(at);
        }
        Ok(Runnable {
            places,
            bound,
            constants: constants.to_vec(),
            calls,
            arenas: Arenas::new(bytes),
            plan: self,
        })
    }

    /// Which constants steps read as they are, by their place in `constants`.
    pub fn kept(&self) -> Vec<usize> {
        let read: Vec<ValueId> = self.steps.iter().flat_map(Task::reads).collect();
        (0..self.constants.len())
            .filter(|i| read.contains(&self.constants[*i]))
            .collect()
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

impl Bound {
    /// # Safety
    /// The memories hold the weight and a bias of as many rows, of the weight's dtype.
    unsafe fn linear(l: &LinearStep, weight: &Value, w: Memory, b: Option<Memory>) -> Result<Bound> {
        let Some((n, k)) = l.sizes(&weight.shape) else {
            return Err(broken("a weight that is no matrix"));
        };
        let failed = |e| broken(format!("{e}"));
        // SAFETY: by the caller.
        unsafe {
            Ok(match weight.dtype {
                DType::F32 => Bound::F32 {
                    packed: PackedF32::pack(Rows::dense(&rows(l, slice(w, n * k), n, k), k), n, k).map_err(failed)?,
                    bias: b.map(|b| slice::<f32>(b, n).to_vec()),
                },
                DType::BF16 => Bound::Bf16 {
                    packed: PackedBf16::pack(Rows::dense(&rows(l, slice(w, n * k), n, k), k), n, k).map_err(failed)?,
                    bias: b.map(|b| slice::<bf16>(b, n).to_vec()),
                },
                other => return Err(broken(format!("no linear layer for {}", other.name()))),
            })
        }
    }
}

/// What follows a product, rounded where eager rounds.
fn epilogue<'a, T>(l: &LinearStep, bias: &'a Option<Vec<T>>, residual: Option<Rows<'a, T>>) -> Epilogue<'a, T> {
    Epilogue {
        bias: bias.as_deref(),
        activation: l.activation,
        residual,
        round_before_activation: true,
    }
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
        let of = |b: &Bound| match b {
            Bound::Nothing => 0,
            Bound::F32 { packed, .. } => packed.bytes(),
            Bound::Bf16 { packed, .. } => packed.bytes(),
        };
        self.bound.iter().map(of).sum::<usize>()
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
            for (at, (step, bound)) in self.plan.steps.iter().zip(&self.bound).enumerate() {
                // SAFETY: values that live at the same time do not overlap, and sizes are the values'.
                let done = match step {
                    Task::Linear(l) => unsafe { self.linear(threads, l, bound, &memory) },
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
        bound: &Bound,
        memory: &dyn Fn(ValueId) -> Result<Memory>,
    ) -> Result<()> {
        let Some((n, k)) = l.sizes(&self.plan.values[l.w].shape) else {
            return Err(broken("a weight that is no matrix"));
        };
        let m = l.m;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let y = memory(l.y)?;
        // SAFETY: by the caller; rows were planned within their values.
        let done = unsafe {
            match bound {
                Bound::Nothing => return Err(broken("a linear layer without weights")),
                Bound::F32 { packed, bias } => packed.run(
                    threads,
                    rows_of(memory(l.x.value)?, &l.x, m, k, l.x_stride),
                    m,
                    RowsMut::dense(slice_mut(y, m * n), n),
                    &epilogue(l, bias, residual(l, memory, n)?),
                ),
                Bound::Bf16 { packed, bias } => packed.run(
                    threads,
                    rows_of(memory(l.x.value)?, &l.x, m, k, l.x_stride),
                    m,
                    RowsMut::dense(slice_mut(y, m * n), n),
                    &epilogue(l, bias, residual(l, memory, n)?),
                ),
            }
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

/// # Safety
/// As for `rows_of`.
unsafe fn residual<'a, T>(
    l: &LinearStep,
    memory: &dyn Fn(ValueId) -> Result<Memory>,
    n: usize,
) -> Result<Option<Rows<'a, T>>> {
    let Some((operand, stride)) = &l.r else {
        return Ok(None);
    };
    // SAFETY: by the caller.
    Ok(Some(unsafe {
        rows_of(memory(operand.value)?, operand, l.m, n, *stride)
    }))
}
