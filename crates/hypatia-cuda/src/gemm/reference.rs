//! The yardstick: random operands, the product by plain loops, and how far a result is from it.

use hypatia_core::ty::DType;

use super::problem::{Problem, Sums};
use super::{Factor, Operands};
use crate::driver::{Device, Function, Stream};
use crate::{Error, Result, kernel};

const SOURCE: &str = include_str!("check.cu");

/// The module that judges algorithms: its name and source.
pub(crate) const CHECK: (&str, &str) = ("gemm_check", SOURCE);

/// Where everything lies in the memory given for tuning.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    pub(super) operands: Operands,
    sums: u64,
    /// What the epilogue makes of them, where that is summed again; else 0.
    wants: u64,
    worst: u64,
    /// Where more copies of the right factor begin, and how far apart they are.
    copies: u64,
    apart: u64,
    /// How many there are, the first one counted.
    count: usize,
    pub(super) end: u64,
}

impl Places {
    /// Room for everything from an address on.
    pub(super) fn from(problem: &Problem, start: u64, workspace: usize) -> Places {
        let mut next = start.next_multiple_of(256);
        let mut room = |bytes: usize| {
            let at = next;
            next = (at + bytes as u64).next_multiple_of(256);
            at
        };
        let (input, output) = (problem.input.size(), problem.output.size());
        let operands = Operands {
            left: room(factor_len(&problem.left, problem.m, problem.k, problem.batch) * input),
            right: room(factor_len(&problem.right, problem.k, problem.n, problem.batch) * input),
            residual: room(problem.residual.map_or(0, |r| slab_len(problem, r)) * output),
            bias: room(problem.bias_len() * output),
            aux: room(problem.aux_bytes()),
            out: room(slab_len(problem, problem.out) * output),
            workspace: room(workspace),
        };
        let bytes = problem.batch * problem.m * problem.n * 4;
        let sums = room(bytes);
        let summed = problem.epilogue.sums() == Some(Sums::Result);
        let wants = if summed { room(bytes) } else { 0 };
        let worst = room(4);
        let right = factor_len(&problem.right, problem.k, problem.n, problem.batch) * input;
        let (apart, count) = (right.next_multiple_of(256), problem.weights());
        let copies = room((count - 1) * apart);
        Places {
            operands,
            sums,
            wants,
            worst,
            copies,
            apart: apart as u64,
            count,
            end: next,
        }
    }

    /// Operands of one of several launches: each reads another copy of the right factor, if there are any.
    pub(super) fn operands_of(&self, number: usize) -> Operands {
        let right = match number % self.count {
            0 => self.operands.right,
            copy => self.copies + (copy as u64 - 1) * self.apart,
        };
        Operands { right, ..self.operands }
    }
}

fn factor_len(f: &Factor, rows: usize, columns: usize, batch: usize) -> usize {
    let (rows, columns) = if f.transposed { (columns, rows) } else { (rows, columns) };
    (batch - 1) * f.batch + (rows - 1) * f.ld + columns
}

fn slab_len(problem: &Problem, slab: super::Slab) -> usize {
    (problem.batch - 1) * slab.batch + (problem.m - 1) * slab.ld + problem.n
}

/// The kernels of the yardstick on a device.
pub(super) struct Reference<'a> {
    problem: &'a Problem,
    stream: Stream,
    places: Places,
    fill: Function,
    spoil: Function,
    product: Function,
    compare: Function,
    compare_sums: Function,
}

