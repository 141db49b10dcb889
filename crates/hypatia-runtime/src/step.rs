//! What a plan is made of: values and the steps that compute them. Each kind of step has a file of its own.

mod attention;
mod batch;
mod columns;
mod demand;
mod depthwise;
mod linear;
mod norm;
mod region;
mod rows;
#[cfg(test)]
mod tests;
mod torch;

use std::collections::BTreeMap;

use hypatia_core::ty::DType;

use crate::operand::dense_strides;
pub use crate::operand::{Operand, ValueId};
pub use attention::AttentionStep;
pub use batch::BatchStep;
pub use columns::{ColumnKind, ColumnStep};
pub use demand::Demand;
pub use depthwise::{DepthwiseStep, Pool, Window, WindowOp};
pub use linear::{Gradient, LinearStep};
pub use norm::NormStep;
pub use region::{Placed, RegionStep};
pub use rows::RowStep;
pub use torch::TorchStep;

/// A dense value.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
}

impl Value {
    /// Elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }
}

/// A kind of step.
trait Step {
    fn reads(&self) -> Vec<ValueId>;

    fn weights(&self) -> Vec<ValueId> {
        vec![]
    }

    fn writes(&self) -> Vec<ValueId>;

    fn operands(&self) -> Vec<(ValueId, usize)> {
        vec![]
    }

    fn multiplications(&self, _values: &[Value]) -> f64 {
        0.0
    }

    fn name(&self) -> String;
}

/// The product of sizes.
fn numel(shape: &[usize]) -> f64 {
    shape.iter().map(|n| *n as f64).product()
}

/// Where an operand begins: its value, and elements behind the start of that.
fn start(operand: &Operand) -> (ValueId, usize) {
    (operand.value, operand.offset)
}

/// The kinds of steps.
macro_rules! tasks {
    ($($(#[$doc:meta])* $kind:ident($step:ty),)*) => {
        /// What a step does.
        #[derive(Debug)]
        pub enum Task {
            $($(#[$doc])* $kind($step),)*
        }

        impl Task {
            /// Values that a step reads at every call.
            pub fn reads(&self) -> Vec<ValueId> {
                match self { $(Task::$kind(step) => step.reads(),)* }
            }

            /// Values that a step reads as weights: constants, or anything where the device takes it.
            pub fn weights(&self) -> Vec<ValueId> {
                match self { $(Task::$kind(step) => step.weights(),)* }
            }

            /// Values that a step writes.
            pub fn writes(&self) -> Vec<ValueId> {
                match self { $(Task::$kind(step) => step.writes(),)* }
            }

            /// What the kernel of a step takes, in this order, if it is always one: values, and elements behind their
            /// starts.
            pub fn operands(&self) -> Vec<(ValueId, usize)> {
                match self { $(Task::$kind(step) => step.operands(),)* }
            }

            /// Multiplications with additions of matrix products, convolutions and attention, of values as these.
            pub fn multiplications(&self, values: &[Value]) -> f64 {
                match self { $(Task::$kind(step) => step.multiplications(values),)* }
            }

            /// What a step does, in words.
            pub fn name(&self) -> String {
                match self { $(Task::$kind(step) => step.name(),)* }
            }
        }
    };
}

tasks! {
    /// A linear layer.
    Linear(LinearStep),
    /// Products of matrices of a batch.
    Batch(Box<BatchStep>),
    /// Pointwise ops.
    Region(Box<RegionStep>),
    /// An op on rows.
    Rows(Box<RowStep>),
    /// Sums over rows.
    Columns(Box<ColumnStep>),
    /// A norm of a training step.
    Norm(Box<NormStep>),
    /// A convolution or a pooling of each channel by itself.
    Depthwise(Box<DepthwiseStep>),
    /// Attention of one query for each head.
    Attention(Box<AttentionStep>),
    /// A call into torch.
    Torch(TorchStep),
}

/// Steps in order, over values. Every value is an input, a constant, or written by exactly one step.
#[derive(Debug, Default)]
pub struct Plan {
    /// The name of the device that it was made for.
    pub device: &'static str,
    /// All values.
    pub values: Vec<Value>,
    /// What is done.
    pub steps: Vec<Task>,
    /// Values given at every call.
    pub inputs: Vec<ValueId>,
    /// Values given once.
    pub constants: Vec<ValueId>,
    /// Values returned, each written by a step.
    pub outputs: Vec<ValueId>,
    /// Sizes and strides in which callers and torch see a value, where that is not as it lies in memory.
    pub seen: BTreeMap<ValueId, (Vec<usize>, Vec<isize>)>,
}

impl Plan {
    /// Bytes that a step reads and writes at least: each of its values once, of a part that part, and of a table what is
    /// looked up.
    pub fn moved(&self, step: &Task) -> usize {
        let mut touched: BTreeMap<ValueId, usize> = BTreeMap::new();
        let whole = |id: ValueId| (id, self.values[id].numel());
        let parts: Vec<(ValueId, usize)> = match step {
            Task::Region(region) => region.elements_read(),
            Task::Torch(call) => {
                let written = call.writes.iter().map(|id| self.values[*id].numel()).sum();
                call.elements_read(written)
            }
            _ => step.reads().into_iter().map(whole).collect(),
        };
        let others = step.weights().into_iter().chain(step.writes()).map(whole);
        for (id, elements) in parts.into_iter().chain(others) {
            *touched.entry(id).or_default() += elements;
        }
        let bytes = |(id, elements): (ValueId, usize)| {
            let value = &self.values[id];
            elements.min(value.numel()) * value.dtype.size()
        };
        touched.into_iter().map(bytes).sum()
    }

    /// What a step reads and writes, in words: `f32[8, 64] f32[16, 64] -> f32[8, 16]`.
    pub fn sizes(&self, step: &Task) -> String {
        let text = |ids: Vec<ValueId>| {
            let mut seen: Vec<ValueId> = vec![];
            for id in ids {
                if !seen.contains(&id) {
                    seen.push(id);
                }
            }
            let value = |id: &ValueId| format!("{}{:?}", self.values[*id].dtype.name(), self.values[*id].shape);
            seen.iter().map(value).collect::<Vec<_>>().join(" ")
        };
        let read = text([step.reads(), step.weights()].concat());
        format!("{read} -> {}", text(step.writes()))
    }

    /// Sizes and strides in which callers and torch see a value.
    pub fn form(&self, id: ValueId) -> (Vec<usize>, Vec<isize>) {
        let shape = &self.values[id].shape;
        self.seen
            .get(&id)
            .cloned()
            .unwrap_or_else(|| (shape.clone(), dense_strides(shape)))
    }
}
