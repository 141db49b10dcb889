//! Independent parts of a problem.
//!
//! Given that the forced classes are computed anyway, a choice matters only to what it alone
//! brings in. This is what makes a deep network many small problems, a few per layer.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::problem::{Children, Lists, Problem};

/// A part as a problem of its own. It has its own numbers, so that the parts of repeated layers
/// are equal, and one solution serves them all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Part {
    /// Per class, whether it is computed in any case.
    pub forced: Vec<bool>,
    /// Per class, the lowest of those that can reach it and that it can reach.
    pub group: Vec<usize>,
    starts: Vec<usize>,
    /// Costs by their bits, which unlike floats can be hashed.
    costs: Vec<u64>,
    /// Per node, the classes that it brings in or may close a cycle with.
    pub children: Vec<Children>,
}

/// The cost of a program, and the program: classes, and which of their nodes.
pub(super) type Program = (f64, Vec<(usize, usize)>);

impl Part {
    fn new(problem: &Problem, classes: &[usize], local: &[usize]) -> Self {
        let ids = || classes.iter().flat_map(|&class| problem.of(class));
        let mut starts = vec![0];
        for &class in classes {
            starts.push(starts[starts.len() - 1] + problem.of(class).len());
        }
        let mut first: FxHashMap<usize, usize> = FxHashMap::default();
        let groups = classes.iter().enumerate();
        let groups = groups.map(|(at, &class)| *first.entry(problem.group[class]).or_insert(at));
        Self {
            group: groups.collect(),
            forced: classes.iter().map(|&class| problem.forced[class]).collect(),
            starts,
            costs: ids().map(|id| problem.nodes[id].cost.to_bits()).collect(),
            children: ids()
                .map(|id| problem.residual(id).map(|child| local[child]).collect())
                .collect(),
        }
    }

    /// The nodes of a class.
    pub fn of(&self, class: usize) -> Range<usize> {
        self.starts[class]..self.starts[class + 1]
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.costs.len()
    }

    /// Whether there is nothing to choose.
    pub fn decided(&self) -> bool {
        self.nodes() == self.forced.len()
    }

    pub fn cost(&self, node: usize) -> f64 {
        f64::from_bits(self.costs[node])
    }

    /// The program that takes the node `pick` names for each class, or the classes of a cycle in it.
    pub fn program(&self, pick: impl Fn(usize) -> usize) -> Result<Program, Vec<usize>> {
        let mut entered = vec![false; self.forced.len()];
        let mut left = vec![false; self.forced.len()];
        let (mut cost, mut program) = (0.0, Vec::new());
        // Classes, each with its node's children that are still to be entered.
        let mut path: Vec<(usize, &[usize])> = Vec::new();
        for start in (0..self.forced.len()).filter(|&class| self.forced[class]) {
            let mut entering = Some(start);
            loop {
                if let Some(class) = entering.take().filter(|&class| !left[class]) {
                    if entered[class] {
                        let cycle = path.iter().map(|&(class, _)| class);
                        return Err(cycle.skip_while(|&on| on != class).collect());
                    }
                    entered[class] = true;
                    let node = pick(class);
                    cost += self.cost(node);
                    program.push((class, node - self.of(class).start));
                    path.push((class, &self.children[node]));
                }
                let Some((class, children)) = path.last_mut() else {
                    break;
                };
                if let Some((&child, rest)) = children.split_first() {
                    (entering, *children) = (Some(child), rest);
                } else {
                    left[*class] = true;
                    path.pop();
                }
            }
        }
        Ok((cost, program))
    }

    /// Per node, the classes that it brings in whatever is chosen below, ascending.
    ///
    /// Children at or above the node's own class count for themselves only, as in
    /// [`super::bound::forced`].
    pub fn needs(&self) -> Vec<Vec<usize>> {
        let mut needs: Vec<Vec<usize>> = Vec::with_capacity(self.nodes());
        let mut of_class: Vec<Vec<usize>> = Vec::with_capacity(self.forced.len());
        for class in 0..self.forced.len() {
            for node in self.of(class) {
                let mut need = Vec::new();
                for &child in self.children[node].iter().filter(|&&child| !self.forced[child]) {
                    need.push(child);
                    if child < class {
                        need.extend_from_slice(&of_class[child]);
                    }
                }
                need.sort_unstable();
                need.dedup();
                needs.push(need);
            }
            let (first, rest) = (self.of(class).start, self.of(class).skip(1));
            let mut common = needs[first].clone();
            rest.for_each(|node| common.retain(|need| needs[node].binary_search(need).is_ok()));
            of_class.push(common);
        }
        needs
    }
}

/// All parts, each with its classes in ascending order.
pub(super) fn split(problem: &Problem) -> Vec<(Part, Vec<usize>)> {
    let mut leader: Vec<usize> = (0..problem.len()).collect();
    for (id, node) in problem.nodes.iter().enumerate() {
        for child in problem.residual(id) {
            let (a, b) = (find(&mut leader, node.class), find(&mut leader, child));
            // The lower class leads, so that the parts come out in a fixed order.
            leader[a.max(b)] = a.min(b);
        }
    }
    let leaders: Vec<usize> = (0..problem.len()).map(|class| find(&mut leader, class)).collect();
    let members = Lists::new(problem.len(), leaders.iter().copied().zip(0..));
    let mut local = vec![0; problem.len()];
    let parts = (0..problem.len()).map(|leader| members.of(leader));
    parts
        .filter(|classes| !classes.is_empty())
        .map(|classes| {
            classes.iter().enumerate().for_each(|(at, &class)| local[class] = at);
            (Part::new(problem, classes, &local), classes.to_vec())
        })
        .collect()
}

/// The class that stands for the part of `class`.
fn find(leader: &mut [usize], mut class: usize) -> usize {
    while leader[class] != class {
        leader[class] = leader[leader[class]];
        class = leader[class];
    }
    class
}