impl<'a> Reference<'a> {
    pub(super) fn new(problem: &'a Problem, stream: Stream, places: Places) -> Result<Reference<'a>> {
        let device: &'static Device = stream.device();
        let module = kernel::module(device, CHECK.0, CHECK.1)?;
        Ok(Reference {
            problem,
            stream,
            places,
            fill: module.function("fill")?,
            spoil: module.function("spoil")?,
            product: module.function("product")?,
            compare: module.function("compare")?,
            compare_sums: module.function("compare_sums")?,
        })
    }

    /// Draws the operands and computes their product.
    ///
    /// # Safety
    /// The places must be the caller's alone.
    pub(super) unsafe fn draw(&self) -> Result<()> {
        let (p, at) = (self.problem, &self.places.operands);
        let (input, output) = (code(p.input)?, code(p.output)?);
        let aux = if p.epilogue.aux_is_bits() {
            (3, p.aux_bytes())
        } else {
            (output, p.aux_bytes() / p.output.size())
        };
        let all = [
            (at.left, input, factor_len(&p.left, p.m, p.k, p.batch)),
            (at.right, input, factor_len(&p.right, p.k, p.n, p.batch)),
            (at.residual, output, p.residual.map_or(0, |r| slab_len(p, r))),
            (at.bias, output, p.bias_len()),
            (at.aux, aux.0, aux.1),
        ];
        for (seed, (address, dtype, len)) in all.into_iter().enumerate().filter(|(_, (_, _, len))| *len > 0) {
            let arguments = [address, len as u64, dtype, seed as u64 + 1];
            // SAFETY: promised by the caller; the places are as long as that.
            unsafe { self.fill.launch(self.stream, spread(len), 256, &arguments)? };
        }
        for copy in 1..self.places.count {
            let (address, len) = (self.places.operands_of(copy).right, all[1].2);
            // SAFETY: as above.
            unsafe {
                self.fill
                    .launch(self.stream, spread(len), 256, &[address, len as u64, input, 2])?;
            }
        }
        let ([left_row, left_step], [right_step, right_column]) = (steps(&p.left), steps(&p.right));
        if p.n > 1 && p.epilogue.sums().is_none() {
            // A column of the result is NaN then, and must stay so.
            let spoiled = (p.n / 3 * right_column + p.k / 2 * right_step) as u64;
            // SAFETY: promised by the caller; the element is one of the first matrix.
            unsafe {
                self.spoil
                    .launch(self.stream, [1, 1, 1], 1, &[at.right, spoiled, input])?
            };
        }
        let residual = p.residual.unwrap_or(p.out);
        let blocks = [p.n.div_ceil(64) as u32, p.m.div_ceil(64) as u32, p.batch as u32];
        let mut product = vec![at.left, at.right, at.residual, self.places.sums, input, output];
        product.extend([p.m, p.n, p.k, left_row, left_step, p.left.batch].map(number));
        product.extend([right_step, right_column, p.right.batch, residual.ld, residual.batch].map(number));
        product.push(u64::from(p.residual.is_some()));
        // SAFETY: promised by the caller; strides and sizes are those of the places.
        unsafe { self.product.launch(self.stream, blocks, 256, &product) }
    }

    /// Fills what a candidate writes with NaN, so that what it leaves out is seen.
    ///
    /// # Safety
    /// As of [`Reference::draw`].
    pub(super) unsafe fn poison(&self) -> Result<()> {
        let (p, at) = (self.problem, &self.places.operands);
        // SAFETY: promised by the caller.
        unsafe {
            self.stream.fill(at.out, 0xff, slab_len(p, p.out) * p.output.size())?;
            if p.epilogue.sums().is_some() {
                self.stream.fill(at.bias, 0xff, p.bias_len() * p.output.size())?;
            }
            if p.epilogue.has_aux() && !p.epilogue.reads_aux() {
                // Bits of a mask have no NaN; any pattern that is not the result will do.
                self.stream.fill(at.aux, 0xff, p.aux_bytes())?;
            }
        }
        Ok(())
    }

    /// How far the library's result is from the yardstick, as a multiple of what is allowed.
    ///
    /// # Safety
    /// As of [`Reference::draw`].
    pub(super) unsafe fn judge(&self) -> Result<f32> {
        let (p, at) = (self.problem, &self.places.operands);
        let (input, output) = (code(p.input)?, code(p.output)?);
        let (relative, absolute) = allowance(p);
        let bits = [u64::from(relative.to_bits()), u64::from(absolute.to_bits())];
        let ([left_row, left_step], [right_step, right_column]) = (steps(&p.left), steps(&p.right));
        let total = p.batch * p.m * p.n;
        let mut compare = vec![
            self.places.sums,
            self.places.wants,
            at.out,
            at.bias,
            at.aux,
            self.places.worst,
            output,
        ];
        compare.push(u64::from(p.epilogue.number()));
        compare.extend([p.m, p.n, p.out.ld, p.out.batch, p.aux_ld(), total].map(number));
        compare.extend(bits);
        // SAFETY: promised by the caller; strides and sizes are those of the places.
        unsafe {
            self.stream.fill(self.places.worst, 0, 4)?;
            self.compare.launch(self.stream, spread(total), 256, &compare)?;
            if let Some(which) = p.epilogue.sums() {
                // Elements, how many, how far apart, and how far the next sum is.
                let (data, dtype, count, apart, next) = match which {
                    Sums::Result => (self.places.wants, 0, p.m, p.n, 1),
                    Sums::Left => (at.left, input, p.k, left_step, left_row),
                    Sums::Right => (at.right, input, p.k, right_step, right_column),
                };
                let mut arguments = vec![data, at.bias, self.places.worst, dtype, output];
                arguments.extend([p.bias_len(), count, apart, next].map(number));
                arguments.extend(bits);
                self.compare_sums
                    .launch(self.stream, spread(p.bias_len()), 256, &arguments)?;
            }
        }
        // SAFETY: four bytes of ours, written by what the call waits for.
        let worst = unsafe { self.stream.read_u32(self.places.worst)? };
        Ok(f32::from_bits(worst))
    }
}

/// From a row of a factor to the next, and from a column to the next.
fn steps(f: &Factor) -> [usize; 2] {
    if f.transposed { [1, f.ld] } else { [f.ld, 1] }
}

fn number(n: usize) -> u64 {
    n as u64
}

/// Blocks for as many elements, at most some dozens for each multiprocessor.
fn spread(len: usize) -> [u32; 3] {
    [len.div_ceil(256).clamp(1, 4096) as u32, 1, 1]
}

fn code(dtype: DType) -> Result<u64> {
    match dtype {
        DType::F32 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F16 => Ok(2),
        _ => Err(Error::unsupported(format!("products of {dtype}"))),
    }
}

/// The error that is allowed: a share of the result for its rounding, and a part for the roundings of sums. Factors lie
/// evenly between -1 and 1, so the terms of a sum are about a quarter each.
fn allowance(p: &Problem) -> (f32, f32) {
    let k = p.k as f32;
    let unit = match (p.input, p.tf32) {
        (DType::F32, true) => 2f32.powi(-14),
        (DType::F32, false) => 2f32.powi(-22),
        _ => 2f32.powi(-20),
    };
    let sums = unit * (k.sqrt() / 4.0).max(4.0) * (k / 3.0 + 1.0);
    // The library's gelu is an approximation; and it may round before it, as eager does, and after it.
    let (curve, roundings) = if p.epilogue.name().contains("gelu") {
        (1e-5 * (1.0 + k.sqrt()), 3.0)
    } else {
        (0.0, 1.5)
    };
    (roundings * p.output.epsilon() as f32, sums + curve)
}
