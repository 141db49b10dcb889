//! The proof of a compilation: the rule applications that turn the program in into the program
//! out, taken from the e-graph, and checked again without it.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;
use std::time::{Duration, Instant};

use egg::{Id, Language, RecExpr, Symbol, TreeExplanation, TreeTerm};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use crate::egraph::EGraph;
use crate::error::{Error, Result};
use crate::eval::{Arr, Mode, Val, difference};
use crate::ir::node::{Node, Op};
use crate::ir::program::{Input, Leaves, Program};
use crate::ir::text;
use crate::random::{LARGEST, Random};
use crate::ty::Ty;

/// Time for evaluating the steps of a proof; those that are left then are skipped.
const PATIENCE: Duration = Duration::from_secs(60);

/// One application of a rule.
#[derive(Debug, Clone)]
pub struct Step {
    /// The rule's name.
    pub rule: String,
    /// From left to right; otherwise the rule was used from right to left.
    pub forward: bool,
    /// Before, in the proof's terms.
    pub before: Id,
    /// After, in the proof's terms.
    pub after: Id,
}

/// A proof that two programs are equal.
#[derive(Debug, Clone)]
pub struct Proof {
    /// All terms that occur; its leaves are the program's.
    pub terms: Program,
    /// The program in.
    pub from: Id,
    /// The program out.
    pub to: Id,
    /// Rule applications, each once.
    pub steps: Vec<Step>,
}

/// What checking a proof again showed.
#[derive(Debug, Clone, Serialize)]
pub struct Replay {
    /// Steps evaluated on random inputs and found equal.
    pub evaluated: usize,
    /// Steps left out: too large, symbolic, through a call that only torch can evaluate, or when the time was up.
    pub skipped: usize,
    /// The largest relative difference seen.
    pub worst: f64,
    /// The steps alone connect the program in to the program out.
    pub connected: bool,
    /// Steps whose sides differ, with the difference.
    pub failures: Vec<String>,
}

impl Replay {
    /// True when the proof holds.
    pub fn holds(&self) -> bool {
        self.connected && self.failures.is_empty()
    }
}

impl Proof {
    /// Asks the e-graph why two of its expressions are equal.
    pub fn explain(egraph: &mut EGraph, from: &RecExpr<Node>, to: &RecExpr<Node>) -> Result<Proof> {
        let explanation = egraph.explain_equivalence(from, to);
        let leaves: &Leaves = &egraph.analysis.leaves;
        let mut walk = Walk {
            terms: Program::over(leaves),
            first: FxHashMap::default(),
            last: FxHashMap::default(),
        };
        let steps = walk.steps(&explanation.explanation_trees)?;
        let mut terms = walk.terms;
        let from = add_expr(&mut terms, from)?;
        let to = add_expr(&mut terms, to)?;
        Ok(Proof { terms, from, to, steps })
    }

    /// Rules and how often each was used, in order of first use.
    pub fn rules(&self) -> Vec<(String, usize)> {
        let mut out: Vec<(String, usize)> = vec![];
        for step in &self.steps {
            match out.iter_mut().find(|(n, _)| *n == step.rule) {
                Some((_, n)) => *n += 1,
                None => out.push((step.rule.clone(), 1)),
            }
        }
        out
    }

    /// Both sides of a step, with what they share written as `$1`, `$2`, ….
    pub fn step_text(&self, step: &Step) -> Result<(String, String)> {
        let local = self.local(step, 0)?;
        let side = |root: Id| {
            let mut p = local.program.clone();
            p.root = root;
            text::print(&p).replace('\n', " ")
        };
        Ok((side(local.before), side(local.after)))
    }

    /// Checks the proof without the e-graph: every step is evaluated in float64 on random
    /// inputs, and the steps must connect the two programs.
    pub fn replay(&self, seed: u64, budget: f64) -> Result<Replay> {
        self.replay_within(PATIENCE, seed, budget)
    }

    fn replay_within(&self, patience: Duration, seed: u64, budget: f64) -> Result<Replay> {
        let mut replay = Replay {
            evaluated: 0,
            skipped: 0,
            worst: 0.0,
            connected: self.connected(),
            failures: vec![],
        };
        let start = Instant::now();
        for (i, step) in self.steps.iter().enumerate() {
            if start.elapsed() >= patience {
                replay.skipped += 1;
                continue;
            }
            match self.difference(step, seed.wrapping_add(i as u64), budget)? {
                None => replay.skipped += 1,
                Some(d) => {
                    replay.evaluated += 1;
                    if !equal(d) {
                        replay
                            .failures
                            .push(format!("step {} ({}): relative difference {d:e}", i + 1, step.rule));
                    }
                    replay.worst = replay.worst.max(d);
                }
            }
        }
        Ok(replay)
    }

