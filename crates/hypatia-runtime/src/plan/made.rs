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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hypatia_core::ty::DType;

    use super::*;
    use crate::error::Result;
    use crate::kernels::call::Strided;
    use crate::plan::{Operand, TorchStep, Value};

    struct Fake {
        makes: bool,
    }

    impl Call for Fake {
        unsafe fn call(&self, _: &[Strided<'_>], _: &[Strided<'_>]) -> Result<Handed> {
            Ok(vec![])
        }

        fn makes(&self) -> bool {
            self.makes
        }
    }

    fn step(call: usize, reads: &[ValueId], writes: &[ValueId]) -> Task {
        Task::Torch(TorchStep {
            name: String::new(),
            call,
            reads: reads.iter().map(|id| Operand::dense(*id, &[4, 4])).collect(),
            writes: writes.to_vec(),
        })
    }

    /// Values 1 and 2 are of a call that makes tensors, 3 is of one that writes where it is told, 4 and 5 are outputs.
    fn plan() -> (Plan, Vec<Box<dyn Call>>) {
        let value = |_| Value {
            shape: vec![4, 4],
            dtype: DType::F32,
        };
        let plan = Plan {
            values: (0..6).map(value).collect(),
            steps: vec![
                step(0, &[0], &[1, 2]),
                step(1, &[1], &[3]),
                step(2, &[1, 3], &[4]),
                step(3, &[4, 2], &[5]),
            ],
            inputs: vec![0],
            outputs: vec![5, 4],
            ..Plan::default()
        };
        let calls = [true, false, true, false].map(|makes| Box::new(Fake { makes }) as Box<dyn Call>);
        (plan, calls.into_iter().collect())
    }

    fn made(made: &Made) -> Vec<ValueId> {
        (0..6).filter(|id| made.number(*id).is_some()).collect()
    }

    #[test]
    fn calls_that_make_tensors_have_results_without_a_place() {
        let (plan, calls) = plan();
        assert_eq!(made(&Made::between(&plan, &calls, None)), [1, 2]);
        let all = Made::all(&plan, &calls, None);
        assert_eq!(made(&all), [1, 2, 4]);
        assert_eq!([0, 1].map(|at| all.is_output(at)), [false, true]);
        let (places, bytes) = plan.places(&all).unwrap();
        assert_eq!(bytes, 64);
        assert_eq!(places[1], crate::plan::Place::Nowhere);
        assert_eq!(places[3], crate::plan::Place::Arena(0));
        assert_eq!(places[4], crate::plan::Place::Output(1));
    }

    #[test]
    fn values_that_live_across_a_border_have_a_place() {
        let (plan, calls) = plan();
        // The last step reads the second value; outputs have addresses of their own then.
        assert_eq!(made(&Made::all(&plan, &calls, Some(3))), [1, 4]);
        assert_eq!(made(&Made::all(&plan, &calls, Some(1))), [4]);
    }

    #[test]
    fn values_of_which_torch_sees_a_part_have_a_place() {
        let (mut plan, calls) = plan();
        plan.seen.insert(1, (vec![4, 4], vec![1, 4]));
        plan.seen.insert(2, (vec![4, 3], vec![4, 1]));
        assert_eq!(made(&Made::between(&plan, &calls, None)), [1]);
        plan.values[1].shape = vec![4, 0];
        plan.seen.clear();
        assert_eq!(made(&Made::between(&plan, &calls, None)), [2]);
    }

    #[test]
    fn a_value_with_two_writers_has_a_place() {
        let (mut plan, calls) = plan();
        plan.steps[1] = step(1, &[1], &[3, 2]);
        assert_eq!(made(&Made::between(&plan, &calls, None)), [1]);
    }

    #[test]
    fn memory_is_held_until_the_last_reader() {
        struct Owner(Arc<AtomicUsize>);
        impl Drop for Owner {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (plan, calls) = plan();
        let all = Made::all(&plan, &calls, None);
        let freed = Arc::new(AtomicUsize::new(0));
        let count = || freed.load(Ordering::Relaxed);
        let kept = |at: usize| Kept::new(at as *mut u8, Owner(freed.clone()));
        let mut holding = Holding::new(&all);
        assert_eq!(holding.at(1), None);
        holding.hold(1, kept(16));
        holding.hold(2, kept(32));
        holding.leave(0);
        holding.leave(1);
        assert_eq!(
            (holding.at(1), holding.at(2)),
            (Some(16 as *mut u8), Some(32 as *mut u8))
        );
        holding.hold(4, kept(48));
        holding.leave(2);
        assert_eq!((count(), holding.at(1), holding.at(4)), (1, None, Some(48 as *mut u8)));
        holding.leave(3);
        assert_eq!(count(), 2);
        let outputs = holding.outputs();
        assert_eq!(outputs.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1]);
        assert_eq!(count(), 2);
        drop(outputs);
        assert_eq!(count(), 3);
    }
}
