//! The soundness walk: every rule is tried on random programs of the form that it looks for, over
//! ranks, dtypes, empty and unequal sizes, and everything that it says is equal is computed by
//! the reference evaluation and compared.
//!
//! - `Exact` rules must agree bit for bit with every op rounded to its dtype, on ordinary numbers
//!   and on NaN, ±0, ±∞, the largest and the smallest, denormal ones too, and on integers of every
//!   width at their limits. A NaN equals a NaN, `-0` is not `0`.
//! - `Wider` rules never make NaN or an infinity of what is a finite number with every op rounded,
//!   on the same special values.
//! - `Reassoc`, `Wider` and `Approx` rules must agree in real numbers to 1e-9 of the largest
//!   element (`Approx`: 1e-2), and have their NaNs in the same places when inputs hold NaN and ±0.
//!   They may differ where a sum or product overflows in one order only, so they are given
//!   infinities only if all of their ops work on each element alone. When all inputs are fp32 or
//!   fp64 they must also agree to 1e-4 with every op rounded: a rule may not round to half
//!   precision what was never in it.
//! - A rule that fires on nothing, or never on a value other than zero, is found too, as is one
//!   that is only ever tried on square matrices.

mod compare;
mod draw;
mod pairs;
mod sample;

pub use pairs::{Pair, pairs};

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use egg::{ENodeOrVar, PatternAst, Var};

use super::{Action, Numerics, Rule};
use crate::cost::Cost;
use crate::egraph::{Context, EGraph};
use crate::ir::node::{Node, Op};
use crate::ir::text;
use crate::ops::{Meaning, table};
use crate::random::Random;
use crate::rules::saturate::apply;
use crate::sexp::{Sexp, parse_one};
use compare::{Seen, Specials, compare, inputs, stays_finite, trials};
use sample::{Sample, Sampler};

/// What is wrong with a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It fired on no sample, or never where it could be seen to be right.
    NeverFired,
    /// Its sides have different values.
    Differs,
    /// It united classes whose facts disagree.
    Conflict,
    /// It fired on matrices, but on square ones only.
    OnlySquare,
    /// A sample cannot be read.
    BadSample,
}

/// One thing found.
#[derive(Debug, Clone)]
pub struct Finding {
    /// The rule's name.
    pub rule: &'static str,
    /// What is wrong.
    pub kind: Kind,
    /// On which program, and how.
    pub detail: String,
}

/// What the walk did with one rule.
#[derive(Debug, Clone)]
pub struct Report {
    /// The rule's name.
    pub rule: &'static str,
    /// Programs on which it fired and was checked, by the highest rank among their inputs.
    pub fired: BTreeMap<usize, usize>,
    /// Those of them with unequal sizes in one tensor.
    pub skewed: usize,
    /// What was found.
    pub findings: Vec<Finding>,
}

/// Programs that are tried for one form of a rule at most.
const TRIES: usize = 600;
/// As many times more where these have shown too little.
const MORE: usize = 10;
/// So many programs that show something are enough, once so many draws are spent.
const ENOUGH: usize = 24;
const SPENT: usize = 6_000;
/// What it costs to apply a rule and to evaluate, in draws.
const CHECK: usize = 40;

/// Checks every rule; the same rules give the same findings on every machine.
pub fn walk(rules: &[Rule]) -> Vec<Finding> {
    reports(rules, 1).into_iter().flat_map(|r| r.findings).collect()
}

/// Checks every rule, on all cores, and says what was done.
pub fn reports(rules: &[Rule], seed: u64) -> Vec<Report> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = |t: usize| rules.iter().enumerate().skip(t).step_by(threads);
    let check = |t: usize| {
        share(t)
            .map(|(i, r)| (i, check_rule(r, TRIES, seed)))
            .collect::<Vec<_>>()
    };
    let mut all: Vec<(usize, Report)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || check(t))).collect();
        // A panic in a rule is the rule's fault and must not pass for success.
        handles
            .into_iter()
            .flat_map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, r)| r).collect()
}

