//! Attention of one query for each head.

use super::{Operand, Step, Value, ValueId, numel, start};

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

impl Step for AttentionStep {
    fn reads(&self) -> Vec<ValueId> {
        self.given().map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        vec![self.y]
    }

    fn operands(&self) -> Vec<(ValueId, usize)> {
        self.given().map(start).chain([(self.y, 0)]).collect()
    }

    /// Of both products.
    fn multiplications(&self, _: &[Value]) -> f64 {
        let keys = self.k.shape.get(2).map_or(0.0, |n| *n as f64);
        2.0 * numel(&self.q.shape) * keys
    }

    fn name(&self) -> String {
        format!("attention of {:?} to {:?}", self.q.shape, self.k.shape)
    }
}

impl AttentionStep {
    fn given(&self) -> impl Iterator<Item = &Operand> {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.mask)
    }
}
