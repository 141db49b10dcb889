//! Attention of one query for each head, on devices that have a kernel for it: a decoder that makes one token at a time
//! reads the keys and values of all tokens before, where they are kept.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ty::DType;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::operand::Operand;
use crate::step::{AttentionStep, Task};

/// Heads of a group, numbers of a head, and both together, at most.
const HEADS: usize = 8;
const WIDTH: usize = 256;
const BOTH: usize = 1024;

impl Lowering<'_> {
    /// Heads that share their keys and values, if a node is such attention.
    fn decoding(&self, id: Id) -> Option<usize> {
        if self.name(id) != "attention" {
            return None;
        }
        let &[q, k, v, mask, causal, _] = &self.program.node(id).children[..] else {
            return None;
        };
        let ((query, dtype), keys) = (self.shape(q).ok()?, self.shape(k).ok()?);
        let &[batch, heads, 1, width] = &query[..] else {
            return None;
        };
        let alike = self.shape(v).ok()? == keys && keys.1 == dtype && keys.0.len() == 4;
        let fits = keys.0[..2] == [batch, heads] && keys.0[3] == width && keys.0[2] > 0 && batch * heads > 0;
        let group = match (self.repeated_heads(k), self.repeated_heads(v)) {
            (Some((_, of_keys)), Some((_, of_values))) if of_keys == of_values => of_keys,
            (None, None) => 1,
            _ => return None,
        };
        let row = width.is_multiple_of(8) && width <= WIDTH;
        let seen = match self.shape(mask) {
            Ok((shape, of)) => shape.len() <= 4 && (of == dtype || matches!(of, DType::Bool | DType::F32)),
            Err(_) => self.is_attr(mask),
        };
        let open = self.attr(causal).is_some_and(|c| *c == Attr::Bool(false));
        let few = group <= HEADS && group * width <= BOTH;
        (self.can.decodes.contains(&dtype) && alike && fits && row && seen && open && few).then_some(group)
    }

    /// What a node repeats for the heads of a group, and for how many: `[batch, groups, keys, width]` seen as
    /// `[batch, groups, heads, keys, width]`, and written one after the other.
    fn repeated_heads(&self, id: Id) -> Option<(Id, usize)> {
        let wide = (self.name(id) == "reshape").then(|| self.program.node(id).children[0])?;
        let (shape, _) = self.shape(wide).ok()?;
        let from = (self.name(wide) == "expand").then(|| self.program.node(wide).children[0])?;
        let (narrow, _) = self.shape(from).ok()?;
        let &[batch, groups, heads, keys, width] = &shape[..] else {
            return None;
        };
        let joined = self.shape(id).ok()?.0 == [batch, groups * heads, keys, width];
        (joined && narrow == [batch, groups, 1, keys, width]).then_some((wide, heads))
    }

    /// Lets such attention read keys and values that are repeated for several heads as they are, where only it does.
    pub(super) fn absorb_repeated_heads(&mut self, id: Id) {
        if self.decoding(id).is_none_or(|group| group == 1) {
            return;
        }
        let children = &self.program.node(id).children;
        for child in [children[1], children[2]] {
            let at = usize::from(child);
            self.inside[at] |= self.uses[at] == 1 && !self.source.weight[at];
        }
    }

    /// Whether a node is such attention.
    pub(super) fn decodes(&self, id: Id) -> bool {
        self.decoding(id).is_some()
    }

    pub(super) fn decode_step(&mut self, id: Id) -> Result<()> {
        let heads = self.decoding(id).ok_or_else(|| no_plan("another attention"))?;
        let children = self.program.node(id).children.clone();
        let (shape, _) = self.shape(id)?;
        let (batch, groups, width) = (shape[0], shape[1] / heads, shape[3]);
        let keys = self.shape(children[1])?.0[2];
        let apart = |o: &Operand, rest: usize| {
            let one = o.selected(2, 0);
            one.reshaped(&[batch, groups, heads, rest])
                .ok_or_else(|| no_plan("heads that are not apart"))
        };
        let q = self.operand(children[0])?;
        let q = self.with_aligned_rows(children[0], q)?;
        let q = apart(&q, width)?;
        let k = self.keys(children[1], heads)?;
        let v = self.keys(children[2], heads)?;
        let mask = match self.is_attr(children[3]) {
            true => None,
            false => {
                let mask = self.broadcast(children[3], &[batch, groups * heads, 1, keys])?;
                Some(apart(&mask, keys)?)
            }
        };
        let scale = self.attr(children[5]).and_then(Attr::number);
        let y = self.new_value(id)?;
        self.plan.steps.push(Task::Attention(Box::new(AttentionStep {
            q,
            k,
            v,
            mask,
            scale: scale.unwrap_or(1.0 / (width as f64).sqrt()),
            y,
        })));
        Ok(())
    }

    /// Keys or values as `[batch, groups, keys, width]`.
    fn keys(&mut self, id: Id, heads: usize) -> Result<Operand> {
        let Some((wide, _)) = self.repeated_heads(id).filter(|_| heads > 1) else {
            let found = self.operand(id)?;
            return self.with_aligned_rows(id, found);
        };
        let found = self.operand(wide)?.selected(2, 0);
        match found.has_dense_rows() && found.has_aligned_rows(self.shape(id)?.1.size()) {
            true => Ok(found),
            false => {
                let copy = self.copied(id, &found)?;
                Ok(Operand::dense(copy, &found.shape))
            }
        }
    }

    /// What the kernel can read 16 bytes at a time.
    fn with_aligned_rows(&mut self, id: Id, found: Operand) -> Result<Operand> {
        match found.has_dense_rows() && found.has_aligned_rows(self.shape(id)?.1.size()) {
            true => Ok(found),
            false => self.copy_of(id, &found),
        }
    }
}