/// Checks one rule on at most `tries` random programs for each of its forms.
pub fn check_rule(rule: &Rule, tries: usize, seed: u64) -> Report {
    let mut report = Report {
        rule: rule.name,
        fired: BTreeMap::new(),
        skewed: 0,
        findings: vec![],
    };
    let forms = forms(rule).unwrap_or_else(|e| {
        report.find(Kind::BadSample, e.to_string());
        vec![]
    });
    for (i, form) in forms.iter().enumerate() {
        let seed = rule.name.bytes().fold(seed ^ i as u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        check_form(rule, form, tries, Random(seed), &mut report);
        if report.findings.iter().any(|f| f.kind != Kind::NeverFired) {
            return report;
        }
    }
    if has_matrices(&report) && report.skewed == 0 {
        let matrices = report.matrices();
        report.find(Kind::OnlySquare, format!("{matrices} programs"));
    }
    report
}

/// The programs that a rule looks for.
fn forms(rule: &Rule) -> crate::Result<Vec<PatternAst<Node>>> {
    match &rule.action {
        Action::Pattern(rewrites) => Ok(rewrites.iter().map(|r| r.left().clone()).collect()),
        Action::Program(_) => rule.samples.iter().map(|s| sample::read(s)).collect(),
    }
}

/// Whether it fired on matrices often enough to have met some that are not square.
fn has_matrices(report: &Report) -> bool {
    report.matrices() >= 8
}

impl Report {
    fn matrices(&self) -> usize {
        self.fired.iter().filter(|(rank, _)| **rank > 1).map(|(_, n)| n).sum()
    }

    fn find(&mut self, kind: Kind, detail: String) {
        self.findings.push(Finding {
            rule: self.rule,
            kind,
            detail,
        });
    }
}

fn check_form(rule: &Rule, form: &PatternAst<Node>, tries: usize, mut random: Random, report: &mut Report) {
    let elementwise = form.as_ref().iter().all(works_on_elements);
    let (mut telling, mut spent) = (0, 0);
    for tried in 0..MORE * tries {
        let enough = telling > 0 && (report.skewed > 0 || !has_matrices(report));
        if tried >= tries && enough {
            return;
        }
        let frozen = frozen(rule, form, &mut random);
        let Some(sample) = Sampler::sample(form, &frozen, &mut random, &mut spent) else {
            continue;
        };
        spent += CHECK;
        let Some(egraph) = applied(rule, &sample) else { continue };
        if let Some(conflict) = egraph.analysis.conflicts.first() {
            return report.find(Kind::Conflict, format!("{conflict}: {}", text::print(&sample.program)));
        }
        let mut seen = Seen::Nothing;
        for (mode, specials, tolerance) in trials(rule.numerics, &sample, elementwise) {
            let inputs = inputs(&sample, specials, &mut random);
            match compare(&egraph, &inputs, mode, tolerance) {
                Ok(s) => seen = seen.max(s),
                Err(detail) => {
                    let program = text::print(&sample.program).replace('\n', " ");
                    return report.find(Kind::Differs, format!("{program}: {detail}"));
                }
            }
        }
        if rule.numerics == Numerics::Wider {
            let inputs = inputs(&sample, Specials::All, &mut random);
            if let Err(detail) = stays_finite(&egraph, &sample, &inputs) {
                let program = text::print(&sample.program).replace('\n', " ");
                return report.find(Kind::Differs, format!("{program}: {detail}"));
            }
        }
        if seen > Seen::Nothing {
            let ranks = sample
                .program
                .leaves
                .inputs
                .iter()
                .filter_map(|i| i.ty.tensor())
                .map(|t| t.rank());
            *report.fired.entry(ranks.max().unwrap_or(0)).or_default() += 1;
            report.skewed += usize::from(skewed(&sample));
            telling += usize::from(seen == Seen::Numbers);
        }
        if telling >= ENOUGH && spent >= SPENT && report.skewed > 0 {
            return;
        }
    }
    if telling == 0 {
        report.find(Kind::NeverFired, format!("{tries} programs of the form {form}"));
    }
}

fn works_on_elements(node: &ENodeOrVar<Node>) -> bool {
    match node {
        ENodeOrVar::ENode(Node { op: Op::Row(op), .. }) => matches!(
            table().row(*op).meaning,
            Meaning::Primitive {
                cost: Cost::Map(_) | Cost::View | Cost::Free,
                ..
            }
        ),
        _ => true,
    }
}

/// Weights: those that the rule's guards ask for, or those named like weights, or any.
fn frozen(rule: &Rule, form: &PatternAst<Node>, random: &mut Random) -> BTreeSet<Var> {
    let mut asked: BTreeSet<String> = BTreeSet::new();
    for guard in rule.guards {
        if let Ok(Sexp::List(items, _)) = parse_one(guard)
            && matches!(items.first(), Some(Sexp::Atom(name, _)) if name == "weight")
        {
            asked.extend(items.iter().skip(1).filter_map(|i| match i {
                Sexp::Atom(word, _) => Some(word.clone()),
                Sexp::List(..) => None,
            }));
        }
    }
    let by_name = matches!(rule.action, Action::Program(_));
    let any = random.below(8) == 0;
    let vars: BTreeSet<Var> = form
        .as_ref()
        .iter()
        .filter_map(|n| match n {
            ENodeOrVar::Var(v) => Some(*v),
            ENodeOrVar::ENode(_) => None,
        })
        .collect();
    vars.into_iter()
        .filter(|v| {
            let name = v.to_string();
            match any {
                true => random.below(2) == 0,
                false if by_name => name.starts_with("?w") || name.starts_with("?b"),
                false => asked.contains(&name),
            }
        })
        .collect()
}

/// The sample after one application of the rule alone, if it fired.
fn applied(rule: &Rule, sample: &Sample) -> Option<EGraph> {
    let mut egraph = EGraph::new(Context {
        leaves: Arc::new(sample.program.leaves.clone()),
        conflicts: vec![],
    });
    egraph.add_expr(&sample.program.expr().0);
    egraph.rebuild();
    let fired = apply(&mut egraph, rule, usize::MAX);
    egraph.rebuild();
    (fired > 0).then_some(egraph)
}

fn skewed(sample: &Sample) -> bool {
    sample
        .program
        .leaves
        .inputs
        .iter()
        .filter_map(|i| i.ty.tensor())
        .any(|t| {
            let large: BTreeSet<i64> = t.shape.iter().filter_map(|d| d.known()).filter(|n| *n > 1).collect();
            large.len() > 1
        })
}
