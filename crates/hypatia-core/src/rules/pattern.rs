//! Rules given by patterns: reading them, and applying them with types checked and every
//! equality justified.

use egg::{ENodeOrVar, Id, Language, Pattern, PatternAst, SearchMatches, Searcher, Subst, Symbol, Var};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::guards::{Guard, guard};
use crate::attr::Attr;
use crate::egraph::{EGraph, Facts};
use crate::error::{Error, Result};
use crate::ir::build::{Sink, build};
use crate::ir::functions::{Function, function};
use crate::ir::node::{Node, Op};
use crate::ops::OpId;
use crate::sexp::{Pos, Sexp, parse_one};
use crate::ty::Ty;

/// Where a function or guard takes an operand from.
#[derive(Debug, Clone)]
enum Source {
    Var(Var),
    Attr(Attr),
    Computed(usize),
}

/// A compile-time value to compute before the right side is built.
struct Computation {
    function: Function,
    sources: Vec<Source>,
    /// The variable of the right side that stands for it, if it is used there.
    var: Var,
}

struct Check {
    guard: Guard,
    sources: Vec<Source>,
}

/// One pair of patterns.
pub struct Rewrite {
    left: Pattern<Node>,
    right: PatternAst<Node>,
    computations: Vec<Computation>,
    checks: Vec<Check>,
    vars: Vec<Var>,
}

/// Matches whose two sides were united already, by rewrite, class and operands.
pub type Tried = FxHashSet<(usize, Id, SmallVec<[Id; 8]>)>;

impl Rewrite {
    /// Reads a rule; one rewrite for each order of the operands of `op~`.
    pub fn variants(left: &str, right: &str, guards: &[&str]) -> Result<Vec<Rewrite>> {
        orders(&parse_one(left)?)
            .into_iter()
            .map(|sexp| {
                let mut reader = Reader::default();
                build(&sexp, &mut reader)?;
                let left = reader.ast;
                let mut reader = Reader::default();
                let top = build(&parse_one(right)?, &mut reader)?;
                let right = match top {
                    Built::Node(_) => std::mem::take(&mut reader.ast),
                    _ => return Err(Pos { line: 1, column: 1 }.error("the right side is no value")),
                };
                let mut checks = vec![];
                for text in guards {
                    checks.push(read_guard(text, &mut reader)?);
                }
                let left = Pattern::new(left);
                let vars = left.vars();
                Ok(Rewrite {
                    left,
                    right,
                    computations: reader.computations,
                    checks,
                    vars,
                })
            })
            .collect()
    }

    /// The pattern of the left side.
    pub fn left(&self) -> &PatternAst<Node> {
        &self.left.ast
    }

    /// Where it matches, at so many places at most.
    pub fn search(&self, egraph: &EGraph, most: usize) -> Vec<SearchMatches<'_, Node>> {
        self.left.search_with_limit(egraph, most)
    }

    /// Applies it to its matches, until `limit` nodes; returns how many equalities are new.
    /// What `tried` says was united before is left out.
    pub fn apply(
        &self,
        egraph: &mut EGraph,
        name: &str,
        limit: usize,
        matches: &[SearchMatches<'_, Node>],
        tried: &mut Tried,
    ) -> usize {
        let mut fired = 0;
        for found in matches {
            for subst in &found.substs {
                if egraph.total_size() > limit {
                    return fired;
                }
                let key = self.key(egraph, found.eclass, subst);
                // A value that is made of itself, such as x in x * 1e-5 / 1e-5, gives nothing new but numbers that
                // differ by roundings, without end.
                if key.2.contains(&key.1) || tried.contains(&key) {
                    continue;
                }
                if let Some(new) = self.apply_one(egraph, found.eclass, subst, name) {
                    tried.insert(key);
                    fired += usize::from(new);
                }
            }
        }
        fired
    }

    fn key(&self, egraph: &EGraph, class: Id, subst: &Subst) -> (usize, Id, SmallVec<[Id; 8]>) {
        let ids = self.vars.iter().map(|v| egraph.find(subst[*v])).collect();
        (std::ptr::from_ref(self) as usize, egraph.find(class), ids)
    }

    /// None if it does not apply, else whether the equality is new.
    fn apply_one(&self, egraph: &mut EGraph, class: Id, subst: &Subst, name: &str) -> Option<bool> {
        let computed = self.compute(egraph, subst)?;
        let source = |s: &Source| -> Facts {
            match s {
                Source::Var(v) => egraph[subst[*v]].data.clone(),
                Source::Attr(a) => Facts::of_attr(a.clone()),
                Source::Computed(i) => Facts::of_attr(computed[*i].clone()),
            }
        };
        let holds = |c: &Check| (c.guard)(&c.sources.iter().map(source).collect::<Vec<_>>());
        if !self.checks.iter().all(holds) {
            return None;
        }
        let vars = |v: Var| match self.computations.iter().position(|c| c.var == v) {
            Some(i) => Ty::Attr(computed[i].clone()),
            None => egraph[subst[v]].data.ty.clone(),
        };
        if type_of(egraph, &self.right, &vars).as_ref() != Some(&egraph[class].data.ty) {
            return None;
        }
        let mut subst = subst.clone();
        for (computation, value) in self.computations.iter().zip(computed) {
            let id = egraph.add(Node::attr(value));
            subst.insert(computation.var, id);
        }
        Some(
            egraph
                .union_instantiations(&self.left.ast, &self.right, &subst, Symbol::from(name))
                .1,
        )
    }

    fn compute(&self, egraph: &EGraph, subst: &Subst) -> Option<Vec<Attr>> {
        let mut values: Vec<Attr> = vec![];
        for c in &self.computations {
            let types: Vec<Ty> = c
                .sources
                .iter()
                .map(|s| match s {
                    Source::Var(v) => egraph[subst[*v]].data.ty.clone(),
                    Source::Attr(a) => Ty::Attr(a.clone()),
                    Source::Computed(i) => Ty::Attr(values[*i].clone()),
                })
                .collect();
            values.push((c.function)(&types)?);
        }
        Some(values)
    }
}

