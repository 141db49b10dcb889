//! Products of matrices of a batch.

use super::{Operand, Step, Value, ValueId, numel};

/// Products of matrices: `left[i] · right[i]` for each `i` of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchStep {
    /// `[batch, m, k]`: either rows or columns follow each other without gaps. A matrix that is the same for all is one
    /// that repeats.
    pub left: Operand,
    /// `[batch, k, n]`, likewise.
    pub right: Operand,
    /// The result, densely.
    pub y: ValueId,
}

impl Step for BatchStep {
    fn reads(&self) -> Vec<ValueId> {
        vec![self.left.value, self.right.value]
    }

    fn writes(&self) -> Vec<ValueId> {
        vec![self.y]
    }

    fn multiplications(&self, _: &[Value]) -> f64 {
        numel(&self.left.shape) * self.right.shape.last().map_or(0.0, |n| *n as f64)
    }

    fn name(&self) -> String {
        format!("products of {:?} and {:?}", self.left.shape, self.right.shape)
    }
}
