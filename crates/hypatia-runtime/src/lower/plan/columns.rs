//! Sums, means and norms over dimensions that are not the innermost in memory, such as those of images with channels last.

use egg::Id;
use hypatia_core::attr::Attr;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::operand::dense_strides;
use crate::step::{ColumnKind, ColumnStep, Task};

impl Lowering<'_> {
    /// What a node makes of columns, and the dimensions of its operand, those first that it reduces; how many these are.
    pub(super) fn column_step(&self, id: Id) -> Option<(ColumnKind, Vec<usize>, usize)> {
        if !self.can.column_sums {
            return None;
        }
        let children = &self.program.node(id).children;
        let kind = match self.name(id) {
            "sum" => ColumnKind::Sum,
            "mean" => ColumnKind::Mean,
            "vector_norm" if self.attr(*children.get(2)?).and_then(Attr::number) == Some(2.0) => ColumnKind::Norm,
            _ => return None,
        };
        let x = *children.first()?;
        let (shape, from) = self.shape(x).ok()?;
        let dims = self.attr(*children.get(1)?).and_then(Attr::known_ints)?;
        let rank = shape.len();
        let reduced: Vec<bool> = (0..rank).map(|d| dims.contains(&(d as i64 - rank as i64))).collect();
        let count = reduced.iter().filter(|r| **r).count();
        let to = self.shape(id).ok()?.1;
        if count == 0 || count == rank || from != to || !to.is_float() || shape.contains(&0) {
            return None;
        }
        let strides = self
            .place
            .get(&x)
            .map_or_else(|| dense_strides(&shape), |o| o.strides.clone());
        let innermost = (0..rank)
            .filter(|d| shape[*d] > 1 && strides[*d] > 0)
            .min_by_key(|d| strides[*d]);
        if innermost.is_some_and(|d| reduced[d]) {
            return None;
        }
        let order = (0..rank)
            .filter(|d| reduced[*d])
            .chain((0..rank).filter(|d| !reduced[*d]));
        Some((kind, order.collect(), count))
    }

    pub(super) fn columns(&mut self, id: Id) -> Result<()> {
        let (kind, order, rows) = self.column_step(id).ok_or_else(|| no_plan("sums of another kind"))?;
        let x = self.operand(self.program.node(id).children[0])?.permuted(&order);
        let output = self.new_value(id)?;
        self.plan
            .steps
            .push(Task::Columns(Box::new(ColumnStep { kind, x, rows, output })));
        Ok(())
    }
}
