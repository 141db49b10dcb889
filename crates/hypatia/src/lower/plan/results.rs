//! What a plan returns.

use egg::Id;
use serde::Serialize;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::runtime::plan::{Operand, Task, ValueId};

/// A result of a program: an output or an input of its plan, as it is or seen otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Returned {
    /// True for an input.
    pub given: bool,
    /// Its place among the plan's inputs or outputs.
    pub at: usize,
    /// Elements before the first.
    pub offset: usize,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Strides.
    pub strides: Vec<isize>,
    /// True if it is what is given or written, and no view.
    pub whole: bool,
}

impl Lowering<'_> {
    /// A result that is kept for a backward pass.
    pub(super) fn returned(&mut self, id: Id, place: usize) -> Result<Returned> {
        let mut operand = self.operand(id)?;
        if let Some(at) = self.plan.inputs.iter().position(|v| *v == operand.value) {
            return Ok(self.seen(&operand, true, at));
        }
        let wish = self.wish;
        if let Some(Some(wanted)) = wish.layouts.outputs.get(place) {
            operand = self.as_wanted(id, operand, Some(wanted))?;
        }
        if self.plan.constants.contains(&operand.value) {
            return Err(no_plan("a result that is made of weights only"));
        }
        let known = self.plan.outputs.iter().position(|v| *v == operand.value);
        let at = known.unwrap_or_else(|| {
            self.plan.outputs.push(operand.value);
            self.plan.outputs.len() - 1
        });
        let whole =
            operand.is_dense() && operand.shape.iter().product::<usize>() == self.plan.values[operand.value].numel();
        // Products and torch know a value by its shape.
        let fixed = self.plan.steps.iter().any(|s| {
            let torch = matches!(s, Task::Torch(t) if t.writes.contains(&operand.value));
            torch || s.weights().contains(&operand.value)
        });
        if known.is_none() && whole && !fixed {
            // Made in the shape in which it is wanted, it needs no view.
            self.plan.values[operand.value].shape.clone_from(&operand.shape);
        }
        Ok(self.seen(&operand, false, at))
    }

    pub(super) fn seen(&self, operand: &Operand, given: bool, at: usize) -> Returned {
        Returned {
            whole: operand.offset == 0 && operand.is_dense() && self.plan.values[operand.value].shape == operand.shape,
            given,
            at,
            offset: operand.offset,
            shape: operand.shape.clone(),
            strides: operand.strides.clone(),
        }
    }

    /// The value of a result: one that a step writes for it alone.
    pub(super) fn result(&mut self, id: Id) -> Result<ValueId> {
        let operand = self.operand(id)?;
        let value = &self.plan.values[operand.value];
        let whole = operand.is_dense() && value.numel() == operand.shape.iter().product::<usize>();
        let written = self.plan.steps.iter().any(|s| s.writes().contains(&operand.value));
        if whole && written && !self.plan.outputs.contains(&operand.value) {
            return Ok(operand.value);
        }
        if !written {
            // Eager gives the memory of an input away; a copy would not be the same thing.
            return Err(no_plan("a result that no step writes"));
        }
        self.copied(id, &operand)
    }
}
