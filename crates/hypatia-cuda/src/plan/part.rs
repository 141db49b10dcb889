//! Parts of a plan: what a recording holds, and what follows it at every call.
//!
//! What a recording writes lies at addresses of its own, and callers get copies. A copy of a large result takes as long
//! as the result is large. So the last steps, from the one on that first writes such a result, are left out of the
//! recording and launched after it, into new memory.

use std::ops::Range;

use hypatia_runtime::plan::{Plan, Task, ValueId};

use crate::replay::Replay;

/// Graphs kept for sets of addresses.
const GRAPHS: usize = 8;

/// Bytes that are copied on the device while the host launches one step, about 8 µs.
const STEP: usize = 16 << 20;

/// Steps of a plan that are launched together.
#[derive(Debug)]
pub struct Part {
    pub(super) steps: Range<usize>,
    /// Graphs by addresses; none if some of the steps are torch's.
    pub(super) replay: Option<Replay>,
}

impl Part {
    pub(super) fn new(steps: Range<usize>, is_native: bool) -> Part {
        Part {
            steps,
            replay: is_native.then(|| Replay::new(GRAPHS)),
        }
    }
}

/// Where the steps begin that are better launched after a recording of those before; none if copies of all results take
/// less than that.
pub fn late(plan: &Plan) -> Option<usize> {
    let first: Vec<Option<usize>> = plan.outputs.iter().map(|id| first_use(plan, *id)).collect();
    let gain = |from: usize| {
        let written = plan.outputs.iter().zip(&first);
        let bytes: usize = written
            .filter(|(_, first)| first.is_some_and(|at| at >= from))
            .map(|(id, _)| plan.values[*id].bytes())
            .sum();
        bytes.saturating_sub((plan.steps.len() - from).saturating_mul(STEP))
    };
    let candidates = first.iter().flatten().filter(|at| **at > 0 && gain(**at) > 0);
    candidates.copied().max_by_key(|at| (gain(*at), *at))
}

/// Which outputs are first used by the steps from this one on.
pub fn is_late(plan: &Plan, from: usize) -> Vec<bool> {
    let used = |id: &ValueId| first_use(plan, *id).is_some_and(|at| at >= from);
    plan.outputs.iter().map(used).collect()
}

fn first_use(plan: &Plan, id: ValueId) -> Option<usize> {
    let uses = |step: &Task| [step.reads(), step.weights(), step.writes()].concat().contains(&id);
    plan.steps.iter().position(uses)
}
