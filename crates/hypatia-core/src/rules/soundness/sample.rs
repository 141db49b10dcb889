//! Random programs of the form that a rule looks for. Operands are drawn at random, near what is
//! there already, until the op's own type rule takes them; what it refuses is drawn again, from
//! the inside out.

use std::collections::{BTreeMap, BTreeSet};

use egg::{ENodeOrVar, Id, PatternAst, Var};

use super::draw::{DTYPES, FLOATS, pick};
use crate::attr::Attr;
use crate::error::Result;
use crate::ir::build::{Sink, build};
use crate::ir::define::infer;
use crate::ir::node::{Node, Op};
use crate::ir::program::{Input, Program};
use crate::ops::{Kind, OpId, known_shape, op_id, table};
use crate::random::Random;
use crate::sexp::{Pos, parse_one};
use crate::ty::{DType, TensorType, Ty};

/// Elements of the largest value: the reference evaluation is slow.
const LARGEST: i64 = 400;
/// Draws for one op, for one op with its operands' operands, and for a whole program.
const NEAR: usize = 200;
const FAR: usize = 12;
const ALL: usize = 4_000;

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
pub(super) struct Bound {
    pub(super) ty: Ty,
    /// All elements are this number.
    constant: Option<f64>,
    positive: bool,
}

pub(super) struct Sampler<'a> {
    pub(super) ast: &'a PatternAst<Node>,
    pub(super) random: &'a mut Random,
    /// The dtype of most tensors.
    pub(super) dtype: DType,
    pub(super) bound: BTreeMap<Var, Bound>,
    /// Types of the ops drawn before, beside the one that is drawn now.
    pub(super) beside: Vec<Ty>,
    draws: usize,
}

impl<'a> Sampler<'a> {
    /// Draws a program; none if the ops refused too much. Variables in `frozen` are weights;
    /// `spent` counts the draws.
    pub(super) fn sample(
        ast: &'a PatternAst<Node>,
        frozen: &BTreeSet<Var>,
        random: &'a mut Random,
        spent: &mut usize,
    ) -> Option<Sample> {
        let dtype = match random.below(8) {
            0..3 => DType::F32,
            7 => *pick(random, &DTYPES[5..]),
            i => DTYPES[i - 2],
        };
        let mut sampler = Sampler {
            ast,
            random,
            dtype,
            bound: BTreeMap::new(),
            beside: vec![],
            draws: ALL,
        };
        let found = sampler.node(ast.len() - 1);
        *spent += ALL - sampler.draws;
        found.and_then(|_| sampler.build(frozen).ok())
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
        let (before, depth) = (self.bound.clone(), self.beside.len());
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
                        self.beside.extend(types[i].clone());
                    }
                }
            }
            // A variable may have been bound by an operand after it.
            free.retain(|(i, v)| {
                types[*i] = self.bound.get(v).map(|b| b.ty.clone());
                types[*i].is_none()
            });
            self.beside.truncate(depth);
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
            // Half of the time tensors of one kind are alike, as the parameters of a norm must be.
            let alike = self.one_in(2);
            let mut last: Option<(Kind, TensorType)> = None;
            for (i, var) in free {
                let known: Vec<Ty> = types.iter().flatten().cloned().collect();
                let name = row.params.get(*i).map_or("", |p| p.name.as_str());
                let kind = row.kind(*i);
                let mut bound = match &last {
                    Some((k, t)) if alike && kind.is_tensor() && (*k == kind || t.rank() == 1) && !self.one_in(4) => {
                        Bound::of(Ty::Tensor(t.clone()))
                    }
                    _ => Bound::of(self.operand(kind, name, &known)),
                };
                bound.positive = name == "var";
                if let Ty::Tensor(t) = &bound.ty {
                    last = Some((kind, t.clone()));
                    if kind == Kind::Scalar && self.one_in(6) {
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

fn small(ty: &Ty) -> bool {
    match ty {
        Ty::Tensor(t) => known_shape(&t.shape).is_ok() && t.numel().known().is_some_and(|n| n <= LARGEST),
        Ty::Tuple(items) => items.iter().all(small),
        Ty::Attr(_) | Ty::Unknown => true,
    }
}
