//! Results of torch's calls that stay where torch made them.
//!
//! Most of torch's ops return new tensors. A copy of each to a place of the plan's would take as long as the tensor is
//! large, so the tensor itself is the value: one in between until its last reader is launched, an output for its caller.

use super::{Plan, Task, ValueId};
use crate::kernels::call::{Call, Handed, Kept};

/// Which values of a plan are made by torch's calls.
pub struct Made {
    /// By value, its number among those that are made.
    numbers: Vec<Option<usize>>,
    /// By step, the numbers of values in between that no later step reads.
    last: Vec<Vec<usize>>,
    /// By output, its number.
    outputs: Vec<Option<usize>>,
    /// How many there are.
    pub count: usize,
}

impl Made {
    /// Values in between whose only writer is a call that makes tensors. One that lives across a `border` has a place:
    /// the steps from there on run later, when nobody knows any more what the others made.
    pub fn between(plan: &Plan, calls: &[Box<dyn Call>], border: Option<usize>) -> Made {
        Made::new(plan, calls, |id, first, last| {
            !plan.outputs.contains(&id) && border.is_none_or(|at| last < at || first >= at)
        })
    }

    /// Such values, and outputs.
    pub fn all(plan: &Plan, calls: &[Box<dyn Call>], border: Option<usize>) -> Made {
        Made::new(plan, calls, |id, first, last| {
            plan.outputs.contains(&id) || border.is_none_or(|at| last < at || first >= at)
        })
    }

    /// Values of calls that make tensors, with the first and the last step that use them.
    fn new(plan: &Plan, calls: &[Box<dyn Call>], takes: impl Fn(ValueId, usize, usize) -> bool) -> Made {
        let count = plan.values.len();
        let (mut writers, mut first, mut last) = (vec![0; count], vec![0; count], vec![0; count]);
        for (at, step) in plan.steps.iter().enumerate() {
            for id in step.writes() {
                writers[id] += 1;
                (first[id], last[id]) = (at, at);
            }
            for id in step.reads().into_iter().chain(step.weights()) {
                last[id] = at;
            }
        }
        let mut made = vec![false; count];
        for step in &plan.steps {
            let Task::Torch(t) = step else { continue };
            if !calls.get(t.call).is_some_and(|call| call.makes()) {
                continue;
            }
            for id in &t.writes {
                made[*id] = writers[*id] == 1 && is_whole(plan, *id) && takes(*id, first[*id], last[*id]);
            }
        }
        let mut numbers = vec![None; count];
        let mut done = vec![vec![]; plan.steps.len()];
        for (number, id) in (0..count).filter(|id| made[*id]).enumerate() {
            numbers[id] = Some(number);
            if !plan.outputs.contains(&id) {
                done[last[id]].push(number);
            }
        }
        Made {
            outputs: plan.outputs.iter().map(|id| numbers[*id]).collect(),
            last: done,
            count: numbers.iter().flatten().count(),
            numbers,
        }
    }

    /// The number of a value, if it is made.
    pub fn number(&self, id: ValueId) -> Option<usize> {
        self.numbers[id]
    }

    /// Whether an output is made, by its place among them.
    pub fn is_output(&self, at: usize) -> bool {
        self.outputs[at].is_some()
    }
}

/// Whether torch sees all the memory of a value that has some: kernels may read what lies between its rows, too.
fn is_whole(plan: &Plan, id: ValueId) -> bool {
    let (shape, strides) = plan.form(id);
    let extent: isize = shape.iter().zip(&strides).map(|(n, s)| (*n as isize - 1) * s).sum();
    let all: usize = shape.iter().product();
    all > 0 && plan.values[id].numel() == all && extent + 1 == all as isize && strides.iter().all(|s| *s >= 0)
}

/// What torch made during a run, as long as it is needed.
pub struct Holding<'a> {
    made: &'a Made,
    held: Vec<Option<Kept>>,
}

impl<'a> Holding<'a> {
    /// Nothing yet.
    pub fn new(made: &'a Made) -> Holding<'a> {
        Holding {
            held: (0..made.count).map(|_| None).collect(),
            made,
        }
    }

    /// Where a value is, if torch made it in this run.
    pub fn at(&self, id: ValueId) -> Option<*mut u8> {
        Some(self.held[self.made.numbers[id]?].as_ref()?.data())
    }

    /// Takes a value that torch made.
    pub fn hold(&mut self, id: ValueId, kept: Kept) {
        if let Some(number) = self.made.numbers[id] {
            self.held[number] = Some(kept);
        }
    }

    /// Lets go of what no step after this one reads.
    pub fn leave(&mut self, step: usize) {
        for number in &self.made.last[step] {
            self.held[*number] = None;
        }
    }

    /// The outputs, by their places among those of the plan.
    pub fn outputs(mut self) -> Handed {
        let numbers = self.made.outputs.iter().enumerate();
        let output = |(at, number): (usize, &Option<usize>)| Some((at, self.held[(*number)?].take()?));
        numbers.filter_map(output).collect()
    }
}
