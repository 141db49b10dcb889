//! Pointwise work.

use super::{Operand, Step, ValueId, start};
use crate::kernels::region::{Read, Region};

/// A fused pointwise region.
#[derive(Debug)]
pub struct RegionStep {
    /// What is computed.
    pub region: Region,
    /// The shape of the results.
    pub shape: Vec<usize>,
    /// What it reads, in that shape.
    pub inputs: Vec<Operand>,
    /// How it reads each of them, if not all as their strides say; only where the device can.
    pub reads: Vec<Read>,
    /// What it writes, densely.
    pub outputs: Vec<ValueId>,
    /// Where in those values each result lies, if not densely.
    pub slices: Vec<Operand>,
    /// Strides of a dense value of that shape.
    pub dense: Vec<isize>,
    /// How far behind its place each result lies, if a tensor says so; only where the device can.
    pub placed: Vec<Placed>,
}

/// A result that lies at a place that is known when the plan runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The input whose only element is the place, a whole number.
    pub by: usize,
    /// Elements from one place to the next.
    pub stride: isize,
    /// So many places there are. Any other ends the run, as it does in torch.
    pub size: usize,
}

impl RegionStep {
    /// Values that it reads, and of how many elements.
    pub(super) fn elements_read(&self) -> Vec<(ValueId, usize)> {
        let one = |(i, operand): (usize, &Operand)| match self.reads.get(i) {
            Some(Read::At { .. }) => (operand.value, operand.shape.iter().product()),
            _ => (operand.value, operand.elements()),
        };
        let changed = self.slices.iter().filter(|o| !self.outputs.contains(&o.value));
        let changed = changed.map(|o| (o.value, o.elements()));
        self.inputs.iter().enumerate().map(one).chain(changed).collect()
    }
}

impl Step for RegionStep {
    /// What it writes into and is no result of its own, is an input that it changes.
    fn reads(&self) -> Vec<ValueId> {
        let changed = self.slices.iter().filter(|o| !self.outputs.contains(&o.value));
        self.inputs.iter().chain(changed).map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        self.outputs.clone()
    }

    fn operands(&self) -> Vec<(ValueId, usize)> {
        let results = self.outputs.iter().filter(|_| self.slices.is_empty());
        let read = self.inputs.iter().chain(&self.slices).map(start);
        read.chain(results.map(|id| (*id, 0))).collect()
    }

    fn name(&self) -> String {
        format!("pointwise over {:?}", self.shape)
    }
}
