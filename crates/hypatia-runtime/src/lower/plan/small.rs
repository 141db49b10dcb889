//! Small pointwise steps, put together: each alone takes longer to start than to run.
//!
//! A batch norm moves its running statistics and counts its batches, and so does every other one; each layer of a decoder
//! counts its tokens. Steps over the same
//! sizes are one, as long as nobody reads what they write in between. What is written back into inputs is written by
//! such a step at once, not into memory of its own and from there by a copy.

use std::collections::BTreeMap;

use hypatia_core::ty::DType;

use super::Lowering;
use crate::error::Result;
use crate::kernels::region::{Region, Rounding};
use crate::step::{Operand, Placed, RegionStep, Task, ValueId};

/// Elements of a small step, at most.
const SMALL: usize = 1 << 14;
/// Steps that become one, at most: what a kernel reads and writes are its arguments.
const MOST: usize = 32;

/// A value that is written back into an input.
pub(super) struct Change {
    /// What is copied.
    pub from: Operand,
    /// Where it belongs.
    pub to: Operand,
}

impl Lowering<'_> {
    /// Inputs that are changed before the end of the plan.
    fn changed_in_place(&self) -> Vec<ValueId> {
        let value = |input| self.given.get(input).map(|o: &Operand| o.value);
        self.in_place.values().filter_map(value).collect()
    }

    /// Puts small steps together.
    pub(super) fn merge_small(&mut self) -> Result<()> {
        if !self.can.changes_inputs {
            return Ok(());
        }
        // What changes in between is read where it was.
        let changed = self.changed_in_place();
        let mut open: BTreeMap<(bool, bool, Vec<usize>), Vec<usize>> = BTreeMap::new();
        let mut groups = vec![];
        for (at, step) in self.plan.steps.iter().enumerate() {
            let (reads, weights) = (step.reads(), step.weights());
            let read =
                |member: &usize| written(&self.plan.steps[*member]).any(|v| reads.contains(&v) || weights.contains(&v));
            open.retain(|_, members| {
                let closed = members.iter().any(read);
                if closed {
                    groups.push(std::mem::take(members));
                }
                !closed
            });
            let Task::Region(r) = step else { continue };
            if is_small(r) && !r.inputs.iter().any(|o| changed.contains(&o.value)) {
                let alike = (r.outputs.is_empty(), r.placed.is_empty(), r.shape.clone());
                let members = open.entry(alike.clone()).or_default();
                members.push(at);
                if members.len() == MOST {
                    groups.extend(open.remove(&alike));
                }
            }
        }
        groups.extend(open.into_values());
        let mut gone = vec![];
        for members in groups.into_iter().filter(|m| m.len() > 1) {
            let steps: Vec<&RegionStep> = (members.iter())
                .filter_map(|at| match &self.plan.steps[*at] {
                    Task::Region(r) => Some(&**r),
                    _ => None,
                })
                .collect();
            let step = beside(&steps)?;
            let (last, others) = members.split_last().unwrap_or((&0, &[]));
            self.plan.steps[*last] = Task::Region(Box::new(step));
            gone.extend_from_slice(others);
        }
        let mut at = 0;
        self.plan.steps.retain(|_| {
            at += 1;
            !gone.contains(&(at - 1))
        });
        Ok(())
    }

    /// A step that writes a tensor into an input, at the place along one dimension that another tensor says. It computes
    /// what it writes, if it is `alone` in reading that.
    pub(super) fn placing(
        &mut self,
        to: &Operand,
        index: &Operand,
        from: &Operand,
        alone: bool,
    ) -> Result<Option<RegionStep>> {
        let dtype = |o: &Operand| self.plan.values[o.value].dtype;
        let shapes = to.shape.iter().zip(&from.shape).enumerate();
        let others: Vec<usize> = shapes.filter(|(_, (a, b))| a != b).map(|(d, _)| d).collect();
        let &[along] = &others[..] else { return Ok(None) };
        let elements = from.shape.iter().product::<usize>();
        let each = (to.shape.iter().zip(&to.strides)).all(|(n, s)| *n <= 1 || *s > 0);
        let fits = to.shape.len() == from.shape.len()
            && from.shape[along] == 1
            && index.shape.iter().product::<usize>() == 1
            && (dtype(index), dtype(to)) == (DType::I64, dtype(from))
            && (1..=SMALL).contains(&elements)
            && each
            && ![index.value, from.value].contains(&to.value)
            && !dtype(to).is_complex();
        if !fits || !self.can.changes_inputs {
            return Ok(None);
        }
        let change = Change {
            from: from.clone(),
            to: Operand {
                shape: from.shape.clone(),
                ..to.clone()
            },
        };
        let mut step = match alone {
            true => self.computing(&change, &self.changed_in_place())?,
            false => self.copying(&change)?,
        };
        step.placed = vec![Placed {
            by: step.inputs.len(),
            stride: to.strides[along],
            size: to.shape[along],
        }];
        step.region = step.region.with_input(DType::I64)?;
        step.inputs.push(Operand {
            shape: from.shape.clone(),
            strides: vec![0; from.shape.len()],
            ..index.clone()
        });
        step.slices = vec![change.to];
        step.outputs = vec![];
        Ok(Some(step))
    }

    /// Steps that write values back into inputs; all inputs that some step changes.
    pub(super) fn write_back(&mut self, changes: Vec<Change>, changed: &[ValueId]) -> Result<()> {
        for change in changes {
            let mut step = self.computing(&change, changed)?;
            step.slices = vec![change.to];
            step.outputs = vec![];
            self.plan.steps.push(Task::Region(Box::new(step)));
        }
        Ok(())
    }

    /// The step that computes what is written back, if nobody else reads it, or a copy.
    fn computing(&mut self, change: &Change, changed: &[ValueId]) -> Result<RegionStep> {
        let value = change.from.value;
        let whole =
            change.from.is_dense() && self.plan.values[value].numel() == change.from.shape.iter().product::<usize>();
        let read = (self.plan.steps.iter()).any(|s| s.reads().contains(&value) || s.weights().contains(&value));
        let own = |o: &Operand| !changed.contains(&o.value) || *o == change.to;
        let writer = self.plan.steps.iter().position(|s| {
            matches!(s, Task::Region(r) if r.outputs == [value] && is_small(r)
                && r.shape == change.to.shape && r.inputs.iter().all(own))
        });
        if let Some(at) = writer.filter(|_| whole && !read && !self.plan.outputs.contains(&value))
            && let Task::Region(step) = self.plan.steps.remove(at)
        {
            return Ok(*step);
        }
        self.copying(change)
    }

    fn copying(&self, change: &Change) -> Result<RegionStep> {
        let dtype = self.plan.values[change.from.value].dtype;
        Ok(RegionStep {
            region: Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?,
            shape: change.to.shape.clone(),
            inputs: vec![change.from.clone()],
            reads: vec![],
            outputs: vec![],
            slices: vec![],
            dense: vec![],
            placed: vec![],
        })
    }
}

