//! Linear layers over the places of an image or of a sequence, as mixers have them: the model swaps the last two
//! dimensions, applies the layer, and swaps them back.
//!
//! A pass over the inlined program. Such a layer is `w · x` for each matrix `x` of the batch, as it lies, and nothing is
//! swapped in memory. The bias, one number for each row then, is added in the region of what follows. What is between two
//! such layers is swapped along with them.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use hypatia_core::ty::TensorType;
use rustc_hash::{FxHashMap, FxHashSet};

use super::copying::Copying;
use super::inline::Inlined;
use super::pointwise::has_code;
use crate::device::Abilities;
use crate::error::Result;

/// The order of a batch of matrices with their rows as columns.
const SWAPPED: [i64; 3] = [0, 2, 1];

/// Rows of fewer elements are not worth a product of their own.
const LEAST: usize = 64;

/// The program with products over places, if it has some.
pub(super) fn over_places(source: Inlined, can: &Abilities) -> Result<Inlined> {
    let chosen = Choice::of(&source, can).chosen();
    if chosen.is_empty() {
        return Ok(source);
    }
    let mut places = Places {
        copy: Copying::of(&source),
        swapped: FxHashMap::default(),
    };
    for id in source.program.reachable() {
        places.add(id, chosen.contains(&id))?;
    }
    Ok(places.copy.done())
}

/// Which nodes are computed with their last two dimensions swapped.
struct Choice<'a> {
    copy: Copying<'a>,
    can: &'a Abilities,
    order: Vec<Id>,
    users: FxHashMap<Id, Vec<Id>>,
}

impl<'a> Choice<'a> {
    fn of(source: &'a Inlined, can: &'a Abilities) -> Choice<'a> {
        let order = source.program.reachable();
        let mut users: FxHashMap<Id, Vec<Id>> = FxHashMap::default();
        for id in &order {
            for child in &source.program.node(*id).children {
                users.entry(*child).or_default().push(*id);
            }
        }
        let copy = Copying::of(source);
        Choice {
            copy,
            can,
            order,
            users,
        }
    }

    /// Nodes whose operands can be had swapped and of which nothing but swapped nodes are made.
    fn chosen(&self) -> FxHashSet<Id> {
        let mut chosen = FxHashSet::default();
        for id in &self.order {
            if !self.copy.is_weight(*id) && self.can_swap(*id, &chosen) {
                chosen.insert(*id);
            }
        }
        // Taking one away takes others away.
        loop {
            let before = chosen.len();
            for id in self
                .order
                .iter()
                .rev()
                .filter(|id| self.copy.source.program.root != **id)
            {
                let users = self.users.get(id).map_or(&[][..], |u| u);
                let swapped = |user: &Id| chosen.contains(user) || is_swap(&self.copy, *user);
                if !users.iter().all(swapped) {
                    chosen.remove(id);
                }
            }
            let left: Vec<Id> = self.order.iter().copied().filter(|id| chosen.contains(id)).collect();
            for id in left {
                if !self.can_swap(id, &chosen) {
                    chosen.remove(&id);
                }
            }
            if chosen.len() == before {
                return chosen;
            }
        }
    }

    /// Whether a node can be computed from swapped operands.
    fn can_swap(&self, id: Id, chosen: &FxHashSet<Id>) -> bool {
        let Some(t) = matrices(&self.copy, id) else {
            return false;
        };
        let children = self.copy.children(id);
        let swaps = |id: Id| chosen.contains(&id) || is_swap(&self.copy, id);
        match (self.copy.name(id), children) {
            ("linear", &[w, b, x]) => self.is_layer(t, w, b, x) && swaps(x),
            ("slice", &[x, d, ..]) => chosen.contains(&x) && matches!(self.copy.int(d), Some(-1 | -2)),
            (name, _) if has_code(name) => {
                let alike = |c: &Id| match self.copy.source.program.ty(*c).tensor() {
                    Some(other) => other.rank() == 0 || other.shape == t.shape && swaps(*c),
                    None => true,
                };
                children.iter().all(alike) && children.iter().any(|c| chosen.contains(c))
            }
            _ => false,
        }
    }

    /// Whether a linear layer is one that gains: with rows that begin at multiples of 16 bytes when it is swapped.
    fn is_layer(&self, t: &TensorType, w: Id, b: Id, x: Id) -> bool {
        let (Some(weight), Some(from)) = (self.copy.shape(w), self.copy.shape(x)) else {
            return false;
        };
        let bias =
            self.copy.source.program.ty(b).attr().is_some() || self.copy.shape(b) == weight.first().map(|n| vec![*n]);
        let whole = !from.contains(&0) && !weight.contains(&0) && from.len() == 3 && weight.len() == 2;
        let wide = whole && from[1] >= LEAST && (from[1] * t.dtype.size()).is_multiple_of(16);
        let alike = [w, x].iter().all(|o| {
            self.copy
                .source
                .program
                .ty(*o)
                .tensor()
                .is_some_and(|o| o.dtype == t.dtype)
        });
        wide && bias && alike && self.can.batches.contains(&t.dtype)
    }
}

