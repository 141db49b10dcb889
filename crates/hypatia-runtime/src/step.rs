//! What a plan is made of: values and the steps that compute them.

use crate::operand::dense_strides;
pub use crate::operand::{Operand, ValueId};

use std::collections::BTreeMap;
use std::ops::Range;

use hypatia_core::ty::DType;

use crate::kernels::product::Activation;
use crate::kernels::region::{Read, Region};
use crate::kernels::rowwise::Rowwise;

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

/// A linear layer with what follows it: `act(x · wᵀ + b) + r` or `act(x · wᵀ + b + r)`.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearStep {
    /// Rows, each `x_stride` elements after the one before.
    pub x: Operand,
    /// See there.
    pub x_stride: usize,
    /// How many rows.
    pub m: usize,
    /// Weight, a constant if the device packs it.
    pub w: ValueId,
    /// The weight has a column, not a row, for each column of the result.
    pub transposed: bool,
    /// Bias, as the weight.
    pub b: Option<ValueId>,
    /// The columns of the result that are computed, if not all, from those parts of weight and bias.
    pub columns: Option<Range<usize>>,
    /// What is added at the end: rows, and how far apart.
    pub r: Option<(Operand, usize)>,
    /// What is applied before that.
    pub activation: Activation,
    /// The result.
    pub y: ValueId,
    /// What passes of a training step need beside; only where the device can.
    pub gradient: Gradient,
}

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

/// What a product does beside for a forward or a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gradient {
    /// The rows of `x` are the columns of the product's left factor.
    pub x_transposed: bool,
    /// The sum of each row of the left factor is written: the gradient of a bias.
    pub sums: Option<ValueId>,
    /// Bits that tell where the result of a ReLU is positive are written.
    pub keeps: Option<ValueId>,
    /// The result is zero where such bits are not set.
    pub masked: Option<ValueId>,
}

/// What a column step makes of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// The sum of its elements.
    Sum,
    /// Their mean.
    Mean,
    /// The root of the sum of their squares.
    Norm,
    /// Their mean, and the sum of squared distances from it divided by their number less this.
    Moments {
        /// See there.
        correction: u32,
    },
}

impl ColumnKind {
    /// How many numbers are made of a column.
    pub fn results(self) -> usize {
        match self {
            ColumnKind::Moments { .. } => 2,
            _ => 1,
        }
    }
}

/// Sums, means or norms over the first dimensions of what a region computes.
#[derive(Debug)]
pub struct ColumnStep {
    /// What is summed, in the type that sums are made in.
    pub region: Region,
    /// What is made of the columns of each of its results.
    pub kinds: Vec<ColumnKind>,
    /// Sizes of what it reads.
    pub shape: Vec<usize>,
    /// The sums are over so many of the first dimensions.
    pub rows: usize,
    /// What the region reads.
    pub inputs: Vec<Operand>,
    /// What is written: results of the first kind, of the second one and so on.
    pub outputs: Vec<ValueId>,
}

impl ColumnStep {
    /// What is made of one operand as it is.
    pub fn of_one(&self) -> Option<(ColumnKind, &Operand)> {
        match (&self.kinds[..], &self.inputs[..]) {
            ([kind], [x]) if self.region.only_widens() => Some((*kind, x)),
            _ => None,
        }
    }
}

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
}

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

/// Attention of one query for each head: `softmax(scale · q · kᵀ + mask) · v`. Groups of heads share their keys and values.
/// A query that sees no key has zeros.
#[derive(Debug)]
pub struct AttentionStep {
    /// `[batch, groups, heads, width]`, rows without gaps, as of keys and values.
    pub q: Operand,
    /// `[batch, groups, keys, width]`.
    pub k: Operand,
    /// The same.
    pub v: Operand,
    /// `[batch, groups, heads, keys]`: true for keys that are seen, or what is added to the scores.
    pub mask: Option<Operand>,
    /// What scores are multiplied by.
    pub scale: f64,
    /// What is written, densely, as the queries are.
    pub y: ValueId,
}

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

/// What a step does.
#[derive(Debug)]
pub enum Task {
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

impl LinearStep {
    /// Columns of the result and of the operand, given the shape of the weight.
    pub fn sizes(&self, weight: &[usize]) -> Option<(usize, usize)> {
        match (weight, self.transposed) {
            (&[n, k], false) | (&[k, n], true) => Some((n, k)),
            // A matrix that is kept as something of more dimensions.
            _ => {
                let terms = if self.gradient.x_transposed {
                    self.x.shape.first()
                } else {
                    self.x.shape.last()
                };
                let (k, all) = (*terms?, weight.iter().product::<usize>());
                (k > 0 && all.is_multiple_of(k)).then(|| (all / k, k))
            }
        }
    }