    /// How far the two sides of a step are apart, relative to their size; none when they cannot be evaluated.
    ///
    /// What both sides share stands for anything at first, which says more than the step does. If the sides differ
    /// then, what is shared may be part of the rule, as in `(relu (relu x)) = (relu x)`: it is written out a level
    /// deeper each time, until there is nothing left to write out.
    fn difference(&self, step: &Step, seed: u64, budget: f64) -> Result<Option<f64>> {
        let mut depth = 0;
        loop {
            let local = self.local(step, depth)?;
            match local.difference(seed, budget)? {
                Some(d) if !equal(d) && local.cut => depth += 1,
                found => return Ok(found),
            }
        }
    }

    /// Congruence closure over the steps alone.
    fn connected(&self) -> bool {
        let n = self.terms.nodes().len();
        let mut parent: Vec<usize> = (0..n).collect();
        fn find(parent: &mut [usize], mut x: usize) -> usize {
            while parent[x] != x {
                parent[x] = parent[parent[x]];
                x = parent[x];
            }
            x
        }
        for s in &self.steps {
            let (a, b) = (find(&mut parent, s.before.into()), find(&mut parent, s.after.into()));
            parent[a] = b;
        }
        loop {
            let mut seen: FxHashMap<Node, usize> = FxHashMap::default();
            let mut changed = false;
            for i in 0..n {
                let node = self
                    .terms
                    .node(i.into())
                    .clone()
                    .map_children(|c| find(&mut parent, c.into()).into());
                let here = find(&mut parent, i);
                let there = *seen.entry(node).or_insert(here);
                let there = find(&mut parent, there);
                if here != there {
                    parent[here] = there;
                    changed = true;
                }
            }
            if !changed {
                return find(&mut parent, self.from.into()) == find(&mut parent, self.to.into());
            }
        }
    }

    /// A step on its own: what both sides share becomes inputs, but for what is at most so far below one of them.
    fn local(&self, step: &Step, depth: usize) -> Result<Local> {
        // What only torch understands stands for anything at every depth.
        let stands = |id: Id, a: usize, b: usize| a.min(b) > depth || matches!(self.terms.node(id).op, Op::Opaque(_));
        let shared = self.shared(step, stands);
        let mut program = Program::default();
        program.leaves.opaques = self.terms.leaves.opaques.clone();
        program.leaves.hints = self.terms.leaves.hints.clone();
        let mut cut = Cut {
            terms: &self.terms,
            shared: &|id| shared.contains(&id),
            place: BTreeMap::new(),
            program,
            cut: false,
        };
        let before = cut.copy(step.before)?;
        let after = cut.copy(step.after)?;
        Ok(Local {
            cut: cut.cut,
            program: cut.program,
            before,
            after,
        })
    }

    /// Terms of both sides that `stands`, given how far they are below each, says may stand for anything. Both sides
    /// are walked a level at a time, and no further below a term that was found.
    fn shared(&self, step: &Step, stands: impl Fn(Id, usize, usize) -> bool) -> FxHashSet<Id> {
        let mut shared = FxHashSet::default();
        let mut seen: [FxHashMap<Id, usize>; 2] = Default::default();
        let mut levels = [vec![step.before], vec![step.after]];
        let mut alone = 0;
        for below in 0.. {
            for side in 0..2 {
                levels[side].retain(|id| match seen[side].entry(*id) {
                    Entry::Occupied(_) => false,
                    Entry::Vacant(place) => *place.insert(below) == below,
                });
                for id in &levels[side] {
                    if seen[1 - side].get(id).is_some_and(|other| stands(*id, below, *other)) {
                        shared.insert(*id);
                    }
                }
            }
            if levels.iter().any(Vec::is_empty) {
                alone += levels.iter().map(Vec::len).sum::<usize>();
                if levels.iter().all(Vec::is_empty) || alone > ALONE {
                    break;
                }
            }
            for level in &mut levels {
                *level = (level.iter().filter(|id| !shared.contains(id)))
                    .flat_map(|id| self.terms.node(*id).children.iter().copied())
                    .collect();
            }
        }
        shared
    }
}

/// So many terms of one side are looked at once all of the other were seen: what is left of it is its own, and a
/// long program is not walked for each step.
const ALONE: usize = 256;

/// Equal but for rounding.
fn equal(difference: f64) -> bool {
    difference <= 1e-9
}

