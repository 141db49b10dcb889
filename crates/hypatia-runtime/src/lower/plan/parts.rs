//! A product whose result is taken apart: where parts are results of the plan, each part is a step of its own, which
//! writes it where it belongs. Merged rows that are only read stay merged.

use std::ops::Range;

use egg::Id;
use hypatia_core::attr::Attr;

use super::Lowering;

impl Lowering<'_> {
    /// The nodes that take a product's columns apart, and which columns; none if one step is to write all of them.
    pub(super) fn parts(&self, product: Id) -> Option<Vec<(Id, Range<usize>)>> {
        if !self.can.columns_apart || self.wish.saved {
            return None;
        }
        let mut parts = vec![];
        for user in self.users_of(product) {
            match self.name(user) {
                "slice" => parts.push((user, self.slice_columns(user)?)),
                "split" => {
                    for item in self.users_of(user) {
                        parts.push((item, self.split_columns(item)?));
                    }
                }
                _ => return None,
            }
        }
        parts.sort_by_key(|(_, columns)| columns.start);
        let apart = parts.windows(2).all(|two| two[0].1.end <= two[1].1.start);
        let returned = parts.iter().any(|(id, _)| self.is_returned(*id));
        (parts.len() > 1 && apart && returned).then_some(parts)
    }

    /// The nodes that read a node in every call.
    pub(super) fn users_of(&self, id: Id) -> Vec<Id> {
        let uses = |user: &Id| self.program.node(*user).children.contains(&id);
        let alive = self.program.reachable().into_iter();
        alive
            .filter(|user| !self.source.weight[usize::from(*user)] && uses(user))
            .collect()
    }

    /// The columns of a slice of whole rows.
    fn slice_columns(&self, id: Id) -> Option<Range<usize>> {
        let (x, _) = self.shape(self.program.node(id).children[0]).ok()?;
        let (dim, start, step) = self.sliced(id, &x).ok()?;
        let length = *self.shape(id).ok()?.0.last()?;
        (dim + 1 == x.len() && step == 1 && length > 0).then_some(start..start + length)
    }

    /// The columns of one part of whole rows that are split.
    fn split_columns(&self, item: Id) -> Option<Range<usize>> {
        let &[split, index, ..] = &self.program.node(item).children[..] else {
            return None;
        };
        let operands = &self.program.node(split).children;
        let rank = self.shape(*operands.first()?).ok()?.0.len();
        let sizes = self.attr(*operands.get(1)?).and_then(Attr::known_ints)?;
        let index = usize::try_from(self.attr(index).and_then(Attr::as_int)?).ok()?;
        let start = sizes.get(..index)?.iter().sum::<i64>() as usize;
        let length = *sizes.get(index)? as usize;
        let last = self.dimension(*operands.get(2)?, rank).ok()? + 1 == rank;
        (last && length > 0).then_some(start..start + length)
    }

    /// Whether a node is a result, in this or another shape, that has memory of its own in eager.
    fn is_returned(&self, id: Id) -> bool {
        self.users_of(id).into_iter().any(|user| {
            let same = matches!(self.name(user), "reshape" | "contiguous" | "detach" | "alias");
            user == self.program.root && self.is_whole(id) || same && self.is_returned(user)
        })
    }

    fn is_whole(&self, id: Id) -> bool {
        let results = self.program.node(self.program.root).children[..self.results]
            .iter()
            .enumerate();
        results
            .filter(|(_, result)| **result == id)
            .all(|(place, _)| self.wanted(place).whole)
    }
}
