//! Local search on the DAG cost, with moves that switch all users of a shared class at once.
//!
//! A merged node, such as one matrix product for query, key and value, never pays for one of its
//! users alone: greedy methods reject it, and so does any search that changes one class at a time.

use super::problem::{Lists, Problem, improves};

/// Rounds over all moves; the search stops earlier when a round finds nothing.
const ROUNDS: usize = 8;
/// Classes one move may switch.
const GROUP: usize = 256;
/// Work allowed per class of the problem: a limit that, unlike a clock, is the same on every run.
const WORK: usize = 200;

/// Improves a choice of forward nodes until no move lowers its cost; it is never made worse.
pub(super) fn flip(problem: &Problem, readers: &Lists, choice: Vec<usize>) -> Vec<usize> {
    let mut search = Search::new(problem, readers, choice);
    for _ in 0..ROUNDS {
        let before = search.cost;
        for class in 0..problem.len() {
            search.switch(class);
            if !problem.forced[class] {
                search.join(class);
                search.leave(class);
            }
        }
        if !improves(search.cost, before) || search.exhausted() {
            break;
        }
    }
    search.choice
}

struct Search<'a> {
    problem: &'a Problem,
    readers: &'a Lists,
    /// The node each class has, or would have if it were used.
    choice: Vec<usize>,
    /// How many used classes read each class.
    uses: Vec<usize>,
    cost: f64,
    /// What was replaced, to take moves back.
    log: Vec<(usize, usize)>,
    /// The move in which each class was last seen, and the number of the present one.
    seen: Vec<usize>,
    now: usize,
    pending: Vec<usize>,
    work: usize,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, readers: &'a Lists, choice: Vec<usize>) -> Self {
        let mut search = Self {
            problem,
            readers,
            choice,
            uses: vec![0; problem.len()],
            cost: 0.0,
            log: Vec::new(),
            seen: vec![0; problem.len()],
            now: 0,
            pending: vec![problem.root],
            work: 0,
        };
        search.acquire();
        search.work = 0;
        search
    }

    fn exhausted(&self) -> bool {
        self.work > WORK * self.problem.len()
    }

    /// Uses each pending class once more, with all that it brings in.
    fn acquire(&mut self) {
        while let Some(class) = self.pending.pop() {
            self.work += 1;
            self.uses[class] += 1;
            if self.uses[class] == 1 {
                let node = &self.problem.nodes[self.choice[class]];
                self.cost += node.cost;
                self.pending.extend_from_slice(&node.children);
            }
        }
    }

    /// Uses each pending class once less, with all that it brought in.
    fn release(&mut self) {
        while let Some(class) = self.pending.pop() {
            self.work += 1;
            self.uses[class] -= 1;
            if self.uses[class] == 0 {
                let node = &self.problem.nodes[self.choice[class]];
                self.cost -= node.cost;
                self.pending.extend_from_slice(&node.children);
            }
        }
    }

    fn set(&mut self, class: usize, id: usize) {
        self.work += 1;
        let old = std::mem::replace(&mut self.choice[class], id);
        if old == id {
            return;
        }
        self.log.push((class, old));
        if self.uses[class] > 0 {
            let (old, new) = (&self.problem.nodes[old], &self.problem.nodes[id]);
            self.cost += new.cost - old.cost;
            // In this order, what both need stays in use throughout.
            self.pending.extend_from_slice(&new.children);
            self.acquire();
            self.pending.extend_from_slice(&old.children);
            self.release();
        }
    }

    /// Takes back what was set since the log had `mark` entries and the cost was `cost`.
    fn undo(&mut self, mark: usize, cost: f64) {
        while self.log.len() > mark {
            let (class, old) = self.log[self.log.len() - 1];
            self.set(class, old);
            self.log.truncate(self.log.len() - 2);
        }
        // Sums taken apart again do not round back to where they were.
        self.cost = cost;
    }

    /// Gives one class the node that is cheapest with all others as they are.
    fn switch(&mut self, class: usize) {
        let problem = self.problem;
        if self.uses[class] == 0 || problem.of(class).len() == 1 || self.exhausted() {
            return;
        }
        for id in problem.forward(class) {
            let (mark, cost) = (self.log.len(), self.cost);
            self.set(class, id);
            if !improves(self.cost, cost) {
                self.undo(mark, cost);
            }
        }
    }

    /// Makes every class that can read `target` do so, then lets each go its own way again if that
    /// is cheaper; kept if the whole costs less.
    fn join(&mut self, target: usize) {
        if self.exhausted() {
            return;
        }
        let (mark, cost) = (self.log.len(), self.cost);
        let problem = self.problem;
        self.now += 1;
        self.seen[target] = self.now;
        let mut reached = vec![target];
        let mut users = Vec::new();
        let mut next = 0;
        while let Some(&class) = reached.get(next) {
            next += 1;
            for &id in self.readers.of(class) {
                let user = problem.nodes[id].class;
                if problem.nodes[id].back || self.seen[user] == self.now || users.len() >= GROUP {
                    continue;
                }
                self.seen[user] = self.now;
                if !problem.nodes[self.choice[user]].children.contains(&class) {
                    users.push((user, id));
                }
                // A class nobody uses yet (a slice or a view of the target) is a way to its users.
                if self.uses[user] == 0 {
                    reached.push(user);
                }
            }
        }
        // Users are switched after all are known, since a switch changes what is in use.
        for &(user, id) in &users {
            self.set(user, id);
        }
        if self.log.len() > mark {
            for &(user, _) in users.iter().rev() {
                self.switch(user);
            }
        }
        if !improves(self.cost, cost) {
            self.undo(mark, cost);
        }
    }

    /// Makes every class that reads `target` do without it; kept if the whole costs less.
    fn leave(&mut self, target: usize) {
        if self.uses[target] == 0 || self.exhausted() {
            return;
        }
        let (mark, cost) = (self.log.len(), self.cost);
        let problem = self.problem;
        self.now += 1;
        self.seen[target] = self.now;
        let mut avoided = vec![target];
        let mut next = 0;
        while let Some(&class) = avoided.get(next) {
            next += 1;
            for &id in self.readers.of(class) {
                let user = problem.nodes[id].class;
                if self.choice[user] != id || self.uses[user] == 0 {
                    continue;
                }
                if let Some(other) = self.cheapest_without(user) {
                    self.set(user, other);
                } else if problem.forced[user] || avoided.len() >= GROUP {
                    self.undo(mark, cost);
                    return;
                } else if self.seen[user] != self.now {
                    // It has no other way, so its own users must do without it.
                    self.seen[user] = self.now;
                    avoided.push(user);
                }
            }
        }
        if !improves(self.cost, cost) {
            self.undo(mark, cost);
        }
    }

    /// The cheapest node of a class, all else as it is, that reads no class seen in this move.
    fn cheapest_without(&mut self, class: usize) -> Option<usize> {
        let problem = self.problem;
        let mut best: Option<(f64, usize)> = None;
        for id in problem.forward(class) {
            if problem.nodes[id]
                .children
                .iter()
                .any(|&child| self.seen[child] == self.now)
            {
                continue;
            }
            let (mark, cost) = (self.log.len(), self.cost);
            self.set(class, id);
            if best.is_none_or(|(least, _)| improves(self.cost, least)) {
                best = Some((self.cost, id));
            }
            self.undo(mark, cost);
        }
        best.map(|(_, id)| id)
    }
}
