//! Random programs of the form that a rule looks for. Operands are drawn at random, near what is
//! there already, until the op's own type rule takes them; what it refuses is drawn again, from
//! the inside out.

use std::collections::{BTreeMap, BTreeSet};

use egg::{ENodeOrVar, Id, PatternAst, Var};

use crate::attr::Attr;
use crate::dim::{Dim, dims};
use crate::egraph::proof::Random;
use crate::error::Result;
use crate::ir::build::{Sink, build};
use crate::ir::define::infer;
use crate::ir::node::{Node, Op};
use crate::ir::program::{Input, Program};
use crate::ir::sexp::{Pos, parse_one};
use crate::ops::{Kind, OpId, known_shape, op_id, table};
use crate::ty::{DType, TensorType, Ty};

/// Elements of the largest value: the reference evaluation is slow.
const LARGEST: i64 = 400;
/// Draws for one op, for one op with its operands' operands, and for a whole program.
const NEAR: usize = 200;
const FAR: usize = 12;
const ALL: usize = 20_000;

const FLOATS: [f64; 9] = [1.0, 0.0, -1.0, 2.0, 0.5, -0.0, 3.0, -0.25, 1.7];
const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::Bool];

/// Reads a sample: an expression whose words are variables.
pub(super) fn read(text: &str) -> Result<PatternAst<Node>> {
    let mut reader = Reader(PatternAst::default());
    build(&parse_one(text)?, &mut reader)?;
    Ok(reader.0)
}

struct Reader(PatternAst<Node>);

impl Sink for Reader {
    type Ref = Id;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Id> {
        let var: Var = word.parse().map_err(|_| pos.error("a variable is expected"))?;
        Ok(self.0.add(ENodeOrVar::Var(var)))
    }

    fn attr(&mut self, attr: Attr) -> Result<Id> {
        Ok(self.0.add(ENodeOrVar::ENode(Node::attr(attr))))
    }

    fn op(&mut self, op: OpId, operands: Vec<Id>, _: Pos) -> Result<Id> {
        Ok(self.0.add(ENodeOrVar::ENode(Node::new(op, operands))))
    }
}

/// A program, and which of its inputs only make sense above zero.
pub(super) struct Sample {
    pub(super) program: Program,
    pub(super) positive: Vec<bool>,
}

/// What stands for a variable.
#[derive(Clone)]
struct Bound {
    ty: Ty,
    /// All elements are this number.
    constant: Option<f64>,
    positive: bool,
}

pub(super) struct Sampler<'a> {
    pub(super) ast: &'a PatternAst<Node>,
    pub(super) random: &'a mut Random,
    /// The dtype of most tensors.
    dtype: DType,
    bound: BTreeMap<Var, Bound>,
    draws: usize,
}

impl<'a> Sampler<'a> {
    /// Draws a program; none if the ops refused too much. Variables in `frozen` are weights.
    pub(super) fn sample(
        ast: &'a PatternAst<Node>,
        frozen: &BTreeSet<Var>,
        random: &'a mut Random,
    ) -> Option<Sample> {
        let dtype = *pick(random, &[0, 0, 0, 1, 2, 3, 4, 5].map(|i| DTYPES[i]));
        let mut sampler = Sampler {
            ast,
            random,
            dtype,
            bound: BTreeMap::new(),
            draws: ALL,
        };
        sampler.node(ast.len() - 1)?;
        sampler.build(frozen).ok()
    }

