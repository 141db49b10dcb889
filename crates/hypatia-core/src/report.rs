//! What a compilation did, for people and programs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cost::{self, Target};
use crate::error::Result;
use crate::extract::Method;
use crate::ir::node::Op;
use crate::ir::program::Program;
use crate::ir::text;
use crate::ops::{Meaning, table};
use crate::optimize::{Optimized, Times};
use crate::rules::faults::planted;
use crate::rules::{Numerics, Phase, rules};
use crate::ty::Ty;

/// A rule that was used.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Used {
    /// Its name.
    pub rule: String,
    /// The law.
    pub law: String,
    /// How it may change the numbers.
    pub numerics: Option<Numerics>,
    /// How often it was used.
    pub times: usize,
}

/// A step of the proof.
#[derive(Debug, Clone, Serialize)]
pub struct StepText {
    /// The rule.
    pub rule: String,
    /// From left to right.
    pub forward: bool,
    /// Before.
    pub before: String,
    /// After.
    pub after: String,
}

/// A node of a program, for drawing.
#[derive(Debug, Clone, Serialize)]
pub struct Drawn {
    /// Unique in its program; operands have smaller ones.
    pub id: usize,
    /// The op, or what torch calls.
    pub op: String,
    /// Name of an input or of an opaque call in the captured graph.
    pub name: String,
    /// Operands that are values.
    pub inputs: Vec<usize>,
    /// Operands that are known at compile time.
    pub attrs: Vec<String>,
    /// Type of the value.
    #[serde(rename = "type")]
    pub ty: String,
    /// Microseconds of the cost model; zero for what is computed once.
    pub cost: f64,
    /// Made of frozen weights only: computed once.
    pub folded: bool,
    /// input, weight, op, fused, opaque or result.
    pub kind: &'static str,
    /// The captured record that has the same value.
    pub origin: Option<u32>,
}

/// The programs in and out, for drawing.
#[derive(Debug, Clone, Serialize)]
pub struct Graphs {
    /// In.
    pub before: Vec<Drawn>,
    /// Out.
    pub after: Vec<Drawn>,
}

/// The report of a compilation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Target of the cost model.
    pub target: String,
    /// Cost of the program in, in microseconds.
    pub cost_before: f64,
    /// Cost of the program out.
    pub cost_after: f64,
    /// No equal program in the e-graph costs less.
    pub lower_bound: f64,
    /// Distance to the bound, as a share of the cost.
    pub gap: f64,
    /// What found the program out.
    pub method: String,
    /// Ops of the program in, by name; not those that are computed once, from frozen weights.
    pub ops_before: BTreeMap<String, usize>,
    /// Ops of the program out, by name; those of every call, too.
    pub ops_after: BTreeMap<String, usize>,
    /// Calls that only torch understands, by target.
    pub opaque: BTreeMap<String, usize>,
    /// Rules used, in order of first use.
    pub rules: Vec<Used>,
    /// Steps of the proof.
    pub steps: usize,
    /// Nodes of the e-graph.
    pub nodes: usize,
    /// Classes of the e-graph.
    pub classes: usize,
    /// The node limit ended the search.
    pub limited: bool,
    /// Milliseconds by stage.
    pub times: Times,
}

impl Optimized {
    /// What was done.
    pub fn report(&self) -> Report {
        let used = self.proof.as_ref().map(|p| p.rules()).unwrap_or_default();
        let lookup = |name: &str| rules().iter().chain(planted()).find(|r| r.name == name);
        Report {
            target: self.target.name.clone(),
            cost_before: self.cost_before,
            cost_after: self.cost_after,
            lower_bound: self.lower_bound,
            gap: if self.cost_after > 0.0 {
                (self.cost_after - self.lower_bound) / self.cost_after
            } else {
                0.0
            },
            method: match self.method {
                Method::Original => "original",
                Method::TreeGreedy => "tree greedy",
                Method::DagGreedy => "DAG greedy",
                Method::GroupFlip => "group flip",
                Method::Ilp => "exact search",
            }
            .into(),
            ops_before: count(&self.input, &weights_of(&self.input)),
            ops_after: count(&self.output, &self.weights),
            opaque: opaque(&self.output),
            rules: used
                .into_iter()
                .map(|(rule, times)| Used {
                    law: lookup(&rule).map(|r| r.law.clone()).unwrap_or_default(),
                    numerics: lookup(&rule).map(|r| r.numerics),
                    rule,
                    times,
                })
                .collect(),
            steps: self.proof.as_ref().map_or(0, |p| p.steps.len()),
            nodes: self.size.0,
            classes: self.size.1,
            limited: self.stats.limited,
            times: self.times,
        }
    }

    /// The proof as text, step by step.
    pub fn steps(&self) -> Result<Vec<StepText>> {
        let Some(proof) = &self.proof else {
            return Ok(vec![]);
        };
        proof
            .steps
            .iter()
            .map(|s| {
                let (before, after) = proof.step_text(s)?;
                Ok(StepText {
                    rule: s.rule.clone(),
                    forward: s.forward,
                    before,
                    after,
                })
            })
            .collect()
    }

    /// Both programs as lists of nodes, for drawing.
    pub fn graphs(&self) -> Graphs {
        Graphs {
            before: drawn(&self.input, &weights_of(&self.input), Some(&self.target)),
            after: drawn(&self.output, &self.weights, Some(&self.target)),
        }
    }

