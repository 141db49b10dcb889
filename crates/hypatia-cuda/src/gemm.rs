//! Matrix products by cuBLASLt, with what is done to their results on the way out.
//!
//! A [`Problem`] says what is computed, as torch sees it: rows lie one after the other. [`tune`] looks for the fastest
//! algorithm whose result is right, a [`Tuned`] record keeps it, and a [`Gemm`] runs it.

mod describe;
mod problem;
mod reference;
mod tune;

#[cfg(test)]
mod tests;

pub use problem::{Epilogue, Factor, Problem, Slab};
pub(crate) use reference::CHECK;
pub use tune::{Budget, Launch, Scratch, Trial, Tuned, Tuning, Verdict, compare, scratch_bytes, tune};

use std::sync::{Mutex, PoisonError};

use crate::driver::{Device, Stream};
use crate::sys::{Algorithm, Blas, Candidate, Handle};
use crate::{Error, Result};
use describe::Described;

/// The version of cuBLASLt, to be part of the key of whatever it was asked.
pub fn version() -> Result<usize> {
    // SAFETY: takes nothing.
    Ok(unsafe { (Blas::get()?.cublasLtGetVersion)() })
}

/// What the record of a problem on a device is kept under: all that decides which algorithm is best.
pub fn record_key(device: &Device, problem: &Problem) -> Result<String> {
    let turns = if problem.weights() > 1 { " in turns" } else { "" };
    Ok(format!("{problem}{turns} on {} by {}", device.name(), version()?))
}

/// How cuBLASLt was found.
pub fn origin() -> Result<&'static str> {
    Ok(&Blas::get()?.origin)
}

/// Addresses of a product's operands; 0 for those that its problem does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Operands {
    /// The left factor.
    pub left: u64,
    /// The right factor.
    pub right: u64,
    /// What is added to the product.
    pub residual: u64,
    /// The bias, or where sums go if the epilogue makes some.
    pub bias: u64,
    /// What the epilogue keeps for the backward pass, or takes from the forward pass.
    pub aux: u64,
    /// The result; it may be the residual.
    pub out: u64,
    /// Bytes that the algorithm works with, [`Gemm::workspace`] many.
    pub workspace: u64,
}

impl Operands {
    /// Refuses what would fault on the device, which would be useless for the rest of the process.
    fn check(&self, problem: &Problem, workspace: usize) -> Result<()> {
        let needed = [
            (self.left, true, problem.alignment),
            (self.right, true, problem.alignment),
            (self.out, true, problem.alignment),
            (self.residual, problem.residual.is_some(), problem.alignment),
            (self.bias, problem.bias_len() > 0, problem.output.size() as u32),
            (self.aux, problem.epilogue.has_aux(), 16),
            (self.workspace, workspace > 0, 256),
        ];
        let fits = |(address, needed, alignment): &(u64, bool, u32)| {
            !needed || *address != 0 && address.is_multiple_of(u64::from(*alignment))
        };
        if needed.iter().all(fits) {
            return Ok(());
        }
        Err(Error::malformed(format!(
            "{problem}: {self:x?} lacks something or is not aligned"
        )))
    }
}

/// A product that is ready to run.
#[derive(Debug)]
pub struct Gemm {
    device: &'static Device,
    problem: Problem,
    described: Mutex<Described>,
    algorithm: Algorithm,
    workspace: usize,
}

impl Gemm {
    /// A product by the algorithm that was found to be best; an error if this library does not have it.
    pub fn new(device: &'static Device, problem: Problem, tuned: &Tuned) -> Result<Gemm> {
        let described = Described::new(&problem)?;
        let algorithm = Algorithm { data: tuned.algorithm };
        let mut result = Candidate::default();
        let (blas, handle) = (Blas::get()?, handle(device)?);
        let [a, b, c, d] = described.layouts();
        // SAFETY: descriptors that live, and a place to write to.
        unsafe { blas.cublasLtMatmulAlgoCheck(handle, described.desc(), a, b, c, d, &algorithm, &mut result)? };
        if result.workspace > tuned.workspace {
            return Err(Error::unsupported(format!(
                "{problem}: the algorithm kept needs more room than it did"
            )));
        }
        Ok(Gemm {
            device,
            problem,
            described: Mutex::new(described),
            algorithm,
            workspace: tuned.workspace,
        })
    }

    /// What it computes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Bytes that it works with.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    /// Launches it, within [`Device::enter`].
    ///
    /// # Safety
    /// All operands of the problem must be given, have its sizes and alignment, and live until it is done.
    pub unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        operands.check(&self.problem, self.workspace)?;
        let mut described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        described.point(operands)?;
        let run = Run {
            handle: handle(self.device)?,
            described: &described,
            residual: self.problem.residual.is_some(),
        };
        // SAFETY: promised by the caller.
        unsafe { run.launch(&self.algorithm, self.workspace, stream, operands) }
    }
}

/// One call of the library.
struct Run<'a> {
    handle: Handle,
    described: &'a Described,
    residual: bool,
}

impl Run<'_> {
    /// # Safety
    /// As of [`Gemm::launch`]; the descriptor must point to the operands.
    unsafe fn launch(
        &self,
        algorithm: &Algorithm,
        workspace: usize,
        stream: Stream,
        operands: &Operands,
    ) -> Result<()> {
        let (alpha, beta) = (1f32, if self.residual { 1f32 } else { 0f32 });
        let [a, b, c, d] = self.described.layouts();
        let addend = if self.residual { operands.residual } else { operands.out };
        // SAFETY: promised by the caller. What torch calls the right factor is the library's A.
        unsafe {
            Blas::get()?.cublasLtMatmul(
                self.handle,
                self.described.desc(),
                std::ptr::from_ref(&alpha).cast(),
                operands.right,
                a,
                operands.left,
                b,
                std::ptr::from_ref(&beta).cast(),
                addend,
                c,
                operands.out,
                d,
                algorithm,
                operands.workspace,
                workspace,
                stream.raw(),
            )
        }
    }
}

/// The library's state on a device, made once.
fn handle(device: &'static Device) -> Result<Handle> {
    if let Some(handle) = device.blas.get() {
        return Ok(*handle as Handle);
    }
    let _current = device.enter()?;
    let mut made: Handle = std::ptr::null_mut();
    // SAFETY: a place to write to.
    unsafe { Blas::get()?.cublasLtCreate(&mut made)? };
    Ok(*device.blas.get_or_init(|| made as usize) as Handle)
}
