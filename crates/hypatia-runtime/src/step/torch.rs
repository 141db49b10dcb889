//! Calls into torch.

use super::{Operand, Step, Value, ValueId, numel};

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

/// Calls whose first operand is a table, of which as much is read as is written.
const LOOKUPS: [&str; 4] = [
    "aten.embedding.",
    "aten.index_select.",
    "aten.gather.",
    "aten.index.Tensor",
];

impl TorchStep {
    /// Values that it reads, and of how many elements, if it writes so many.
    pub(super) fn elements_read(&self, written: usize) -> Vec<(ValueId, usize)> {
        let looks_up = LOOKUPS.iter().any(|name| self.name.starts_with(name));
        let one = |(i, operand): (usize, &Operand)| match i {
            0 if looks_up => (operand.value, written),
            _ => (operand.value, operand.elements()),
        };
        self.reads.iter().enumerate().map(one).collect()
    }
}

impl Step for TorchStep {
    fn reads(&self) -> Vec<ValueId> {
        self.reads.iter().map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        self.writes.clone()
    }

    /// Of the ops that do most of them; of others none are counted.
    fn multiplications(&self, values: &[Value]) -> f64 {
        let read = |at: usize| self.reads.get(at).map_or(&[][..], |o| &o.shape);
        let written = self.writes.first().and_then(|id| values.get(*id));
        let results = written.map_or(0.0, |value| value.numel() as f64);
        let op = self.name.strip_prefix("aten.").unwrap_or(&self.name);
        let op = op.split('.').next().unwrap_or_default();
        if op.contains("attention") && read(1).len() >= 2 {
            let keys = read(1)[read(1).len() - 2] as f64;
            return 2.0 * numel(read(0)) * keys;
        }
        if op.contains("convolution") || op.starts_with("conv") {
            // The weight has the results of a group of channels first; a transposed one has what is read first.
            let window = read(1).get(1..).map_or(0.0, numel);
            return if op.contains("transpose") {
                numel(read(0))
            } else {
                results
            } * window;
        }
        let terms = match op {
            "mm" | "bmm" | "matmul" | "linear" | "_grouped_mm" => read(0).last(),
            "addmm" | "baddbmm" => read(1).last(),
            _ => None,
        };
        terms.map_or(0.0, |k| results * *k as f64)
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
