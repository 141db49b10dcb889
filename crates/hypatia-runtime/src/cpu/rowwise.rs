//! Ops along rows of the last dimensions: softmax, norms, sums, with pointwise work before and after.
//!
//! A few rows at a time are brought into the first-level cache by the prologue, reduced and normalised there, and
//! written by the epilogue: memory is read and written once.
//!
//! ```
//! use hypatia_core::ty::DType;
//! use hypatia_runtime::cpu::region::{View, ViewMut};
//! use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};
//!
//! let (x, mut out) = ([0.0f32, 0.0, 1.0, 1.0], [0.0f32; 4]);
//! let softmax = Rowwise::new(RowOp::Softmax { flushes: false }, DType::F32)?;
//! softmax.run(1, &[2, 2], 1, &[View::new(&x, &[2, 1])], &mut [ViewMut::new(&mut out, &[2, 1])])?;
//! assert_eq!(out, [0.5; 4]);
//! # Ok::<(), hypatia_runtime::Error>(())
//! ```

mod fit;
mod rows;
mod short;

#[cfg(test)]
mod tests;

use std::cell::Cell;

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use super::lanes::dispatch;
use super::region::{Access, Affine, Bound, Line, Runner, View, ViewMut, check_bounds};
use crate::Result;
use crate::kernels::region::Region;
use crate::kernels::rowwise::Rowwise;
use crate::pool::{self, Pool};
pub use fit::RowFit;
use fit::Stages;
use rows::{Finish, Number, Rows, Source, SumOf};
use short::Short;

/// Elements that are worked on at a time, in whole rows: they and their results fit the first-level cache.
const GROUP: usize = 2048;

/// Elements for each thread: about 20 us of work, since waking a thread takes longer.
const WORTH_THREADS: usize = 32_768;

impl Rowwise {
    /// Runs on tensors of this shape, whose last `reduced` dimensions are the rows.
    ///
    /// Inputs are those of the prologue, or the rows themselves, then those of the epilogue but its first. Outputs are
    /// those of the epilogue, or the result itself, then those of the prologue but its first. If the op reduces, the
    /// epilogue's have the shape without the last `reduced` dimensions.
    pub fn run(
        &self,
        threads: usize,
        shape: &[usize],
        reduced: usize,
        inputs: &[View],
        outputs: &mut [ViewMut],
    ) -> Result<()> {
        // What follows a reduction has the first dimensions only; `fit` says so of any other number.
        for (i, v) in inputs.iter().enumerate() {
            check_bounds("input", i, &shape[..v.strides.len().min(shape.len())], v.strides, v.len)?;
        }
        for (i, v) in outputs.iter().enumerate() {
            check_bounds(
                "output",
                i,
                &shape[..v.strides.len().min(shape.len())],
                v.strides,
                v.len,
            )?;
        }
        let fit = self.fit(
            shape,
            reduced,
            &Vec::from_iter(inputs.iter().map(|v| (v.dtype, v.strides))),
            &Vec::from_iter(outputs.iter().map(|v| (v.dtype, v.strides))),
        )?;
        let from: SmallVec<[*mut u8; 4]> = inputs.iter().map(|v| v.data.cast_mut()).collect();
        let to: SmallVec<[*mut u8; 2]> = outputs.iter().map(|v| v.data).collect();
        // SAFETY: views vouch for their memory, and it was compared with the shape.
        unsafe { self.run_at(&fit, threads, &from, &to) };
        Ok(())
    }

