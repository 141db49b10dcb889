//! Exact choice, part by part: by elimination, and where that leaves a doubt by integer programming
//! under a deadline.
//!
//! Per node x ∈ {0, 1}. A forced class chooses exactly one node. For classes c and d, of the nodes
//! of c that need d at most as many are chosen as of d. Cycles are allowed at first, and each that
//! turns up is forbidden. The relaxation comes first: often its solution is a program already.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use good_lp::solvers::SolutionStatus;
use good_lp::{
    Expression, ProblemVariables, Solution as _, SolverModel, Variable, WithTimeLimit, constraint, microlp, variable,
};
use rustc_hash::FxHashMap;

use super::parts::{self, Part, Program};
use super::problem::{Problem, improves};
use super::{Options, bound, eliminate};

/// Cycles to forbid before giving up on a part.
const CUTS: usize = 64;
/// Error to expect of the solver's objective, relative to it and to the dearest node.
const TOLERANCE: f64 = 1e-7;

/// What is known after the search.
pub(super) struct Outcome {
    /// A node per class: the incumbent's, except in parts where a cheaper choice was found.
    pub choice: Vec<usize>,
    /// No program costs less.
    pub bound: f64,
    /// The choice costs no more than any program.
    pub optimal: bool,
    /// Some part was searched.
    pub ran: bool,
}

/// Improves the incumbent, a choice of forward nodes.
///
/// Only proven optima are taken: what the clock leaves unfinished would differ from run to run.
pub(super) fn solve(problem: &Problem, incumbent: Vec<usize>, options: &Options) -> Outcome {
    let started = Instant::now();
    let shares = bound::shares(problem);
    let active = problem.active(&incumbent);
    let mut outcome = Outcome {
        choice: incumbent,
        bound: 0.0,
        optimal: true,
        ran: false,
    };
    let mut parts = parts::split(problem);
    // The small ones first, so that a hard one cannot take their time.
    parts.sort_by_key(|(part, _)| part.nodes());
    let mut known: FxHashMap<Part, Found> = FxHashMap::default();
    for (part, classes) in parts {
        let used = classes.iter().filter(|&&class| active[class]);
        let paid: f64 = used.map(|&class| problem.nodes[outcome.choice[class]].cost).sum();
        let forced = classes.iter().filter(|&&class| problem.forced[class]);
        let least: f64 = forced.map(|&class| shares[class]).sum();
        if part.decided() || !improves(least, paid) {
            outcome.bound += paid;
            continue;
        }
        let solvable = part.nodes() <= options.max_ilp_nodes;
        let found = known.entry(part).or_insert_with_key(|part| {
            Found::of(part, options, || options.ilp_deadline.saturating_sub(started.elapsed()))
        });
        outcome.ran |= options.use_ilp && (solvable || found.program.is_some());
        match &found.program {
            Some((cost, program)) => {
                outcome.bound += cost.min(paid);
                if !improves(*cost, paid) {
                    continue;
                }
                outcome.optimal &= options.use_ilp;
                if options.use_ilp {
                    for &(class, at) in program {
                        outcome.choice[classes[class]] = problem.of(classes[class]).start + at;
                    }
                }
            }
            None => {
                let least = least.max(found.bound).min(paid);
                outcome.bound += least;
                outcome.optimal &= !improves(least, paid);
            }
        }
    }
    outcome
}

/// What is known of a part.
#[derive(Debug, Default)]
struct Found {
    bound: f64,
    /// A cheapest program.
    program: Option<Program>,
}

impl Found {
    /// Eliminates, then if that leaves a doubt and the options allow it, solves the integer program.
    fn of(part: &Part, options: &Options, time_left: impl Fn() -> Duration) -> Self {
        let eliminated = eliminate::eliminate(part, &eliminate::Limits::default());
        let program = eliminated
            .nodes
            .and_then(|nodes| part.program(|class| nodes[class]).ok());
        let bound = eliminated.bound * (1.0 - TOLERANCE);
        if program.is_some() || !options.use_ilp || part.nodes() > options.max_ilp_nodes {
            return Self { bound, program };
        }
        let solved = Model::new(part).solve(time_left);
        Self {
            bound: bound.max(solved.bound),
            ..solved
        }
    }
}

/// The integer program of one part.
struct Model<'a> {
    part: &'a Part,
    /// The solver's tolerances are absolute, so costs are brought to the size of one.
    scale: f64,
    /// (some nodes of a class, another class): at most as many are chosen of these as of that.
    needs: Vec<(Vec<usize>, usize)>,
    /// Nodes, and how many of them may be chosen.
    cuts: Vec<(Vec<usize>, usize)>,
}

impl<'a> Model<'a> {
    fn new(part: &'a Part) -> Self {
        let dearest = (0..part.nodes()).map(|node| part.cost(node)).fold(0.0, f64::max);
        let all = part.needs();
        let class_of = (0..part.forced.len()).flat_map(|class| part.of(class).map(move |_| class));
        // A node that needs its own class is in no program.
        let idle = class_of.enumerate().filter(|(node, class)| all[*node].contains(class));
        let idle: Vec<usize> = idle.map(|(node, _)| node).collect();
        Self {
            part,
            scale: if dearest > 0.0 { dearest } else { 1.0 },
            needs: distinct(part, &all),
            cuts: if idle.is_empty() { Vec::new() } else { vec![(idle, 0)] },
        }
    }

