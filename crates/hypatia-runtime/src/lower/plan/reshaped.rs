//! Pointwise ops with a reshape in between, as attention in windows has them: they are computed in the later shape, and
//! so in one region.
//!
//! A pass over the inlined program. What such an op reads is seen in the later shape; operands that repeat along all
//! dimensions that change do so in both. A softmax of rows is one of rows in any shape, so that the reshape follows it.
//! A reshape that has to copy, since what it reads is permuted, follows the pointwise op after it: that op copies.

use egg::Id;
use hypatia_core::ir::node::Op;
use rustc_hash::FxHashMap;

use super::copying::Copying;
use super::inline::Inlined;
use super::pointwise::has_code;
use crate::error::Result;

/// The program with reshapes before pointwise ops and after softmax, if there are such ones.
pub(super) fn pushed(source: Inlined) -> Result<Inlined> {
    let copy = Copying::of(&source);
    let uses = copy.uses();
    let mut reshaped = Reshaped {
        copy,
        uses,
        apart: FxHashMap::default(),
    };
    let order = source.program.reachable();
    if order.iter().all(|id| reshaped.place(*id).is_none()) {
        return Ok(source);
    }
    for id in order {
        let new = match reshaped.place(id) {
            Some(Place::Between(at)) => reshaped.with_reshaped(id, at)?,
            Some(Place::AfterSoftmax(x)) => reshaped.softmax(id, x)?,
            Some(Place::AfterPointwise(at)) => reshaped.copying(id, at)?,
            None => reshaped.copy.as_it_is(id)?,
        };
        reshaped.copy.note(id, new);
    }
    Ok(reshaped.copy.done())
}

/// Where a reshape is moved that a node reads.
enum Place {
    /// Before the pointwise op that this operand is a reshape of.
    Between(usize),
    /// Behind the softmax, which is of this node then.
    AfterSoftmax(Id),
    /// Behind the pointwise op of which this is an operand.
    AfterPointwise(usize),
}

struct Reshaped<'a> {
    copy: Copying<'a>,
    /// How many nodes read each one.
    uses: FxHashMap<Id, usize>,
    /// New nodes of pointwise ops that are computed in another shape, and that shape.
    apart: FxHashMap<Id, (Id, Vec<usize>)>,
}

