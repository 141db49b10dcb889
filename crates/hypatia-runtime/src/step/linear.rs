//! Linear layers with what follows them.

use std::ops::Range;

use super::{Operand, Step, Value, ValueId};
use crate::kernels::product::Activation;

/// A linear layer with what follows it: `act(x · wᵀ + b) + r` or `act(x · wᵀ + b + r)`; `act(x · wᵀ + b) · r` where the
/// device can.
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
    /// It is multiplied by that instead.
    pub multiplies: bool,
    /// What is applied before that.
    pub activation: Activation,
    /// The result.
    pub y: ValueId,
    /// What passes of a training step need beside; only where the device can.
    pub gradient: Gradient,
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

impl Step for LinearStep {
    fn reads(&self) -> Vec<ValueId> {
        let r = self.r.as_ref().map(|r| r.0.value);
        [Some(self.x.value), r, self.gradient.masked]
            .into_iter()
            .flatten()
            .collect()
    }

    fn weights(&self) -> Vec<ValueId> {
        [Some(self.w), self.b].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        let all = [Some(self.y), self.gradient.sums, self.gradient.keeps];
        all.into_iter().flatten().collect()
    }

    fn multiplications(&self, values: &[Value]) -> f64 {
        let sizes = values.get(self.w).and_then(|w| self.sizes(&w.shape));
        sizes.map_or(0.0, |(n, k)| self.m as f64 * self.part(n).len() as f64 * k as f64)
    }

    fn name(&self) -> String {
        let mut name = String::from("linear");
        if self.activation != Activation::None {
            name += &format!(" + {:?}", self.activation).to_lowercase();
        }
        if self.multiplies {
            name += ", multiplied";
        }
        let g = &self.gradient;
        for (used, what) in [(g.keeps, " + mask"), (g.masked, ", masked"), (g.sums, ", sums")] {
            name += if used.is_some() { what } else { "" };
        }
        name
    }
}
