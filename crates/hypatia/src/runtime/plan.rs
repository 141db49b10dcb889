//! A plan: steps over planned buffers, run by one call. Shapes are known; constants are bound once.

use std::borrow::Cow;
use std::sync::Arc;

use half::bf16;

use super::arena::{Arenas, Life, place};
use super::cpu::aligned::Aligned;
use super::cpu::linear::{Epilogue, PackedBf16, PackedF32, Rows, RowsMut};
use super::cpu::region::{View, ViewMut};
pub use super::step::{LinearStep, Plan, RegionStep, RowStep, Task, Value, ValueId};
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
    constants: Vec<Aligned<u8>>,
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
    /// Binds the constants, in the order of `constants`, and plans memory.
    ///
    /// # Safety
    /// Each memory holds its constant's bytes, densely; they are copied or packed here.
    pub unsafe fn bind(self: Arc<Plan>, constants: &[Memory]) -> Result<Runnable> {
        if constants.len() != self.constants.len() {
            return Err(broken(format!(
                "{} constants instead of {}",
                constants.len(),
                self.constants.len()
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
                Task::Region(_) | Task::Rows(_) => Bound::Nothing,
            });
        }
        let (mut places, bytes) = self.places()?;
        let mut copies = vec![];
        for step in &self.steps {
            for id in step.reads() {
                if places[id] == Place::Nowhere {
                    let value = self.value(id)?;
                    let mut copy = Aligned::zeroed(value.bytes());
                    // SAFETY: the caller vouches for the memory.
                    copy.copy_from_slice(unsafe { slice(given(id)?, value.bytes()) });
                    places[id] = Place::Constant(copies.len());
                    copies.push(copy);
                }
            }
        }
        Ok(Runnable {
            places,
            bound,
            constants: copies,
            arenas: Arenas::new(bytes),
            plan: self,
        })
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
        let mut inner = vec![];
        let mut lives = vec![];
        for (first, step) in self.steps.iter().enumerate() {
            for id in step.writes() {
                if places[id] == Place::Nowhere {
                    let last = self
                        .steps
                        .iter()
                        .rposition(|s| s.reads().contains(&id))
                        .unwrap_or(first);
                    inner.push(id);
                    lives.push(Life {
                        bytes: self.value(id)?.bytes(),
                        first,
                        last,
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
        self.bound.iter().map(of).sum::<usize>() + self.constants.iter().map(|c| c.len()).sum::<usize>()
    }

    /// Runs all steps.
    ///
    /// # Safety
    /// Each memory holds its value's bytes, densely; outputs overlap nothing else.
    pub unsafe fn run(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(broken("another number of inputs or outputs"));
        }
        self.arenas.with(|arena| {
            let base = arena.as_mut_ptr();
            let memory = |id: ValueId| match self.places[id] {
                Place::Input(i) => Ok(inputs[i]),
                Place::Output(i) => Ok(outputs[i]),
                // SAFETY: offsets were planned within the block.
                Place::Arena(offset) => Ok(Memory(unsafe { base.add(offset) })),
                Place::Constant(i) => Ok(Memory(self.constants[i].as_ptr().cast_mut())),
                Place::Nowhere => Err(broken(format!("value {id} is nowhere"))),
            };
            for (at, (step, bound)) in self.plan.steps.iter().zip(&self.bound).enumerate() {
                // SAFETY: values that live at the same time do not overlap, and sizes are the values'.
                let done = match step {
                    Task::Linear(l) => unsafe { self.linear(threads, l, bound, &memory) },
                    Task::Region(r) => unsafe { self.region(threads, r, &memory) },
                    Task::Rows(r) => unsafe { self.rows(threads, r, &memory) },
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
        let (x, y) = (&self.plan.values[l.x], &self.plan.values[l.y]);
        let Some((n, k)) = l.sizes(&self.plan.values[l.w].shape) else {
            return Err(broken("a weight that is no matrix"));
        };
        let m = y.numel().checked_div(n).unwrap_or(0);
        if m == 0 || n == 0 {
            return Ok(());
        }
        debug_assert_eq!(x.numel(), m * k);
        let (xm, ym) = (memory(l.x)?, memory(l.y)?);
        let rm = l.r.map(memory).transpose()?;
        // SAFETY: by the caller.
        let done = unsafe {
            match bound {
                Bound::Nothing => return Err(broken("a linear layer without weights")),
                Bound::F32 { packed, bias } => packed.run(
                    threads,
                    Rows::dense(slice(xm, m * k), k),
                    m,
                    RowsMut::dense(slice_mut(ym, m * n), n),
                    &epilogue(l, bias, rm.map(|r| Rows::dense(slice(r, m * n), n))),
                ),
                Bound::Bf16 { packed, bias } => packed.run(
                    threads,
                    Rows::dense(slice(xm, m * k), k),
                    m,
                    RowsMut::dense(slice_mut(ym, m * n), n),
                    &epilogue(l, bias, rm.map(|r| Rows::dense(slice(r, m * n), n))),
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
    unsafe fn views<'a>(
        &self,
        inputs: &'a [(ValueId, Vec<isize>)],
        memory: &dyn Fn(ValueId) -> Result<Memory>,
    ) -> Result<Vec<View<'a>>> {
        let view = |(id, strides): &'a (ValueId, Vec<isize>)| {
            // SAFETY: by the caller.
            Ok(unsafe { View::from_raw(memory(*id)?.0, self.plan.values[*id].dtype, strides) })
        };
        inputs.iter().map(view).collect()
    }
}
