//! Sums of two groups of channels, as nets with split attention have them: additions, in the region of what follows.
//!
//! A pass over the inlined program, before images get their channels last: an image whose channels are two groups has
//! five dimensions, in which nobody would know it for an image.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use rustc_hash::FxHashMap;

use super::copying::Copying;
use super::inline::Inlined;
use super::pointwise::has_code;
use crate::error::Result;

/// The dimension of the groups, from the last on: after it come channels, height and width.
const GROUPS: i64 = -4;

/// The program with additions, if there are such sums.
pub(super) fn added(source: Inlined) -> Result<Inlined> {
    let mut pairs = Pairs {
        copy: Copying::of(&source),
        users: FxHashMap::default(),
    };
    let order = source.program.reachable();
    if !order.iter().any(|id| pairs.summed(*id).is_some()) {
        return Ok(source);
    }
    pairs.users = pairs.copy.uses();
    for id in order {
        let new = match pairs.summed(id) {
            Some(x) => pairs.sum(id, x)?,
            None => pairs.copy.as_it_is(id)?,
        };
        pairs.copy.note(id, new);
    }
    Ok(pairs.copy.done())
}

struct Pairs<'a> {
    copy: Copying<'a>,
    /// How many nodes read each one.
    users: FxHashMap<Id, usize>,
}

impl Pairs<'_> {
    /// What a node sums over two groups of channels.
    fn summed(&self, id: Id) -> Option<Id> {
        let &[x, dims, _] = self.copy.children(id) else {
            return None;
        };
        let pair = self.copy.name(id) == "sum" && self.copy.ints(dims)? == [GROUPS];
        let float = self.copy.source.program.ty(id).tensor()?.dtype.is_float();
        let image = matches!(self.copy.shape(x)?[..], [_, 2, _, _, _]);
        (pair && float && image && !self.copy.is_weight(id) && self.copy.shape(id).is_some()).then_some(x)
    }

    fn sum(&mut self, id: Id, x: Id) -> Result<Id> {
        let (first, second) = (self.group(x, 0)?, self.group(x, 1)?);
        let sum = self.copy.op("add", [first, second])?;
        // Torch begins with a zero: the sum of two negative ones is positive.
        let zero = self.copy.made.program.attr(Attr::float(0.0));
        let sum = self.copy.op("add", [sum, zero])?;
        let shape = self.copy.shape(id).unwrap_or_default();
        match shape.len() {
            4 => Ok(sum),
            _ => self.shaped(sum, &shape),
        }
    }

    /// One of two groups: of a pointwise op it is the op of groups, of channels a part of them.
    fn group(&mut self, id: Id, at: i64) -> Result<Id> {
        let shape = self.copy.shape(id).unwrap_or_default();
        let children = self.copy.children(id);
        let name = self.copy.name(id);
        let alone = self.users.get(&id) == Some(&1) && !self.copy.is_weight(id);
        if let (Op::Row(op), true, true) = (&self.copy.source.program.node(id).op, alone, has_code(name)) {
            let mut operands = vec![];
            for child in children {
                let own = self.copy.shape(*child);
                operands.push(match own.as_deref() {
                    Some([_, 2, _, _, _]) => self.group(*child, at)?,
                    // What is the same for both groups.
                    Some([n, 1, c, h, w]) => self.shaped(self.copy.place[child], &[*n, *c, *h, *w])?,
                    Some([2, c, h, w]) => {
                        let part = self.part(self.copy.place[child], GROUPS, at, at + 1)?;
                        self.shaped(part, &[*c, *h, *w])?
                    }
                    Some([1, c, h, w]) => self.shaped(self.copy.place[child], &[*c, *h, *w])?,
                    _ => self.copy.place[child],
                });
            }
            return Ok(self.copy.made.program.op(*op, operands)?);
        }
        let channels = shape[2] as i64;
        if let ("reshape", Some([n, c, h, w])) = (name, children.first().and_then(|x| self.copy.shape(*x)).as_deref())
            && [*n, *c, *h, *w] == [shape[0], 2 * shape[2], shape[3], shape[4]]
        {
            return self.part(self.copy.place[&children[0]], -3, at * channels, (at + 1) * channels);
        }
        let part = self.part(self.copy.place[&id], GROUPS, at, at + 1)?;
        self.shaped(part, &[shape[0], shape[2], shape[3], shape[4]])
    }

    fn part(&mut self, id: Id, dim: i64, start: i64, end: i64) -> Result<Id> {
        let bounds = [dim, start, end, 1].map(|n| self.copy.made.program.attr(Attr::int(n)));
        self.copy.op("slice", [&[id], &bounds[..]].concat())
    }

    fn shaped(&mut self, id: Id, shape: &[usize]) -> Result<Id> {
        let sizes: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
        self.copy.reshaped(id, &sizes)
    }
}
