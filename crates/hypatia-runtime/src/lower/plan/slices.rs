//! Parts of what a pointwise op makes, where nobody reads the whole: the op of parts, each in the region of what follows.
//!
//! A pass over the inlined program. No element is computed twice: the parts together are no more than the whole. And every
//! part is read by an op that takes it over, so that there is one step less.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use rustc_hash::FxHashMap;

use super::copying::Copying;
use super::inline::Inlined;
use super::pointwise::has_code;
use crate::device::Abilities;
use crate::error::Result;
use crate::kernels::product::Activation;

/// A part of a node: the dimension from the last on, and indices of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    dim: i64,
    start: i64,
    end: i64,
}

/// The program with pointwise ops of parts, if it has some.
pub(super) fn in_parts(source: Inlined, can: &Abilities) -> Result<Inlined> {
    let mut parts = Parts {
        copy: Copying::of(&source),
        users: FxHashMap::default(),
        can,
    };
    let order = source.program.reachable();
    for id in order.iter().filter(|id| !source.weight[usize::from(**id)]) {
        for child in &source.program.node(*id).children {
            parts.users.entry(*child).or_default().push(*id);
        }
    }
    let taken: FxHashMap<Id, (Id, Part)> = order.iter().flat_map(|id| parts.taken(*id)).collect();
    if taken.is_empty() {
        return Ok(source);
    }
    for id in order {
        let new = match taken.get(&id) {
            Some((whole, part)) => parts.part(*whole, *part, true)?,
            None => parts.copy.as_it_is(id)?,
        };
        parts.copy.note(id, new);
    }
    Ok(parts.copy.done())
}

struct Parts<'a> {
    copy: Copying<'a>,
    users: FxHashMap<Id, Vec<Id>>,
    can: &'a Abilities,
}

impl Parts<'_> {
    fn users(&self, id: Id) -> &[Id] {
        self.users.get(&id).map_or(&[], |users| users)
    }

    /// The nodes that are parts of a pointwise node, if it is better computed in parts.
    fn taken(&self, id: Id) -> Vec<(Id, (Id, Part))> {
        let none = vec![];
        if !self.is_apart(id) {
            return none;
        }
        let mut found = vec![];
        for user in self.users(id) {
            let items = match self.copy.name(*user) {
                "slice" => std::slice::from_ref(user),
                "split" => self.users(*user),
                _ => return none,
            };
            for item in items {
                match self.part_of(*item, *user).filter(|_| self.is_taken_over(*item)) {
                    Some(part) => found.push((*item, (id, part))),
                    None => return none,
                }
            }
        }
        let elements = |id: Id| self.copy.shape(id).map_or(usize::MAX, |s| s.iter().product());
        let all: usize = found.iter().map(|(item, _)| elements(*item)).sum();
        if all > elements(id) { none } else { found }
    }

    /// Whether a node is pointwise and no product takes it over.
    fn is_apart(&self, id: Id) -> bool {
        let Some(t) = self.copy.source.program.ty(id).tensor() else {
            return false;
        };
        let known = |c: &Id| self.copy.source.program.ty(*c).tensor().is_none() || self.copy.shape(*c).is_some();
        has_code(self.copy.name(id))
            && t.dtype.is_float()
            && !self.copy.is_weight(id)
            && self.copy.shape(id).is_some()
            && self.copy.children(id).iter().all(known)
            && !self.ends_product(id)
    }

    /// Whether the step of a product may take a node over.
    fn ends_product(&self, id: Id) -> bool {
        let name = self.copy.name(id);
        let dtype = self.copy.source.program.ty(id).tensor().map(|t| t.dtype);
        let applied = |a: Activation| dtype.is_some_and(|dtype| self.can.applies(a, dtype));
        let product = |c: &Id| matches!(self.copy.name(*c), "linear" | "addmm" | "mm" | "matmul");
        let mut children = self.copy.children(id).iter();
        match Activation::named(name).is_some_and(applied) {
            true => children.any(product),
            false => name == "add" && children.any(|c| product(c) || self.ends_product(*c)),
        }
    }

    /// Which part of its operand a slice or an item of a split is.
    fn part_of(&self, item: Id, user: Id) -> Option<Part> {
        let children = self.copy.children(user);
        let shape = self.copy.shape(children[0])?;
        let from_last = |d: i64| if d < 0 { d } else { d - shape.len() as i64 };
        if item == user {
            let &[_, d, start, end, step] = children else {
                return None;
            };
            let dim = from_last(self.copy.int(d)?);
            let size = *shape.get(usize::try_from(dim + shape.len() as i64).ok()?)? as i64;
            let place = |at: i64| if at < 0 { at + size } else { at }.clamp(0, size);
            let part = Part {
                dim,
                start: place(self.copy.int(start)?),
                end: place(self.copy.int(end)?),
            };
            return (self.copy.int(step) == Some(1)).then_some(part);
        }
        let &[_, sizes, d] = children else {
            return None;
        };
        let (sizes, index) = (
            self.copy.ints(sizes)?,
            self.copy.int(*self.copy.children(item).get(1)?)?,
        );
        let start: i64 = sizes.iter().take(index as usize).sum();
        Some(Part {
            dim: from_last(self.copy.int(d)?),
            start,
            end: start + sizes.get(index as usize)?,
        })
    }

    /// Whether a part is read once, by an op whose step computes what it reads.
    fn is_taken_over(&self, part: Id) -> bool {
        let &[user] = self.users(part) else {
            return false;
        };
        let rows = matches!(
            self.copy.name(user),
            "softmax" | "softmax_f32" | "log_softmax" | "layer_norm" | "rms_norm"
        );
        let first = self.copy.children(user).first() == Some(&part);
        let alike = self.copy.shape(user) == self.copy.shape(part);
        alike && (rows && first || has_code(self.copy.name(user)) && !self.ends_product(user))
    }

    /// A part of a node; of a pointwise one it is the op of parts.
    fn part(&mut self, whole: Id, part: Part, apart: bool) -> Result<Id> {
        let node = self.copy.source.program.node(whole);
        let (true, Op::Row(op)) = (apart, &node.op) else {
            let place = self.copy.place[&whole];
            let bounds = [part.dim, part.start, part.end, 1].map(|n| self.copy.made.program.attr(Attr::int(n)));
            return self.copy.op("slice", [&[place], &bounds[..]].concat());
        };
        let shape = self.copy.shape(whole).unwrap_or_default();
        let from_last = |shape: &[usize]| Some(shape[shape.len().checked_sub(part.dim.unsigned_abs() as usize)?]);
        let mut operands = vec![];
        for child in self.copy.children(whole) {
            let own = self.copy.shape(*child).and_then(|s| from_last(&s));
            // What repeats along the dimension is the same for every part.
            operands.push(match own == from_last(&shape) {
                true => {
                    let inner = self.users(*child).len() == 1 && self.is_apart(*child);
                    self.part(*child, part, inner)?
                }
                false => self.copy.place[child],
            });
        }
        Ok(self.copy.made.program.op(*op, operands)?)
    }
}
