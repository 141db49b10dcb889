//! Ops along rows of the last dimensions: softmax, norms, sums, with pointwise work before and after.

use hypatia_core::ty::DType;

use super::region::Region;
use crate::{Error, Result};

/// What is done with a row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum RowOp {
    Softmax {
        /// Probabilities below the normal numbers may be zero: processors are slow at them.
        flushes: bool,
    },
    LogSoftmax,
    /// (x - mean) / √(variance + eps).
    LayerNorm {
        eps: f64,
    },
    /// x / √(mean of squares + eps).
    RmsNorm {
        eps: f64,
    },
    Sum,
    Mean,
    /// The greatest element, NaN if there is one.
    Amax,
}

impl RowOp {
    /// True if a row becomes one number.
    pub fn reduces(self) -> bool {
        matches!(self, RowOp::Sum | RowOp::Mean | RowOp::Amax)
    }

    /// True if a row is divided by its spread.
    pub(crate) fn is_norm(self) -> bool {
        matches!(self, RowOp::LayerNorm { .. } | RowOp::RmsNorm { .. })
    }
}

/// A row op with its prologue and epilogue.
#[derive(Debug)]
pub struct Rowwise {
    pub(crate) op: RowOp,
    /// The dtype of the rows where there is no prologue, and of the result where there is no epilogue.
    pub(crate) dtype: DType,
    /// What the op computes in.
    pub(crate) compute: DType,
    pub(crate) prologue: Option<Region>,
    pub(crate) epilogue: Option<Region>,
}

impl Rowwise {
    /// An op on rows of a floating dtype. It computes in f32, in f64 for f64, and rounds its result once.
    pub fn new(op: RowOp, dtype: DType) -> Result<Rowwise> {
        if !dtype.is_float() {
            return Err(fail(op, format!("is not defined for {dtype}")));
        }
        let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(Rowwise {
            op,
            dtype,
            compute,
            prologue: None,
            epilogue: None,
        })
    }

    /// What is done with a row.
    pub fn op(&self) -> RowOp {
        self.op
    }

    /// The dtype of the rows where there is no prologue, and of the result where there is no epilogue.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What is done before.
    pub fn prologue(&self) -> Option<&Region> {
        self.prologue.as_ref()
    }

    /// What is done after.
    pub fn epilogue(&self) -> Option<&Region> {
        self.epilogue.as_ref()
    }

    /// Takes the rows from the first output of a region, which must be f32, or f64 if the dtype is. Its other outputs
    /// are written.
    pub fn with_prologue(mut self, region: Region) -> Result<Rowwise> {
        if region.outputs().first() != Some(&self.compute) {
            return Err(fail(
                self.op,
                format!("needs a prologue whose first output is {}", self.compute),
            ));
        }
        self.prologue = Some(region);
        Ok(self)
    }

    /// Hands the result to a region as its first input, which must be f32, or f64 if the dtype is.
    pub fn with_epilogue(mut self, region: Region) -> Result<Rowwise> {
        if region.inputs().first() != Some(&self.compute) {
            return Err(fail(
                self.op,
                format!("needs an epilogue whose first input is {}", self.compute),
            ));
        }
        self.epilogue = Some(region);
        Ok(self)
    }
}

pub(crate) fn fail(op: RowOp, message: String) -> Error {
    Error::Type {
        op: format!("{op:?}"),
        message,
    }
}