    fn solve(&mut self, time_left: impl Fn() -> Duration) -> Found {
        let mut found = Found::default();
        let mut integer = false;
        while self.cuts.len() < CUTS {
            let Some((values, objective)) = self.relax(integer, time_left()) else {
                break;
            };
            let slack = TOLERANCE * (objective + self.scale);
            if !integer {
                found.bound = objective - slack;
            }
            match self.round(&values) {
                Ok(program) => {
                    if integer || program.0 <= objective + slack {
                        found.program = Some(program);
                        break;
                    }
                }
                Err(cycle) => self.forbid(&cycle),
            }
            integer = true;
        }
        found
    }

    /// Solves the program, or without integrality its relaxation, to optimality: values, objective.
    fn relax(&self, integer: bool, limit: Duration) -> Option<(Vec<f64>, f64)> {
        if limit.is_zero() {
            return None;
        }
        let part = self.part;
        let mut variables = ProblemVariables::new();
        let kind = || {
            if integer {
                variable().binary()
            } else {
                variable().clamp(0, 1)
            }
        };
        let x: Vec<Variable> = (0..part.nodes()).map(|_| variables.add(kind())).collect();
        let price = x.iter().enumerate().map(|(node, &x)| part.cost(node) / self.scale * x);
        let price: Expression = price.sum();
        let mut model = variables.minimise(price.clone()).using(microlp);
        let chosen = |nodes: &[usize]| nodes.iter().map(|&node| x[node]).sum::<Expression>();
        let of = |class: usize| x[part.of(class)].iter().sum::<Expression>();
        for class in (0..part.forced.len()).filter(|&class| part.forced[class]) {
            model.add_constraint(constraint!(of(class) == 1));
        }
        for (nodes, class) in &self.needs {
            model.add_constraint(constraint!(chosen(nodes) <= of(*class)));
        }
        for (nodes, limit) in &self.cuts {
            model.add_constraint(constraint!(chosen(nodes) <= i32::try_from(*limit).ok()?));
        }
        let model = model.with_time_limit(limit.as_secs_f64());
        // The incumbent must survive a numerical failure in the solver, which may be a panic.
        let solution = catch_unwind(AssertUnwindSafe(|| model.solve())).ok()?.ok()?;
        if !matches!(solution.status(), SolutionStatus::Optimal) {
            return None;
        }
        let values = x.iter().map(|&variable| solution.value(variable)).collect();
        Some((values, price.eval_with(&solution) * self.scale))
    }

    /// The program that takes the largest variable of each class, or a cycle in it.
    fn round(&self, values: &[f64]) -> Result<Program, Vec<usize>> {
        let larger = |a: usize, b: usize| if values[b] > values[a] + 1e-6 { b } else { a };
        self.part
            .program(|class| self.part.of(class).reduce(larger).unwrap_or_default())
    }

    /// Forbids all choices that lead from each class of a cycle to the next.
    fn forbid(&mut self, cycle: &[usize]) {
        let part = self.part;
        let onward =
            |(&class, &next): (&usize, &usize)| part.of(class).filter(move |&node| part.children[node].contains(&next));
        let next = cycle.iter().cycle().skip(1);
        let nodes = cycle.iter().zip(next).flat_map(onward).collect();
        self.cuts.push((nodes, cycle.len() - 1));
    }
}

/// For each class the nodes that need another, over all others, except where it follows.
///
/// It is the needs below the children that make the relaxation tight: of two nodes that need a
/// class, one by way of another class, only both together force it.
fn distinct(part: &Part, needs: &[Vec<usize>]) -> Vec<(Vec<usize>, usize)> {
    let mut result = Vec::new();
    for class in 0..part.forced.len() {
        let mut pairs: Vec<(usize, usize)> = Vec::new();
        for node in part.of(class) {
            let others = needs[node].iter().filter(|&&need| need != class);
            pairs.extend(others.map(|&need| (need, node)));
        }
        pairs.sort_unstable();
        let groups: Vec<&[(usize, usize)]> = pairs.chunk_by(|a, b| a.0 == b.0).collect();
        let nodes = |group: &[(usize, usize)]| group.iter().map(|&(_, node)| node).collect::<Vec<_>>();
        // The same nodes need `by`, and whatever is chosen there needs `need`.
        let follows = |group: &[(usize, usize)]| {
            let need = group[0].0;
            groups.iter().any(|other| {
                let by = other[0].0;
                let same = by != need && other.len() == group.len() && nodes(other) == nodes(group);
                same && part.of(by).all(|node| needs[node].binary_search(&need).is_ok())
            })
        };
        for group in &groups {
            if !follows(group) {
                result.push((nodes(group), group[0].0));
            }
        }
    }
    result
}
