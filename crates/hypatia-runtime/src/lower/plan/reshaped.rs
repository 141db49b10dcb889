//! Pointwise ops with a reshape in between, as attention in windows has them: they are computed in the later shape, and
//! so in one region.
//!
//! A pass over the inlined program. What such an op reads is seen in the later shape; operands that repeat along all
//! dimensions that change do so in both. A softmax of rows is one of rows in any shape, so that the reshape follows it.
//! A reshape that has to copy, since what it reads is permuted, follows the pointwise op after it: that op copies. If
//! its result is permuted again and copied once more, for a product or another reshape, that is one copy. Matrices of a
//! product that are swapped, and whose batches are put together, are copied as they lie and swapped then.

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
    let mut readers = FxHashMap::default();
    for id in source.program.reachable() {
        readers.extend(source.program.node(id).children.iter().map(|c| (*c, id)));
    }
    let mut reshaped = Reshaped {
        copy,
        uses,
        readers,
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
            Some(Place::AfterPermutation(x)) => reshaped.permuted_once(id, x)?,
            Some(Place::BeforeSwap(x)) => reshaped.swapped_last(id, x)?,
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
    /// Behind the permutation, which is of this node then.
    AfterPermutation(Id),
    /// Before the last two dimensions of this node are swapped.
    BeforeSwap(Id),
}

struct Reshaped<'a> {
    copy: Copying<'a>,
    /// How many nodes read each one.
    uses: FxHashMap<Id, usize>,
    /// One of those.
    readers: FxHashMap<Id, Id>,
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
            .or_else(|| self.copied_twice(id).map(Place::AfterPermutation))
            .or_else(|| self.swapped(id).map(Place::BeforeSwap))
    }

    /// What a node has the last two dimensions swapped of, if it puts others together for a product.
    fn swapped(&self, id: Id) -> Option<Id> {
        let reader = self.readers.get(&id).filter(|_| self.uses.get(&id) == Some(&1))?;
        if self.copy.name(id) != "reshape" || self.copy.name(*reader) != "bmm" || self.copy.is_weight(id) {
            return None;
        }
        let swap = self.copy.children(id)[0];
        let mut order = match self.copy.name(swap) == "permute" && self.uses.get(&swap) == Some(&1) {
            true => self.copy.ints(self.copy.children(swap)[1])?,
            false => return None,
        };
        let (from, to) = (self.copy.shape(swap)?, self.copy.shape(id)?);
        let (rank, last) = (order.len(), to.len().checked_sub(2)?);
        if rank < 4 || to[last..] != from[rank - 2..] {
            return None;
        }
        order.swap(rank - 2, rank - 1);
        let whole = order.iter().enumerate().all(|(at, d)| at as i64 == *d);
        whole.then(|| self.copy.children(swap)[0])
    }

    fn swapped_last(&mut self, id: Id, x: Id) -> Result<Id> {
        let mut shape = self.copy.shape(id).unwrap_or_default();
        let mut order: Vec<i64> = (0..shape.len() as i64).collect();
        let last = shape.len() - 2;
        shape.swap(last, last + 1);
        order.swap(last, last + 1);
        let whole = self.copy.reshaped(self.copy.place[&x], &sizes(&shape))?;
        self.copy.permuted(whole, &order)
    }

    /// What a node is the permutation of a reshape of, if that is permuted itself and the node is to be copied.
    fn copied_twice(&self, id: Id) -> Option<Id> {
        let permutes = |id: Id| self.copy.name(id) == "permute" && !self.copy.is_weight(id);
        let reader = self.readers.get(&id).filter(|_| self.uses.get(&id) == Some(&1))?;
        let copies = matches!(self.copy.name(*reader), "matmul" | "bmm" | "reshape");
        let from = self.reshape_of(*self.copy.children(id).first()?)?;
        let found = (permutes(id) && copies && permutes(from)).then_some(from)?;
        let finest = finest(&self.copy.shape(found)?, &self.copy.shape(self.copy.children(id)[0])?)?;
        // It would copy nothing if it took dimensions apart only.
        finest.iter().any(|group| group.len() > 1).then_some(found)
    }

    /// A permutation before the reshape.
    fn permuted_once(&mut self, id: Id, x: Id) -> Result<Id> {
        let children = self.copy.children(id);
        let shapes = (self.copy.shape(x), self.copy.shape(children[0]));
        let (Some(order), (Some(from), Some(to))) = (self.copy.ints(children[1]), shapes) else {
            return self.copy.as_it_is(id);
        };
        let Some(groups) = finest(&from, &to) else {
            return self.copy.as_it_is(id);
        };
        let parts: Vec<usize> = groups.concat();
        let starts: Vec<usize> = (groups.iter())
            .scan(0, |at, group| {
                *at += group.len();
                Some(*at - group.len())
            })
            .collect();
        let moved = order.iter().map(|d| *d as usize);
        let moved: Vec<i64> = moved
            .flat_map(|d| (starts[d]..starts[d] + groups[d].len()).map(|i| i as i64))
            .collect();
        let apart = self.copy.reshaped(self.copy.place[&x], &sizes(&parts))?;
        let permuted = self.copy.permuted(apart, &moved)?;
        let shape = self.copy.shape(id).unwrap_or_default();
        self.copy.reshaped(permuted, &sizes(&shape))
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

/// The sizes into which the dimensions of two shapes can both be taken apart, for each dimension of the second one.
fn finest(from: &[usize], to: &[usize]) -> Option<Vec<Vec<usize>>> {
    let mut rest = from.iter().copied().filter(|n| *n != 1);
    let mut left = 1;
    let mut groups = vec![];
    for size in to {
        let (mut group, mut size) = (vec![], *size);
        while size > 1 {
            if left == 1 {
                left = rest.next()?;
            }
            let part = left.min(size);
            if part == 0 || !left.is_multiple_of(part) || !size.is_multiple_of(part) {
                return None;
            }
            group.push(part);
            (left, size) = (left / part, size / part);
        }
        groups.push(group);
    }
    (left == 1 && rest.next().is_none()).then_some(groups)
}

fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|n| *n as i64).collect()
}