    /// Both programs as text.
    pub fn texts(&self) -> (String, String) {
        (text::print(&self.input), text::print(&self.output))
    }
}

/// Which nodes are made of frozen weights only.
fn weights_of(program: &Program) -> Vec<bool> {
    let mut weights: Vec<bool> = vec![];
    for i in 0..program.nodes().len() {
        let node = program.node(i.into());
        let mut operands = node.children.iter().filter(|c| !is_attr(program, **c)).peekable();
        weights.push(match &node.op {
            Op::Input(n) => program.leaves.inputs.get(*n as usize).is_some_and(|i| i.weight),
            Op::Row(_) => operands.peek().is_some() && operands.all(|c| weights[usize::from(*c)]),
            _ => false,
        });
    }
    weights
}

fn is_attr(program: &Program, id: egg::Id) -> bool {
    matches!(program.node(id).op, Op::Attr(_))
}

fn drawn(program: &Program, weights: &[bool], target: Option<&Target>) -> Vec<Drawn> {
    let hint = |s: &str| program.leaves.hint(s);
    let mut nodes: Vec<Drawn> = vec![];
    for id in program.reachable() {
        let node = program.node(id);
        let types: Vec<Ty> = node.children.iter().map(|c| program.ty(*c).clone()).collect();
        let out = program.ty(id);
        let folded = weights[usize::from(id)];
        let (kind, op, name, work) = match &node.op {
            Op::Attr(_) => continue,
            Op::Input(i) => {
                let input = &program.leaves.inputs[*i as usize];
                (
                    if input.weight { "weight" } else { "input" },
                    "input",
                    input.name.clone(),
                    None,
                )
            }
            Op::Opaque(i) => {
                let call = program.leaves.opaques.get(i);
                let name = call.map_or(String::new(), |c| c.name.clone());
                let target = call.map_or("opaque", |c| c.target.as_str());
                ("opaque", target, name, Some(cost::opaque_work(&types, out, &hint)))
            }
            Op::Row(op) => {
                let row = table().row(*op);
                let kind = match (row.name, &row.meaning) {
                    ("tuple", _) => "result",
                    (_, Meaning::Defined(_)) => "fused",
                    _ => "op",
                };
                (kind, row.name, String::new(), Some(cost::work(*op, &types, out, &hint)))
            }
        };
        let cost = match (work, target) {
            (Some(work), Some(target)) if !folded && kind != "result" => target.time(&work),
            _ => 0.0,
        };
        let (attrs, inputs): (Vec<egg::Id>, Vec<egg::Id>) =
            node.children.iter().copied().partition(|c| is_attr(program, *c));
        nodes.push(Drawn {
            id: usize::from(id),
            op: op.to_string(),
            name,
            inputs: inputs.into_iter().map(usize::from).collect(),
            attrs: attrs.into_iter().map(|c| program.ty(c).to_string()).collect(),
            ty: out.to_string(),
            cost,
            folded: folded && !matches!(node.op, Op::Input(_)),
            kind,
            origin: program.origin.get(&id).copied(),
        });
    }
    nodes.sort_by_key(|n| n.id);
    nodes
}

/// The ops of every call, as they are drawn.
fn count(program: &Program, weights: &[bool]) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for node in drawn(program, weights, None) {
        if matches!(node.kind, "op" | "fused" | "opaque") && !node.folded {
            *out.entry(node.op).or_default() += 1;
        }
    }
    out
}

fn opaque(program: &Program) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for id in program.reachable() {
        if let Op::Opaque(i) = &program.node(id).op
            && let Some(call) = program.leaves.opaques.get(i)
        {
            *out.entry(call.target.clone()).or_default() += 1;
        }
    }
    out
}

/// A row of the generated table of ops.
#[derive(Debug, Serialize)]
pub struct OpDoc {
    /// Name.
    pub name: &'static str,
    /// Operands.
    pub operands: Vec<String>,
    /// Torch calls that mean it.
    pub torch: Vec<String>,
    /// Definition of a fused op.
    pub definition: Option<String>,
}

/// A row of the generated table of rules.
#[derive(Debug, Serialize)]
pub struct RuleDoc {
    /// Name.
    pub name: &'static str,
    /// Phase.
    pub phase: Phase,
    /// Numerics class.
    pub numerics: Numerics,
    /// The law.
    pub law: String,
    /// Whether both sides have the same gradient too.
    pub gradient: bool,
    /// Guards.
    pub guards: Vec<&'static str>,
}

/// The table of ops, for the documentation.
pub fn op_docs() -> Vec<OpDoc> {
    let doc = |row: &crate::ops::Row| OpDoc {
        name: row.name,
        operands: row.params.iter().map(|p| p.name.clone()).collect(),
        torch: row
            .aten_text
            .iter()
            .map(|t| t.split(" =>").next().unwrap_or(t).to_string())
            .collect(),
        definition: match &row.meaning {
            Meaning::Defined(f) => Some(f(if row.variadic() { 5 } else { row.params.len() })),
            Meaning::Primitive { .. } => None,
        },
    };
    table().rows().iter().map(doc).collect()
}

/// The table of rules, for the documentation.
pub fn rule_docs() -> Vec<RuleDoc> {
    let doc = |r: &crate::rules::Rule| RuleDoc {
        name: r.name,
        phase: r.phase,
        numerics: r.numerics,
        law: r.law.clone(),
        gradient: r.gradient,
        guards: r.guards.to_vec(),
    };
    rules().iter().map(doc).collect()
}
