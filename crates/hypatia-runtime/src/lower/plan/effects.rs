//! Calls that do more than compute: random numbers and assertions in their order, changes of inputs last.

use egg::{Id, Language};
use hypatia_core::emit::emit_node;
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Opaque;
use rustc_hash::FxHashMap;

use super::small::Change;
use super::{CallOperand, Lowering, TorchCall, no_plan};
use crate::error::Result;
use crate::step::{Operand, Task, TorchStep, ValueId};

impl Lowering<'_> {
    fn opaque(&self, id: Id) -> Option<&Opaque> {
        match &self.program.node(id).op {
            Op::Opaque(i) => self.program.leaves.opaques.get(i),
            _ => None,
        }
    }

    /// Whether a call changes tensors in place.
    pub(super) fn changes_operands(&self, id: Id) -> bool {
        self.opaque(id).is_some_and(|o| o.mutates)
    }

    /// How many nodes read a node.
    pub(super) fn user_count(&self, id: Id) -> usize {
        let root = self.program.node(self.program.root);
        let named = root.children.iter().filter(|c| **c == id).count();
        self.uses[usize::from(id)] - named
    }

    /// All nodes, operands first, and calls with effects as they were called.
    pub(super) fn in_order(&self) -> Vec<Id> {
        let root = self.program.node(self.program.root);
        let (results, effects) = root.children.split_at(self.results);
        if effects.is_empty() {
            return self.program.reachable();
        }
        let (changes, calls): (Vec<Id>, Vec<Id>) = effects.iter().partition(|id| self.changes_operands(**id));
        let mut seen = vec![false; self.program.nodes().len()];
        let mut order = vec![];
        for id in calls.iter().chain(results).chain(&changes) {
            let mut stack = vec![(*id, false)];
            while let Some((id, done)) = stack.pop() {
                if done {
                    order.push(id);
                } else if !seen[usize::from(id)] {
                    seen[usize::from(id)] = true;
                    stack.push((id, true));
                    self.program.node(id).for_each(|c| stack.push((c, false)));
                }
            }
        }
        order
    }

    /// An input that is changed where it lies.
    pub(super) fn changed(&mut self, id: Id) -> Result<Operand> {
        if self.program.ty(id).tensor().is_none_or(|t| t.device != self.device) {
            return Err(no_plan("a change of a value on another device"));
        }
        let operand = match self.given.get(&id) {
            Some(given) => given.clone(),
            None => self.operand(id)?,
        };
        match self.plan.inputs.contains(&operand.value) {
            true => Ok(operand),
            false => Err(no_plan("a change of what is no input")),
        }
    }

    /// Whether the last steps change an input.
    pub(super) fn is_changed_later(&self, value: ValueId) -> bool {
        let effects = &self.program.node(self.program.root).children[self.results..];
        effects.iter().any(|id| {
            let children = &self.program.node(*id).children;
            let places = self.opaque(*id).map_or(&[][..], |o| &o.changes);
            let mut changed = places.iter().filter_map(|at| children.get(*at));
            changed.any(|child| self.given.get(child).is_some_and(|given| given.value == value))
        })
    }

    /// Calls that can change an input themselves: nothing but `copy_` reads what they return back into it, and
    /// nobody else reads what it was before.
    pub(super) fn changing_in_place(&self) -> FxHashMap<Id, Id> {
        let effects = &self.program.node(self.program.root).children[self.results..];
        let written = effects.iter().filter_map(|id| {
            let copies = self.opaque(*id).is_some_and(|o| o.target == "aten.copy_.default");
            let [input, call, ..] = self.program.node(*id).children[..] else {
                return None;
            };
            let named = self.opaque(call).is_some_and(|o| self.wish.in_place.contains(&o.name));
            let itself = self.program.node(call).children.first() == Some(&input);
            let alone = matches!(self.program.node(input).op, Op::Input(_)) && self.uses[usize::from(input)] == 2;
            let alike = self.program.ty(input) == self.program.ty(call) && !self.source.weight[usize::from(call)];
            (copies && named && itself && alone && alike && !self.wish.saved).then_some((call, input))
        });
        written.collect()
    }

    /// Whether a change of an input was made by the call whose result it copies.
    fn is_made(&self, id: Id) -> bool {
        let children = &self.program.node(id).children;
        matches!(children[..], [input, call, ..] if self.in_place.get(&call) == Some(&input))
    }

    /// A call that writes into an input; who reads its result reads that input.
    pub(super) fn run_in_place(&mut self, id: Id) -> Result<()> {
        let children = self.program.node(id).children.clone();
        let input = self.changed(children[0])?;
        let opaque = self.opaque(id).cloned();
        let (mut reads, operands) = self.call_reads(id, opaque.as_ref())?;
        let tensors: Vec<usize> = (operands.iter())
            .filter_map(|o| match o {
                CallOperand::Tensor(at) => Some(*at),
                _ => None,
            })
            .collect();
        let alone = (children.last())
            .is_some_and(|source| self.pointwise[usize::from(*source)] && self.user(*source) == Some(id));
        if opaque.as_ref().is_some_and(|o| o.target == "aten.index_copy.default")
            && let [_, index, from] = tensors[..]
            && let Some(step) = self.placing(&input, &reads[index], &reads[from], alone)?
        {
            self.plan.steps.push(Task::Region(Box::new(step)));
            self.place.insert(id, input);
            return Ok(());
        }
        if let Some(CallOperand::Tensor(first)) = operands.first() {
            reads[*first] = input.clone();
        }
        self.call_for_change(id, reads, operands, true)?;
        self.place.insert(id, input);
        Ok(())
    }

    /// A step that writes nothing but what it changes.
    fn call_for_change(
        &mut self,
        id: Id,
        reads: Vec<Operand>,
        operands: Vec<CallOperand>,
        in_place: bool,
    ) -> Result<()> {
        let emitted = emit_node(self.program, id)?;
        let name = self.opaque(id).map_or_else(String::new, |o| o.target.clone());
        self.plan.steps.push(Task::Torch(TorchStep {
            name,
            call: self.calls.len(),
            reads,
            writes: vec![],
        }));
        self.calls.push(TorchCall {
            onednn: None,
            origin: emitted.origin,
            target: emitted.target,
            args: vec![],
            operands,
            kept: Some(vec![]),
            in_place,
            is_vector: false,
        });
        Ok(())
    }

    /// What a call writes back into an input, if a region can.
    fn copied_back(&self, id: Id, reads: &[Operand], operands: &[CallOperand]) -> Option<Change> {
        let [CallOperand::Tensor(to), CallOperand::Tensor(from)] = operands[..2] else {
            return None;
        };
        let copies = self.opaque(id).is_some_and(|o| o.target == "aten.copy_.default") && operands.len() == 2;
        let (from, to) = (&reads[from], &reads[to]);
        let dtype = |o: &Operand| self.plan.values[o.value].dtype;
        let alike = dtype(from) == dtype(to) && from.shape == to.shape && !dtype(to).is_complex();
        // Elements of a tensor that repeats are not to be written side by side.
        let each = to.shape.iter().zip(&to.strides).all(|(n, s)| *n <= 1 || *s > 0);
        let good = copies && alike && each && self.can.changes_inputs && from.value != to.value;
        good.then(|| Change {
            from: from.clone(),
            to: to.clone(),
        })
    }

    /// The last steps, which change inputs; places of all inputs that are changed among the plan's inputs.
    pub(super) fn change(&mut self, order: &[Id]) -> Result<Vec<usize>> {
        let mut calls = vec![];
        let mut changed = vec![];
        for input in self.in_place.clone().into_values() {
            changed.push(self.changed(input)?.value);
        }
        let last: Vec<Id> = (order.iter().copied())
            .filter(|id| self.changes_operands(*id) && !self.is_made(*id))
            .collect();
        for id in last {
            let opaque = self.opaque(id).cloned();
            let (reads, operands) = self.call_reads(id, opaque.as_ref())?;
            let places: Vec<usize> = opaque.map_or_else(Vec::new, |o| o.changes);
            for at in &places {
                let child = self.program.node(id).children[*at];
                changed.push(self.changed(child)?.value);
            }
            calls.push((id, reads, operands, places));
        }
        // What one call reads and another one changes is read before.
        for (id, reads, operands, places) in &mut calls {
            for (at, operand) in operands.iter().enumerate() {
                let CallOperand::Tensor(read) = operand else {
                    continue;
                };
                if !places.contains(&at) && changed.contains(&reads[*read].value) {
                    let child = self.program.node(*id).children[at];
                    let strides = reads[*read].strides.clone();
                    reads[*read] = self.written(child, &reads[*read].clone(), &strides)?;
                }
            }
        }
        let mut changes = vec![];
        for (id, reads, operands, _) in calls {
            let once = |change: &Change| changed.iter().filter(|v| **v == change.to.value).count() == 1;
            match self.copied_back(id, &reads, &operands).filter(once) {
                Some(change) => changes.push(change),
                None => self.call_for_change(id, reads, operands, false)?,
            }
        }
        self.write_back(changes, &changed)?;
        let inputs = self.plan.inputs.iter().enumerate();
        Ok(inputs.filter(|(_, v)| changed.contains(v)).map(|(at, _)| at).collect())
    }
}
