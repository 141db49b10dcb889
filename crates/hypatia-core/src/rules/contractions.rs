//! Sums of products over a shared dimension, written with broadcasts, are matrix products: nothing as large as all
//! the products of elements is ever written.

use egg::Id;

use super::equality::{Side, Sides, nested};
use super::{Numerics, Phase, Rule, program};
use crate::attr::Attr;
use crate::dim::{Dim, product};
use crate::egraph::EGraph;
use crate::ops::op_id;
use crate::ty::TensorType;

pub(super) fn rules() -> Vec<Rule> {
    vec![program(
        "sum-of-products",
        Phase::Algebra,
        Numerics::Reassoc,
        "(sum (mul ?x ?y) ?d ?k) = (bmm ?x' ?y'), if each factor has a dimension that the other is broadcast along",
        &[
            "(sum (mul (sum ?x [-2] true) (sum ?y [-1] true)) [-3] ?k)",
            "(sum (mul (sum ?x [-3] true) (sum ?y [-2] true)) [-1] ?k)",
        ],
        sums_of_products,
    )]
}

/// What becomes of each dimension of a sum of products.
#[derive(Default)]
struct Roles {
    /// In both factors and in the result.
    batch: Vec<usize>,
    /// In the first factor and in the result.
    rows: Vec<usize>,
    /// In the second factor and in the result.
    columns: Vec<usize>,
    /// In both factors; summed.
    summed: Vec<usize>,
    /// Of size 1 in both factors, in the result or not.
    units: Vec<usize>,
}

fn sums_of_products(egraph: &mut EGraph, rule: &Rule) -> usize {
    let (sum, mul) = (op_id("sum"), op_id("mul"));
    let found: Vec<_> = nested(egraph, sum, 3, mul)
        .into_iter()
        .filter_map(|(outer, factors)| {
            let right = contraction(egraph, &outer, &factors)?;
            Some((outer, factors, right))
        })
        .collect();
    let mut fired = 0;
    for (outer, factors, right) in found {
        let mut sides = Sides::default();
        let (x, y) = (sides.left.var(factors[0]), sides.left.var(factors[1]));
        let terms = sides.left.add(mul, &[x, y]);
        let rest: Vec<Id> = outer[1..].iter().map(|c| sides.left.var(*c)).collect();
        sides.left.add(sum, &[&[terms], rest.as_slice()].concat());
        right.write(&mut sides.right, factors[0], factors[1]);
        fired += usize::from(sides.unite(egraph, rule.name));
    }
    fired
}

/// A sum of products as a matrix product.
struct Contraction {
    x: Vec<Dim>,
    y: Vec<Dim>,
    roles: Roles,
    /// The dimensions of the result, as numbers of those of the products.
    kept: Vec<usize>,
}

/// The matrix product that a sum is, if it is one of an outer product.
fn contraction(egraph: &EGraph, outer: &[Id], factors: &[Id]) -> Option<Contraction> {
    let tensor = |id: Id| egraph[id].data.ty.tensor();
    let (x, y) = (tensor(factors[0])?, tensor(factors[1])?);
    if !x.dtype.is_float() || x.dtype != y.dtype {
        return None;
    }
    let rank = x.rank().max(y.rank());
    let dims = egraph[outer[1]].data.ty.attr()?.known_ints()?;
    let keep = egraph[outer[2]].data.ty.attr()? == &Attr::Bool(true);
    let summed: Vec<bool> = (0..rank).map(|d| dims.contains(&(d as i64 - rank as i64))).collect();
    let (x, y) = (padded(x, rank), padded(y, rank));
    let mut roles = Roles::default();
    for d in 0..rank {
        match (x[d].is(1), y[d].is(1), summed[d]) {
            (true, true, _) => roles.units.push(d),
            (false, false, _) if x[d] != y[d] => return None,
            (false, false, true) => roles.summed.push(d),
            (false, false, false) => roles.batch.push(d),
            (false, true, false) => roles.rows.push(d),
            (true, false, false) => roles.columns.push(d),
            (_, _, true) => return None,
        }
    }
    if roles.summed.is_empty() || roles.rows.is_empty() || roles.columns.is_empty() {
        return None;
    }
    let kept = (0..rank).filter(|d| keep || !summed[*d]).collect();
    Some(Contraction { x, y, roles, kept })
}

fn padded(t: &TensorType, rank: usize) -> Vec<Dim> {
    let ones = std::iter::repeat_n(Dim::Const(1), rank - t.rank());
    ones.chain(t.shape.iter().cloned()).collect()
}

impl Contraction {
    fn write(&self, side: &mut Side, x: Id, y: Id) {
        let r = &self.roles;
        let (x, y) = (side.var(x), side.var(y));
        let x = matrices(side, x, &self.x, [&r.batch, &r.rows, &r.summed]);
        let y = matrices(side, y, &self.y, [&r.batch, &r.summed, &r.columns]);
        let all = side.add(op_id("bmm"), &[x, y]);
        // Dimensions of size 1 lie anywhere.
        let lying: Vec<usize> = [&r.batch[..], &r.rows, &r.columns].concat();
        let ones = self.kept.iter().filter(|d| !lying.contains(d)).copied();
        let lying: Vec<usize> = lying.iter().copied().chain(ones).collect();
        let size = |d: &usize| match (r.rows.contains(d) || r.batch.contains(d), r.columns.contains(d)) {
            (true, _) => self.x[*d].clone(),
            (_, true) => self.y[*d].clone(),
            _ => Dim::Const(1),
        };
        let whole = reshape(side, all, lying.iter().map(size).collect());
        let order: Vec<usize> = self
            .kept
            .iter()
            .filter_map(|d| lying.iter().position(|l| l == d))
            .collect();
        permute(side, whole, &order);
    }
}

/// A factor as matrices, given the dimensions of the batch, the rows and the columns.
fn matrices(side: &mut Side, factor: Id, shape: &[Dim], parts: [&Vec<usize>; 3]) -> Id {
    let order: Vec<usize> = parts.iter().flat_map(|p| p.iter().copied()).collect();
    let rest = (0..shape.len()).filter(|d| !order.contains(d));
    let order: Vec<usize> = order.iter().copied().chain(rest).collect();
    let whole = reshape(side, factor, shape.to_vec());
    let turned = permute(side, whole, &order);
    let size = |part: &Vec<usize>| product(&part.iter().map(|d| shape[*d].clone()).collect::<Vec<_>>());
    reshape(side, turned, parts.iter().map(|p| size(p)).collect())
}

fn reshape(side: &mut Side, x: Id, shape: Vec<Dim>) -> Id {
    let shape = side.attr(Attr::Ints(shape.into()));
    side.add(op_id("reshape"), &[x, shape])
}

fn permute(side: &mut Side, x: Id, order: &[usize]) -> Id {
    if order.iter().enumerate().all(|(at, d)| at == *d) {
        return x;
    }
    let order = side.attr(Attr::ints(&order.iter().map(|d| *d as i64).collect::<Vec<_>>()));
    side.add(op_id("permute"), &[x, order])
}
