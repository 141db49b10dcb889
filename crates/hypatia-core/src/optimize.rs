//! The pipeline: program in, e-graph, saturation, extraction, proof, program out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egg::{Id, Language, RecExpr};
use serde::{Deserialize, Serialize};

use crate::cost::{self, Measured, Target};
use crate::egraph::{Context, EGraph};
use crate::emit::{Emission, emit_pairs};
use crate::error::{Error, Result};
use crate::extract;
use crate::ir::node::{Node, Op};
use crate::ir::program::Program;
use crate::proof::Proof;
use crate::rules::faults::planted;
use crate::rules::saturate::{Limits, Stats, saturate_with};
use crate::rules::{Rule, rules};
use crate::ty::Ty;

/// What to optimize for, and how hard.
#[derive(Debug, Clone)]
pub struct Options {
    /// The machine that the program will run on.
    pub target: Target,
    /// Times measured there.
    pub measured: Measured,
    /// How far to search.
    pub limits: Limits,
    /// How to extract.
    pub extract: extract::Options,
    /// Whether to keep the proof.
    pub proof: bool,
    /// Wrong rules to use, by name, for tests of what comes after.
    pub planted: Vec<String>,
    /// Prices by lot, drawn from this seed: any equal program may come out, for tests that compare equals.
    pub random_costs: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        let [cpu, ..] = Target::all();
        Options {
            target: cpu,
            measured: Measured::default(),
            limits: Limits::default(),
            extract: extract::Options::default(),
            proof: true,
            planted: vec![],
            random_costs: None,
        }
    }
}

/// Milliseconds of each stage.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Times {
    /// Growing the e-graph.
    pub saturate: f64,
    /// Choosing from it.
    pub extract: f64,
    /// Explaining the choice.
    pub prove: f64,
}

/// A program and everything that is known of how it came about.
#[derive(Debug, Clone)]
pub struct Optimized {
    /// The program that came in.
    pub input: Program,
    /// The program that goes out.
    pub output: Program,
    /// Which nodes of the output are made of frozen weights only.
    pub weights: Vec<bool>,
    /// Cost of the input in microseconds of the target.
    pub cost_before: f64,
    /// Cost of the output.
    pub cost_after: f64,
    /// No equal program in the e-graph costs less.
    pub lower_bound: f64,
    /// What found the output.
    pub method: extract::Method,
    /// What each method found.
    pub costs: extract::Costs,
    /// Why output and input are equal.
    pub proof: Option<Proof>,
    /// What saturation did.
    pub stats: Stats,
    /// Nodes and classes of the e-graph.
    pub size: (usize, usize),
    /// Where the time went.
    pub times: Times,
    /// What costs are counted on.
    pub target: Target,
}

/// Finds the cheapest equal program.
pub fn optimize(program: &Program, options: &Options) -> Result<Optimized> {
    let wanted = |r: &&Rule| options.planted.iter().any(|n| n == r.name);
    optimize_with(
        program,
        options,
        &rules()
            .iter()
            .chain(planted().iter().filter(wanted))
            .collect::<Vec<_>>(),
    )
}

/// Finds the cheapest equal program under the given rules.
pub fn optimize_with(program: &Program, options: &Options, rules: &[&Rule]) -> Result<Optimized> {
    // egg explains by recursion, as deep as the program is.
    const STACK: usize = 1 << 30;
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("hypatia-optimize".into())
            .stack_size(STACK)
            .spawn_scoped(scope, || run(program, options, rules))
            .map_err(|e| Error::Graph(format!("cannot start a thread: {e}")))?
            .join()
            .map_err(|_| Error::Graph("the optimizer panicked".into()))?
    })
}

