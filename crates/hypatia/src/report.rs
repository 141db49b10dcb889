//! What a compilation did, for people and programs.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cost;
use crate::error::Result;
use crate::extract::Method;
use crate::ir::node::Op;
use crate::ir::program::Program;
use crate::ir::text;
use crate::ops::{Meaning, table};
use crate::optimize::{Optimized, Times};
use crate::rules::{Numerics, Phase, rules};
use crate::ty::Ty;

/// A rule that was used.
#[derive(Debug, Clone, Serialize)]
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

/// The report of a compilation.
#[derive(Debug, Clone, Serialize)]
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
    /// Ops of the program in, by name.
    pub ops_before: BTreeMap<String, usize>,
    /// Ops of the program out, by name.
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
        let lookup = |name: &str| rules().iter().find(|r| r.name == name);
        Report {
            target: self.target.clone(),
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
            ops_before: count(&self.input),
            ops_after: count(&self.output),
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

    /// Cost of each node of the program out, in microseconds; zero for what is computed once.
    pub fn node_costs(&self, target: &cost::Target) -> Vec<f64> {
        let hint = |s: &str| self.output.leaves.hint(s);
        (0..self.output.nodes().len())
            .map(|i| {
                let node = self.output.node(i.into());
                if self.weights[i] {
                    return 0.0;
                }
                let types: Vec<Ty> = node.children.iter().map(|c| self.output.ty(*c).clone()).collect();
                let out = self.output.ty(i.into());
                match &node.op {
                    Op::Row(op) => target.time(&cost::work(*op, &types, out, &hint)),
                    Op::Opaque(_) => target.time(&cost::opaque_work(&types, out, &hint)),
                    _ => 0.0,
                }
            })
            .collect()
    }

    /// Both programs as text.
    pub fn texts(&self) -> (String, String) {
        (text::print(&self.input), text::print(&self.output))
    }
}

fn count(program: &Program) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for name in program.op_names() {
        if name != "tuple" {
            *out.entry(name.to_string()).or_default() += 1;
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
        guards: r.guards.to_vec(),
    };
    rules().iter().map(doc).collect()
}
