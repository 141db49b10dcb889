//! The cheapest program in a saturated e-graph, with shared work counted once.
//!
//! Extraction first reduces the graph without losing the optimum (classes that every program
//! needs, dominated alternatives), then lets several methods compete: the input program itself,
//! greedy by tree and by DAG cost, a local search that switches all users of a shared class at
//! once, and for each independent part an exact search: elimination of one class after the other,
//! or, where the classes are too entangled, an integer program under a deadline. The best wins, so the result is never worse
//! than the input; a lower bound says how far from the optimum it can be at most.
//!
//! The module knows nothing of operators: it sees costs and edges.

mod bound;
mod cycles;
mod eliminate;
mod flip;
mod graph;
mod greedy;
mod ilp;
mod parts;
mod problem;
#[cfg(test)]
mod properties;
mod reduce;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod timings;

use std::time::Duration;

pub use graph::{Class, Error, Graph, Node};
use problem::{Problem, improves};

/// Limits of the search.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Whether to search for the optimum where the local search may have missed it. Without, a
    /// bound is still found, by elimination.
    pub use_ilp: bool,
    /// Time for all integer programs together.
    pub ilp_deadline: Duration,
    /// The largest part, in nodes, that is given to the solver: larger ones would only time out,
    /// and a limit on size gives the same result on every machine.
    pub max_ilp_nodes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            use_ilp: true,
            ilp_deadline: Duration::from_millis(100),
            max_ilp_nodes: 600,
        }
    }
}

/// How a program was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// It is the input program.
    Original,
    /// Greedy, a shared class charged to each reader in full.
    TreeGreedy,
    /// Greedy, a shared class charged once.
    DagGreedy,
    /// Local search that switches all users of a shared class at once.
    GroupFlip,
    /// Exact search: elimination, or integer programming.
    Ilp,
}

/// What the best program of each method costs, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// The input program; where it computes a value in two ways, with one of them.
    pub original: f64,
    /// By tree greedy.
    pub tree_greedy: f64,
    /// By DAG greedy.
    pub dag_greedy: f64,
    /// By group flip, from the best of several starts.
    pub group_flip: f64,
    /// After exact search, if any was needed and allowed.
    pub ilp: Option<f64>,
}

/// A program, and how good it is known to be.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// The chosen node of each class that the root needs, `None` for the others.
    pub choice: Vec<Option<usize>>,
    /// Its cost in microseconds, shared work counted once.
    pub cost: f64,
    /// No program in the graph costs less than this.
    pub lower_bound: f64,
    /// The first method that reached the cost.
    pub method: Method,
    /// What each method reached.
    pub costs: Costs,
    /// Whether the cost is proven to be the least, by exact search or because the bound is
    /// met without; then `lower_bound` equals `cost`.
    pub ilp_optimal: bool,
}

/// Finds the cheapest program for the root of `graph`.
///
/// The nodes marked as original must contain a program for the root. Of equal costs the original
/// program wins, then the simpler method.
///
/// # Errors
/// When the graph is malformed or the original nodes do not compute the root.
///
/// # Examples
/// ```
/// use hypatia_core::extract::{Class, Graph, Node, Options, extract};
///
/// let node = |cost, children: &[usize], original| Node { cost, children: children.to_vec(), original };
/// let graph = Graph {
///     classes: vec![
///         Class { nodes: vec![node(1.0, &[], true)] },
///         Class { nodes: vec![node(5.0, &[0], true), node(2.0, &[0], false)] },
///     ],
///     root: 1,
/// };
/// let solution = extract(&graph, &Options::default())?;
/// assert_eq!(solution.cost, 3.0);
/// assert_eq!(solution.choice, [Some(0), Some(1)]);
/// # Ok::<(), hypatia_core::extract::Error>(())
/// ```
pub fn extract(graph: &Graph, options: &Options) -> Result<Solution, Error> {
    let classes = graph.classes.len();
    let mut problem = Problem::new(graph)?;
    let original = problem.decode(problem.backbone(), classes);
    let mut best = Best {
        graph,
        method: Method::Original,
        cost: graph.dag_cost(&original)?,
        choice: original,
    };
    let original = best.cost;

    reduce::reduce(&mut problem);
    let tree = greedy::tree(&problem);
    let dag = greedy::dag(&problem);
    let tree_greedy = best.offer(Method::TreeGreedy, problem.decode(tree.iter().copied(), classes))?;
    let dag_greedy = best.offer(Method::DagGreedy, problem.decode(dag.iter().copied(), classes))?;

    // Each start leads to a local optimum of its own.
    let mut input = dag.clone();
    problem.backbone().for_each(|id| input[problem.nodes[id].class] = id);
    let mut starts = vec![dag, tree, input];
    starts.dedup();
    let readers = problem.readers();
    let flipped = starts.into_iter().map(|start| flip::flip(&problem, &readers, start));
    let (_, flipped) = flipped
        .map(|choice| (problem.cost(&choice), choice))
        .reduce(|best, other| if improves(other.0, best.0) { other } else { best })
        .expect("there is a start");
    let group_flip = best.offer(Method::GroupFlip, problem.decode(flipped.iter().copied(), classes))?;

    let exact = ilp::solve(&problem, flipped, options);
    let ilp = if exact.ran {
        Some(best.offer(Method::Ilp, problem.decode(exact.choice, classes))?)
    } else {
        None
    };

    let Best {
        method,
        cost,
        mut choice,
        ..
    } = best;
    let ilp_optimal = exact.optimal || !improves(exact.bound, cost);
    let needed = graph.schedule(&choice)?;
    choice.fill(None);
    needed.into_iter().for_each(|(class, node)| choice[class] = Some(node));
    Ok(Solution {
        choice,
        cost,
        lower_bound: if ilp_optimal { cost } else { exact.bound.min(cost) },
        method,
        costs: Costs {
            original,
            tree_greedy,
            dag_greedy,
            group_flip,
            ilp,
        },
        ilp_optimal,
    })
}

/// The best program so far.
struct Best<'a> {
    graph: &'a Graph,
    method: Method,
    cost: f64,
    choice: Vec<Option<usize>>,
}

impl Best<'_> {
    /// Takes a program if it is cheaper; answers its cost in the input's terms, which checks that
    /// it is a program at all.
    fn offer(&mut self, method: Method, choice: Vec<Option<usize>>) -> Result<f64, Error> {
        let cost = self.graph.dag_cost(&choice)?;
        if improves(cost, self.cost) {
            (self.method, self.cost, self.choice) = (method, cost, choice);
        }
        Ok(cost)
    }
}