    fn build(self, frozen: &BTreeSet<Var>) -> Result<Sample> {
        let mut program = Program::default();
        let mut positive = vec![];
        let mut place: Vec<Id> = vec![];
        let mut known: BTreeMap<Var, Id> = BTreeMap::new();
        for node in self.ast.as_ref() {
            place.push(match node {
                ENodeOrVar::Var(var) => match (known.get(var), &self.bound[var]) {
                    (Some(id), _) => *id,
                    (None, bound) => {
                        let id = match &bound.ty {
                            Ty::Attr(a) => program.attr(a.clone()),
                            ty => {
                                positive.push(bound.positive);
                                program.input(Input {
                                    name: var.to_string().trim_start_matches('?').into(),
                                    ty: ty.clone(),
                                    weight: frozen.contains(var),
                                })?
                            }
                        };
                        let id = match (bound.constant, bound.ty.tensor()) {
                            (Some(v), Some(t)) => {
                                let shape = program.attr(Attr::Ints(t.shape.clone()));
                                let value = program.attr(Attr::float(v));
                                program.op(op_id("full"), [id, shape, value])?
                            }
                            _ => id,
                        };
                        known.insert(*var, id);
                        id
                    }
                },
                ENodeOrVar::ENode(n) => {
                    let children = n.children.iter().map(|c| place[usize::from(*c)]).collect();
                    program.add(Node {
                        op: n.op.clone(),
                        children,
                    })?
                }
            });
        }
        if let Some(root) = place.last() {
            program.root = *root;
        }
        Ok(Sample { program, positive })
    }

    fn node(&mut self, at: usize) -> Option<Ty> {
        match &self.ast[Id::from(at)] {
            ENodeOrVar::Var(v) => self.bound.get(v).map(|b| b.ty.clone()),
            ENodeOrVar::ENode(n) => match &n.op {
                Op::Attr(a) => Some(Ty::Attr(a.clone())),
                Op::Row(op) => self.op(*op, &n.children),
                Op::Input(_) | Op::Opaque(_) => None,
            },
        }
    }

    /// Binds the variables below an op so that it has a type.
    fn op(&mut self, op: OpId, children: &[Id]) -> Option<Ty> {
        let ast = self.ast;
        let before = self.bound.clone();
        for _ in 0..FAR {
            let mut types: Vec<Option<Ty>> = vec![None; children.len()];
            let mut free: Vec<(usize, Var)> = vec![];
            let mut refused = false;
            for (i, c) in children.iter().enumerate() {
                match &ast[*c] {
                    ENodeOrVar::Var(v) if !self.bound.contains_key(v) => free.push((i, *v)),
                    _ => {
                        types[i] = self.node(usize::from(*c));
                        refused |= types[i].is_none();
                    }
                }
            }
            // A variable may have been bound by an operand after it.
            free.retain(|(i, v)| {
                types[*i] = self.bound.get(v).map(|b| b.ty.clone());
                types[*i].is_none()
            });
            if !refused && let Some(ty) = self.operands(op, &types, &free) {
                return Some(ty);
            }
            self.bound = before.clone();
        }
        None
    }

    /// Binds the free operands of an op, given the others.
    fn operands(&mut self, op: OpId, given: &[Option<Ty>], free: &[(usize, Var)]) -> Option<Ty> {
        let row = table().row(op);
        for _ in 0..if free.is_empty() { 1 } else { NEAR } {
            self.draws = self.draws.checked_sub(1)?;
            let mut types = given.to_vec();
            // Half of the time an op's tensors are alike, as the parameters of a norm must be.
            let alike = self.one_in(2);
            let mut last: Option<TensorType> = None;
            for (i, var) in free {
                let known: Vec<Ty> = types.iter().flatten().cloned().collect();
                let name = row.params.get(*i).map_or("", |p| p.name.as_str());
                let mut bound = match (&last, row.kind(*i)) {
                    (Some(t), Kind::Tensor | Kind::OptTensor) if alike && !self.one_in(4) => Bound::of(Ty::Tensor(t.clone())),
                    (_, kind) => Bound::of(self.operand(kind, name, &known)),
                };
                bound.positive = name == "var";
                if let Ty::Tensor(t) = &bound.ty {
                    last = Some(t.clone());
                    if row.kind(*i) == Kind::Scalar && self.one_in(6) {
                        bound.constant = Some(*pick(self.random, &FLOATS));
                    }
                }
                types[*i] = Some(bound.ty.clone());
                self.bound.insert(*var, bound);
            }
            let types: Vec<Ty> = types.into_iter().flatten().collect();
            match infer(op, &types) {
                Ok(ty) if small(&ty) => return Some(ty),
                _ => free.iter().for_each(|(_, v)| {
                    self.bound.remove(v);
                }),
            }
        }
        None
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.random.below(n) == 0
    }