/// Type that an instantiated pattern would have, if every op in it is well typed.
pub fn type_of(egraph: &EGraph, ast: &PatternAst<Node>, vars: &dyn Fn(Var) -> Ty) -> Option<Ty> {
    let mut types: Vec<Ty> = Vec::with_capacity(ast.len());
    for node in ast.as_ref() {
        types.push(match node {
            ENodeOrVar::Var(v) => vars(*v),
            ENodeOrVar::ENode(n) => {
                let operands: Vec<Ty> = n.children().iter().map(|c| types[usize::from(*c)].clone()).collect();
                egraph.analysis.leaves.infer(&n.op, &operands).ok()?
            }
        });
    }
    types.pop().filter(|t| *t != Ty::Unknown)
}

/// A pattern with every `~` decided in every way.
fn orders(sexp: &Sexp) -> Vec<Sexp> {
    let Sexp::List(items, pos) = sexp else {
        return vec![sexp.clone()];
    };
    let mut all: Vec<Vec<Sexp>> = vec![vec![]];
    for item in items {
        let choices = orders(item);
        all = all
            .into_iter()
            .flat_map(|head| {
                choices.iter().map(move |c| {
                    let mut list = head.clone();
                    list.push(c.clone());
                    list
                })
            })
            .collect();
    }
    let mut out = vec![];
    for mut list in all {
        if let Some(Sexp::Atom(word, p)) = list.first().cloned()
            && let Some(op) = word.strip_suffix('~')
        {
            list[0] = Sexp::Atom(op.into(), p);
            let mut other = list.clone();
            other.swap(1, 2);
            if other != list {
                out.push(Sexp::List(other, *pos));
            }
        }
        out.push(Sexp::List(list, *pos));
    }
    out
}

#[derive(Clone)]
enum Built {
    Node(Id),
    Computed(usize),
}

#[derive(Default)]
struct Reader {
    ast: PatternAst<Node>,
    computations: Vec<Computation>,
}

impl Reader {
    fn var(&mut self, name: &str) -> Result<Var> {
        name.parse()
            .map_err(|_| Error::Graph(format!("'{name}' is no variable")))
    }

    fn place(&mut self, built: &Built) -> Id {
        match built {
            Built::Node(id) => *id,
            Built::Computed(i) => self.ast.add(ENodeOrVar::Var(self.computations[*i].var)),
        }
    }

    fn source(&self, built: &Built) -> Option<Source> {
        match built {
            Built::Computed(i) => Some(Source::Computed(*i)),
            Built::Node(id) => match &self.ast[*id] {
                ENodeOrVar::Var(v) => Some(Source::Var(*v)),
                ENodeOrVar::ENode(n) => match &n.op {
                    Op::Attr(a) => Some(Source::Attr(a.clone())),
                    _ => None,
                },
            },
        }
    }
}

impl Sink for Reader {
    type Ref = Built;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Built> {
        if !word.starts_with('?') {
            return Err(pos.error(format!("'{word}' is neither a variable nor a value")));
        }
        let var = self.var(word)?;
        Ok(Built::Node(self.ast.add(ENodeOrVar::Var(var))))
    }

    fn attr(&mut self, attr: Attr) -> Result<Built> {
        Ok(Built::Node(self.ast.add(ENodeOrVar::ENode(Node::attr(attr)))))
    }

    fn op(&mut self, op: OpId, operands: Vec<Built>, _: Pos) -> Result<Built> {
        let children: Vec<Id> = operands.iter().map(|b| self.place(b)).collect();
        Ok(Built::Node(self.ast.add(ENodeOrVar::ENode(Node::new(op, children)))))
    }

    fn function(&mut self, name: &str, operands: Vec<Built>, pos: Pos) -> Result<Built> {
        let function = function(name).ok_or_else(|| pos.error(format!("there is no function '${name}'")))?;
        let sources = operands
            .iter()
            .map(|b| {
                self.source(b)
                    .ok_or_else(|| pos.error(format!("${name} takes variables and values only")))
            })
            .collect::<Result<Vec<_>>>()?;
        let var = self.var(&format!("?computed{}", self.computations.len()))?;
        self.computations.push(Computation { function, sources, var });
        Ok(Built::Computed(self.computations.len() - 1))
    }
}

fn read_guard(text: &str, reader: &mut Reader) -> Result<Check> {
    let sexp = parse_one(text)?;
    let (Sexp::List(items, pos), start) = (&sexp, Pos { line: 1, column: 1 }) else {
        return Err(sexp.pos().error("a guard is written '(name …)'"));
    };
    let Some((Sexp::Atom(name, _), rest)) = items.split_first() else {
        return Err(start.error("a guard is written '(name …)'"));
    };
    let guard = guard(name).ok_or_else(|| pos.error(format!("there is no guard '{name}'")))?;
    // Guards share the computations of the right side but must not add to its pattern.
    let kept = reader.ast.clone();
    let sources = rest
        .iter()
        .map(|item| {
            let built = build(item, reader)?;
            reader
                .source(&built)
                .ok_or_else(|| item.pos().error("a guard takes variables and values only"))
        })
        .collect::<Result<Vec<_>>>();
    reader.ast = kept;
    Ok(Check {
        guard,
        sources: sources?,
    })
}
