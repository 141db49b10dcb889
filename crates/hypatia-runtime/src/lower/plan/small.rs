//! Small pointwise steps, put together: each alone takes longer to start than to run.
//!
//! A batch norm moves its running statistics and counts its batches, and so does every other one; each layer of a decoder
//! counts its tokens. Steps over the same
//! sizes are one, as long as nobody reads what they write in between. What is written back into inputs is written by
//! such a step at once, not into memory of its own and from there by a copy.

use std::collections::BTreeMap;

use super::Lowering;
use crate::error::Result;
use crate::kernels::region::{Region, Rounding};
use crate::step::{Operand, RegionStep, Task, ValueId};

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
    /// Puts small steps together.
    pub(super) fn merge_small(&mut self) -> Result<()> {
        if !self.can.changes_inputs {
            return Ok(());
        }
        // What a call into torch changes in between is read where it was.
        let changed: Vec<ValueId> = (self.in_place.values())
            .filter_map(|input| self.given.get(input).map(|o| o.value))
            .collect();
        let mut open: BTreeMap<(bool, Vec<usize>), Vec<usize>> = BTreeMap::new();
        let mut groups = vec![];
        for (at, step) in self.plan.steps.iter().enumerate() {
            let (reads, weights) = (step.reads(), step.weights());
            let read = |member: &usize| {
                let mut written = self.plan.steps[*member].writes().into_iter();
                written.any(|v| reads.contains(&v) || weights.contains(&v))
            };
            open.retain(|_, members| {
                let closed = members.iter().any(read);
                if closed {
                    groups.push(std::mem::take(members));
                }
                !closed
            });
            let Task::Region(r) = step else { continue };
            if is_small(r) && !r.inputs.iter().any(|o| changed.contains(&o.value)) {
                let alike = (r.outputs.is_empty(), r.shape.clone());
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
        let dtype = self.plan.values[value].dtype;
        Ok(RegionStep {
            region: Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?,
            shape: change.to.shape.clone(),
            inputs: vec![change.from.clone()],
            reads: vec![],
            outputs: vec![],
            slices: vec![],
            dense: vec![],
        })
    }
}

fn is_small(r: &RegionStep) -> bool {
    r.shape.iter().product::<usize>() <= SMALL && r.reads.is_empty() && r.slices.len() + r.outputs.len() == 1
}

/// Several steps over the same sizes as one.
fn beside(steps: &[&RegionStep]) -> Result<RegionStep> {
    let regions: Vec<&Region> = steps.iter().map(|s| &s.region).collect();
    let all = |list: fn(&RegionStep) -> &Vec<Operand>| steps.iter().flat_map(|s| list(s).clone()).collect();
    Ok(RegionStep {
        region: Region::beside(&regions)?,
        shape: steps[0].shape.clone(),
        inputs: all(|s| &s.inputs),
        reads: vec![],
        outputs: steps.iter().flat_map(|s| s.outputs.clone()).collect(),
        slices: all(|s| &s.slices),
        dense: steps[0].dense.clone(),
    })
}
