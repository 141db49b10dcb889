//! Norms of training steps.

use super::{Step, ValueId};

/// A norm in a training step: with its statistics, or its gradients.
#[derive(Debug)]
pub struct NormStep {
    /// Rows, and elements of a row.
    pub rows: usize,
    /// See there.
    pub width: usize,
    /// The mean is taken away, and there is a bias.
    pub centered: bool,
    /// What is added to the spread in the forward pass; none in the backward pass.
    pub eps: Option<f64>,
    /// Forward: `x`, weight, bias. Backward: gradient, `x`, mean, factor, weight. Without a mean and a bias if it is not
    /// centered.
    pub reads: Vec<ValueId>,
    /// Forward: the result, mean, factor. Backward: gradients of `x`, weight, bias.
    pub writes: Vec<ValueId>,
}

impl Step for NormStep {
    fn reads(&self) -> Vec<ValueId> {
        self.reads.clone()
    }

    fn writes(&self) -> Vec<ValueId> {
        self.writes.clone()
    }

    fn name(&self) -> String {
        let name = if self.centered { "layer_norm" } else { "rms_norm" };
        let what = if self.eps.is_some() {
            "with statistics"
        } else {
            "backward"
        };
        format!("{name} {what} over {:?}", [self.rows, self.width])
    }
}
