//! A pass over the inlined program: a new program, node by node, in which some nodes have another form.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::{Node, Op};
use hypatia_core::ir::program::Program;
use hypatia_core::ops::{op_id, table};
use hypatia_core::ty::DType;
use rustc_hash::FxHashMap;

use super::inline::Inlined;
use crate::error::Result;

/// A program that is being made from another.
pub(super) struct Copying<'a> {
    pub made: Inlined,
    pub source: &'a Inlined,
    /// The new node of each old one.
    pub place: FxHashMap<Id, Id>,
}

impl<'a> Copying<'a> {
    pub fn of(source: &'a Inlined) -> Copying<'a> {
        Copying {
            made: Inlined {
                program: Program::over(&source.program.leaves),
                origin: Default::default(),
                weight: vec![],
                images: source.images,
            },
            source,
            place: FxHashMap::default(),
        }
    }

    /// How many nodes read each one.
    pub fn uses(&self) -> FxHashMap<Id, usize> {
        let mut found = FxHashMap::default();
        for id in self.source.program.reachable() {
            for child in self.children(id) {
                *found.entry(*child).or_default() += 1;
            }
        }
        found
    }

    /// Notes the new node of an old one.
    pub fn note(&mut self, id: Id, new: Id) {
        self.place.insert(id, new);
        let nodes = self.made.program.nodes().len();
        self.made.weight.resize(nodes, false);
        if let Some(origin) = self.source.origin.get(&id) {
            self.made.weight[usize::from(new)] = self.source.weight[usize::from(id)];
            self.made.origin.insert(new, *origin);
        }
    }

    /// The new program, of which all nodes are noted.
    pub fn done(mut self) -> Inlined {
        self.made.weight.resize(self.made.program.nodes().len(), false);
        self.made.program.root = self.place[&self.source.program.root];
        self.made
    }

    pub fn is_weight(&self, id: Id) -> bool {
        self.source.weight[usize::from(id)]
    }

    pub fn as_it_is(&mut self, id: Id) -> Result<Id> {
        let node = self.source.program.node(id);
        let children = node.children.iter().map(|c| self.place[c]).collect();
        let op = node.op.clone();
        Ok(self.made.program.add(Node { op, children })?)
    }

    pub fn name(&self, id: Id) -> &'static str {
        match &self.source.program.node(id).op {
            Op::Row(op) => table().row(*op).name,
            _ => "",
        }
    }

    pub fn children(&self, id: Id) -> &'a [Id] {
        &self.source.program.node(id).children
    }

    /// The shape of a tensor, if its sizes are known.
    pub fn shape(&self, id: Id) -> Option<Vec<usize>> {
        let t = self.source.program.ty(id).tensor()?;
        t.shape.iter().map(|d| d.known().map(|n| n as usize)).collect()
    }

    pub fn ints(&self, id: Id) -> Option<Vec<i64>> {
        self.source.program.ty(id).attr().and_then(Attr::known_ints)
    }

    pub fn int(&self, id: Id) -> Option<i64> {
        self.source.program.ty(id).attr().and_then(Attr::as_int)
    }

    pub fn permuted(&mut self, id: Id, order: &[i64]) -> Result<Id> {
        let order = self.made.program.attr(Attr::ints(order));
        self.op("permute", [id, order])
    }

    pub fn reshaped(&mut self, id: Id, sizes: &[i64]) -> Result<Id> {
        let sizes = self.made.program.attr(Attr::ints(sizes));
        self.op("reshape", [id, sizes])
    }

    /// A node in another type, if it is not of that already.
    pub fn cast(&mut self, id: Id, dtype: DType) -> Result<Id> {
        if self.made.program.ty(id).tensor().is_some_and(|t| t.dtype == dtype) {
            return Ok(id);
        }
        let dtype = self.made.program.attr(Attr::DType(dtype));
        self.op("cast", [id, dtype])
    }

    pub fn op(&mut self, name: &str, operands: impl IntoIterator<Item = Id>) -> Result<Id> {
        Ok(self.made.program.op(op_id(name), operands)?)
    }
}
