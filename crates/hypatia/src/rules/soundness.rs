//! The soundness walk: every rule is tried on random programs of the form that it looks for, over
//! ranks, dtypes, empty and unequal sizes, and everything that it says is equal is computed by
//! the reference evaluation and compared.
//!
//! - `Exact` rules must agree bit for bit with every op rounded to its dtype, on ordinary numbers
//!   and on NaN, ±0, ±∞, the largest and the smallest. A NaN equals a NaN, `-0` is not `0`.
//! - `Reassoc`, `Wider` and `Approx` rules must agree in real numbers to 1e-9 of the largest
//!   element (`Approx`: 1e-2), and have their NaNs in the same places when inputs hold NaN and ±0.
//!   They may differ where a sum or product overflows in one order only, so they are given
//!   infinities only if all of their ops work on each element alone. When all inputs are fp32 or
//!   fp64 they must also agree to 1e-4 with every op rounded: a rule may not round to half
//!   precision what was never in it.
//! - A rule that fires on nothing, or never on a value other than zero, is found too, as is one
//!   that is only ever tried on square matrices.

mod sample;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use egg::{ENodeOrVar, Id, PatternAst, Var};

use super::{Action, Numerics, Rule};
use crate::cost::Cost;
use crate::egraph::proof::{Random, difference};
use crate::egraph::saturate::apply;
use crate::egraph::{Context, EGraph};
use crate::eval::{Arr, Mode, Val};
use crate::ir::define;
use crate::ir::node::{Node, Op};
use crate::ir::sexp::{Sexp, parse_one};
use crate::ir::text;
use crate::ops::{Meaning, known_shape, table};
use crate::ty::{DType, Ty};
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

/// Enough programs for one form of a rule.
const ENOUGH: usize = 24;

/// Checks every rule; the same rules give the same findings on every machine.
pub fn walk(rules: &[Rule]) -> Vec<Finding> {
    reports(rules).into_iter().flat_map(|r| r.findings).collect()
}

/// Checks every rule, on all cores, and says what was done.
pub fn reports(rules: &[Rule]) -> Vec<Report> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all: Vec<(usize, Report)> = std::thread::scope(|scope| {
        let work = |t: usize| move || rules.iter().enumerate().skip(t).step_by(threads).map(|(i, r)| (i, check_rule(r, 600, 1)));
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t)().collect::<Vec<_>>())).collect();
        handles.into_iter().flat_map(|h| h.join().unwrap_or_default()).collect()
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
    let forms: Vec<PatternAst<Node>> = match &rule.action {
        Action::Pattern(rewrites) => rewrites.iter().map(|r| r.left().clone()).collect(),
        Action::Program(_) => match rule.samples.iter().map(|s| sample::read(s)).collect() {
            Ok(forms) => forms,
            Err(e) => {
                report.find(Kind::BadSample, e.to_string());
                vec![]
            }
        },
    };
    for (i, form) in forms.iter().enumerate() {
        let seed = rule.name.bytes().fold(seed ^ i as u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        check_form(rule, form, tries, Random(seed), &mut report);
        if report.findings.iter().any(|f| f.kind != Kind::NeverFired) {
            return report;
        }
    }
    let matrices: usize = report.fired.iter().filter(|(rank, _)| **rank > 1).map(|(_, n)| n).sum();
    if matrices >= 8 && report.skewed == 0 {
        report.find(Kind::OnlySquare, format!("{matrices} programs"));
    }
    report
}

