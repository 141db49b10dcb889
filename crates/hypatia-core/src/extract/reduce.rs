//! Drops alternatives that are never needed for a cheapest program.

use smallvec::SmallVec;

use super::problem::{Children, Problem};
use super::{bound, cycles};

/// Rounds of reduction. Each may force more classes and so open more to the next; two or three
/// reach the fixpoint on networks.
const ROUNDS: usize = 6;

/// Size beyond which what a node needs is not followed further.
const NEEDS: usize = 24;

/// Arranges the problem, finds the forced classes and prunes dominated nodes, to a fixpoint.
/// The cheapest program keeps its cost.
pub(super) fn reduce(problem: &mut Problem) {
    arrange(problem);
    for _ in 0..ROUNDS {
        if !prune(problem) {
            break;
        }
        arrange(problem);
    }
}

/// Numbers the classes anew and finds those that are forced. A class that can be had for nothing is
/// taken as forced: to add it to a program changes neither its cost nor what can be computed.
pub(super) fn arrange(problem: &mut Problem) {
    cycles::arrange(problem);
    problem.forced = bound::forced(problem);
    for class in 0..problem.len() {
        let free = |id: usize| {
            let node = &problem.nodes[id];
            node.cost == 0.0 && node.children.iter().all(|&child| problem.forced[child])
        };
        let free = problem.forward(class).any(free);
        problem.forced[class] |= free;
    }
}

/// Drops each node for which its class has another that costs no more and reads only what the
/// dropped one needs, directly or further down. Of equals the original stays, then the lower index.
///
/// What a node needs does not depend on its class, so the other closes no cycle in its place.
/// Forced classes are computed anyway and so do not count, unless reading them could close one.
fn prune(problem: &mut Problem) -> bool {
    let musts = musts(problem);
    let mut dominator: Vec<Option<usize>> = vec![None; problem.nodes.len()];
    let mut dropped = vec![false; problem.nodes.len()];
    let mut candidates: Vec<Candidate> = Vec::new();
    for class in 0..problem.len() {
        if problem.of(class).len() < 2 {
            continue;
        }
        candidates.clear();
        candidates.extend(problem.of(class).map(|id| Candidate {
            id,
            cost: problem.nodes[id].cost,
            brings: problem.residual(id).collect(),
            needs: needs(problem, &musts, id),
        }));
        // Sorted like this, only an earlier node can dominate; ids put originals first.
        candidates.sort_by(|a, b| {
            let costs = a.cost.total_cmp(&b.cost);
            costs.then(a.needs.len().cmp(&b.needs.len())).then(a.id.cmp(&b.id))
        });
        let mut kept: SmallVec<[usize; 8]> = SmallVec::new();
        for (at, candidate) in candidates.iter().enumerate() {
            let mut others = kept.iter().map(|&other| &candidates[other]);
            let winner = others.find(|other| subset(&other.brings, &candidate.needs));
            dominator[candidate.id] = winner.map(|winner| winner.id);
            // A node that needs its own class is in no program.
            dropped[candidate.id] = winner.is_some() || candidate.needs.binary_search(&class).is_ok();
            if !dropped[candidate.id] {
                kept.push(at);
            }
        }
    }
    if !dropped.contains(&true) {
        return false;
    }
    // The winner reads of any cycle only what was below the loser, so it can take its place in the backbone.
    for (id, winner) in dominator.iter().enumerate() {
        if let Some(winner) = winner {
            problem.nodes[*winner].backbone |= problem.nodes[id].backbone;
        }
    }
    problem.retain(|id, _| !dropped[id]);
    true
}

/// A node that may be dropped.
struct Candidate {
    id: usize,
    cost: f64,
    /// What choosing it brings in, or may close a cycle with.
    brings: Children,
    /// That, and what it needs further down.
    needs: Set,
}

/// Sorted, distinct classes.
type Set = SmallVec<[usize; 8]>;

/// For each class, classes that every program with it contains: itself, and what all its nodes
/// need. Forced classes are left out where no cycle can lead to them.
///
/// What lies above a node counts for itself only, and large sets are cut, both of which is sound:
/// see [`bound::forced`].
fn musts(problem: &Problem) -> Vec<Set> {
    let mut musts: Vec<Set> = Vec::with_capacity(problem.len());
    for class in 0..problem.len() {
        let mut all = problem.of(class).map(|id| needs(problem, &musts, id));
        let mut must = all.next().unwrap_or_default();
        for other in all {
            must.retain(|need| other.binary_search(need).is_ok());
        }
        if let Err(at) = must.binary_search(&class) {
            must.insert(at, class);
        }
        musts.push(must);
    }
    musts
}

/// What a node needs, given the same for some of the lower classes.
fn needs(problem: &Problem, musts: &[Set], id: usize) -> Set {
    let mut needs = Set::new();
    for child in problem.residual(id) {
        needs.push(child);
        if needs.len() < NEEDS {
            needs.extend(musts.get(child).into_iter().flatten().copied());
        }
    }
    needs.sort_unstable();
    needs.dedup();
    needs
}

/// Whether every item of `fewer` is in `more`; both sorted.
fn subset(fewer: &[usize], more: &[usize]) -> bool {
    let mut rest = more.iter();
    fewer.iter().all(|item| rest.any(|other| other == item))
}
