//! Work that shares an operand becomes one piece of work, for all sharers at once. Merging
//! pairs would need several rounds and triple the e-graph.

use std::collections::BTreeMap;

use egg::Id;

use super::Numerics::Reassoc;
use super::Phase::Merge;
use super::equality::{Side, Sides, classes_of, nodes_of};
use super::{Rule, program};
use crate::attr::Attr;
use crate::dim::Dim;
use crate::egraph::EGraph;
use crate::ops::op_id;
use crate::ty::{DType, TensorType, Ty};

/// The most operands that are concatenated into one.
const WIDEST: usize = 64;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        program(
            "merge-linears",
            Merge,
            Reassoc,
            "(linear ?wi ?bi ?x) = (slice (linear (cat -2 ?w1 … ?wn) (cat -1 ?b1 … ?bn) ?x) -1 start end 1)",
            &[
                "(tuple (linear ?w1 ?b1 ?x) (linear ?w2 ?b2 ?x))",
                "(tuple (linear ?w1 ?b1 ?x) (linear ?w2 none ?x) (linear ?w3 ?b3 ?x))",
                "(tuple (linear ?w1 none ?x) (linear ?w2 none ?x))",
            ],
            |egraph, rule| merge(egraph, rule, &LINEARS),
        ),
        program(
            "merge-rows",
            Merge,
            Reassoc,
            "(linear ?w ?b ?xi) = (slice (linear ?w ?b (cat -2 ?x1 … ?xn)) -2 start end 1)",
            &[
                "(tuple (linear ?w ?b ?x1) (linear ?w ?b ?x2))",
                "(tuple (linear ?w none ?x1) (linear ?w none ?x2))",
            ],
            |egraph, rule| merge(egraph, rule, &ROWS),
        ),
        program(
            "merge-bmms",
            Merge,
            Reassoc,
            "(bmm ?x ?wi) = (slice (bmm ?x (cat -1 ?w1 … ?wn)) -1 start end 1)",
            &["(tuple (bmm ?x ?w1) (bmm ?x ?w2))"],
            |egraph, rule| merge(egraph, rule, &BMMS),
        ),
        program(
            "merge-convs",
            Merge,
            Reassoc,
            "(conv ?x ?wi ?bi ?s ?p ?d 1) = (slice (conv ?x (cat ?w1 … ?wn) (cat ?b1 … ?bn) ?s ?p ?d 1) channels start end 1)",
            &[
                "(tuple (conv ?x ?w1 ?b1 ?s ?p ?d 1) (conv ?x ?w2 ?b2 ?s ?p ?d 1))",
                "(tuple (conv ?x ?w1 none ?s ?p ?d 1) (conv ?x ?w2 ?b2 ?s ?p ?d 1))",
            ],
            |egraph, rule| merge(egraph, rule, &CONVS),
        ),
    ]
}

/// How nodes of an op are merged.
struct Shape {
    op: &'static str,
    operands: usize,
    /// What the merged nodes must have in common; none if a node cannot be merged.
    key: fn(&EGraph, &[Id]) -> Option<Vec<u64>>,
    /// Size of a node's share of the merged result.
    share: fn(&EGraph, &[Id]) -> Option<i64>,
    /// The merged node.
    build: fn(&EGraph, &mut Side, &[Vec<Id>]) -> Option<Id>,
    /// The dimension of the result along which shares lie.
    dim: fn(&EGraph, &[Id]) -> Option<i64>,
}

fn tensor(egraph: &EGraph, class: Id) -> Option<&TensorType> {
    egraph[class].data.ty.tensor()
}

fn is_none(egraph: &EGraph, class: Id) -> bool {
    egraph[class].data.ty == Ty::Attr(Attr::None)
}

fn weights(egraph: &EGraph, classes: &[Id]) -> bool {
    classes.iter().all(|c| egraph[*c].data.weight)
}

fn code(class: Id) -> u64 {
    usize::from(class) as u64
}

fn dtype_code(t: &TensorType) -> u64 {
    DType::ALL.iter().position(|d| *d == t.dtype).unwrap_or(0) as u64
}

const LINEARS: Shape = Shape {
    op: "linear",
    operands: 3,
    key: |e, o| (weights(e, &o[..2]) && !e[o[2]].data.weight).then(|| vec![code(o[2])]),
    share: |e, o| tensor(e, o[0])?.shape[0].known(),
    build: |e, side, all| {
        let w = cat(side, -2, all.iter().map(|o| o[0]));
        let b = biases(e, side, all, 0, 1)?;
        let x = side.var(all[0][2]);
        Some(side.add(op_id("linear"), &[w, b, x]))
    },
    dim: |_, _| Some(-1),
};

const ROWS: Shape = Shape {
    op: "linear",
    operands: 3,
    key: |e, o| {
        let x = tensor(e, o[2])?;
        (x.rank() == 2 && weights(e, &o[..2]) && !e[o[2]].data.weight).then(|| vec![code(o[0]), code(o[1])])
    },
    share: |e, o| tensor(e, o[2])?.shape[0].known(),
    build: |_, side, all| {
        let (w, b) = (side.var(all[0][0]), side.var(all[0][1]));
        let x = cat(side, -2, all.iter().map(|o| o[2]));
        Some(side.add(op_id("linear"), &[w, b, x]))
    },
    dim: |_, _| Some(-2),
};