/// Whether a shape is another one with dimensions taken apart, at least one of them.
fn splits(shape: &[usize], parts: &[usize]) -> bool {
    let more = |n: &&usize| **n > 1;
    let mut rest = parts.iter().filter(more);
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
        && parts.iter().filter(more).count() > shape.iter().filter(more).count()
        && shape.iter().filter(more).all(&mut whole)
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
    use super::{finest, repeats, splits};

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
    fn dimensions_of_two_shapes() {
        let windows = finest(&[16, 192, 3, 3, 14, 14], &[16, 6, 32, 9, 196]);
        assert_eq!(
            windows,
            Some(vec![vec![16], vec![6], vec![32], vec![3, 3], vec![14, 14]])
        );
        assert_eq!(finest(&[4, 1, 6], &[1, 2, 12]), Some(vec![vec![], vec![2], vec![2, 6]]));
        assert_eq!(finest(&[4, 9], &[6, 6]), None);
        assert_eq!(finest(&[4, 9], &[4, 3]), None);
        assert_eq!(finest(&[0, 9], &[0, 9]), None);
    }

    #[test]
    fn dimensions_taken_apart() {
        assert!(splits(&[2, 56, 56, 128], &[2, 8, 7, 8, 7, 128]));
        assert!(splits(&[6], &[2, 3]) && splits(&[1, 6, 1], &[1, 2, 1, 3]));
        assert!(!splits(&[1, 6], &[6, 1, 1]));
        assert!(!splits(&[4, 6], &[2, 3, 4]));
        assert!(!splits(&[6, 4], &[2, 4, 3]));
        assert!(!splits(&[6], &[6]));
    }
}
