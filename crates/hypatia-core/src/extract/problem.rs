//! The working form of a graph: flat, numbered bottom-up, free of what no program can use.

use std::ops::Range;

use smallvec::SmallVec;

use super::graph::{Error, Graph};

/// Sorted, distinct classes.
pub(super) type Children = SmallVec<[usize; 4]>;

/// One alternative of a class; named by its index in [`Problem::nodes`].
#[derive(Debug, Clone)]
pub(super) struct Alternative {
    pub cost: f64,
    pub children: Children,
    pub class: usize,
    /// Its index in the class it had in the input.
    pub index: usize,
    pub original: bool,
    /// Part of one acyclic program that computes the root: what cycle filtering must spare.
    pub backbone: bool,
    /// Reads a class that is not below its own: only the integer program may choose it.
    pub back: bool,
}

/// Once arranged, a class comes after every class that its forward (not `back`) nodes read, so a
/// choice of forward nodes is acyclic whatever it is.
#[derive(Debug)]
pub(super) struct Problem {
    /// Grouped by class; within a class originals first, then in the order of the input.
    pub nodes: Vec<Alternative>,
    starts: Vec<usize>,
    /// The input's index of each class.
    pub source: Vec<usize>,
    /// Classes that can reach each other have the same number.
    pub group: Vec<usize>,
    /// Whether every program computes the class: then reading it costs nothing more.
    pub forced: Vec<bool>,
    pub root: usize,
}

/// Whether `new` is cheaper than `old` by more than the rounding of a sum.
pub(super) fn improves(new: f64, old: f64) -> bool {
    new < old * (1.0 - 1e-9)
}

impl Problem {
    /// The classes of `graph` under their own numbers, without nodes that no finite program contains.
    pub fn new(graph: &Graph) -> Result<Self, Error> {
        graph.validate()?;
        let count = graph.classes.len();
        let mut nodes = Vec::with_capacity(graph.classes.iter().map(|c| c.nodes.len()).sum());
        for (class, alternatives) in graph.classes.iter().enumerate() {
            for original in [true, false] {
                for (index, node) in alternatives.nodes.iter().enumerate() {
                    if node.original != original || node.children.contains(&class) {
                        continue;
                    }
                    let mut children = Children::from_slice(&node.children);
                    children.sort_unstable();
                    children.dedup();
                    nodes.push(Alternative {
                        cost: node.cost,
                        children,
                        class,
                        index,
                        original,
                        backbone: false,
                        back: false,
                    });
                }
            }
        }
        let mut problem = Self {
            starts: starts(count, nodes.iter().map(|node| node.class)),
            nodes,
            source: (0..count).collect(),
            group: (0..count).collect(),
            forced: vec![false; count],
            root: graph.root,
        };
        let readers = problem.readers();
        let originals = problem.first_ready(&readers, |node| node.original);
        if originals[problem.root].is_none() {
            return Err(Error::Original { root: graph.root });
        }
        for id in originals.into_iter().flatten() {
            problem.nodes[id].backbone = true;
        }
        let ready = problem.first_ready(&readers, |_| true);
        problem.retain(|_, node| node.children.iter().all(|&child| ready[child].is_some()));
        Ok(problem)
    }

    pub fn len(&self) -> usize {
        self.source.len()
    }

    /// The nodes of a class.
    pub fn of(&self, class: usize) -> Range<usize> {
        self.starts[class]..self.starts[class + 1]
    }

