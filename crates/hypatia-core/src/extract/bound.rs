//! What every program pays: the classes none can do without, and a bound that splits shared costs.

use super::problem::Problem;

/// Words per row of a block: 512 classes at a time keep the rows of a block in cache and the
/// memory linear, where one bit matrix over all classes would be quadratic.
const WORDS: usize = 8;

/// The classes that every program contains: must(root), where
/// must(c) = {c} ∪ ⋂ over nodes of c, ⋃ over their children d, must(d).
///
/// A node that reads upwards counts with the children themselves only. That is sound, since any
/// family of sets that satisfies the inclusion is: go up the topological order of a program.
pub(super) fn forced(problem: &Problem) -> Vec<bool> {
    let count = problem.len();
    let mut forced = vec![false; count];
    let mut rows = vec![[0u64; WORDS]; count];
    let width = WORDS * 64;
    // Of what follows the root, which is on a cycle with it, nothing is known.
    for first in (0..=problem.root).step_by(width) {
        let block = first..first + width;
        // Below the block nothing is known to need a class of it.
        for class in first..count {
            let mut must = [u64::MAX; WORDS];
            for node in &problem.nodes[problem.of(class)] {
                let mut union = [0; WORDS];
                for &child in node.children.iter().filter(|&&child| child >= first) {
                    if child < class {
                        union.iter_mut().zip(&rows[child]).for_each(|(word, &row)| *word |= row);
                    } else if block.contains(&child) {
                        insert(&mut union, child - first);
                    }
                }
                must.iter_mut().zip(union).for_each(|(word, other)| *word &= other);
            }
            if block.contains(&class) {
                insert(&mut must, class - first);
            }
            rows[class] = must;
        }
        let row = &rows[problem.root];
        for (bit, forced) in forced[first..count.min(block.end)].iter_mut().enumerate() {
            *forced = row[bit / 64] >> (bit % 64) & 1 == 1;
        }
    }
    forced
}

fn insert(row: &mut [u64; WORDS], bit: usize) {
    row[bit / 64] |= 1 << (bit % 64);
}

/// Per class, a lower bound on what a program that contains it pays for it, when the price of a
/// class is split evenly among all classes that could read it. A program has at most that many
/// readers, so the sum over the forced classes is a lower bound on its cost.
pub(super) fn shares(problem: &Problem) -> Vec<f64> {
    let mut readers = vec![0u32; problem.len()];
    let mut counted = vec![usize::MAX; problem.len()];
    for node in &problem.nodes {
        for &child in &node.children {
            if counted[child] != node.class {
                counted[child] = node.class;
                readers[child] += 1;
            }
        }
    }
    let mut shares: Vec<f64> = Vec::with_capacity(problem.len());
    for class in 0..problem.len() {
        let price = |id: usize| {
            let node = &problem.nodes[id];
            let own = |&&child: &&usize| child < class && !problem.forced[child];
            let below = node.children.iter().filter(own);
            node.cost
                + below
                    .map(|&child| shares[child] / f64::from(readers[child]))
                    .sum::<f64>()
        };
        let least = problem.of(class).map(price).fold(f64::INFINITY, f64::min);
        shares.push(least);
    }
    shares
}
