//! Convolutions and poolings of each channel by itself.

use super::{Operand, Step, Value, ValueId, numel, start};
use crate::kernels::region::Region;

/// How the window of a convolution or a pooling moves over an image: along its height, then along its width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Elements of the window.
    pub size: [usize; 2],
    /// From one place of the window to the next.
    pub stride: [usize; 2],
    /// Pixels before the image that are not there; behind it are as many as the result needs.
    pub padding: [usize; 2],
    /// From one element of the window to the next.
    pub dilation: [usize; 2],
}

impl Window {
    /// How many places it has in an image, none of which hangs over the padding.
    pub fn places(&self, image: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| {
            let span = self.dilation[d] * (self.size[d] - 1) + 1;
            let room = (image[d] + 2 * self.padding[d]).checked_sub(span);
            room.map_or(0, |room| room / self.stride[d] + 1)
        })
    }
}

/// What a pooling takes of the pixels under its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// The greatest; NaN is greater than all.
    Max,
    /// Their mean.
    Mean {
        /// Padding counts as zeros, but for what a window that hangs over it would have there.
        counts_padding: bool,
    },
}

/// What is made of the pixels under a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowOp {
    /// Their sum by a weight: the channels of each element of the window, densely.
    Conv(ValueId),
    /// See there.
    Pool(Pool),
}

/// A convolution or a pooling of each channel by itself, over images with channels last, with the pointwise work that
/// follows it.
#[derive(Debug)]
pub struct DepthwiseStep {
    /// Images: `[n, height, width, channels]`, with channels side by side.
    pub x: Operand,
    /// What is made of them.
    pub op: WindowOp,
    /// How the window moves.
    pub window: Window,
    /// What follows.
    pub after: Region,
    /// What that reads, in the shape of the result; none is what was made.
    pub inputs: Vec<Option<Operand>>,
    /// The shape of the result, with channels last.
    pub shape: Vec<usize>,
    /// What is written, densely.
    pub output: ValueId,
}

impl Step for DepthwiseStep {
    fn reads(&self) -> Vec<ValueId> {
        let given = self.inputs.iter().flatten();
        [&self.x].into_iter().chain(given).map(|o| o.value).collect()
    }

    fn weights(&self) -> Vec<ValueId> {
        match self.op {
            WindowOp::Conv(w) => vec![w],
            WindowOp::Pool(_) => vec![],
        }
    }

    fn writes(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn operands(&self) -> Vec<(ValueId, usize)> {
        let weights = self.weights().into_iter().map(|w| (w, 0));
        let given = self.inputs.iter().flatten().map(start);
        let read = [start(&self.x)].into_iter().chain(weights).chain(given);
        read.chain([(self.output, 0)]).collect()
    }

    fn multiplications(&self, _: &[Value]) -> f64 {
        match self.op {
            WindowOp::Conv(_) => numel(&self.shape) * numel(&self.window.size),
            WindowOp::Pool(_) => 0.0,
        }
    }

    fn name(&self) -> String {
        let [kh, kw] = self.window.size;
        let follows = if self.after.is_input() { "" } else { " + pointwise" };
        let what = match self.op {
            WindowOp::Conv(_) => "depthwise",
            WindowOp::Pool(Pool::Max) => "max_pool",
            WindowOp::Pool(Pool::Mean { .. }) => "avg_pool",
        };
        format!("{what} {kh}x{kw}{follows} over {:?}", self.shape)
    }
}
