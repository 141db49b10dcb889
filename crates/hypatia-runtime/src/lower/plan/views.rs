//! Views: other operands on the same value.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::step::Operand;

impl Lowering<'_> {
    /// The node as a view of its operand; none if it is no view.
    pub(super) fn view(&mut self, id: Id) -> Result<Option<Operand>> {
        let children = self.program.node(id).children.clone();
        let name = self.name(id);
        if name == "getitem" {
            return self.item(id).map(Some);
        }
        if !matches!(
            name,
            "reshape" | "permute" | "slice" | "select" | "expand" | "unfold" | "contiguous" | "detach" | "alias"
        ) {
            return Ok(None);
        }
        let x = self.operand(children[0])?;
        let (shape, _) = self.shape(id)?;
        Ok(Some(match name {
            "reshape" => match x.reshaped(&shape) {
                Some(view) => view,
                // Its elements are not in this order in memory.
                None => {
                    let copy = self.copied(children[0], &x)?;
                    Operand::dense(copy, &shape)
                }
            },
            "permute" => {
                let order = self.ints(children[1])?;
                x.permuted(&order.iter().map(|d| *d as usize).collect::<Vec<_>>())
            }
            "expand" => x
                .broadcast(&shape)
                .ok_or_else(|| no_plan("an expansion to another shape"))?,
            "slice" => {
                let (dim, start, step) = self.sliced(id, &x.shape)?;
                x.sliced(dim, start, shape[dim], step)
            }
            "unfold" => {
                let dim = self.dimension(children[1], x.shape.len())?;
                x.unfolded(dim, self.int(children[2])? as usize, self.int(children[3])? as usize)
            }
            "select" => {
                let dim = self.dimension(children[1], x.shape.len())?;
                let index = self.int(children[2])?;
                x.selected(dim, place(index, x.shape[dim]))
            }
            _ => x,
        }))
    }

    /// The dimension that a slice is taken of, given the sizes of the whole; its first index and its step.
    pub(super) fn sliced(&self, id: Id, whole: &[usize]) -> Result<(usize, usize, usize)> {
        let children = &self.program.node(id).children;
        let dim = self.dimension(children[1], whole.len())?;
        let step = self.int(children[4])?.max(1);
        let start = match &self.program.node(children[2]).op {
            Op::Attr(Attr::None) => 0,
            _ => place(self.int(children[2])?, whole[dim]),
        };
        Ok((dim, start, step as usize))
    }

    /// One of several results.
    fn item(&mut self, id: Id) -> Result<Operand> {
        let children = self.program.node(id).children.clone();
        let (from, index) = (children[0], self.int(children[1])? as usize);
        if self.name(from) == "split" {
            let operands = self.program.node(from).children.clone();
            let x = self.operand(operands[0])?;
            let sizes = self.ints(operands[1])?;
            let dim = self.dimension(operands[2], x.shape.len())?;
            let start: i64 = sizes.iter().take(index).sum();
            let size = *sizes.get(index).ok_or_else(|| no_plan("no such part"))?;
            return Ok(x.sliced(dim, start as usize, size as usize, 1));
        }
        if self.name(from) == "unbind" {
            let operands = self.program.node(from).children.clone();
            let x = self.operand(operands[0])?;
            let dim = self.dimension(operands[1], x.shape.len())?;
            return Ok(x.selected(dim, index));
        }
        let item = self.items.get(&from).and_then(|items| items.get(index)).cloned();
        item.flatten().ok_or_else(|| no_plan("a result that is no tensor"))
    }

    pub(super) fn attr(&self, id: Id) -> Option<&Attr> {
        match &self.program.node(id).op {
            Op::Attr(a) => Some(a),
            _ => None,
        }
    }

    fn int(&self, id: Id) -> Result<i64> {
        self.attr(id)
            .and_then(Attr::as_int)
            .ok_or_else(|| no_plan("a place that is not known"))
    }

    fn ints(&self, id: Id) -> Result<Vec<i64>> {
        self.attr(id)
            .and_then(Attr::known_ints)
            .ok_or_else(|| no_plan("sizes that are not known"))
    }

    /// A dimension counted from the last, as the table has it.
    pub(super) fn dimension(&self, id: Id, rank: usize) -> Result<usize> {
        let dim = self.int(id)?;
        let dim = if dim < 0 { dim + rank as i64 } else { dim };
        usize::try_from(dim)
            .ok()
            .filter(|d| *d < rank)
            .ok_or_else(|| no_plan("no such dimension"))
    }
}

/// An index counted from either end, within a dimension.
fn place(index: i64, size: usize) -> usize {
    let index = if index < 0 { index + size as i64 } else { index };
    index.clamp(0, size as i64) as usize
}
