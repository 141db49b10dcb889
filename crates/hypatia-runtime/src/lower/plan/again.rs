//! What several steps of a training plan compute, each for itself.
//!
//! A result of pointwise ops that several kernels read is written once and read by all of them, or each of them
//! computes it of what it is made of. Memory decides: the fewer bytes are read and written, the better.

use egg::Id;
use rustc_hash::{FxHashMap, FxHashSet};

use super::Lowering;

/// Ops that take no time beside reading and writing.
const CHEAP: [&str; 15] = [
    "cast",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "relu",
    "relu_backward",
    "hardswish",
    "hardswish_backward",
    "hardsigmoid_backward",
    "where",
    "masked_fill",
    "square",
    "clamp",
];
/// Ops that are computed again at most.
const MOST: usize = 24;

/// What it takes to compute a node once more.
#[derive(Default)]
struct Again {
    /// Bytes that are read for each element.
    bytes: usize,
    /// Nodes that are computed.
    nodes: Vec<Id>,
}

impl Lowering<'_> {
    /// Marks nodes that every kernel computes that reads them.
    pub(super) fn compute_again(&mut self, order: &[Id]) {
        if !self.wish.saved || !self.can.column_sums {
            return;
        }
        let mut readers: FxHashMap<Id, Vec<Id>> = FxHashMap::default();
        for id in order.iter().chain([&self.program.root]) {
            for child in &self.program.node(*id).children {
                readers.entry(*child).or_default().push(*id);
            }
        }
        let mut kernels: FxHashMap<Id, FxHashSet<Id>> = FxHashMap::default();
        for id in order.iter().rev() {
            let Some(readers) = readers.get(id).filter(|r| r.len() > 1) else {
                continue;
            };
            if !self.is_cheap(*id) || !readers.iter().all(|r| self.can_compute(*r, *id)) {
                continue;
            }
            let mut found = FxHashSet::default();
            for reader in readers {
                match kernels.get(reader) {
                    Some(known) => found.extend(known),
                    None => found.extend([self.region_of(*reader)]),
                }
            }
            let count = found.len();
            let (again, size) = (self.again(*id, count), self.bytes(*id));
            if again.nodes.len() <= MOST && again.bytes * count < again.bytes + size * (1 + count) {
                for node in &again.nodes {
                    self.inside[usize::from(*node)] = true;
                    kernels.insert(*node, found.clone());
                }
            }
        }
    }

    /// Whether a step of this node can compute an operand itself.
    fn can_compute(&self, reader: Id, operand: Id) -> bool {
        let children = &self.program.node(reader).children;
        if self.row_op(reader).is_some() || self.reductions.contains(&reader) {
            return !children[1..].contains(&operand);
        }
        let alike = || self.shape(reader).ok().map(|s| s.0) == self.shape(operand).ok().map(|s| s.0);
        self.pointwise[usize::from(reader)] && !self.tails.contains_key(&reader) && alike()
    }

    fn is_cheap(&self, id: Id) -> bool {
        let at = usize::from(id);
        self.pointwise[at]
            && !self.inside[at]
            && !self.source.weight[at]
            && !self.tails.contains_key(&id)
            && CHEAP.contains(&self.name(id))
    }

    /// A node whose step computes this one: reductions of the same dimensions of one shape are one step.
    fn region_of(&self, id: Id) -> Id {
        if self.reductions.contains(&id) {
            let over = |id: Id| {
                let children = &self.program.node(id).children;
                (self.shape(children[0]).ok().map(|s| s.0), children[1])
            };
            let first = self.reductions.iter().find(|other| over(**other) == over(id));
            return first.copied().unwrap_or(id);
        }
        match self.user(id) {
            Some(user) if self.pointwise[usize::from(id)] && self.can_compute(user, id) => self.region_of(user),
            _ => id,
        }
    }

    /// Bytes of an element; few where it repeats.
    fn bytes(&self, id: Id) -> usize {
        self.shape(id).map_or(0, |s| s.1.size())
    }

    /// The cheapest way for so many kernels to compute a node, of values that are written anyway or first of all.
    fn again(&self, id: Id, kernels: usize) -> Again {
        let mut found = Again {
            bytes: 0,
            nodes: vec![id],
        };
        let shape = self.shape(id).ok().map(|s| s.0);
        for child in &self.program.node(id).children {
            if self.is_attr(*child) || self.shape(*child).ok().map(|s| s.0) != shape || self.repeats(*child) {
                continue;
            }
            let size = self.bytes(*child);
            let inner = match self.is_cheap(*child) && self.user(*child) == Some(id) {
                true => self.again(*child, kernels),
                false => Again::default(),
            };
            if !inner.nodes.is_empty() && inner.bytes * kernels <= inner.bytes + size * (1 + kernels) {
                found.bytes += inner.bytes;
                found.nodes.extend(inner.nodes);
            } else {
                found.bytes += size;
            }
        }
        found
    }

    /// Whether a node is something smaller, many times over.
    fn repeats(&self, id: Id) -> bool {
        match self.name(id) {
            "expand" => true,
            "cast" => self.repeats(self.program.node(id).children[0]),
            _ => false,
        }
    }
}
