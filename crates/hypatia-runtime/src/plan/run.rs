//! Running a plan: its steps in order, over memory that was planned.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use half::bf16;
use hypatia_core::ty::DType;
use smallvec::SmallVec;

use super::ready::{Ends, Form, Ready, Weights};
use super::{Holding, LinearStep, Memory, Runnable, Task, TorchStep, broken, slice, slice_mut};
use crate::cpu::linear::{Epilogue, LinearElement, Rows, RowsMut};
use crate::error::{Error, Result};
use crate::kernels::call::{Handed, Strided};
use crate::pool::{Pool, on_borrowed};

impl Runnable {
    /// Runs all steps.
    ///
    /// # Safety
    /// Each memory holds its value's bytes, densely; outputs overlap nothing else.
    pub unsafe fn run(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(broken("another number of inputs or outputs"));
        }
        if !self.beside_torch {
            // SAFETY: by the caller.
            return unsafe { self.run_steps(threads, inputs, outputs) };
        }
        // SAFETY: by the caller.
        on_borrowed(|| unsafe { self.run_steps(threads, inputs, outputs) })
    }

    /// # Safety
    /// As for `run`.
    unsafe fn run_steps(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        let given: SmallVec<[Memory; 15]> = inputs.iter().chain(outputs).copied().collect();
        if self.together == 1 || threads == 1 {
            // SAFETY: by the caller.
            return (0..self.starts.len()).try_for_each(|chunk| unsafe { self.chunk(chunk, threads, &given, |_| ()) });
        }
        let failed = Mutex::new(None);
        Pool::global().run(threads, self.starts.len(), &|chunk| {
            // SAFETY: by the caller; chunks write other rows of the results and have blocks of their own.
            if let Err(e) = unsafe { self.chunk(chunk, 1, &given, |_| ()) } {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
            }
        });
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), Err)
    }

    /// Runs all steps, and tells the seconds of each. Where chunks of rows run beside each other, they run one after the
    /// other here, and the times are divided by how many would.
    ///
    /// # Safety
    /// As for `run`.
    pub unsafe fn run_timed(&self, threads: usize, inputs: &[Memory], outputs: &[Memory]) -> Result<Vec<f64>> {
        if inputs.len() != self.plan.inputs.len() || outputs.len() != self.plan.outputs.len() {
            return Err(broken("another number of inputs or outputs"));
        }
        let given: SmallVec<[Memory; 15]> = inputs.iter().chain(outputs).copied().collect();
        let alone = self.together == 1 || threads == 1;
        let (each, beside) = if alone {
            (threads, 1)
        } else {
            (1, threads.min(self.starts.len()))
        };
        let mut seconds = vec![0.0; self.plan.steps.len()];
        let mut all = || -> Result<()> {
            for chunk in 0..self.starts.len() {
                let mut before = Instant::now();
                let done = |at: usize| {
                    let now = Instant::now();
                    seconds[at] += (now - before).as_secs_f64() / beside as f64;
                    before = now;
                };
                // SAFETY: by the caller.
                unsafe { self.chunk(chunk, each, &given, done) }?;
            }
            Ok(())
        };
        if self.beside_torch { on_borrowed(all) } else { all() }?;
        Ok(seconds)
    }

    /// Runs all steps for a chunk of rows; `done_with` hears of each that is done.
    ///
    /// # Safety
    /// As for `run`, for the chunk's rows.
    #[inline(always)]
    unsafe fn chunk(
        &self,
        chunk: usize,
        threads: usize,
        given: &[Memory],
        mut done_with: impl FnMut(usize),
    ) -> Result<()> {
        let (start, last) = (self.starts[chunk], chunk + 1 == self.starts.len());
        let form = if last { self.forms.last() } else { self.forms.first() };
        let steps = form.map_or(&[][..], |steps| steps);
        let done = self.arenas.with(|arena| {
            let mut blocks: SmallVec<[*mut u8; 16]> = SmallVec::new();
            blocks.push(arena.as_mut_ptr());
            let moved = given.iter().zip(&self.rows);
            blocks.extend(moved.map(|(m, row)| m.0.wrapping_add(start * row)));
            let behind = blocks.len();
            blocks.resize(behind + self.made.count, std::ptr::null_mut());
            let mut holding = Holding::new(&self.made);
            for (at, (step, ready)) in self.plan.steps.iter().zip(steps).enumerate() {
                // SAFETY: values that live at the same time do not overlap, and sizes are the values'. Each value that
                // torch makes is held from the step that makes it to the last one that reads it.
                let done = unsafe { self.step(threads, step, ready, &blocks) };
                let handed = done.map_err(|e| broken(format!("step {at} ({}): {e}", step.name())))?;
                for (i, taken) in handed {
                    let id = step.writes()[i];
                    if let Some(number) = self.made.number(id) {
                        blocks[behind + number] = taken.data();
                        holding.hold(id, taken);
                    }
                }
                holding.leave(at);
                done_with(at);
            }
            Ok(())
        });
        done.unwrap_or_else(|| Err(Error::Memory(self.arenas.bytes())))
    }

    /// # Safety
    /// The blocks are those that addresses were made for, and values lie in them apart from each other.
    unsafe fn step(&self, threads: usize, step: &Task, ready: &Ready, blocks: &[*mut u8]) -> Result<Handed> {
        // SAFETY: by the caller; fits were made for these steps.
        unsafe {
            match (step, ready) {
                (Task::Torch(t), Ready::Torch(ends, forms)) => return self.torch(t, ends, forms, blocks),
                (Task::Linear(l), Ready::Linear { weights, m, x, r, y }) => {
                    let at = (x.of(blocks), r.map(|r| r.of(blocks)), y.of(blocks));
                    match weights.packed.kind().dtype() {
                        DType::F32 => linear::<f32>(threads, l, *m, weights, at),
                        _ => linear::<bf16>(threads, l, *m, weights, at),
                    }
                }
                (Task::Linear(l), Ready::Product(product)) => product.run(threads, l, blocks),
                (Task::Region(_), Ready::Region(fit, ends)) => {
                    ends.at(blocks, |inputs, outputs| fit.run(threads, inputs, outputs));
                    Ok(())
                }
                (Task::Rows(r), Ready::Rows(fit, ends)) => {
                    ends.at(blocks, |inputs, outputs| r.rows.run_at(fit, threads, inputs, outputs));
                    Ok(())
                }
                _ => Err(broken("bound as something else")),
            }
        }
        .map(|()| vec![])
    }

    /// # Safety
    /// As for `step`.
    unsafe fn torch(&self, t: &TorchStep, ends: &Ends, forms: &[Form], blocks: &[*mut u8]) -> Result<Handed> {
        let (inputs, outputs) = ends.addresses.split_at(ends.inputs);
        let read = t.reads.iter().zip(inputs).map(|(operand, address)| Strided {
            data: address.of(blocks),
            dtype: self.plan.values[operand.value].dtype,
            shape: &operand.shape,
            strides: &operand.strides,
            gpu: None,
        });
        let results = t.writes.iter().zip(outputs).zip(forms);
        let write = results.map(|((id, address), (shape, strides))| Strided {
            data: address.of(blocks),
            dtype: self.plan.values[*id].dtype,
            shape,
            strides,
            gpu: None,
        });
        let (reads, writes): (SmallVec<[_; 4]>, SmallVec<[_; 2]>) = (read.collect(), write.collect());
        let call = (self.calls.get(t.call)).ok_or_else(|| broken(format!("there is no call {}", t.call)))?;
        // SAFETY: by the caller.
        let handed = unsafe { call.call(&reads, &writes)? };
        match writes.iter().filter(|w| w.is_open()).count() == handed.len() {
            true => Ok(handed),
            false => Err(broken("a call did not hand over its results")),
        }
    }
}

