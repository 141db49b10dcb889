//! Ops along rows.

use super::{Operand, Step, ValueId, start};
use crate::kernels::rowwise::Rowwise;

/// An op along rows of the last dimensions, with pointwise work before and after.
#[derive(Debug)]
pub struct RowStep {
    /// What is computed.
    pub rows: Rowwise,
    /// The shape of what it reads.
    pub shape: Vec<usize>,
    /// So many of its last dimensions are a row.
    pub reduced: usize,
    /// What it reads, in that shape.
    pub inputs: Vec<Operand>,
    /// What it writes, densely.
    pub output: ValueId,
    /// Strides of the result.
    pub dense: Vec<isize>,
}

impl Step for RowStep {
    fn reads(&self) -> Vec<ValueId> {
        self.inputs.iter().map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn operands(&self) -> Vec<(ValueId, usize)> {
        self.inputs.iter().map(start).chain([(self.output, 0)]).collect()
    }

    fn name(&self) -> String {
        format!("{:?} over {:?}", self.rows.op(), self.shape).to_lowercase()
    }
}