fn add_expr(terms: &mut Program, expr: &RecExpr<Node>) -> Result<Id> {
    let mut place: Vec<Id> = Vec::with_capacity(expr.len());
    for node in expr.as_ref() {
        place.push(terms.add(node.clone().map_children(|c| place[usize::from(c)]))?);
    }
    place
        .last()
        .copied()
        .ok_or_else(|| Error::Graph("empty expression".into()))
}

/// Walks egg's shared proof trees. Flattening them would cost time exponential in depth.
struct Walk {
    terms: Program,
    first: FxHashMap<*const TreeTerm<Node>, Id>,
    last: FxHashMap<*const TreeTerm<Node>, Id>,
}

impl Walk {
    fn steps(&mut self, trees: &TreeExplanation<Node>) -> Result<Vec<Step>> {
        let mut steps = vec![];
        let mut known: FxHashSet<(Symbol, Id, Id)> = FxHashSet::default();
        let mut seen: FxHashSet<*const TreeTerm<Node>> = FxHashSet::default();
        let mut stack: Vec<&TreeExplanation<Node>> = vec![trees];
        while let Some(list) = stack.pop() {
            for pair in list.windows(2) {
                let (before, after) = (self.term(&pair[0], true)?, self.term(&pair[1], false)?);
                let (rule, forward) = match (&pair[1].forward_rule, &pair[1].backward_rule) {
                    (Some(rule), _) => (*rule, true),
                    (None, Some(rule)) => (*rule, false),
                    (None, None) => continue,
                };
                if known.insert((rule, before, after)) {
                    steps.push(Step {
                        rule: rule.to_string(),
                        forward,
                        before,
                        after,
                    });
                }
            }
            for term in list {
                if seen.insert(Rc::as_ptr(term)) {
                    stack.extend(term.child_proofs.iter());
                }
            }
        }
        Ok(steps)
    }

    /// The term at the start or at the end of its operands' proofs; without recursion, since
    /// programs are deep.
    fn term(&mut self, root: &Rc<TreeTerm<Node>>, last: bool) -> Result<Id> {
        let mut stack = vec![root];
        while let Some(term) = stack.last().copied() {
            let ptr = Rc::as_ptr(term);
            let memo = if last { &self.last } else { &self.first };
            if memo.contains_key(&ptr) {
                stack.pop();
                continue;
            }
            let end = |proof: &'_ TreeExplanation<Node>| -> Option<Rc<TreeTerm<Node>>> {
                if last { proof.last() } else { proof.first() }.cloned()
            };
            let mut ids = vec![];
            let mut missing = vec![];
            for proof in &term.child_proofs {
                let child = end(proof).ok_or_else(|| Error::Graph("empty proof".into()))?;
                match memo.get(&Rc::as_ptr(&child)) {
                    Some(id) => ids.push(*id),
                    None => missing.push(proof),
                }
            }
            if missing.is_empty() {
                let mut next = ids.into_iter();
                let node = term.node.clone().map_children(|c| next.next().unwrap_or(c));
                let id = self.terms.add(node)?;
                if last { &mut self.last } else { &mut self.first }.insert(ptr, id);
                stack.pop();
            } else {
                for proof in missing {
                    let child = if last { proof.last() } else { proof.first() };
                    stack.extend(child);
                }
            }
        }
        let memo = if last { &self.last } else { &self.first };
        memo.get(&Rc::as_ptr(root))
            .copied()
            .ok_or_else(|| Error::Graph("proof without a term".into()))
    }
}

struct Cut<'a> {
    terms: &'a Program,
    shared: &'a dyn Fn(Id) -> bool,
    place: BTreeMap<Id, Id>,
    program: Program,
    /// Whether an op became an input.
    cut: bool,
}

impl Cut<'_> {
    fn copy(&mut self, id: Id) -> Result<Id> {
        if let Some(done) = self.place.get(&id) {
            return Ok(*done);
        }
        let node = self.terms.node(id);
        let is_attr = matches!(node.op, Op::Attr(_));
        let new = if (self.shared)(id) && !is_attr || matches!(node.op, Op::Input(_)) {
            let name = match &node.op {
                Op::Input(i) => self.terms.leaves.inputs[*i as usize].name.clone(),
                op => {
                    self.cut |= !matches!(op, Op::Opaque(_));
                    format!("${}", self.program.leaves.inputs.len() + 1)
                }
            };
            self.program.input(Input {
                name,
                ty: self.terms.ty(id).clone(),
                weight: false,
            })?
        } else {
            let children = node.children.iter().map(|c| self.copy(*c)).collect::<Result<_>>()?;
            self.program.add(Node {
                op: node.op.clone(),
                children,
            })?
        };
        self.place.insert(id, new);
        Ok(new)
    }
}