impl Reshaped<'_> {
    fn place(&self, id: Id) -> Option<Place> {
        let between = self.between(id).map(Place::Between);
        let softmax = || self.before_softmax(id).map(Place::AfterSoftmax);
        between
            .or_else(softmax)
            .or_else(|| self.copied(id).map(Place::AfterPointwise))
    }

    /// Which operand of a pointwise op is a reshape that copies: of a permutation, and it joins dimensions of that.
    fn copied(&self, id: Id) -> Option<usize> {
        let shape = self.copy.shape(id).filter(|_| has_code(self.copy.name(id)))?;
        let children = self.copy.children(id);
        let tensors = || {
            children
                .iter()
                .filter(|c| self.copy.source.program.ty(**c).tensor().is_some())
        };
        if self.copy.is_weight(id) || tensors().any(|c| self.is_product(*c)) {
            return None;
        }
        children.iter().position(|c| {
            let alike = self.copy.shape(*c).as_ref() == Some(&shape);
            let fits = |(_, to): (Id, Vec<usize>)| {
                let seen = |own: Vec<usize>| own == shape || repeats(&own, &shape, &to);
                splits(&shape, &to) && tensors().all(|c| self.copy.shape(*c).is_some_and(seen))
            };
            alike && self.permuted(*c).is_some_and(fits)
        })
    }

    /// The new node that a node is the reshape of, with its shape: a permutation, or what is computed of one.
    fn permuted(&self, id: Id) -> Option<(Id, Vec<usize>)> {
        if self.uses.get(&id) == Some(&1)
            && let Some(apart) = self.apart.get(&id)
        {
            return Some(apart.clone());
        }
        let from = self.reshape_of(id)?;
        let permuted = self.copy.name(from) == "permute" && !self.copy.is_weight(from);
        let new = self.copy.place.get(&from).copied().unwrap_or(from);
        permuted.then_some((new, self.copy.shape(from)?))
    }

    /// Which operand of a pointwise op is a reshape of another one that can be computed in the later shape.
    fn between(&self, id: Id) -> Option<usize> {
        let shape = self.copy.shape(id).filter(|_| has_code(self.copy.name(id)))?;
        let free = !self.copy.is_weight(id);
        (self.copy.children(id).iter()).position(|c| {
            let from = self
                .reshape_of(*c)
                .filter(|_| free && self.copy.shape(*c).as_ref() == Some(&shape));
            from.is_some_and(|from| self.can_be(from, &shape))
        })
    }

    /// What a softmax over rows is of, if it is the reshape of a pointwise op that leaves rows as they are.
    fn before_softmax(&self, id: Id) -> Option<Id> {
        let children = self.copy.children(id);
        let rows = matches!(
            self.copy.name(id),
            "softmax" | "log_softmax" | "softmax_f32" | "log_softmax_f32"
        ) && self.copy.int(*children.get(1)?) == Some(-1)
            && !self.copy.is_weight(id);
        let from = self.reshape_of(*children.first()?).filter(|_| rows)?;
        let alike = self.copy.shape(from)?.last() == self.copy.shape(id)?.last();
        (alike && self.is_free(from)).then_some(from)
    }

    /// What nobody but this node's only reader sees in another shape.
    fn reshape_of(&self, id: Id) -> Option<Id> {
        let alone = self.copy.name(id) == "reshape" && self.uses.get(&id) == Some(&1) && !self.copy.is_weight(id);
        alone.then(|| self.copy.children(id)[0])
    }

    /// Whether a node is a pointwise op that one other node reads. What products do themselves stays with them.
    fn is_free(&self, id: Id) -> bool {
        has_code(self.copy.name(id))
            && self.uses.get(&id) == Some(&1)
            && !self.copy.is_weight(id)
            && !self.copy.children(id).iter().any(|c| self.is_product(*c))
    }

    fn is_product(&self, id: Id) -> bool {
        matches!(self.copy.name(id), "linear" | "addmm" | "mm" | "conv")
    }

    /// Whether a pointwise op can be computed in another shape.
    fn can_be(&self, id: Id, to: &[usize]) -> bool {
        let Some(from) = self.copy.shape(id).filter(|_| self.is_free(id)) else {
            return false;
        };
        let fits = |c: &Id| match self.copy.source.program.ty(*c).tensor() {
            None => true,
            Some(_) => match self.copy.shape(*c) {
                Some(own) => own == from || repeats(&own, &from, to),
                None => false,
            },
        };
        matches!(self.copy.source.program.node(id).op, Op::Row(_)) && self.copy.children(id).iter().all(fits)
    }

    /// A pointwise op whose operand is computed in the op's own shape.
    fn with_reshaped(&mut self, id: Id, at: usize) -> Result<Id> {
        let (children, shape) = (self.copy.children(id), self.copy.shape(id).unwrap_or_default());
        let Op::Row(op) = self.copy.source.program.node(id).op else {
            return self.copy.as_it_is(id);
        };
        let mut operands: Vec<Id> = children.iter().map(|c| self.copy.place[c]).collect();
        operands[at] = self.seen(self.copy.children(children[at])[0], &shape)?;
        Ok(self.copy.made.program.op(op, operands)?)
    }

    /// A node in another shape.
    fn seen(&mut self, id: Id, to: &[usize]) -> Result<Id> {
        let from = self.copy.shape(id).unwrap_or_default();
        let (Op::Row(op), true) = (&self.copy.source.program.node(id).op, self.can_be(id, to)) else {
            return self.copy.reshaped(self.copy.place[&id], &sizes(to));
        };
        let mut operands = vec![];
        for child in self.copy.children(id) {
            operands.push(match self.copy.shape(*child) {
                Some(own) if own == from => self.seen(*child, to)?,
                _ => self.copy.place[child],
            });
        }
        Ok(self.copy.made.program.op(*op, operands)?)
    }

    /// A pointwise op in the shape of what its operand is a reshape of.
    fn copying(&mut self, id: Id, at: usize) -> Result<Id> {
        let (children, shape) = (self.copy.children(id), self.copy.shape(id).unwrap_or_default());
        let (Op::Row(op), Some((first, to))) = (&self.copy.source.program.node(id).op, self.permuted(children[at]))
        else {
            return self.copy.as_it_is(id);
        };
        let mut operands = vec![];
        for child in children {
            operands.push(match self.copy.shape(*child) {
                _ if *child == children[at] => first,
                Some(own) if own == shape => self.copy.reshaped(self.copy.place[child], &sizes(&to))?,
                _ => self.copy.place[child],
            });
        }
        let made = self.copy.made.program.op(*op, operands)?;
        self.apart.insert(id, (made, to));
        self.copy.reshaped(made, &sizes(&shape))
    }

    /// A softmax before the reshape.
    fn softmax(&mut self, id: Id, x: Id) -> Result<Id> {
        let Op::Row(op) = self.copy.source.program.node(id).op else {
            return self.copy.as_it_is(id);
        };
        let mut operands: Vec<Id> = self.copy.children(id).iter().map(|c| self.copy.place[c]).collect();
        operands[0] = self.copy.place[&x];
        let rows = self.copy.made.program.op(op, operands)?;
        self.copy
            .reshaped(rows, &sizes(&self.copy.shape(id).unwrap_or_default()))
    }
}

fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|n| *n as i64).collect()
}

/// Whether a shape is another one with dimensions taken apart, at least one of them.
fn splits(shape: &[usize], parts: &[usize]) -> bool {
    let mut rest = parts.iter();
    let mut whole = |n: &usize| {
        let mut product = 1;
        while product < *n {
            match rest.next() {
                Some(part) => product *= part,
                None => return false,
            }
        }
        product == *n
    };
    !shape.contains(&0)
        && parts.len() > shape.len()
        && parts.iter().all(|n| *n > 1)
        && shape.iter().filter(|n| **n > 1).all(&mut whole)
        && rest.next().is_none()
}

/// Whether an operand repeats along all dimensions in which two shapes differ, and fits both.
fn repeats(own: &[usize], from: &[usize], to: &[usize]) -> bool {
    let alike = from
        .iter()
        .rev()
        .zip(to.iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let others = own.len().saturating_sub(alike);
    own.len() <= to.len() && own[..others].iter().all(|n| *n == 1)
}

#[cfg(test)]
mod tests {
    use super::{repeats, splits};

    #[test]
    fn operands_that_repeat() {
        let (from, to) = (&[128, 4, 49, 49][..], &[2, 64, 4, 49, 49][..]);
        for own in [&[4, 49, 49][..], &[1, 4, 49, 49], &[1, 1, 49], &[]] {
            assert!(repeats(own, from, to), "{own:?}");
        }
        for own in [&[128, 1, 1, 1][..], &[128, 4, 49, 49]] {
            assert!(!repeats(own, from, to), "{own:?}");
        }
        assert!(!repeats(&[1, 1, 4, 49], &[2, 64, 4, 49], &[512, 49]));
        assert!(repeats(&[49], &[2, 64, 4, 49], &[512, 49]));
    }

    #[test]
    fn dimensions_taken_apart() {
        assert!(splits(&[2, 56, 56, 128], &[2, 8, 7, 8, 7, 128]));
        assert!(splits(&[6], &[2, 3]));
        assert!(!splits(&[4, 6], &[2, 3, 4]));
        assert!(!splits(&[6, 4], &[2, 4, 3]));
        assert!(!splits(&[6], &[6]));
    }
}