const BMMS: Shape = Shape {
    op: "bmm",
    operands: 2,
    key: |e, o| (weights(e, &o[1..]) && !e[o[0]].data.weight).then(|| vec![code(o[0])]),
    share: |e, o| tensor(e, o[1])?.shape[2].known(),
    build: |_, side, all| {
        let w = cat(side, -1, all.iter().map(|o| o[1]));
        let x = side.var(all[0][0]);
        Some(side.add(op_id("bmm"), &[x, w]))
    },
    dim: |_, _| Some(-1),
};

const CONVS: Shape = Shape {
    op: "conv",
    operands: 7,
    key: |e, o| {
        let w = tensor(e, o[1])?;
        let ungrouped = e[o[6]].data.ty.attr()?.as_int() == Some(1);
        if !ungrouped || !weights(e, &o[1..3]) || e[o[0]].data.weight {
            return None;
        }
        let mut key = vec![code(o[0]), code(o[3]), code(o[4]), code(o[5]), dtype_code(w)];
        for d in &w.shape[2..] {
            key.push(d.known()? as u64);
        }
        Some(key)
    },
    share: |e, o| tensor(e, o[1])?.shape[0].known(),
    build: |e, side, all| {
        let rank = tensor(e, all[0][1])?.rank() as i64;
        let w = cat(side, -rank, all.iter().map(|o| o[1]));
        let b = biases(e, side, all, 1, 2)?;
        let rest: Vec<Id> = all[0][3..].iter().map(|c| side.var(*c)).collect();
        let x = side.var(all[0][0]);
        Some(side.add(op_id("conv"), &[&[x, w, b], rest.as_slice()].concat()))
    },
    dim: |e, o| Some(1 - tensor(e, o[1])?.rank() as i64),
};

fn cat(side: &mut Side, dim: i64, parts: impl Iterator<Item = Id>) -> Id {
    let mut operands = vec![side.attr(Attr::int(dim))];
    operands.extend(parts.map(|p| side.var(p)).collect::<Vec<_>>());
    side.add(op_id("cat"), &operands)
}

/// All biases as one; zeros stand in for those that are missing, unless all are.
fn biases(egraph: &EGraph, side: &mut Side, all: &[Vec<Id>], weight: usize, bias: usize) -> Option<Id> {
    if all.iter().all(|o| is_none(egraph, o[bias])) {
        return Some(side.var(all[0][bias]));
    }
    let mut operands = vec![side.attr(Attr::int(-1))];
    for o in all {
        operands.push(if is_none(egraph, o[bias]) {
            let n = tensor(egraph, o[weight])?.shape[0].clone();
            let like = side.var(o[weight]);
            let (shape, zero) = (side.attr(Attr::Ints(vec![n].into())), side.attr(Attr::float(0.0)));
            side.add(op_id("full"), &[like, shape, zero])
        } else {
            side.var(o[bias])
        });
    }
    Some(side.add(op_id("cat"), &operands))
}

/// Groups nodes by what they share and unites each with its slice of the merged node.
fn merge(egraph: &mut EGraph, rule: &Rule, shape: &Shape) -> usize {
    let op = op_id(shape.op);
    let mut groups: BTreeMap<Vec<u64>, Vec<Vec<Id>>> = BTreeMap::new();
    for class in classes_of(egraph, op, shape.operands) {
        // One node for each class: others compute the same.
        let candidates = nodes_of(egraph, class, op);
        let found = candidates
            .into_iter()
            .find_map(|o| Some(((shape.key)(egraph, &o)?, (shape.share)(egraph, &o)?, o)));
        if let Some((key, _, operands)) = found {
            groups.entry(key).or_default().push(operands);
        }
    }
    let mut fired = 0;
    for group in groups.into_values() {
        let group = without_scaled(egraph, group);
        for chunk in group.chunks(WIDEST).filter(|c| c.len() > 1) {
            fired += merge_group(egraph, rule, shape, chunk).unwrap_or(0);
        }
    }
    fired
}

/// Drops members with an operand that is a scaled copy of another member's: rules that move a
/// scale into a weight leave both in the e-graph, and only one of them is needed.
fn without_scaled(egraph: &EGraph, group: Vec<Vec<Id>>) -> Vec<Vec<Id>> {
    let all: Vec<Id> = group.iter().flatten().copied().collect();
    let scaled = |class: &Id| {
        let sources = ["mul", "div"].iter().flat_map(|op| nodes_of(egraph, *class, op_id(op)));
        sources
            .map(|o| o[0])
            .any(|source| source != *class && all.contains(&source))
    };
    group
        .into_iter()
        .filter(|operands| !operands.iter().any(scaled))
        .collect()
}

fn merge_group(egraph: &mut EGraph, rule: &Rule, shape: &Shape, all: &[Vec<Id>]) -> Option<usize> {
    let mut start = 0;
    let mut fired = 0;
    for operands in all {
        let end = start + (shape.share)(egraph, operands)?;
        let mut sides = Sides::default();
        let left: Vec<Id> = operands.iter().map(|o| sides.left.var(*o)).collect();
        sides.left.add(op_id(shape.op), &left);
        let merged = (shape.build)(egraph, &mut sides.right, all)?;
        let dim = (shape.dim)(egraph, operands)?;
        let bounds = [
            Attr::int(dim),
            Attr::Int(Dim::Const(start)),
            Attr::Int(Dim::Const(end)),
            Attr::int(1),
        ];
        let bounds: Vec<Id> = bounds.into_iter().map(|a| sides.right.attr(a)).collect();
        sides
            .right
            .add(op_id("slice"), &[&[merged], bounds.as_slice()].concat());
        fired += usize::from(sides.unite(egraph, rule.name));
        start = end;
    }
    Some(fired)
}