    /// The nodes of a class that any choice may combine.
    pub fn forward(&self, class: usize) -> impl Iterator<Item = usize> + '_ {
        self.of(class).filter(|&id| !self.nodes[id].back)
    }

    /// The children of a node that choosing it brings in, or that it may close a cycle with.
    pub fn residual(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        let node = &self.nodes[id];
        let group = self.group[node.class];
        node.children
            .iter()
            .copied()
            .filter(move |&child| !self.forced[child] || self.group[child] == group)
    }

    /// The nodes that read each class.
    pub fn readers(&self) -> Lists {
        let edges = self.nodes.iter().enumerate();
        Lists::new(
            self.len(),
            edges.flat_map(|(id, node)| node.children.iter().map(move |&child| (child, id))),
        )
    }

    /// For each class the node through which it is first computable from nodes that `admit` admits.
    /// Children are computable before their readers, so these nodes together are acyclic.
    fn first_ready(&self, readers: &Lists, admit: impl Fn(&Alternative) -> bool) -> Vec<Option<usize>> {
        let mut first = vec![None; self.len()];
        let mut queue = Vec::with_capacity(self.len());
        let mut missing: Vec<usize> = self.nodes.iter().map(|node| node.children.len()).collect();
        let mut offer = |id: usize, queue: &mut Vec<usize>| {
            let node = &self.nodes[id];
            if first[node.class].is_none() && admit(node) {
                first[node.class] = Some(id);
                queue.push(node.class);
            }
        };
        (0..self.nodes.len())
            .filter(|&id| missing[id] == 0)
            .for_each(|id| offer(id, &mut queue));
        let mut next = 0;
        while let Some(&class) = queue.get(next) {
            next += 1;
            for &id in readers.of(class) {
                missing[id] -= 1;
                if missing[id] == 0 {
                    offer(id, &mut queue);
                }
            }
        }
        first
    }

    /// Drops the nodes that `keep` rejects.
    pub fn retain(&mut self, keep: impl Fn(usize, &Alternative) -> bool) {
        let mut id = 0;
        self.nodes.retain(|node| {
            id += 1;
            keep(id - 1, node)
        });
        self.starts = starts(self.len(), self.nodes.iter().map(|node| node.class));
    }

    /// Renumbers the classes as listed in `sequence`; those not listed are dropped with their nodes.
    pub fn renumber(&mut self, sequence: &[usize], group: &[usize]) {
        let mut position = vec![usize::MAX; self.len()];
        for (new, &old) in sequence.iter().enumerate() {
            position[old] = new;
        }
        let mut nodes = Vec::with_capacity(self.nodes.len());
        for (new, &old) in sequence.iter().enumerate() {
            for id in self.of(old) {
                let mut children = std::mem::take(&mut self.nodes[id].children);
                children.iter_mut().for_each(|child| *child = position[*child]);
                children.sort_unstable();
                nodes.push(Alternative {
                    children,
                    class: new,
                    ..self.nodes[id]
                });
            }
        }
        self.starts = starts(sequence.len(), nodes.iter().map(|node| node.class));
        self.nodes = nodes;
        self.source = sequence.iter().map(|&old| self.source[old]).collect();
        self.group = sequence.iter().map(|&old| group[old]).collect();
        self.forced = vec![false; sequence.len()];
        self.root = position[self.root];
    }

    /// The classes that a choice of forward nodes computes.
    pub fn active(&self, choice: &[usize]) -> Vec<bool> {
        let mut active = vec![false; self.len()];
        active[self.root] = true;
        for class in (0..self.len()).rev().filter(|&class| class <= self.root) {
            if active[class] {
                self.nodes[choice[class]]
                    .children
                    .iter()
                    .for_each(|&child| active[child] = true);
            }
        }
        active
    }

    /// The DAG cost of a choice of forward nodes.
    pub fn cost(&self, choice: &[usize]) -> f64 {
        let active = self.active(choice);
        (0..self.len())
            .filter(|&class| active[class])
            .map(|class| self.nodes[choice[class]].cost)
            .sum()
    }

    /// The nodes of the backbone, at most one per class.
    pub fn backbone(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).filter(|&id| self.nodes[id].backbone)
    }

    /// A node per class in the input's terms, for an input of `classes` classes.
    pub fn decode(&self, ids: impl IntoIterator<Item = usize>, classes: usize) -> Vec<Option<usize>> {
        let mut choice = vec![None; classes];
        for id in ids {
            choice[self.source[self.nodes[id].class]] = Some(self.nodes[id].index);
        }
        choice
    }
}

/// Where each class's nodes begin, from the ascending classes of the nodes.
fn starts(classes: usize, class_of_node: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut starts = vec![0; classes + 1];
    class_of_node.for_each(|class| starts[class + 1] += 1);
    for class in 0..classes {
        starts[class + 1] += starts[class];
    }
    starts
}

/// A list per key, all in one allocation.
#[derive(Debug)]
pub(super) struct Lists {
    starts: Vec<usize>,
    items: Vec<usize>,
}

impl Lists {
    /// Groups (key, item) pairs by key, keeping their order.
    pub fn new(keys: usize, pairs: impl Iterator<Item = (usize, usize)> + Clone) -> Self {
        let starts = starts(keys, pairs.clone().map(|(key, _)| key));
        let mut next = starts.clone();
        let mut items = vec![0; starts[keys]];
        for (key, item) in pairs {
            items[next[key]] = item;
            next[key] += 1;
        }
        Self { starts, items }
    }

    pub fn of(&self, key: usize) -> &[usize] {
        &self.items[self.starts[key]..self.starts[key + 1]]
    }
}