    /// The columns that are computed, of so many.
    pub fn part(&self, n: usize) -> Range<usize> {
        self.columns.clone().unwrap_or(0..n)
    }
}

impl Task {
    /// Values that a step reads at every call.
    pub fn reads(&self) -> Vec<ValueId> {
        match self {
            Task::Linear(l) => [Some(l.x.value), l.r.as_ref().map(|r| r.0.value), l.gradient.masked]
                .into_iter()
                .flatten()
                .collect(),
            Task::Batch(b) => vec![b.left.value, b.right.value],
            // What it writes into and is no result of its own, is an input that it changes.
            Task::Region(r) => (r.inputs.iter())
                .chain(r.slices.iter().filter(|o| !r.outputs.contains(&o.value)))
                .map(|o| o.value)
                .collect(),
            Task::Rows(r) => r.inputs.iter().map(|o| o.value).collect(),
            Task::Columns(c) => c.inputs.iter().map(|o| o.value).collect(),
            Task::Norm(n) => n.reads.clone(),
            Task::Depthwise(d) => [&d.x]
                .into_iter()
                .chain(d.inputs.iter().flatten())
                .map(|o| o.value)
                .collect(),
            Task::Attention(a) => [&a.q, &a.k, &a.v].into_iter().chain(&a.mask).map(|o| o.value).collect(),
            Task::Torch(t) => t.reads.iter().map(|o| o.value).collect(),
        }
    }

    /// Values that a step reads as weights: constants, or anything where the device takes it.
    pub fn weights(&self) -> Vec<ValueId> {
        match self {
            Task::Linear(l) => [Some(l.w), l.b].into_iter().flatten().collect(),
            Task::Depthwise(d) => match d.op {
                WindowOp::Conv(w) => vec![w],
                WindowOp::Pool(_) => vec![],
            },
            _ => vec![],
        }
    }

    /// Values that a step writes.
    pub fn writes(&self) -> Vec<ValueId> {
        match self {
            Task::Linear(l) => [Some(l.y), l.gradient.sums, l.gradient.keeps]
                .into_iter()
                .flatten()
                .collect(),
            Task::Batch(b) => vec![b.y],
            Task::Region(r) => r.outputs.clone(),
            Task::Rows(r) => vec![r.output],
            Task::Columns(c) => c.outputs.clone(),
            Task::Norm(n) => n.writes.clone(),
            Task::Depthwise(d) => vec![d.output],
            Task::Attention(a) => vec![a.y],
            Task::Torch(t) => t.writes.clone(),
        }
    }

    /// What a step does, in words.
    pub fn name(&self) -> String {
        match self {
            Task::Linear(l) => {
                let mut name = String::from("linear");
                if l.activation != Activation::None {
                    name += &format!(" + {:?}", l.activation).to_lowercase();
                }
                let g = &l.gradient;
                for (used, what) in [(g.keeps, " + mask"), (g.masked, ", masked"), (g.sums, ", sums")] {
                    name += if used.is_some() { what } else { "" };
                }
                name
            }
            Task::Batch(b) => format!("products of {:?} and {:?}", b.left.shape, b.right.shape),
            Task::Region(r) => format!("pointwise over {:?}", r.shape),
            Task::Rows(r) => format!("{:?} over {:?}", r.rows.op(), r.shape).to_lowercase(),
            Task::Columns(c) => {
                let word = |kind: &ColumnKind| match kind {
                    ColumnKind::Sum => "sums",
                    ColumnKind::Mean => "means",
                    ColumnKind::Norm => "norms",
                    ColumnKind::Moments { .. } => "moments",
                };
                let words: Vec<&str> = c.kinds.iter().map(word).collect();
                format!("column {} of {:?}", words.join(" and "), c.shape)
            }
            Task::Norm(n) => {
                let name = if n.centered { "layer_norm" } else { "rms_norm" };
                let what = if n.eps.is_some() { "with statistics" } else { "backward" };
                format!("{name} {what} over {:?}", [n.rows, n.width])
            }
            Task::Depthwise(d) => {
                let [kh, kw] = d.window.size;
                let follows = if d.after.is_input() { "" } else { " + pointwise" };
                let what = match d.op {
                    WindowOp::Conv(_) => "depthwise",
                    WindowOp::Pool(Pool::Max) => "max_pool",
                    WindowOp::Pool(Pool::Mean { .. }) => "avg_pool",
                };
                format!("{what} {kh}x{kw}{follows} over {:?}", d.shape)
            }
            Task::Attention(a) => format!("attention of {:?} to {:?}", a.q.shape, a.k.shape),
            Task::Torch(t) => t.name.clone(),
        }
    }
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
    /// Bytes that a step reads and writes, each of its values once.
    pub fn moved(&self, step: &Task) -> usize {
        let mut touched = [step.reads(), step.weights(), step.writes()].concat();
        touched.sort_unstable();
        touched.dedup();
        touched.iter().map(|id| self.values[*id].bytes()).sum()
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
