//! Norms of 16-bit numbers whose result is rounded and then multiplied by a weight, as most decoders have them: one step,
//! which rounds as eager does.

use egg::Id;
use hypatia_core::ty::DType;

use super::Lowering;
use crate::error::Result;
use crate::kernels::region::{Instruction, Op as Lane, Region, Rounding};
use crate::kernels::rowwise::{RowOp, Rowwise};
use crate::step::Operand;

impl Lowering<'_> {
    /// Lets the step of a norm multiply its rows, where nobody else reads them and no region would.
    pub(super) fn scale_norm(&mut self, id: Id) {
        let Some((norm, _)) = self.norm_and_weight(id) else {
            return;
        };
        let reader = self.user(id).is_some_and(|user| self.pointwise[usize::from(user)]);
        let free = |id: Id| !self.inside[usize::from(id)] && !self.tails.contains_key(&id);
        if !reader && free(id) && free(norm) && self.uses[usize::from(norm)] == 1 {
            self.pointwise[usize::from(id)] = false;
            self.inside[usize::from(norm)] = true;
            self.scaled.insert(id, norm);
        }
    }

    /// The norm and the weight that a node multiplies.
    fn norm_and_weight(&self, id: Id) -> Option<(Id, Id)> {
        let &[a, b] = &self.program.node(id).children[..] else {
            return None;
        };
        if self.name(id) != "mul" || !self.pointwise[usize::from(id)] {
            return None;
        }
        let (of, dtype) = self.shape(id).ok()?;
        let plain = |norm: Id| {
            let children = &self.program.node(norm).children;
            let op = self.row_op(norm).map(|(op, _)| op);
            let normed = matches!(op, Some(RowOp::RmsNorm { .. } | RowOp::LayerNorm { .. }));
            // Its own weight and bias.
            normed
                && children[2..].iter().all(|c| self.is_attr(*c))
                && self.shape(norm).ok() == Some((of.clone(), dtype))
        };
        let scales = |weight: Id| {
            let shape = self.shape(weight).ok();
            let row = shape.is_some_and(|(shape, d)| d == dtype && shape.len() == 1 && of.last() == shape.last());
            row && self.source.weight[usize::from(weight)]
        };
        let halves = matches!(dtype, DType::BF16 | DType::F16);
        let found = [(a, b), (b, a)]
            .into_iter()
            .find(|(norm, weight)| plain(*norm) && scales(*weight));
        found.filter(|_| halves)
    }

    pub(super) fn scaled_norm(&mut self, id: Id) -> Result<()> {
        let norm = self.scaled[&id];
        let weight = self.program.node(id).children.iter().copied().find(|c| *c != norm);
        self.rows(norm, weight.map(|weight| (id, weight)))
    }

    /// Rows that are rounded, and then multiplied.
    pub(super) fn with_scale(&mut self, rows: Rowwise, weight: Id, shape: &[usize]) -> Result<(Rowwise, Operand)> {
        let dtype = self.shape(weight)?.1;
        let code = vec![
            Instruction::new(Lane::Cast(dtype), [0]),
            Instruction::new(Lane::Mul, [2, 1]),
        ];
        let region = Region::new(&[DType::F32, dtype], code, &[3], Rounding::EveryOp)?;
        Ok((rows.with_epilogue(region)?, self.broadcast(weight, shape)?))
    }
}