/// The type of a node that is a batch of matrices.
fn matrices<'a>(copy: &Copying<'a>, id: Id) -> Option<&'a TensorType> {
    copy.source.program.ty(id).tensor().filter(|t| t.rank() == 3)
}

/// Whether a node swaps the last two dimensions of another.
fn is_swap(copy: &Copying<'_>, id: Id) -> bool {
    let order = || copy.ints(*copy.children(id).get(1)?);
    copy.name(id) == "permute" && !copy.is_weight(id) && order().is_some_and(|order| order == SWAPPED)
}

struct Places<'a> {
    copy: Copying<'a>,
    /// New nodes, which have the last two dimensions of old ones swapped.
    swapped: FxHashMap<Id, Id>,
}

impl Places<'_> {
    fn add(&mut self, id: Id, swapped: bool) -> Result<()> {
        let children = self.copy.children(id);
        let new = match children.first().and_then(|x| self.swapped.get(x)).copied() {
            _ if swapped => {
                let new = self.swap(id)?;
                self.swapped.insert(id, new);
                self.copy.permuted(new, &SWAPPED)?
            }
            Some(back) if is_swap(&self.copy, id) => back,
            _ => self.copy.as_it_is(id)?,
        };
        self.copy.note(id, new);
        Ok(())
    }

    /// A node from its swapped operands.
    fn swap(&mut self, id: Id) -> Result<Id> {
        let children = self.copy.children(id);
        match (self.copy.name(id), children) {
            ("linear", &[w, b, x]) => {
                let x = self.operand(x);
                let product = self.copy.op("matmul", [self.copy.place[&w], x])?;
                if self.copy.source.program.ty(b).attr().is_some() {
                    return Ok(product);
                }
                let rows = self.copy.shape(b).and_then(|s| s.first().copied()).unwrap_or(0);
                let column = self.copy.made.program.attr(Attr::ints(&[rows as i64, 1]));
                let bias = self.copy.op("reshape", [self.copy.place[&b], column])?;
                self.copy.op("add", [product, bias])
            }
            ("slice", &[x, d, ref rest @ ..]) => {
                let other = if self.copy.int(d) == Some(-1) { -2 } else { -1 };
                let mut operands = vec![self.operand(x), self.copy.made.program.attr(Attr::int(other))];
                operands.extend(rest.iter().map(|r| self.copy.place[r]));
                self.copy.op("slice", operands)
            }
            _ => {
                let operands: Vec<Id> = children.iter().map(|c| self.operand(*c)).collect();
                let Op::Row(op) = self.copy.source.program.node(id).op else {
                    return self.copy.as_it_is(id);
                };
                Ok(self.copy.made.program.op(op, operands)?)
            }
        }
    }

    /// An operand of a swapped node; numbers are as they are.
    fn operand(&self, id: Id) -> Id {
        match self.swapped.get(&id) {
            Some(swapped) => *swapped,
            None if is_swap(&self.copy, id) => self.copy.place[&self.copy.children(id)[0]],
            None => self.copy.place[&id],
        }
    }
}
