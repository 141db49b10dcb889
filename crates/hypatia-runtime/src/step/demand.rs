//! What a step asks of a device beside bytes and multiplications, for predictions of its time.

use hypatia_core::ops::{Meaning, table};
use hypatia_core::work::Cost;

use super::{Operand, Plan, Step as _, Task, WindowOp, numel};
use crate::kernels::product::Activation;
use crate::kernels::region::{Op, Read, Region};
use crate::kernels::rowwise::RowOp;

/// What a step asks of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Demand {
    /// Operations on vector units, as the op table counts them.
    pub vector: f64,
    /// Elements that it writes.
    pub results: f64,
    /// Rows, and runs of elements that lie one after the other in operands with gaps: each begins anew.
    pub runs: f64,
    /// Elements that are taken or written one by one, since their neighbours lie elsewhere.
    pub apart: f64,
    /// Bytes of the constants that it reads, which nobody has touched since the last call.
    pub constants: f64,
}

impl Task {
    /// The kind of step.
    pub fn kind(&self) -> &'static str {
        match self {
            Task::Linear(_) => "linear",
            Task::Batch(_) => "batch",
            Task::Region(_) => "region",
            Task::Rows(_) => "rows",
            Task::Columns(_) => "columns",
            Task::Norm(_) => "norm",
            Task::Depthwise(_) => "depthwise",
            Task::Attention(_) => "attention",
            Task::Torch(_) => "torch",
        }
    }
}

impl Plan {
    /// What a step asks of a device.
    pub fn demand(&self, step: &Task) -> Demand {
        let written = step.writes().into_iter().filter_map(|id| self.values.get(id));
        let results: f64 = written.map(|value| value.numel() as f64).sum();
        let read = [step.reads(), step.weights()].concat();
        let constants = self.constants.iter().filter(|id| read.contains(id));
        let mut demand = Demand {
            results,
            constants: constants.map(|id| self.values[*id].bytes() as f64).sum(),
            ..Demand::default()
        };
        match step {
            Task::Linear(step) => {
                demand.vector = results * (activation(step.activation) + f64::from(u8::from(step.r.is_some())));
                demand.runs = step.m as f64;
            }
            Task::Region(step) => {
                demand.vector = numel(&step.shape) * vector(&step.region);
                step.inputs.iter().chain(&step.slices).for_each(|o| demand.reach(o));
                let shifted = step.reads.iter().filter(|r| !matches!(r, Read::Plain)).count();
                demand.apart += shifted as f64 * numel(&step.shape);
            }
            Task::Rows(step) => {
                let regions = [step.rows.prologue(), step.rows.epilogue()];
                let beside: f64 = regions.into_iter().flatten().map(vector).sum();
                demand.vector = numel(&step.shape) * (beside + of_row(step.rows.op()));
                let outer = step.shape.len().saturating_sub(step.reduced);
                demand.runs = numel(&step.shape[..outer]);
                step.inputs.iter().for_each(|o| demand.reach(o));
            }
            Task::Columns(step) => {
                demand.vector = numel(&step.shape) * (vector(&step.region) + step.kinds.len() as f64);
                demand.runs = numel(&step.shape[..step.rows]);
                step.inputs.iter().for_each(|o| demand.reach(o));
            }
            Task::Norm(step) => {
                demand.vector = numel(&[step.rows, step.width]) * of_name("layer_norm");
                demand.runs = step.rows as f64;
            }
            Task::Depthwise(step) => {
                let window = match step.op {
                    WindowOp::Conv(_) => 0.0,
                    WindowOp::Pool(_) => numel(&step.window.size),
                };
                demand.vector = results * (window + vector(&step.after));
                let pixels = &step.shape[..step.shape.len().saturating_sub(1)];
                demand.runs = numel(pixels) * numel(&step.window.size);
            }
            Task::Attention(step) => {
                demand.vector = scores(&step.q, step.multiplications(&self.values));
            }
            Task::Torch(step) => {
                step.reads.iter().for_each(|o| demand.reach(o));
                if let Some(q) = step.reads.first().filter(|_| step.name.contains("attention")) {
                    demand.runs = numel(&q.shape[..q.shape.len().saturating_sub(1)]);
                    demand.vector = scores(q, step.multiplications(&self.values));
                }
            }
            Task::Batch(step) => demand.runs = step.left.shape.first().map_or(0.0, |n| *n as f64),
        }
        demand
    }
}

impl Demand {
    /// Adds what it takes to reach the elements of an operand.
    fn reach(&mut self, operand: &Operand) {
        if operand.is_dense() || operand.elements() <= 1 {
            return;
        }
        let dims = operand.shape.iter().zip(&operand.strides);
        let mut dims = dims.rev().filter(|(size, _)| **size > 1).peekable();
        let (mut run, step) = dims.next().map_or((1, 1), |(size, step)| (*size, *step));
        while let Some((size, _)) = dims.next_if(|(_, stride)| **stride == step * run as isize) {
            run *= size;
        }
        let all = numel(&operand.shape);
        // One row for all stays where it is.
        if dims.any(|(_, stride)| *stride != 0) {
            self.runs += all / run as f64;
        }
        if !matches!(step, 0 | 1) {
            self.apart += all;
        }
    }
}

/// Vector operations of the softmax of attention, which has so many multiplications in both products.
fn scores(q: &Operand, multiplications: f64) -> f64 {
    let width = q.shape.last().map_or(1.0, |n| (*n).max(1) as f64);
    multiplications / (2.0 * width) * of_name("softmax")
}

/// Vector operations for each element of a region.
fn vector(region: &Region) -> f64 {
    let meaning = region.meaning();
    let (needed, inputs) = (meaning.needed(), region.inputs().len());
    let instructions = meaning.instructions.iter().enumerate();
    let used = instructions.filter(|(i, _)| needed[inputs + i]);
    used.fold(0.0, |sum, (_, instruction)| sum + of_op(instruction.op))
}

fn of_op(op: Op) -> f64 {
    match op {
        Op::Constant(..) => 0.0,
        Op::Cast(_) | Op::Clamp => 1.0,
        _ => op.name().map_or(1.0, of_name),
    }
}

fn of_name(name: &str) -> f64 {
    match table().by_name(name).map(|id| &table().row(id).meaning) {
        Some(Meaning::Primitive {
            cost: Cost::Map(k) | Cost::Reduce(k),
            ..
        }) => *k,
        _ => 1.0,
    }
}

fn of_row(op: RowOp) -> f64 {
    match op {
        RowOp::Softmax { .. } => of_name("softmax"),
        RowOp::LogSoftmax => of_name("log_softmax"),
        RowOp::LayerNorm { .. } => of_name("layer_norm"),
        RowOp::RmsNorm { .. } => of_name("rms_norm"),
        RowOp::Sum | RowOp::Mean | RowOp::Amax => 1.0,
    }
}

fn activation(activation: Activation) -> f64 {
    match activation {
        Activation::None => 0.0,
        Activation::Relu => of_name("relu"),
        Activation::Gelu => of_name("gelu"),
        Activation::GeluTanh => of_name("gelu_tanh"),
        Activation::Silu => of_name("silu"),
        Activation::Sigmoid => of_name("sigmoid"),
        Activation::Tanh => of_name("tanh"),
    }
}