/// What evaluating both sides of a step showed.
enum Sides {
    /// How far they are apart.
    Apart(f64),
    /// They cannot be evaluated.
    Unknown,
    /// The first has no value for these inputs.
    Undefined,
}

struct Local {
    /// Whether an op became an input: the sides may be equal although they are not for all inputs.
    cut: bool,
    program: Program,
    before: Id,
    after: Id,
}

impl Local {
    /// Whether all values can be held: views cost nothing, and evaluated they take memory all the same.
    fn is_small(&self) -> bool {
        let hint = |s: &str| self.program.leaves.hint(s);
        let fits = |id: &Id| match self.program.ty(*id) {
            Ty::Tensor(t) => (0..=LARGEST as i64).contains(&t.numel().value(&hint)),
            _ => true,
        };
        [self.before, self.after].iter().all(|root| {
            let mut side = self.program.clone();
            side.root = *root;
            side.reachable().iter().all(fits)
        })
    }

    /// The largest difference of the two sides on random inputs, relative to their size; none
    /// when they cannot be evaluated.
    fn difference(&self, seed: u64, budget: f64) -> Result<Option<f64>> {
        if !self.is_small() {
            return Ok(None);
        }
        let mut random = Random(seed ^ 0x9e37_79b9_7f4a_7c15);
        let mut inputs = vec![];
        for input in &self.program.leaves.inputs {
            match random.value(&input.ty) {
                Some(v) => inputs.push(v),
                None => return Ok(None),
            }
        }
        match self.apart(&inputs, budget)? {
            Sides::Apart(difference) => Ok(Some(difference)),
            Sides::Unknown => Ok(None),
            // An index may have been beyond what it is an index of: the first element is always there.
            Sides::Undefined => {
                for (value, input) in inputs.iter_mut().zip(&self.program.leaves.inputs) {
                    match (&*value, &input.ty) {
                        (Val::Arr(a), Ty::Tensor(t)) if !t.dtype.is_float() => {
                            *value = Val::arr(Arr::new(a.shape.clone(), vec![0.0; a.data.len()]));
                        }
                        _ => {}
                    }
                }
                match self.apart(&inputs, budget)? {
                    Sides::Apart(difference) => Ok(Some(difference)),
                    Sides::Unknown | Sides::Undefined => Ok(None),
                }
            }
        }
    }

    /// How far the two sides are apart for these inputs.
    fn apart(&self, inputs: &[Val], budget: f64) -> Result<Sides> {
        let hint = |s: &str| self.program.leaves.hint(s);
        let mut total = 0.0;
        let mut sides = vec![];
        for root in [self.before, self.after] {
            let mut p = self.program.clone();
            p.root = root;
            total += p.work(&hint);
            let open = |id: &Id| {
                let sizes = matches!(p.ty(*id), Ty::Tensor(t) if t.shape.iter().any(|d| d.known().is_none()));
                sizes || matches!(p.node(*id).op, Op::Opaque(_))
            };
            if total > budget || p.reachable().iter().any(open) {
                return Ok(Sides::Unknown);
            }
            let values = p.eval(
                &|op, _| match op {
                    Op::Input(i) => Ok(inputs[*i as usize].clone()),
                    other => Err(Error::Eval {
                        op: format!("{other:?}"),
                        message: "is no input".into(),
                    }),
                },
                Mode::Real,
            );
            match values {
                Ok(values) => sides.push(values[&root].clone()),
                // The original has no value for these inputs; what it became needs none.
                Err(Error::Eval { .. }) if sides.is_empty() => return Ok(Sides::Undefined),
                Err(error) => return Err(error),
            }
        }
        Ok(Sides::Apart(difference(&sides[0], &sides[1])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, optimize};

    #[test]
    fn steps_are_skipped_when_the_time_is_up() {
        let program = text::parse("(relu (linear w:[4,3] b:[4] (relu x:[2,3])))", text::Weights::Frozen).unwrap();
        let proof = optimize(&program, &Options::default()).unwrap().proof.unwrap();
        let all = proof.replay(7, 1e9).unwrap();
        assert!(all.holds() && all.evaluated > 0 && all.skipped == 0, "{all:?}");
        let none = proof.replay_within(Duration::ZERO, 7, 1e9).unwrap();
        assert_eq!((none.evaluated, none.skipped), (0, proof.steps.len()));
        assert!(none.connected, "that takes no time");
    }
}