fn run(program: &Program, options: &Options, rules: &[&Rule]) -> Result<Optimized> {
    let (expr, place) = program.expr();
    let context = Context {
        leaves: Arc::new(program.leaves.clone()),
        conflicts: vec![],
    };
    let mut egraph = EGraph::new(context);
    if options.proof {
        egraph = egraph
            .with_explanations_enabled()
            .without_explanation_length_optimization();
    }
    let mut times = Times::default();

    let start = Instant::now();
    let root = egraph.add_expr(&expr);
    let stats = saturate_with(&mut egraph, &options.limits, rules);
    if let Some(conflict) = egraph.analysis.conflicts.first() {
        return Err(Error::Unsound(conflict.clone()));
    }
    times.saturate = millis(start.elapsed());
    let size = (egraph.total_number_of_nodes(), egraph.number_of_classes());
    tracing::debug!(
        rounds = stats.rounds,
        nodes = size.0,
        classes = size.1,
        ms = times.saturate,
        node_limit_reached = stats.limited,
        "search finished"
    );

    let start = Instant::now();
    let ids = egraph
        .lookup_expr_ids(&expr)
        .ok_or_else(|| Error::Graph("the program left its e-graph".into()))?;
    let chosen = Chosen::find(&egraph, egraph.find(root), &expr, &ids, options)?;
    times.extract = millis(start.elapsed());
    let found = &chosen.solution;
    tracing::debug!(
        method = ?found.method,
        optimal = found.ilp_optimal,
        before = found.costs.original,
        cost = found.cost,
        bound = found.lower_bound,
        ms = times.extract,
        "program extracted"
    );

    let start = Instant::now();
    let proof = options
        .proof
        .then(|| Proof::explain(&mut egraph, &expr, &chosen.expr))
        .transpose()?;
    times.prove = millis(start.elapsed());

    // Values that were in the captured graph keep their place in it.
    let mut origin_of_class: BTreeMap<Id, u32> = BTreeMap::new();
    for (id, record) in &program.origin {
        if let Some(at) = place.get(id) {
            let class = egraph.find(ids[usize::from(*at)]);
            let known = origin_of_class.entry(class).or_insert(*record);
            *known = (*known).min(*record);
        }
    }
    let mut output = Program::from_expr(&program.leaves, &chosen.expr)?;
    let mut weights = vec![false; output.nodes().len()];
    let mut new_id: Vec<Id> = vec![];
    for (i, node) in chosen.expr.as_ref().iter().enumerate() {
        let id = output.add(node.clone().map_children(|c| new_id[usize::from(c)]))?;
        new_id.push(id);
        let class = chosen.classes[i];
        weights[usize::from(id)] = egraph[class].data.weight;
        let exact = place_of(program, &output, id);
        if let Some(record) = exact.or_else(|| origin_of_class.get(&class).copied()) {
            output.origin.insert(id, record);
        }
    }
    output.root = *new_id.last().ok_or_else(|| Error::Graph("empty program".into()))?;

    let s = chosen.solution;
    Ok(Optimized {
        input: program.clone(),
        weights,
        cost_before: s.costs.original,
        cost_after: s.cost,
        lower_bound: s.lower_bound,
        method: s.method,
        costs: s.costs,
        proof,
        stats,
        size,
        times,
        target: options.target.clone(),
        output,
    })
}

impl Optimized {
    /// Both sides of every step of the proof as calls into torch, and the numbers of these steps.
    pub fn emit_steps(&self) -> (Emission, Vec<usize>) {
        let Some(proof) = &self.proof else {
            return emit_pairs(&self.input, &[]);
        };
        let mut terms = proof.terms.clone();
        for i in 0..terms.nodes().len() {
            if let Some(record) = place_of(&self.input, &terms, i.into()) {
                terms.origin.insert(i.into(), record);
            }
        }
        let pairs: Vec<(Id, Id)> = proof.steps.iter().map(|s| (s.before, s.after)).collect();
        emit_pairs(&terms, &pairs)
    }
}

