//! Binding a plan: weights packed by the kernels that are the fastest here, memory planned.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use hypatia_core::ty::DType;

use super::chunks::{Chunks, Form};
use super::ready::{Ready, Weights};
use super::{
    Gradient, LinearStep, Made, Memory, Operand, Place, Plan, Runnable, Setting, Task, Value, ValueId, broken, slice,
};
use crate::arena::{Arenas, Life, place};
use crate::cpu::ABILITIES;
use crate::cpu::linear::{ErrorClass, Kind, Packed, Problem, Rows, rank};
use crate::error::{Error, Result};
use crate::kernels::call::{Call, Prepared, Strided};

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
        let chunks = self.chunks(setting.threads)?;
        // SAFETY: handed on.
        unsafe { self.bind_in(chunks, constants, calls, setting) }
    }

    /// # Safety
    /// As for [`Plan::bind`].
    pub(super) unsafe fn bind_in(
        self: Arc<Plan>,
        chunks: Chunks,
        constants: &[Memory],
        mut calls: Vec<Box<dyn Call>>,
        setting: Setting<'_>,
    ) -> Result<Runnable> {
        if self.device != ABILITIES.name {
            return Err(broken(format!("made for the device {:?}", self.device)));
        }
        if constants.len() != self.constants.len() || calls.len() != self.calls() {
            return Err(broken(format!(
                "{} constants and {} calls instead of {} and {}",
                constants.len(),
                calls.len(),
                self.constants.len(),
                self.calls()
            )));
        }
        // SAFETY: the caller vouches for the memory.
        let weights = unsafe { self.all_weights(constants, setting)? };
        let packed: usize = weights.iter().flatten().map(|w| w.packed.bytes()).sum();
        let room = setting.most.map_or(usize::MAX, |most| most.saturating_sub(packed));
        // SAFETY: as above.
        let prepared = unsafe { self.prepare(&mut calls, constants, room, setting.like)? };
        // Rows of a chunk are part of a value; a call makes all of it.
        let whole = chunks.starts().len() == 1;
        let made = Made::between(&self, if whole { &calls } else { &[] }, None);
        let addresses = self.addresses(constants, &chunks, &made)?;
        let bound = |form: Form<'_>| {
            let steps = self.steps.iter().zip(&weights);
            let ready = steps.map(|(step, weights)| Ready::new(&self, step, weights.clone(), (&addresses, form)));
            ready.collect::<Result<Vec<Ready>>>()
        };
        let forms = chunks.forms().into_iter().map(bound).collect::<Result<Vec<_>>>()?;
        let products = forms.iter().flatten().any(|ready| matches!(ready, Ready::Product(_)));
        let row = |id: &ValueId| chunks.row(&self, *id);
        Ok(Runnable {
            forms,
            starts: chunks.starts(),
            rows: self.inputs.iter().chain(&self.outputs).map(row).collect(),
            together: chunks.together,
            beside_torch: products || !calls.is_empty(),
            constants: constants.to_vec(),
            calls,
            prepared,
            made,
            arenas: Arenas::new(addresses.bytes, chunks.together),
            plan: self,
        })
    }

    /// Prepares the calls in so many bytes, beside what a plan like this one has; what they read.
    ///
    /// # Safety
    /// As for [`Plan::bind`].
    unsafe fn prepare(
        &self,
        calls: &mut [Box<dyn Call>],
        constants: &[Memory],
        mut room: usize,
        like: Option<&Runnable>,
    ) -> Result<Vec<Prepared>> {
        let mut known = like.map_or(vec![], |other| other.prepared.clone());
        let before = known.len();
        let mut read = vec![];
        for step in &self.steps {
            let Task::Torch(t) = step else { continue };
            let Some(call) = calls.get_mut(t.call) else { continue };
            let reads: Vec<_> = t.reads.iter().map(|o| self.constant(o, constants)).collect();
            // SAFETY: constants are as the caller says, for as long as the plan is bound to them.
            let prepared = unsafe { call.prepare(&reads, &known, room)? };
            let new = |p: &&Prepared| !known[..].iter().any(|k| Arc::ptr_eq(&k.form, &p.form));
            let new: Vec<_> = prepared.iter().filter(new).cloned().collect();
            room = room.saturating_sub(new.iter().map(|p| p.bytes).sum());
            known.extend(new);
            read.extend(prepared);
        }
        tracing::debug!(shared = before, new = known.len() - before, "weights of calls prepared");
        Ok(read)
    }

    /// What an operand is, if it is a constant.
    fn constant<'a>(&self, operand: &'a Operand, constants: &[Memory]) -> Option<Strided<'a>> {
        let at = self.constants.iter().position(|c| *c == operand.value)?;
        let dtype = self.values[operand.value].dtype;
        Some(Strided {
            data: constants[at].0.wrapping_add(operand.offset * dtype.size()),
            dtype,
            shape: &operand.shape,
            strides: &operand.strides,
            gpu: None,
        })
    }

    /// The weights of all steps that have some, as their kernels like them.
    ///
    /// # Safety
    /// As for [`Plan::bind`].
    unsafe fn all_weights(&self, constants: &[Memory], setting: Setting<'_>) -> Result<Vec<Option<Weights>>> {
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
                Task::Linear(l) if l.gradient != Gradient::default() => {
                    return Err(broken("a step of a GPU"));
                }
                Task::Linear(l) if self.constants.contains(&l.w) => {
                    let left = Setting {
                        limit: setting.limit.saturating_sub(start.elapsed()),
                        most: setting.most.map(|most| most.saturating_sub(copies)),
                        ..setting
                    };
                    // SAFETY: by the caller; sizes and dtype are the value's.
                    let packed = unsafe { self.packed(l, given(l.w)?, left)? };
                    copies += packed.bytes();
                    Some(Weights {
                        packed,
                        bias: l.b.map(|b| self.bias(l, given(b)?)).transpose()?,
                    })
                }
                Task::Linear(_) | Task::Region(_) | Task::Rows(_) | Task::Torch(_) => None,
                _ => return Err(broken("a step of a GPU")),
            });
        }
        Ok(weights)
    }

    /// # Safety
    /// The memory holds the weight, for as long as the result is used.
    unsafe fn packed(&self, l: &LinearStep, w: Memory, setting: Setting<'_>) -> Result<Arc<Packed>> {
        let weight = self.value(l.w)?;
        let Some((all, k)) = l.sizes(&weight.shape) else {
            return Err(broken("a weight that is no matrix"));
        };
        let n = l.part(all).len();
        if let Some(known) = setting.like.and_then(|other| other.packed_for(w, l, (n, k))) {
            return Ok(known);
        }
        let mut kinds = Kind::candidates(weight.dtype, l.m, ErrorClass::Fp32, !l.transposed);
        kinds.retain(|kind| !setting.without.iter().any(|name| name == kind.name()));
        if setting.most.is_some_and(|most| most < n * k * weight.dtype.size()) {
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
                DType::F32 => Packed::first(
                    &kinds,
                    Rows::dense(&rows::<f32>(l, slice(w, all * k), all, k)?, k),
                    n,
                    k,
                ),
                DType::BF16 => Packed::first(
                    &kinds,
                    Rows::dense(&rows::<bf16>(l, slice(w, all * k), all, k)?, k),
                    n,
                    k,
                ),
                other => return Err(broken(format!("no linear layer for {}", other.name()))),
            }
        };
        packed.map(Arc::new).map_err(|e| broken(e.to_string()))
    }

    /// Where the bias of the columns starts that are computed.
    fn bias(&self, l: &LinearStep, whole: Memory) -> Result<Memory> {
        let first = l.columns.as_ref().map_or(0, |c| c.start);
        Ok(Memory(whole.0.wrapping_add(first * self.value(l.w)?.dtype.size())))
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

    /// Where each value is, and the bytes of the values in between; those that torch makes are nowhere yet.
    pub fn places(&self, made: &Made) -> Result<(Vec<Place>, usize)> {
        let (mut places, ids, lives) = self.lives(&Chunks::whole(), Some(made))?;
        let (offsets, bytes) = place(&lives);
        for (id, offset) in ids.into_iter().zip(offsets) {
            places[id] = Place::Arena(offset);
        }
        Ok((places, bytes))
    }

    /// Where inputs, constants and results are; the values in between and when they live, but for those that torch makes.
    pub(super) fn lives(&self, chunks: &Chunks, made: Option<&Made>) -> Result<(Vec<Place>, Vec<ValueId>, Vec<Life>)> {
        let mut places = vec![Place::Nowhere; self.values.len()];
        for (i, id) in self.inputs.iter().enumerate() {
            places[*id] = Place::Input(i);
        }
        for (i, id) in self.constants.iter().enumerate() {
            places[*id] = Place::Constant(i);
        }
        for (i, id) in self.outputs.iter().enumerate() {
            if places[*id] != Place::Nowhere {
                return Err(broken("a result that is an input or is returned twice"));
            }
            places[*id] = Place::Output(i);
        }
        let mut last_read = vec![0; self.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            let read = step.reads().into_iter().chain(step.weights());
            read.for_each(|id| last_read[id] = at);
        }
        let (mut ids, mut lives) = (vec![], vec![]);
        for (first, step) in self.steps.iter().enumerate() {
            for id in step.writes() {
                if places[id] == Place::Nowhere && made.and_then(|m| m.number(id)).is_none() {
                    let last = last_read[id].max(first);
                    let bytes = chunks.bytes(self, id);
                    ids.push(id);
                    lives.push(Life { bytes, first, last });
                }
            }
        }
        Ok((places, ids, lives))
    }
}

/// A weight with a row for each column that is computed, of `n` columns.
fn rows<'a, T: Copy>(l: &LinearStep, weight: &'a [T], n: usize, k: usize) -> Result<Cow<'a, [T]>> {
    let columns = l.part(n);
    if !l.transposed {
        return Ok(Cow::Borrowed(&weight[columns.start * k..columns.end * k]));
    }
    let count = columns.len() * k;
    let mut turned = vec![];
    turned
        .try_reserve_exact(count)
        .map_err(|_| Error::Memory(count * size_of::<T>()))?;
    let row = |column: usize| (0..k).map(move |term| weight[term * n + column]);
    turned.extend(columns.flat_map(row));
    Ok(Cow::Owned(turned))
}
