//! Views change places with the ops around them, so that those ops meet.

use egg::Id;

use super::canon::{elementwise_through, laws};
use super::equality::{Sides, classes_of, nested, nodes_of};
use super::{Numerics, Phase, Rule, program};
use crate::attr::Attr;
use crate::egraph::EGraph;
use crate::ops::op_id;

pub(super) fn rules() -> Vec<Rule> {
    [
        elementwise_through!("reshape", "?s", Exact: "relu" "silu" "sigmoid" "tanh" "neg"),
        elementwise_through!("reshape", "?s", Reassoc: "gelu" "gelu_tanh"),
        elementwise_through!("permute", "?p", Exact: "relu" "silu" "sigmoid" "tanh" "neg"),
        elementwise_through!("permute", "?p", Reassoc: "gelu" "gelu_tanh"),
        elementwise(),
        products(),
        parts(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Views move outwards through ops on each element alone.
fn elementwise() -> Vec<Rule> {
    laws! {
        "cast-through-reshape": Canon Exact, "(cast (reshape ?x ?s) ?d)" => "(reshape (cast ?x ?d) ?s)";
        "cast-through-permute": Canon Exact, "(cast (permute ?x ?p) ?d)" => "(permute (cast ?x ?d) ?p)";
        "mul-number-through-reshape": Algebra Exact, "(mul (reshape ?x ?s) ?c)" => "(reshape (mul ?x ?c) ?s)"
            if "(number ?c)";
        "mul-number-through-permute": Algebra Exact, "(mul (permute ?x ?p) ?c)" => "(permute (mul ?x ?c) ?p)"
            if "(number ?c)";
        "div-number-through-reshape": Algebra Exact, "(div (reshape ?x ?s) ?c)" => "(reshape (div ?x ?c) ?s)"
            if "(number ?c)";
        "div-number-through-permute": Algebra Exact, "(div (permute ?x ?p) ?c)" => "(permute (div ?x ?c) ?p)"
            if "(number ?c)";
        "add-through-reshape": Algebra Exact, "(add (reshape ?x ?s) (reshape ?y ?s))" => "(reshape (add ?x ?y) ?s)"
            if "(eq ($shape ?x) ($shape ?y))";
        "mul-through-reshape": Algebra Exact, "(mul (reshape ?x ?s) (reshape ?y ?s))" => "(reshape (mul ?x ?y) ?s)"
            if "(eq ($shape ?x) ($shape ?y))";
        "add-through-permute": Algebra Exact, "(add (permute ?x ?p) (permute ?y ?p))" => "(permute (add ?x ?y) ?p)"
            if "(eq ($shape ?x) ($shape ?y))";
        "mul-through-permute": Algebra Exact, "(mul (permute ?x ?p) (permute ?y ?p))" => "(permute (mul ?x ?y) ?p)"
            if "(eq ($shape ?x) ($shape ?y))";
        // Parts of what is filled need only those parts, which then join the kernels that read them.
        "slice-before-fill": Algebra Exact, "(slice (masked_fill ?x ?m ?v) ?d ?a ?b ?s)"
            => "(masked_fill (slice ?x ?d ?a ?b ?s) ?m ?v)" if "(eq ($size ?m ?d) 1)" "(number ?v)";
        // Ops on elements broadcast by themselves. A tensor without dimensions is converted as a number is.
        "add-expanded": Canon Exact, "(add~ (expand ?x ?s) ?y)" => "(add ?x ?y)" if "(one_dtype ?x ?y)";
        "mul-expanded": Canon Exact, "(mul~ (expand ?x ?s) ?y)" => "(mul ?x ?y)" if "(one_dtype ?x ?y)";
        "sub-expanded": Canon Exact, "(sub ?y (expand ?x ?s))" => "(sub ?y ?x)" if "(one_dtype ?x ?y)";
        "div-expanded": Canon Exact, "(div ?y (expand ?x ?s))" => "(div ?y ?x)" if "(one_dtype ?x ?y)";
    }
}

/// `(X Y)ᵀ = Yᵀ Xᵀ`, and rows or columns of a product need only those of an operand.
fn products() -> Vec<Rule> {
    laws! {
        "transpose-mm": Algebra Reassoc, "(permute (mm ?x ?y) [1,0])" => "(mm (permute ?y [1,0]) (permute ?x [1,0]))";
        "transpose-linear": Algebra Reassoc, "(permute (linear ?w none ?x) [1,0])" => "(linear ?x none ?w)";
        "transpose-bmm": Algebra Reassoc, "(permute (bmm ?x ?y) [0,2,1])"
            => "(bmm (permute ?y [0,2,1]) (permute ?x [0,2,1]))";
        "transpose-matmul": Algebra Reassoc, "(permute (matmul ?x ?y) ?p)"
            => "(matmul (permute ?y ($swap_last ?y)) (permute ?x ($swap_last ?x)))" if "(swaps_last ?p)";
        "slice-before-linear": Algebra Reassoc, "(slice (linear ?w ?b ?x) ?d ?s ?e ?t)"
            => "(linear ?w ?b (slice ?x ?d ?s ?e ?t))" if "(lt ?d -1)";
        "select-before-linear": Algebra Reassoc, "(select (linear ?w ?b ?x) ?d ?i)"
            => "(linear ?w ?b (select ?x ?d ?i))" if "(lt ?d -1)";
        "slice-into-weight": Algebra Reassoc, "(slice (linear ?w none ?x) -1 ?s ?e ?t)"
            => "(linear (slice ?w -2 ?s ?e ?t) none ?x)" if "(weight ?w)" "(live ?x)";
        "slice-into-weight-and-bias": Algebra Reassoc, "(slice (linear ?w ?b ?x) -1 ?s ?e ?t)"
            => "(linear (slice ?w -2 ?s ?e ?t) (slice ?b -1 ?s ?e ?t) ?x)" if "(weight ?w ?b)" "(live ?x)";
    }
}

/// Taking apart what was put together, and putting together what was taken apart. A split is
/// slices already.
fn parts() -> Vec<Rule> {
    vec![
        program(
            "slice-of-cat",
            Phase::Canon,
            Numerics::Exact,
            "(slice (cat ?d ?x1 … ?xn) ?d ?a ?b ?s) = (slice ?xi ?d a b ?s), a part of one part",
            &[
                "(slice (cat ?d ?x ?y) ?d ?a ?b ?s)",
                "(slice (cat ?d ?x ?y ?z) ?d ?a ?b 1)",
            ],
            slices_of_cats,
        ),
        program(
            "cat-of-slices",
            Phase::Canon,
            Numerics::Exact,
            "(cat ?d (slice ?x ?d ?a ?b 1) … (slice ?x ?d ?y ?z 1)) = (slice ?x ?d ?a ?z 1), if adjacent",
            &[
                "(cat ?d (slice ?x ?d ?a ?b 1) (slice ?x ?d ?b ?c 1))",
                "(cat ?d (slice ?x ?d ?a ?b 1) (slice ?x ?d ?b ?c 1) (slice ?x ?d ?c ?e 1))",
            ],
            cats_of_slices,
        ),
        program(
            "permute-before-merge",
            Phase::Algebra,
            Numerics::Exact,
            "(permute (reshape ?x ?s) ?p) = (reshape (permute ?x p) s), if the reshape only merges dimensions",
            &["(permute (reshape ?x ?s) ?p)"],
            permutes_of_merges,
        ),
    ]
}

fn permutes_of_merges(egraph: &mut EGraph, rule: &Rule) -> usize {
    let (permute, reshape) = (op_id("permute"), op_id("reshape"));
    let found: Vec<_> = nested(egraph, permute, 2, reshape)
        .into_iter()
        .filter_map(|(outer, inner)| {
            let turned = unmerged(egraph, &outer, &inner)?;
            Some((outer, inner, turned))
        })
        .collect();
    let mut fired = 0;
    for (outer, inner, (order, shape)) in found {
        let mut sides = Sides::default();
        let (x, s, p) = (
            sides.left.var(inner[0]),
            sides.left.var(inner[1]),
            sides.left.var(outer[1]),
        );
        let merged = sides.left.add(reshape, &[x, s]);
        sides.left.add(permute, &[merged, p]);
        let (x, order) = (sides.right.var(inner[0]), sides.right.attr(Attr::ints(&order)));
        let turned = sides.right.add(permute, &[x, order]);
        let shape = sides.right.attr(Attr::ints(&shape));
        sides.right.add(reshape, &[turned, shape]);
        fired += usize::from(sides.unite(egraph, rule.name));
    }
    fired
}

/// The order of the dimensions before some of them are merged, and the shape afterwards.
fn unmerged(egraph: &EGraph, outer: &[Id], inner: &[Id]) -> Option<(Vec<i64>, Vec<i64>)> {
    let known = |id: Id| {
        let shape = &egraph[id].data.ty.tensor()?.shape;
        shape.iter().map(|d| d.known()).collect::<Option<Vec<i64>>>()
    };
    let (old, new) = (known(inner[0])?, known(outer[0])?);
    let order = egraph[outer[1]].data.ty.attr()?.known_ints()?;
    if old.len() <= new.len() || old.contains(&0) {
        return None;
    }
    let mut groups = vec![];
    let mut next = 0;
    for (at, size) in new.iter().enumerate() {
        let (start, mut product) = (next, 1);
        while next < old.len() && (product < *size || old[next] == 1 || at + 1 == new.len()) {
            product *= old[next];
            next += 1;
        }
        if product != *size {
            return None;
        }
        groups.push(start..next);
    }
    let place = |d: &i64| usize::try_from(*d).ok().filter(|d| *d < groups.len());
    let places: Option<Vec<usize>> = order.iter().map(place).collect();
    let places = places?;
    let turned = places.iter().flat_map(|d| groups[*d].clone()).map(|d| d as i64);
    Some((turned.collect(), places.iter().map(|d| new[*d]).collect()))
}

/// The most parts of a concatenation that is looked at.
const MOST: usize = 64;

fn int(egraph: &EGraph, class: Id) -> Option<i64> {
    egraph[class].data.ty.attr()?.as_int()
}

/// The known size of a class in a dimension that another class names.
fn size(egraph: &EGraph, x: Id, dim: Id) -> Option<i64> {
    egraph[x].data.ty.tensor()?.dim(int(egraph, dim)?)?.known()
}

fn slices_of_cats(egraph: &mut EGraph, rule: &Rule) -> usize {
    let (slice, cat) = (op_id("slice"), op_id("cat"));
    let found: Vec<_> = nested(egraph, slice, 5, cat)
        .into_iter()
        .filter_map(|(outer, inner)| {
            let at = part(egraph, &outer, &inner)?;
            Some((outer, inner, at))
        })
        .collect();
    let mut fired = 0;
    for (outer, inner, (part, from, to)) in found {
        let mut sides = Sides::default();
        let parts: Vec<Id> = inner.iter().map(|c| sides.left.var(*c)).collect();
        let whole = sides.left.add(cat, &parts);
        let rest: Vec<Id> = outer[1..].iter().map(|c| sides.left.var(*c)).collect();
        sides.left.add(slice, &[&[whole], rest.as_slice()].concat());
        let (x, d) = (sides.right.var(inner[part]), sides.right.var(outer[1]));
        let (a, b) = (sides.right.attr(Attr::int(from)), sides.right.attr(Attr::int(to)));
        let step = sides.right.var(outer[4]);
        sides.right.add(slice, &[x, d, a, b, step]);
        fired += usize::from(sides.unite(egraph, rule.name));
    }
    fired
}

/// Which operand of a concatenation a slice lies in, and where.
fn part(egraph: &EGraph, outer: &[Id], inner: &[Id]) -> Option<(usize, i64, i64)> {
    if outer[1] != inner[0] {
        return None;
    }
    let (from, to) = (int(egraph, outer[2])?, int(egraph, outer[3])?);
    let mut start = 0;
    for (i, x) in inner.iter().enumerate().skip(1) {
        let end = start + size(egraph, *x, inner[0])?;
        if start <= from && from < to && to <= end {
            return Some((i, from - start, to - start));
        }
        start = end;
    }
    None
}

fn cats_of_slices(egraph: &mut EGraph, rule: &Rule) -> usize {
    let (slice, cat) = (op_id("slice"), op_id("cat"));
    let mut found = vec![];
    for n in 3..=MOST + 1 {
        for class in classes_of(egraph, cat, n) {
            for parts in nodes_of(egraph, class, cat) {
                found.extend(run(egraph, &parts).map(|slices| (parts[0], slices)));
            }
        }
    }
    let mut fired = 0;
    for (dim, slices) in found {
        let mut sides = Sides::default();
        let mut parts = vec![sides.left.var(dim)];
        for operands in &slices {
            let operands: Vec<Id> = operands.iter().map(|c| sides.left.var(*c)).collect();
            parts.push(sides.left.add(slice, &operands));
        }
        sides.left.add(cat, &parts);
        let mut whole = slices[0].clone();
        whole[3] = slices[slices.len() - 1][3];
        let whole: Vec<Id> = whole.iter().map(|c| sides.right.var(*c)).collect();
        sides.right.add(slice, &whole);
        fired += usize::from(sides.unite(egraph, rule.name));
    }
    fired
}

/// The operands of a concatenation as slices of one value, each beginning where the last ends.
fn run(egraph: &EGraph, parts: &[Id]) -> Option<Vec<Vec<Id>>> {
    let slices = |class: Id| nodes_of(egraph, class, op_id("slice")).into_iter();
    let fits = |s: &Vec<Id>| s[1] == parts[0] && int(egraph, s[4]) == Some(1);
    slices(parts[1]).filter(|s| fits(s)).find_map(|first| {
        let mut all = vec![first];
        for part in &parts[2..] {
            let last = &all[all.len() - 1];
            let next = slices(*part).find(|s| fits(s) && s[0] == last[0] && s[2] == last[3])?;
            all.push(next);
        }
        Some(all)
    })
}