impl Report {
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
    let mut telling = 0;
    for _ in 0..tries {
        let frozen = frozen(rule, form, &mut random);
        let Some(sample) = Sampler::sample(form, &frozen, &mut random) else {
            continue;
        };
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
        if seen > Seen::Nothing {
            let ranks = sample.program.leaves.inputs.iter().filter_map(|i| i.ty.tensor()).map(|t| t.rank());
            *report.fired.entry(ranks.max().unwrap_or(0)).or_default() += 1;
            report.skewed += usize::from(skewed(&sample));
            telling += usize::from(seen == Seen::Numbers);
        }
        if telling >= ENOUGH {
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

/// Which elements an input may have besides ordinary ones.
#[derive(Clone, Copy, PartialEq)]
enum Specials {
    None,
    NanAndZeros,
    All,
}

/// How a sample is evaluated, on what, and how close its values must be; none means every bit.
fn trials(numerics: Numerics, sample: &Sample, elementwise: bool) -> Vec<(Mode, Specials, Option<f64>)> {
    let real: f64 = match numerics {
        Numerics::Exact => {
            return vec![
                (Mode::Rounded, Specials::None, None),
                (Mode::Rounded, Specials::All, None),
            ];
        }
        Numerics::Wider | Numerics::Reassoc => 1e-9,
        Numerics::Approx => 1e-2,
    };
    let specials = if elementwise { Specials::All } else { Specials::NanAndZeros };
    let mut all = vec![
        (Mode::Real, Specials::None, Some(real)),
        (Mode::Real, specials, Some(real)),
    ];
    let wide = |ty: &Ty| ty.tensor().is_some_and(|t| matches!(t.dtype, DType::F32 | DType::F64));
    if sample.program.leaves.inputs.iter().all(|i| wide(&i.ty)) {
        all.push((Mode::Rounded, Specials::None, Some(real.max(1e-4))));
    }
    all
}

fn inputs(sample: &Sample, specials: Specials, random: &mut Random) -> Vec<Val> {
    let all = sample.program.leaves.inputs.iter().zip(&sample.positive);
    all.map(|(input, positive)| {
        let Some(t) = input.ty.tensor() else {
            return Val::Attr(crate::attr::Attr::None);
        };
        let shape = known_shape(&t.shape).unwrap_or_default();
        let n = shape.iter().product();
        let mut element = || {
            let special = specials != Specials::None && random.below(4) == 0;
            let v = match special {
                true if specials == Specials::All => SPECIALS[random.below(SPECIALS.len())],
                true => SPECIALS[random.below(3)],
                false if t.dtype.is_float() => random.unit() * 2.0,
                false => random.below(7) as f64 - 3.0,
            };
            let v = if *positive { v.abs() + f64::from(u8::from(v == 0.0)) } else { v };
            match (t.dtype.is_float(), special) {
                (false, true) => t.dtype.round(random.below(2) as f64),
                _ => t.dtype.round(v),
            }
        };
        let data = (0..n).map(|_| element()).collect();
        Val::arr(Arr::new(shape, data))
    })
    .collect()
}

/// NaN and zeros first: see [`Specials`].
const SPECIALS: [f64; 9] = [
    f64::NAN,
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    6.0e4,
    -3.0e38,
    1e-45,
    1.0,
];

/// What a comparison could have shown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    Nothing,
    /// Equal values, but empty, zero or not finite.
    Something,
    Numbers,
}

/// Evaluates every node of every class from the values of its operands' classes, and compares
/// the nodes of a class.
fn compare(egraph: &EGraph, inputs: &[Val], mode: Mode, tolerance: Option<f64>) -> Result<Seen, String> {
    let mut classes: Vec<Id> = egraph.classes().map(|c| c.id).collect();
    classes.sort_unstable();
    let mut values: BTreeMap<Id, (Val, &Node)> = BTreeMap::new();
    let mut done: BTreeSet<(Id, usize)> = BTreeSet::new();
    let mut seen = Seen::Nothing;
    loop {
        let before = done.len();
        for class in &classes {
            for (i, node) in egraph[*class].nodes.iter().enumerate() {
                let operands: Option<Vec<Val>> = node.children.iter().map(|c| values.get(&egraph.find(*c)).map(|v| v.0.clone())).collect();
                let Some(operands) = operands.filter(|_| !done.contains(&(*class, i))) else {
                    continue;
                };
                done.insert((*class, i));
                let types: Vec<Ty> = node.children.iter().map(|c| egraph[*c].data.ty.clone()).collect();
                let value = match &node.op {
                    Op::Row(op) => define::eval(*op, &operands, &types, mode).map_err(|e| format!("{node}: {e}"))?,
                    Op::Attr(a) => Val::Attr(a.clone()),
                    Op::Input(k) => inputs[*k as usize].clone(),
                    Op::Opaque(_) => return Err(format!("{node} has no meaning")),
                };
                match values.get(class) {
                    None => {
                        values.insert(*class, (value, node));
                    }
                    Some((other, by)) => {
                        agree(other, &value, tolerance).map_err(|e| format!("{by} and {node}: {e}"))?;
                        seen = seen.max(if telling(other) { Seen::Numbers } else { Seen::Something });
                    }
                }
            }
        }
        if done.len() == before {
            return Ok(seen);
        }
    }
}

fn agree(a: &Val, b: &Val, tolerance: Option<f64>) -> Result<(), String> {
    let Some(tolerance) = tolerance else {
        return match same_bits(a, b) {
            true => Ok(()),
            false => Err(format!("{a:?} is not bit for bit {b:?}")),
        };
    };
    let d = difference(a, b);
    match d <= tolerance {
        true => Ok(()),
        false => Err(format!("relative difference {d:e} of {a:?} and {b:?}")),
    }
}

fn same_bits(a: &Val, b: &Val) -> bool {
    match (a, b) {
        (Val::Arr(a), Val::Arr(b)) => {
            let same = |(x, y): (&f64, &f64)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            a.shape == b.shape && a.data.iter().zip(&b.data).all(same)
        }
        (Val::Tuple(a), Val::Tuple(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_bits(a, b)),
        (Val::Attr(a), Val::Attr(b)) => a == b,
        _ => false,
    }
}

/// A value that a wrong rule would hardly have met by chance.
fn telling(v: &Val) -> bool {
    match v {
        Val::Arr(a) => a.data.iter().any(|v| v.is_finite() && *v != 0.0),
        Val::Tuple(items) => items.iter().any(telling),
        Val::Attr(_) => false,
    }
}

fn skewed(sample: &Sample) -> bool {
    sample.program.leaves.inputs.iter().filter_map(|i| i.ty.tensor()).any(|t| {
        let large: BTreeSet<i64> = t.shape.iter().filter_map(|d| d.known()).filter(|n| *n > 1).collect();
        large.len() > 1
    })
}
