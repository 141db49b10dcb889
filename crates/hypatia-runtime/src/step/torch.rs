//! Calls into torch.

use super::{Operand, Step, ValueId};

/// A call into torch.
#[derive(Debug)]
pub struct TorchStep {
    /// What is called, for messages.
    pub name: String,
    /// Which of the plan's calls it is.
    pub call: usize,
    /// The tensors that it reads.
    pub reads: Vec<Operand>,
    /// What it writes, densely.
    pub writes: Vec<ValueId>,
}

impl Step for TorchStep {
    fn reads(&self) -> Vec<ValueId> {
        self.reads.iter().map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        self.writes.clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
