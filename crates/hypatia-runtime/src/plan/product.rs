//! Products of two activations on the CPU.

use std::sync::{Mutex, PoisonError};

use hypatia_core::ty::DType;

use super::address::{Address, Addresses};
use super::run::rows_at;
use super::{LinearStep, Memory, Plan, broken, slice, slice_mut};
use crate::cpu::gemm_f32::{Factor, Right};
use crate::cpu::linear::{Epilogue, RowsMut};
use crate::error::Result;

/// Factors that are kept for later callers.
const KEPT: usize = 4;

/// A product whose right factor is packed at every call.
pub(super) struct Product {
    m: usize,
    n: usize,
    k: usize,
    x: Address,
    w: Address,
    b: Option<Address>,
    r: Option<Address>,
    y: Address,
    /// Where it is packed; callers have one each while they run.
    free: Mutex<Vec<Factor>>,
}

impl Product {
    pub(super) fn new(plan: &Plan, l: &LinearStep, m: usize, at: &Addresses) -> Result<Product> {
        let weight = &plan.values[l.w];
        let (n, k) = (l.sizes(&weight.shape)).ok_or_else(|| broken("a factor that is no matrix"))?;
        if weight.dtype != DType::F32 || l.columns.is_some() {
            return Err(broken("a product of activations of another form"));
        }
        let size = weight.dtype.size();
        Ok(Product {
            m,
            n,
            k,
            x: at.operand(&l.x, size)?,
            w: at.value(l.w)?,
            b: l.b.map(|b| at.value(b)).transpose()?,
            r: (l.r.as_ref()).map(|(r, _)| at.operand(r, size)).transpose()?,
            y: at.value(l.y)?,
            free: Mutex::new(vec![Factor::new(n, k)]),
        })
    }

    /// Bytes into which a call packs.
    pub(super) fn bytes(&self) -> usize {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.first().map_or(0, Factor::bytes)
    }

    /// # Safety
    /// The blocks are those that addresses were made for, and values lie in them apart from each other.
    pub(super) unsafe fn run(&self, threads: usize, l: &LinearStep, blocks: &[*mut u8]) -> Result<()> {
        let Product { m, n, k, .. } = *self;
        let taken = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut factor = taken.unwrap_or_else(|| Factor::new(n, k));
        // SAFETY: by the caller; sizes are the values'.
        let done = unsafe {
            let residual = l.r.as_ref().zip(self.r);
            let epilogue = Epilogue {
                bias: self.b.map(|b| slice(Memory(b.of(blocks)), n)),
                activation: l.activation,
                residual: residual.map(|((_, stride), r)| rows_at(r.of(blocks), m, n, *stride)),
                round_before_activation: true,
            };
            let (rows, columns) = if l.transposed { (k, n) } else { (n, k) };
            let right = Right {
                rows: rows_at(self.w.of(blocks), rows, columns, columns),
                by_terms: l.transposed,
            };
            let x = rows_at(self.x.of(blocks), m, k, l.x_stride);
            let y = RowsMut::dense(slice_mut(Memory(self.y.of(blocks)), m * n), n);
            factor.multiply(threads, (m, x), right, y, &epilogue)
        };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT {
            free.push(factor);
        }
        done.map_err(|e| broken(e.to_string()))
    }
}
