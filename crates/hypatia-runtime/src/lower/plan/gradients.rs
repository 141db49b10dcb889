//! What backward passes are made of on devices that can: sums over rows, sums that a product takes along, masks of ReLU.

use egg::Id;
use hypatia_core::ty::DType;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::product::Activation;
use crate::step::{ColumnKind, LinearStep, Operand, Task, Value, ValueId};

/// A step that does nothing but set a gradient to zero where the result of a ReLU is.
pub(super) struct Gate {
    /// The gradient.
    g: ValueId,
    /// The result of the ReLU.
    x: ValueId,
    /// What is written.
    y: ValueId,
}

impl Lowering<'_> {
    /// Lets the product that gives the gradient of a weight give that of the bias, too: both read the same rows.
    pub(super) fn merge_sums(&mut self) {
        let mut at = 0;
        while at < self.plan.steps.len() {
            match self.taking(at) {
                Some((product, output)) => {
                    if let Task::Linear(l) = &mut self.plan.steps[product] {
                        l.gradient.sums = Some(output);
                    }
                    self.plan.steps.remove(at);
                }
                None => at += 1,
            }
        }
    }

    /// The product that can take over the sums of a step, and where they go.
    fn taking(&self, at: usize) -> Option<(usize, ValueId)> {
        let Task::Columns(c) = &self.plan.steps[at] else {
            return None;
        };
        let (ColumnKind::Sum, x) = c.of_one()? else {
            return None;
        };
        let output = c.outputs[0];
        let alike = |l: &LinearStep| {
            let rows: usize = c.shape[..c.rows].iter().product();
            let columns: usize = c.shape[c.rows..].iter().product();
            l.gradient.x_transposed
                && l.gradient.sums.is_none()
                && (l.activation, l.b, &l.r) == (Activation::None, None, &None)
                && x.reshaped(&[rows, columns]).as_ref() == Some(&l.x)
        };
        let product = (self.plan.steps.iter()).position(|s| matches!(s, Task::Linear(l) if alike(l)))?;
        let between = self.plan.steps.get(at..product).unwrap_or(&[]);
        let early = between
            .iter()
            .any(|s| s.reads().contains(&output) || s.weights().contains(&output));
        (!early).then_some((product, output))
    }

    /// Notes a region that only masks a gradient.
    pub(super) fn note_gate(&mut self, root: Id, y: ValueId, inputs: &[Operand]) {
        if self.can.relu_masks.is_none() || self.name(root) != "relu_backward" {
            return;
        }
        let children = &self.program.node(root).children;
        let whole = |id: Id| {
            self.place
                .get(&id)
                .filter(|o| o.is_dense() && o.offset == 0)
                .map(|o| o.value)
        };
        if let (&[_, _], Some(g), Some(x)) = (inputs, whole(children[0]), whole(children[1])) {
            self.gates.push(Gate { g, x, y });
        }
    }

    /// Outputs that a layer with a bias and a ReLU writes.
    pub(super) fn keeps(&self) -> Vec<usize> {
        let outputs = self.plan.outputs.iter().enumerate();
        outputs
            .filter(|(_, id)| self.relu(**id).is_some())
            .map(|(at, _)| at)
            .collect()
    }

    fn relu(&self, value: ValueId) -> Option<usize> {
        self.plan.steps.iter().position(|s| {
            matches!(s, Task::Linear(l) if l.y == value
                && l.activation == Activation::Relu
                && l.b.is_some()
                && l.r.is_none()
                && self.can.relu_masks.is_some())
        })
    }

    /// Keeps the mask of an output.
    pub(super) fn keep(&mut self, output: usize) -> Result<()> {
        let value = self.plan.outputs.get(output).copied();
        let step = value.and_then(|v| self.relu(v));
        let step = step.ok_or_else(|| no_plan("an output without a mask"))?;
        let Task::Linear(l) = &self.plan.steps[step] else {
            return Err(no_plan("an output without a mask"));
        };
        let mask = self.mask_of(l)?;
        self.plan.values.push(mask);
        let id = self.plan.values.len() - 1;
        self.plan.outputs.push(id);
        if let Task::Linear(l) = &mut self.plan.steps[step] {
            l.gradient.keeps = Some(id);
        }
        Ok(())
    }

    /// Inputs that all steps that mask by them could have as bits.
    pub(super) fn masks(&self) -> Vec<usize> {
        let inputs = self.plan.inputs.iter().enumerate();
        let masks = |id: ValueId| {
            let mut gates = self.gates.iter().filter(|g| g.x == id).peekable();
            gates.peek().is_some() && gates.all(|g| self.masked_product(g).is_some())
        };
        inputs.filter(|(_, id)| masks(**id)).map(|(at, _)| at).collect()
    }

    /// The product whose result alone a gate masks.
    fn masked_product(&self, gate: &Gate) -> Option<usize> {
        let readers = |id: ValueId| self.plan.steps.iter().filter(|s| s.reads().contains(&id)).count();
        let weights = self.plan.steps.iter().any(|s| s.weights().contains(&gate.g));
        if readers(gate.g) != 1 || weights || self.plan.outputs.contains(&gate.g) {
            return None;
        }
        self.plan.steps.iter().position(|s| {
            matches!(s, Task::Linear(l) if l.y == gate.g
                && l.gradient.sums.is_none()
                && l.gradient.masked.is_none()
                && (l.activation, l.b, &l.r) == (Activation::None, None, &None))
        })
    }

    /// Masks by bits that are given as another input.
    pub(super) fn mask(&mut self, input: usize) -> Result<()> {
        let refused = || no_plan("an input that is no mask");
        let value = *self.plan.inputs.get(input).ok_or_else(refused)?;
        let mut given: Option<ValueId> = None;
        for at in 0..self.gates.len() {
            if self.gates[at].x != value {
                continue;
            }
            let product = self.masked_product(&self.gates[at]).ok_or_else(refused)?;
            let y = self.gates[at].y;
            let Task::Linear(l) = &self.plan.steps[product] else {
                return Err(refused());
            };
            let bits = self.mask_of(l)?;
            let id = *given.get_or_insert_with(|| {
                self.plan.values.push(bits);
                self.plan.values.len() - 1
            });
            if let Task::Linear(l) = &mut self.plan.steps[product] {
                l.gradient.masked = Some(id);
                l.y = y;
            }
            let gate = self
                .plan
                .steps
                .iter()
                .position(|s| matches!(s, Task::Region(r) if r.outputs == [y]));
            self.plan.steps.remove(gate.ok_or_else(refused)?);
        }
        self.plan.inputs.push(given.ok_or_else(refused)?);
        Ok(())
    }

    /// A bit for each element of a product, rows filled up as the device wants them.
    fn mask_of(&self, l: &LinearStep) -> Result<Value> {
        let sizes = l.sizes(&self.plan.values[l.w].shape);
        let (n, _) = sizes.ok_or_else(|| no_plan("a weight that is no matrix"))?;
        let filled = self.can.relu_masks.ok_or_else(|| no_plan("masks of ReLU"))?;
        Ok(Value {
            shape: vec![l.m, n.next_multiple_of(filled) / 8],
            dtype: DType::U8,
        })
    }
}