    /// As [`Rowwise::run`], on tensors that start at these addresses.
    ///
    /// # Safety
    /// The fit is this op's. There is an address for each input and output, and the memory is as
    /// [`View::from_raw`] and [`ViewMut::from_raw`] say.
    pub unsafe fn run_at(&self, fit: &RowFit, threads: usize, inputs: &[*mut u8], outputs: &[*mut u8]) {
        if let (true, Some(kernel)) = (fit.plain, fit.short) {
            let affine = fit.affine;
            // The epilogue's first input is the result of the norm, as ours is its operand.
            let row = |input: Option<usize>| input.map_or(std::ptr::null(), |i| inputs[i].cast_const().cast());
            let rows = Short {
                x: inputs[0].cast_const().cast(),
                plus: std::ptr::null(),
                y: outputs[0].cast(),
                count: fit.rows,
                width: fit.width,
                scale: row(affine.map(|a| a.scale)),
                shift: row(affine.and_then(|a| a.shift)),
                eps: self.op.eps(),
            };
            // SAFETY: by the caller; what scales and shifts is a row.
            return unsafe { kernel(&rows) };
        }
        if fit.plain && inputs[0] != outputs[0] {
            // SAFETY: by the caller.
            return unsafe {
                match self.compute {
                    DType::F64 => self.plain::<f64>(fit, inputs, outputs[0]),
                    _ => self.plain::<f32>(fit, inputs, outputs[0]),
                }
            };
        }
        let bound = fit.stages(inputs, outputs);
        let (rows, width, group) = (fit.rows, fit.width, fit.group);
        let groups = rows.div_ceil(group);
        let threads = threads.min((rows * width / WORTH_THREADS).max(1)).min(groups);
        let part = |start: usize, end: usize| match self.compute {
            DType::F64 => self.part::<f64>(&bound, start, end, group, width),
            _ => self.part::<f32>(&bound, start, end, group, width),
        };
        if threads <= 1 {
            return part(0, rows);
        }
        let parts = pool::parts(threads, rows * width).min(groups);
        Pool::global().run(threads, parts, &|i| {
            part(groups * i / parts * group, (groups * (i + 1) / parts * group).min(rows));
        });
    }

    /// All rows at once, from memory to memory.
    ///
    /// # Safety
    /// As of `run_at`; the fit is plain, and both lie apart.
    unsafe fn plain<T: Number>(&self, fit: &RowFit, inputs: &[*mut u8], target: *mut u8) {
        let len = fit.rows * fit.width;
        let results = if self.op.reduces() { fit.rows } else { len };
        // SAFETY: by the caller; what scales and shifts is a row of the type that is computed in.
        let numbers = |i: usize, len: usize| unsafe { std::slice::from_raw_parts(inputs[i].cast_const().cast(), len) };
        let finish = match fit.affine {
            None => Finish::Nothing,
            // The epilogue's first input is the result of the norm, as ours is its operand.
            Some(Affine { scale, shift: None }) => Finish::Scale(numbers(scale, fit.width)),
            Some(Affine {
                scale,
                shift: Some(shift),
            }) => Finish::ScaleShift(numbers(scale, fit.width), numbers(shift, fit.width)),
        };
        let source: &[T] = numbers(0, len);
        // SAFETY: by the caller.
        let target: &mut [T] = unsafe { std::slice::from_raw_parts_mut(target.cast(), results) };
        self.compute(None, source, target, (fit.rows, fit.width), finish);
    }