/// Values that a step writes, or writes into where they are inputs.
fn written(step: &Task) -> impl Iterator<Item = ValueId> {
    let placed = match step {
        Task::Region(r) if !r.placed.is_empty() => r.slices.iter().map(|o| o.value).collect(),
        _ => vec![],
    };
    step.writes().into_iter().chain(placed)
}

fn is_small(r: &RegionStep) -> bool {
    r.shape.iter().product::<usize>() <= SMALL && r.reads.is_empty() && r.slices.len() + r.outputs.len() == 1
}

/// Several steps over the same sizes as one.
fn beside(steps: &[&RegionStep]) -> Result<RegionStep> {
    let regions: Vec<&Region> = steps.iter().map(|s| &s.region).collect();
    let (mut placed, mut before) = (vec![], 0);
    for step in steps {
        let behind = |p: &Placed| Placed {
            by: p.by + before,
            ..p.clone()
        };
        placed.extend(step.placed.iter().map(behind));
        before += step.inputs.len();
    }
    let all = |list: fn(&RegionStep) -> &Vec<Operand>| steps.iter().flat_map(|s| list(s).clone()).collect();
    Ok(RegionStep {
        region: Region::beside(&regions)?,
        shape: steps[0].shape.clone(),
        inputs: all(|s| &s.inputs),
        reads: vec![],
        outputs: steps.iter().flat_map(|s| s.outputs.clone()).collect(),
        slices: all(|s| &s.slices),
        dense: steps[0].dense.clone(),
        placed,
    })
}
