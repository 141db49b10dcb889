//! Drops alternatives that are never needed for a cheapest program.

use smallvec::SmallVec;

use super::problem::{Children, Problem};
use super::{bound, cycles};

/// Rounds of reduction. Each may force more classes and so open more to the next; two or three
/// reach the fixpoint on networks.
const ROUNDS: usize = 6;

/// Arranges the problem, finds the forced classes and prunes dominated nodes, to a fixpoint.
/// The cheapest program keeps its cost.
pub(super) fn reduce(problem: &mut Problem) {
    cycles::arrange(problem);
    problem.forced = bound::forced(problem);
    for _ in 0..ROUNDS {
        if !prune(problem) {
            break;
        }
        cycles::arrange(problem);
        problem.forced = bound::forced(problem);
    }
}

/// Drops each node for which its class has another that costs no more and brings in no class that
/// the dropped one does not. Of equals the original stays, then the lower index.
///
/// Forced classes are computed anyway and so do not count, unless reading them could close a cycle.
fn prune(problem: &mut Problem) -> bool {
    let mut dominator: Vec<Option<usize>> = vec![None; problem.nodes.len()];
    let mut any = false;
    let mut candidates: Vec<(usize, Children, u64)> = Vec::new();
    for class in 0..problem.len() {
        if problem.of(class).len() < 2 {
            continue;
        }
        candidates.clear();
        candidates.extend(problem.of(class).map(|id| {
            let brings: Children = problem.residual(id).collect();
            let signature = brings.iter().fold(0, |bits, child| bits | 1u64 << (child % 64));
            (id, brings, signature)
        }));
        // Sorted like this, only an earlier node can dominate; ids put originals first.
        candidates.sort_by(|(a, brings_a, _), (b, brings_b, _)| {
            let costs = problem.nodes[*a].cost.total_cmp(&problem.nodes[*b].cost);
            costs.then(brings_a.len().cmp(&brings_b.len())).then(a.cmp(b))
        });
        let mut kept: SmallVec<[usize; 8]> = SmallVec::new();
        for (at, (id, brings, signature)) in candidates.iter().enumerate() {
            let winner = kept.iter().find(|&&other| {
                let (_, fewer, theirs) = &candidates[other];
                theirs & !signature == 0 && subset(fewer, brings)
            });
            match winner {
                Some(&other) => {
                    dominator[*id] = Some(candidates[other].0);
                    any = true;
                }
                None => kept.push(at),
            }
        }
    }
    if any {
        // The winner reads no more of any cycle than the loser, so it can take its place in the backbone.
        for (id, winner) in dominator.iter().enumerate() {
            if let Some(winner) = winner {
                problem.nodes[*winner].backbone |= problem.nodes[id].backbone;
            }
        }
        problem.retain(|id, _| dominator[id].is_none());
    }
    any
}

/// Whether every item of `fewer` is in `more`; both sorted.
fn subset(fewer: &[usize], more: &[usize]) -> bool {
    let mut rest = more.iter();
    fewer.iter().all(|item| rest.any(|other| other == item))
}