    fn size(&mut self) -> i64 {
        *pick(self.random, &[0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5])
    }

    fn operand(&mut self, kind: Kind, name: &str, known: &[Ty]) -> Ty {
        let x = known.iter().find_map(Ty::tensor).cloned();
        let shape: Vec<i64> = x.as_ref().map_or(vec![], sizes);
        let r = shape.len();
        Ty::Attr(match kind {
            Kind::OptTensor if self.one_in(3) => Attr::None,
            Kind::Scalar if self.one_in(3) => match self.one_in(5) {
                true => Attr::int(self.random.below(5) as i64 - 1),
                false => Attr::float(*pick(self.random, &FLOATS)),
            },
            Kind::Tensor | Kind::OptTensor | Kind::Scalar | Kind::Tensors => return Ty::Tensor(self.tensor(known)),
            Kind::Dim => Attr::int(-1 - self.random.below(if r == 0 { 3 } else { r }) as i64),
            Kind::Dims => {
                let all: Vec<i64> = (1..=r as i64).rev().map(|d| -d).collect();
                match self.one_in(2) {
                    true => Attr::ints(&all[self.random.below(r)..]),
                    false => Attr::ints(&all.into_iter().filter(|_| self.one_in(2)).collect::<Vec<_>>()),
                }
            }
            Kind::Perm => {
                let mut perm: Vec<i64> = (0..r as i64).collect();
                match self.random.below(4) {
                    0 => {}
                    1 if r >= 2 => perm.swap(r - 2, r - 1),
                    _ => (1..r).for_each(|i| perm.swap(i, self.random.below(i + 1))),
                }
                Attr::ints(&perm)
            }
            Kind::Shape => Attr::ints(&self.shape(&shape)),
            Kind::Ints => Attr::ints(&self.list(&shape)),
            Kind::OptInt if self.one_in(4) => Attr::None,
            Kind::Int | Kind::OptInt => Attr::int(match self.random.below(4) {
                0 if r > 0 => *pick(self.random, &shape),
                1 if r > 1 => shape[2..].iter().product(),
                _ => self.random.below(6) as i64 - 1,
            }),
            Kind::OptFloat if self.one_in(4) => Attr::None,
            Kind::Float | Kind::OptFloat if name == "eps" && !self.one_in(8) => Attr::float(*pick(self.random, &[1e-5, 0.5])),
            Kind::Float | Kind::OptFloat => Attr::float(*pick(self.random, &FLOATS)),
            Kind::Bool => Attr::Bool(self.one_in(2)),
            Kind::DType => Attr::DType(if self.one_in(3) { self.dtype } else { *pick(self.random, &DTYPES) }),
            Kind::Str => Attr::None,
        })
    }

    /// A tensor whose shape has something in common with what is there.
    fn tensor(&mut self, known: &[Ty]) -> TensorType {
        let near: Vec<Vec<i64>> = known.iter().filter_map(shape_of).collect();
        let far: Vec<Vec<i64>> = self.bound.values().filter_map(|b| shape_of(&b.ty)).collect();
        let pool = if near.is_empty() || self.one_in(4) { far } else { near };
        let shape: Vec<i64> = match pool.is_empty() {
            true => self.fresh(),
            false => {
                let t = pick(self.random, &pool).clone();
                self.like(t)
            }
        };
        let dtype = match self.one_in(10) {
            true => *pick(self.random, &DTYPES),
            false => self.dtype,
        };
        TensorType::new(dims(&shape), dtype)
    }

    fn fresh(&mut self) -> Vec<i64> {
        let rank = *pick(self.random, &[0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]);
        (0..rank).map(|_| self.size()).collect()
    }