    /// The rows from `start` to `end`, a group at a time.
    fn part<T: Number>(&self, bound: &Stages<'_>, start: usize, end: usize, group: usize, width: usize) {
        let size = size_of::<T>();
        let room = group * width.max(1);
        let mut buffer = BUFFER.take();
        let half = (room * size).div_ceil(size_of::<Line>());
        if buffer.len() < 2 * half {
            buffer.resize(2 * half, Line::ZERO);
        }
        let first: *mut u8 = buffer.as_mut_ptr().cast();
        let second: *mut u8 = buffer[half..].as_mut_ptr().cast();
        let mut before = Bound::new(
            bound.take.clone(),
            std::iter::once(self.dense(first, 0))
                .chain(bound.keep.iter().copied())
                .collect(),
        );
        let mut after = Bound::new(
            std::iter::once(self.dense(second, 0))
                .chain(bound.join.iter().copied())
                .collect(),
            bound.make.clone(),
        );
        let mut prologue = bound.prologue.map(Runner::new);
        let shared = bound.prologue.is_some_and(|p| p.begins_twice);
        let sum = self.prologue.as_ref().is_some_and(Region::is_sum);
        let mut columns = [Vec::new(), Vec::new()];
        // SAFETY: `run` checked the memory of the epilogue's inputs.
        let finish = unsafe { self.finish::<T>(bound, width, &mut columns) };
        let alone = !matches!(finish, Finish::Nothing);
        let mut epilogue = bound.epilogue.filter(|_| !alone).map(Runner::new);
        let per_row = if self.op.reduces() { 1 } else { width };
        for row in (start..end).step_by(group) {
            let count = group.min(end - row);
            let (at, len) = (row * width, count * width);
            let (out_at, out_len) = (row * per_row, count * per_row);
            // SAFETY: `run` checked the memory and gave every part its own rows; each buffer has room for a group, and
            // they do not overlap. A result goes where an input came from only if it is the same place, which
            // `Rows` and regions allow.
            unsafe {
                let summands = match sum {
                    true => bound.take[0].direct(at, len).zip(bound.take[1].direct(at, len)),
                    false => None,
                };
                let source = match (&mut prologue, summands) {
                    (_, Some((a, _))) => a,
                    (Some(region), None) => {
                        let kept = bound.keep.first().filter(|_| shared).and_then(|k| k.direct(at, len));
                        let source = kept.unwrap_or(first);
                        before.outputs[0] = self.dense(source, at);
                        region.run(&before, at, at + len);
                        source
                    }
                    (None, None) => bound.take[0].direct(at, len).unwrap_or_else(|| {
                        bound.take[0].load(at, len, first);
                        first
                    }),
                };
                let read = |t: &*mut u8| *t == source || summands.is_some_and(|(_, b)| *t == b);
                let target = match &epilogue {
                    None => bound.make[0]
                        .direct(out_at, out_len)
                        .filter(|t| !read(t))
                        .unwrap_or(second),
                    Some(_) => second,
                };
                let x: &[T] = std::slice::from_raw_parts(source.cast(), len);
                let y: &mut [T] = std::slice::from_raw_parts_mut(target.cast(), out_len);
                match summands {
                    Some((_, b)) => {
                        let b = std::slice::from_raw_parts(b.cast(), len);
                        self.compute(bound.short, SumOf(x, b), y, (count, width), finish);
                    }
                    None => self.compute(bound.short, x, y, (count, width), finish),
                }
                match &mut epilogue {
                    Some(region) => {
                        after.inputs[0] = self.dense(second, out_at);
                        region.run(&after, out_at, out_at + out_len);
                    }
                    None if target == second => bound.make[0].store(out_at, out_len, second),
                    None => {}
                }
            }
        }
        BUFFER.set(buffer);
    }

    fn compute<T: Number, S: Source<T>>(
        &self,
        short: Option<short::Kernel>,
        source: S,
        target: &mut [T],
        (count, width): (usize, usize),
        finish: Finish<T>,
    ) {
        if let Some(kernel) = short {
            let rows = Short::new(self.op, source.arrays(), target, (count, width), finish);
            // SAFETY: there is such a kernel for f32 only, and the arrays have so many rows.
            return unsafe { kernel(&rows) };
        }
        let op = self.op;
        dispatch(Rows {
            op,
            source,
            target,
            count,
            width,
            finish,
        });
    }

    /// The epilogue as part of a norm, if it is that simple. What has to be widened for it goes to `columns`.
    ///
    /// # Safety
    /// The memory of the epilogue's inputs must be readable as long as the result lives.
    unsafe fn finish<'a, T: Number>(
        &self,
        bound: &Stages<'_>,
        width: usize,
        columns: &'a mut [Vec<T>; 2],
    ) -> Finish<'a, T> {
        let Some(affine) = bound.affine.filter(|_| self.op.is_norm()) else {
            return Finish::Nothing;
        };
        let [first, second] = columns;
        let row = |input: usize, column: &'a mut Vec<T>| {
            // The epilogue's first input is the result of the norm.
            let access = &bound.join[input - 1];
            if !access.is_one_row(width) {
                return None;
            }
            let data = access.direct(0, width).unwrap_or_else(|| {
                column.resize(width, T::from_f64(0.0));
                // SAFETY: as promised by the caller; there is room for a row.
                unsafe { access.load(0, width, column.as_mut_ptr().cast()) };
                column.as_mut_ptr().cast()
            });
            // SAFETY: a row as promised by the caller, of the type that is computed in, or the one just written.
            Some(unsafe { std::slice::from_raw_parts(data.cast_const().cast(), width) })
        };
        match (row(affine.scale, first), affine.shift.map(|shift| row(shift, second))) {
            (Some(scale), None) => Finish::Scale(scale),
            (Some(scale), Some(Some(shift))) => Finish::ScaleShift(scale, shift),
            _ => Finish::Nothing,
        }
    }

    fn dense(&self, data: *mut u8, start: usize) -> Access<'static> {
        Access::dense(data, self.compute, start)
    }
}

thread_local! {
    /// Rows and results of this thread, taken while a part runs.
    static BUFFER: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}
