//! Bottom-up order of the classes, and which nodes have to give way for there to be one.
//!
//! Only classes that can reach each other are in question. Among them the next class is the one
//! that loses the fewest nodes, which is none where the order exists: an acyclic graph keeps all.
//! The time is that of a sort.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::problem::{Lists, Problem};

/// Drops what the root cannot reach, numbers the rest bottom-up, and marks the nodes that read
/// upwards as `back`. The backbone is spared, and every class keeps a forward node.
pub(super) fn arrange(problem: &mut Problem) {
    let Components { mut sequence, group } = components(problem);
    problem.nodes.iter_mut().for_each(|node| node.back = false);
    if sequence.windows(2).any(|pair| group[pair[0]] == group[pair[1]]) {
        let mut placer = Placer::new(problem, &group);
        for members in sequence.chunk_by_mut(|&a, &b| group[a] == group[b]) {
            if members.len() > 1 {
                placer.place_all(members);
            }
        }
        let missing = placer.missing;
        for (node, missing) in problem.nodes.iter_mut().zip(missing) {
            node.back = missing > 0;
        }
    }
    problem.renumber(&sequence, &group);
}

/// The strongly connected components of what the root reaches.
struct Components {
    /// The classes, component by component, readers after what they read.
    sequence: Vec<usize>,
    /// The component of each class.
    group: Vec<usize>,
}

/// Tarjan's algorithm with its own stack, since a deep network would exhaust the thread's.
fn components(problem: &Problem) -> Components {
    const UNSEEN: usize = usize::MAX;
    let edges = Lists::new(
        problem.len(),
        problem
            .nodes
            .iter()
            .flat_map(|node| node.children.iter().map(|&child| (node.class, child))),
    );
    let mut found = vec![UNSEEN; problem.len()];
    let mut low = vec![UNSEEN; problem.len()];
    let mut group = vec![UNSEEN; problem.len()];
    let mut sequence = Vec::with_capacity(problem.len());
    let (mut count, mut groups) = (0, 0);
    let mut open = Vec::new();
    let mut frames: Vec<(usize, usize)> = Vec::new();
    let mut entering = Some(problem.root);
    loop {
        if let Some(class) = entering.take() {
            (found[class], low[class]) = (count, count);
            count += 1;
            open.push(class);
            frames.push((class, 0));
        }
        let Some((class, followed)) = frames.last_mut() else {
            return Components { sequence, group };
        };
        let class = *class;
        if let Some(&child) = edges.of(class).get(*followed) {
            *followed += 1;
            if found[child] == UNSEEN {
                entering = Some(child);
            } else if group[child] == UNSEEN {
                low[class] = low[class].min(found[child]);
            }
            continue;
        }
        frames.pop();
        if let Some(&(reader, _)) = frames.last() {
            low[reader] = low[reader].min(low[class]);
        }
        if low[class] == found[class] {
            let start = open.iter().rposition(|&member| member == class).unwrap_or(0);
            for member in open.drain(start..) {
                group[member] = groups;
                sequence.push(member);
            }
            groups += 1;
        }
    }
}

/// Puts the classes of one component after the other in an order.
struct Placer<'a> {
    problem: &'a Problem,
    /// The nodes that read each class from within its component.
    readers: Lists,
    /// Per node, the children within its component that have no place yet.
    missing: Vec<usize>,
    /// Per class, the nodes that miss a child, and its node of the backbone.
    unready: Vec<usize>,
    backbone: Vec<Option<usize>>,
    placed: Vec<bool>,
    /// Classes that may come next, by how many nodes that would cost them.
    next: BinaryHeap<Reverse<(usize, usize)>>,
}

impl<'a> Placer<'a> {
    fn new(problem: &'a Problem, group: &'a [usize]) -> Self {
        let inner = problem.nodes.iter().enumerate().flat_map(|(id, node)| {
            let within = move |child: &&usize| group[**child] == group[node.class];
            node.children.iter().filter(within).map(move |&child| (child, id))
        });
        let readers = Lists::new(problem.len(), inner.clone());
        let mut missing = vec![0; problem.nodes.len()];
        inner.for_each(|(_, id)| missing[id] += 1);
        let mut unready = vec![0; problem.len()];
        let mut backbone = vec![None; problem.len()];
        for (id, node) in problem.nodes.iter().enumerate() {
            unready[node.class] += usize::from(missing[id] > 0);
            if node.backbone {
                backbone[node.class] = Some(id);
            }
        }
        let placed = vec![false; problem.len()];
        Self {
            problem,
            readers,
            missing,
            unready,
            backbone,
            placed,
            next: BinaryHeap::new(),
        }
    }

    fn place_all(&mut self, members: &mut [usize]) {
        members.iter().for_each(|&class| self.offer(class));
        for place in members.iter_mut() {
            *place = loop {
                // The lowest unplaced class of the backbone is always on offer, and once there is
                // none left, the class that was computable first.
                let Reverse((unready, class)) = self.next.pop().expect("a class is on offer");
                if !self.placed[class] && unready == self.unready[class] {
                    break class;
                }
            };
            self.place(*place);
        }
        self.next.clear();
    }

    fn place(&mut self, class: usize) {
        self.placed[class] = true;
        for at in 0..self.readers.of(class).len() {
            let id = self.readers.of(class)[at];
            let reader = self.problem.nodes[id].class;
            // What a placed class still misses it has lost for good.
            if !self.placed[reader] {
                self.missing[id] -= 1;
                if self.missing[id] == 0 {
                    self.unready[reader] -= 1;
                    self.offer(reader);
                }
            }
        }
    }

    /// Lets a class come next if it can be computed from what has a place, sparing the backbone.
    fn offer(&mut self, class: usize) {
        let computable = match self.backbone[class] {
            Some(id) => self.missing[id] == 0,
            None => self.unready[class] < self.problem.of(class).len(),
        };
        if computable {
            self.next.push(Reverse((self.unready[class], class)));
        }
    }
}