impl Ends {
    /// Calls a function with where inputs and outputs start, given where the blocks of a call do.
    #[inline(always)]
    fn at(&self, blocks: &[*mut u8], f: impl FnOnce(&[*mut u8], &[*mut u8])) {
        let (mut few, count) = ([std::ptr::null_mut(); FEW], self.addresses.len());
        if count <= FEW {
            for (start, address) in few.iter_mut().zip(&self.addresses) {
                *start = address.of(blocks);
            }
            let (inputs, outputs) = few[..count].split_at(self.inputs);
            return f(inputs, outputs);
        }
        let all: Vec<*mut u8> = self.addresses.iter().map(|a| a.of(blocks)).collect();
        let (inputs, outputs) = all.split_at(self.inputs);
        f(inputs, outputs);
    }
}

/// Addresses that most steps get by with.
const FEW: usize = 8;

/// The product and what follows it, rounded where eager rounds.
///
/// # Safety
/// Rows of the operand, of what is added and of the result start at these addresses and are within their values.
unsafe fn linear<T: LinearElement>(
    threads: usize,
    l: &LinearStep,
    m: usize,
    weights: &Weights,
    (x, r, y): (*mut u8, Option<*mut u8>, *mut u8),
) -> Result<()> {
    let (n, k) = weights.packed.sizes();
    // SAFETY: by the caller; a bias has as many elements as the result has columns.
    let done = unsafe {
        let residual = l.r.as_ref().zip(r);
        let epilogue = Epilogue {
            bias: weights.bias.map(|b| slice(b, n)),
            activation: l.activation,
            residual: residual.map(|((_, stride), start)| rows_at(start, m, n, *stride)),
            round_before_activation: true,
        };
        let result = RowsMut::dense(slice_mut(Memory(y), m * n), n);
        (weights.packed).run::<T>(threads, rows_at(x, m, k, l.x_stride), m, result, &epilogue)
    };
    done.map_err(|e| broken(e.to_string()))
}

/// # Safety
/// The rows are within their value.
pub(super) unsafe fn rows_at<'a, T>(start: *mut u8, count: usize, columns: usize, stride: usize) -> Rows<'a, T> {
    let length = if count == 0 { 0 } else { (count - 1) * stride + columns };
    Rows {
        // SAFETY: by the caller.
        data: unsafe { slice(Memory(start), length) },
        stride,
    }
}
