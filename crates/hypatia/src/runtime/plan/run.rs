//! Running a plan: its steps in order, over memory that was planned.

use half::bf16;

use super::{
    LinearStep, Memory, Operand, Place, RegionStep, RowStep, Runnable, Task, TorchStep, ValueId, Weights, broken,
    slice, slice_mut,
};
use crate::error::Result;
use crate::runtime::cpu::linear::{Epilogue, LinearElement, Rows, RowsMut};
use crate::runtime::cpu::region::{View, ViewMut};
use crate::runtime::operand::dense_strides;
use crate::runtime::pool::on_borrowed;
use crate::runtime::torch::Strided;
use crate::ty::DType;

impl Runnable {
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
                    Task::Columns(_) => Err(broken("a step of a GPU")),
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
                gpu: None,
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
                gpu: None,
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