/// Inputs are themselves, whatever else has the same value.
fn place_of(input: &Program, output: &Program, id: Id) -> Option<u32> {
    let op = &output.node(id).op;
    if !matches!(op, Op::Input(_)) {
        return None;
    }
    input
        .origin
        .iter()
        .find(|(i, _)| input.node(**i).op == *op)
        .map(|(_, r)| *r)
}

fn millis(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// A price between 1 and 1,000 that depends on the seed, the op and its operands' types only.
fn drawn(seed: u64, node: &Node, types: &[Ty]) -> f64 {
    let mut key = node.to_string();
    for ty in types {
        key.push(' ');
        key.push_str(&ty.to_string());
    }
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in key.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash ^= hash >> 29;
    1000f64.powf((hash % 1024) as f64 / 1024.0)
}

/// A program chosen from the e-graph.
struct Chosen {
    expr: RecExpr<Node>,
    /// Class of each node of the expression.
    classes: Vec<Id>,
    solution: extract::Solution,
}

/// Classes numbered for extraction.
#[derive(Default)]
struct Numbering {
    of_class: BTreeMap<Id, usize>,
    classes: Vec<Id>,
}

impl Numbering {
    fn number(&mut self, class: Id) -> usize {
        *self.of_class.entry(class).or_insert_with(|| {
            self.classes.push(class);
            self.classes.len() - 1
        })
    }
}

impl Chosen {
    fn find(egraph: &EGraph, root: Id, expr: &RecExpr<Node>, ids: &[Id], options: &Options) -> Result<Chosen> {
        let mut original: BTreeMap<Id, Vec<Node>> = BTreeMap::new();
        for (node, id) in expr.as_ref().iter().zip(ids) {
            let node = node.clone().map_children(|c| egraph.find(ids[usize::from(c)]));
            original.entry(egraph.find(*id)).or_default().push(node);
        }
        let is_original = |class: Id, node: &Node| original.get(&class).is_some_and(|n| n.contains(node));
        let is_weight = |class: Id| egraph[class].data.weight;
        let hint = |s: &str| egraph.analysis.leaves.hint(s);
        let cost = |class: Id, node: &Node| {
            let types: Vec<Ty> = node.children.iter().map(|c| egraph[*c].data.ty.clone()).collect();
            let out = &egraph[class].data.ty;
            if let (Some(seed), Op::Row(_) | Op::Opaque(_)) = (options.random_costs, &node.op) {
                return drawn(seed, node, &types);
            }
            let work = match &node.op {
                Op::Row(op) => match options.measured.time(*op, &types) {
                    Some(time) => return time,
                    None => cost::work(*op, &types, out, &hint),
                },
                Op::Opaque(_) => cost::opaque_work(&types, out, &hint),
                Op::Attr(_) | Op::Input(_) => return 0.0,
            };
            // A finite price that no real kernel reaches and that leaves sums their precision.
            options.target.time(&work).min(1e9)
        };

        // What runs at every call: weights are leaves of it.
        let mut live = Numbering::default();
        let live_root = live.number(root);
        let mut graph = extract::Graph {
            classes: vec![],
            root: live_root,
        };
        while graph.classes.len() < live.classes.len() {
            let class = live.classes[graph.classes.len()];
            let mut nodes = vec![];
            if is_weight(class) && class != root {
                nodes.push(extract::Node {
                    cost: 0.0,
                    children: vec![],
                    original: true,
                });
            } else {
                for node in &egraph[class].nodes {
                    let children = node
                        .children
                        .iter()
                        .map(|c| egraph.find(*c))
                        .map(|c| live.number(c))
                        .collect();
                    nodes.push(extract::Node {
                        cost: cost(class, node),
                        children,
                        original: is_original(class, node),
                    });
                }
            }
            graph.classes.push(extract::Class { nodes });
        }
        let solution = extract::extract(&graph, &options.extract)?;

        let mut choice: BTreeMap<Id, &Node> = BTreeMap::new();
        let mut weights: Vec<Id> = vec![];
        for (i, class) in live.classes.iter().enumerate() {
            match solution.choice[i] {
                Some(_) if is_weight(*class) && *class != root => weights.push(*class),
                Some(n) => {
                    choice.insert(*class, &egraph[*class].nodes[n]);
                }
                None => {}
            }
        }
        choose_weights(egraph, &weights, &is_original, &cost, &mut choice)?;
        let (expr, classes) = build(egraph, root, &choice)?;
        Ok(Chosen {
            expr,
            classes,
            solution,
        })
    }
}

/// Weights are computed once, so their own cost only decides among ways to compute them.
fn choose_weights<'a>(
    egraph: &'a EGraph,
    needed: &[Id],
    is_original: &dyn Fn(Id, &Node) -> bool,
    cost: &dyn Fn(Id, &Node) -> f64,
    choice: &mut BTreeMap<Id, &'a Node>,
) -> Result<()> {
    if needed.is_empty() {
        return Ok(());
    }
    // Bottom-up by tree cost: exact sharing does not matter for work that is done once.
    let mut best: BTreeMap<Id, (f64, bool, &Node)> = BTreeMap::new();
    let mut order = vec![];
    let mut seen: BTreeMap<Id, ()> = BTreeMap::new();
    let mut stack: Vec<Id> = needed.iter().map(|c| egraph.find(*c)).collect();
    while let Some(class) = stack.pop() {
        if seen.insert(class, ()).is_none() {
            order.push(class);
            for node in &egraph[class].nodes {
                stack.extend(node.children.iter().map(|c| egraph.find(*c)));
            }
        }
    }
    loop {
        let mut changed = false;
        for class in order.iter().rev() {
            for node in &egraph[*class].nodes {
                let children: Option<f64> = node
                    .children
                    .iter()
                    .map(|c| best.get(&egraph.find(*c)).map(|b| b.0))
                    .sum();
                let Some(children) = children else { continue };
                let total = (cost(*class, node) + children).min(1e300);
                let original = is_original(*class, node);
                let better = match best.get(class) {
                    None => true,
                    Some((old, was_original, _)) => total < *old || total == *old && original && !was_original,
                };
                if better {
                    best.insert(*class, (total, original, node));
                    changed = true;
                }
            }
        }
        if !changed {
            break;
        }
    }
    let mut stack: Vec<Id> = needed.iter().map(|c| egraph.find(*c)).collect();
    while let Some(class) = stack.pop() {
        let Some((_, _, node)) = best.get(&class) else {
            return Err(Error::Graph("a weight cannot be computed".into()));
        };
        if choice.insert(class, node).is_none() {
            stack.extend(node.children.iter().map(|c| egraph.find(*c)));
        }
    }
    Ok(())
}

/// The expression of the choices, operands first.
fn build(egraph: &EGraph, root: Id, choice: &BTreeMap<Id, &Node>) -> Result<(RecExpr<Node>, Vec<Id>)> {
    let mut expr = RecExpr::default();
    let mut classes = vec![];
    let mut place: BTreeMap<Id, Id> = BTreeMap::new();
    let mut stack = vec![root];
    while let Some(class) = stack.last().copied() {
        if place.contains_key(&class) {
            stack.pop();
            continue;
        }
        let node: &Node = match choice.get(&class) {
            Some(n) => n,
            None => egraph[class]
                .nodes
                .iter()
                .find(|n| n.is_leaf())
                .ok_or_else(|| Error::Graph("a class was not chosen".into()))?,
        };
        let missing: Vec<Id> = node
            .children
            .iter()
            .rev()
            .map(|c| egraph.find(*c))
            .filter(|c| !place.contains_key(c))
            .collect();
        if missing.is_empty() {
            let new = node.clone().map_children(|c| place[&egraph.find(c)]);
            place.insert(class, expr.add(new));
            classes.push(class);
            stack.pop();
        } else {
            stack.extend(missing);
        }
    }
    Ok((expr, classes))
}
