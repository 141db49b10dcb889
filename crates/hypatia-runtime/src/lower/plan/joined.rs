//! Tensors put together inside a pointwise region: the parts of the result are computed side by side, each from its
//! part of the operands, and nothing is put together in memory. Rotary positions are written that way. On some devices
//! tensors that are put together in memory are such a region, too, which computes what they are made of.

use egg::Id;

use super::pointwise::Making;
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Region, Rounding};
use crate::operand::dense_strides;
use crate::step::{RegionStep, Task};

/// More parts would be many operands of one kernel.
const MOST: usize = 4;

impl Lowering<'_> {
    /// The dimension along which a node puts parts of one size together, and the parts.
    pub(super) fn join(&self, id: Id) -> Option<(usize, Vec<Id>)> {
        if self.name(id) != "cat" {
            return None;
        }
        let children = &self.program.node(id).children;
        let (shape, dtype) = self.shape(id).ok()?;
        let dim = self.dimension(*children.first()?, shape.len()).ok()?;
        let parts = children[1..].to_vec();
        let mut part = shape.clone();
        part[dim] = shape[dim] / parts.len();
        let alike = parts.iter().all(|p| self.shape(*p).ok() == Some((part.clone(), dtype)));
        ((2..=MOST).contains(&parts.len()) && alike && !shape.contains(&0)).then_some((dim, parts))
    }

    /// The same of a node that is a step of its own, on devices where that is a region.
    pub(super) fn join_step(&self, id: Id) -> Option<(usize, Vec<Id>)> {
        let (_, dtype) = self.shape(id).ok()?;
        let copies = || Region::new(&[dtype], vec![], &[0], Rounding::EveryOp).is_ok() && !dtype.is_complex();
        self.join(id).filter(|_| self.can.puts_together && copies())
    }

    /// Takes a node that puts parts together into a region, with the pointwise nodes that its parts come from.
    pub(super) fn absorb_join(&mut self, join: Id, parts: &[Id]) {
        self.inside[usize::from(join)] = true;
        self.absorb_parts(parts);
    }

    pub(super) fn absorb_parts(&mut self, parts: &[Id]) {
        for part in parts {
            if self.uses[usize::from(*part)] == 1 && self.is_free_pointwise(*part) {
                self.inside[usize::from(*part)] = true;
                self.absorb(*part);
            }
        }
    }

    /// The node inside the region of another that puts parts together.
    pub(super) fn joined_in(&self, root: Id) -> Option<Id> {
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            for child in &self.program.node(id).children {
                let at = usize::from(*child);
                if self.place.contains_key(child) || !self.inside[at] {
                    continue;
                }
                if self.join(*child).is_some() {
                    return Some(*child);
                }
                if self.pointwise[at] {
                    stack.push(*child);
                }
            }
        }
        None
    }

    /// The region of a node in which another puts parts together, or the node itself does.
    pub(super) fn joined_region(&mut self, root: Id, join: Id) -> Result<()> {
        let (dim, parts) = self.join(join).ok_or_else(|| no_plan("parts of other sizes"))?;
        let (whole, dtype) = self.shape(root)?;
        let mut shape = whole.clone();
        shape[dim] /= parts.len();
        let (mut regions, mut inputs) = (vec![], vec![]);
        for (i, part) in parts.iter().enumerate() {
            let mut one = Making::over(&shape);
            if self.is_inside(*part) {
                self.leaves(*part, &mut one)?;
            } else {
                let operand = self.operand(*part)?;
                one.read(*part, operand, self.shape(*part)?.1);
            }
            if root != join {
                self.upper_leaves(root, join, (dim, i), &whole, &mut one)?;
            }
            let place = self.code(*part, &mut one)?;
            one.place.insert(join, place);
            let result = self.code(root, &mut one)?;
            regions.push(Region::new(&one.dtypes, one.code, &[result], Rounding::EveryOp)?);
            inputs.extend(one.inputs);
        }
        let region = Region::beside(&regions.iter().collect::<Vec<_>>())?;
        // As its operands lie, so that what follows finds what it would find in eager.
        let widest = inputs.iter().find(|o| !o.strides.contains(&0));
        let strides = widest.map(|o| o.strides_like(&whole));
        let y = self.laid(&whole, dtype, strides.as_deref())?;
        self.place.insert(root, y.clone());
        let slice = |i: usize| y.sliced(dim, i * shape[dim], shape[dim], 1);
        let slices = (0..parts.len()).map(slice).collect();
        let dense = dense_strides(&shape);
        self.plan.steps.push(Task::Region(Box::new(RegionStep {
            region,
            shape,
            inputs,
            reads: vec![],
            outputs: vec![y.value],
            slices,
            dense,
            placed: vec![],
        })));
        Ok(())
    }

    fn is_inside(&self, id: Id) -> bool {
        self.inside[usize::from(id)] && self.pointwise[usize::from(id)] && !self.place.contains_key(&id)
    }

    /// What a region reads beside what is put together: its part of each operand.
    fn upper_leaves(
        &mut self,
        root: Id,
        join: Id,
        (dim, part): (usize, usize),
        whole: &[usize],
        made: &mut Making,
    ) -> Result<()> {
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            for child in self.program.node(id).children.clone() {
                if self.is_attr(child) || child == join || made.place.contains_key(&child) {
                    continue;
                }
                if self.is_inside(child) {
                    stack.push(child);
                    continue;
                }
                self.read_apart(child)?;
                let operand = self.broadcast(child, whole)?;
                let length = made.shape[dim];
                let operand = operand.sliced(dim, part * length, length, 1);
                made.read(child, operand, self.shape(child)?.1);
            }
        }
        Ok(())
    }
}