    fn like(&mut self, mut t: Vec<i64>) -> Vec<i64> {
        let r = t.len();
        if r == 0 {
            return self.fresh();
        }
        let last = t[r - 1];
        match self.random.below(12) {
            0..3 => t,
            3 => {
                t.drain(..self.random.below(r + 1));
                t.iter_mut().for_each(|s| *s = if self.one_in(3) { 1 } else { *s });
                t
            }
            4 => vec![last],
            5 => vec![*pick(self.random, &t)],
            6 => vec![self.size(), last],
            7 => vec![*pick(self.random, &t), last],
            8 => vec![last, self.size()],
            9 => {
                let at = self.random.below(r);
                t[at] = self.size();
                t
            }
            10 => t.iter().map(|s| if self.one_in(2) { *s } else { self.size() }).collect(),
            _ => self.fresh(),
        }
    }

    /// A shape for a view of `x`: as many elements, or more of the same.
    fn shape(&mut self, x: &[i64]) -> Vec<i64> {
        let (r, n) = (x.len(), x.iter().product::<i64>());
        let others: Vec<Vec<i64>> = self.bound.values().filter_map(|b| shape_of(&b.ty)).collect();
        match self.random.below(8) {
            0 => x.to_vec(),
            1 if r > 1 => vec![x[..r - 1].iter().product(), x[r - 1]],
            2 if r > 0 => {
                let (rows, last) = (n / x[r - 1].max(1), x[r - 1]);
                [self.factors(rows), vec![last]].concat()
            }
            3 if r > 0 && !others.is_empty() => {
                let mut s = pick(self.random, &others).clone();
                if let Some(end) = s.last_mut() {
                    *end = x[r - 1];
                }
                s
            }
            4 => {
                let mut s = x.to_vec();
                s.insert(self.random.below(r + 1), 1);
                s
            }
            5 | 6 => {
                let mut s: Vec<i64> = (0..self.random.below(3)).map(|_| self.size()).collect();
                s.extend(x.iter().map(|d| if *d == 1 { self.size() } else { *d }).collect::<Vec<_>>());
                s
            }
            _ => self.factors(n),
        }
    }

    /// Random factors of a number.
    fn factors(&mut self, mut n: i64) -> Vec<i64> {
        let mut out = vec![];
        for _ in 0..self.random.below(4) {
            let divisors: Vec<i64> = (1..=n).filter(|d| n % d == 0).collect();
            let d = divisors.get(self.random.below(divisors.len())).copied().unwrap_or(1);
            out.push(d);
            n /= d;
        }
        out.push(n);
        out
    }

    /// Integers: parts of a dimension, last sizes, or one small number for each window.
    fn list(&mut self, x: &[i64]) -> Vec<i64> {
        let r = x.len();
        match self.random.below(5) {
            0 | 1 if r > 0 => {
                let mut left = *pick(self.random, x);
                let mut parts = vec![];
                for _ in 0..self.random.below(3) {
                    parts.push(self.random.below(left as usize + 1) as i64);
                    left -= parts[parts.len() - 1];
                }
                parts.push(left);
                parts
            }
            2 if r > 0 => x[self.random.below(r)..].to_vec(),
            3 => vec![self.random.below(2) as i64; r.saturating_sub(2)],
            _ => (2..r).map(|_| self.random.below(3) as i64).collect(),
        }
    }
}

impl Bound {
    fn of(ty: Ty) -> Bound {
        Bound {
            ty,
            constant: None,
            positive: false,
        }
    }
}

fn pick<'t, T>(random: &mut Random, from: &'t [T]) -> &'t T {
    &from[random.below(from.len())]
}

fn sizes(t: &TensorType) -> Vec<i64> {
    t.shape.iter().filter_map(Dim::known).collect()
}

/// The shape of a tensor, or one that a list could be.
fn shape_of(ty: &Ty) -> Option<Vec<i64>> {
    match ty {
        Ty::Tensor(t) => Some(sizes(t)),
        Ty::Attr(list @ Attr::Ints(_)) => list.known_ints().filter(|v| v.iter().all(|d| *d >= 0)),
        _ => None,
    }
}

fn small(ty: &Ty) -> bool {
    match ty {
        Ty::Tensor(t) => known_shape(&t.shape).is_ok() && t.numel().known().is_some_and(|n| n <= LARGEST),
        Ty::Tuple(items) => items.iter().all(small),
        Ty::Attr(_) | Ty::Unknown => true,
    }
}
