//! Values of everything that a rule made equal, and how close they must be.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;

use super::sample::Sample;
use crate::attr::Attr;
use crate::egraph::EGraph;
use crate::eval::difference;
use crate::eval::{Arr, Mode, Val};
use crate::ir::define;
use crate::ir::node::{Node, Op};
use crate::ops::known_shape;
use crate::random::Random;
use crate::rules::Numerics;
use crate::ty::{DType, Ty};

/// Which elements an input may have besides ordinary ones.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Specials {
    None,
    NanAndZeros,
    All,
}

/// How a sample is evaluated, on what, and how close its values must be; none means every bit.
pub(super) fn trials(numerics: Numerics, sample: &Sample, elementwise: bool) -> Vec<(Mode, Specials, Option<f64>)> {
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
    let specials = if elementwise {
        Specials::All
    } else {
        Specials::NanAndZeros
    };
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

pub(super) fn inputs(sample: &Sample, specials: Specials, random: &mut Random) -> Vec<Val> {
    let all = sample.program.leaves.inputs.iter().zip(&sample.positive);
    all.map(|(input, positive)| {
        let Some(t) = input.ty.tensor() else {
            return Val::Attr(Attr::None);
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
            let v = if *positive {
                v.abs() + f64::from(u8::from(v == 0.0))
            } else {
                v
            };
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
pub(super) enum Seen {
    Nothing,
    /// Equal values, but empty, zero or not finite.
    Something,
    Numbers,
}

/// Evaluates every node of every class from the values of its operands' classes, and compares
/// the nodes of a class.
pub(super) fn compare(egraph: &EGraph, inputs: &[Val], mode: Mode, tolerance: Option<f64>) -> Result<Seen, String> {
    let mut classes: Vec<Id> = egraph.classes().map(|c| c.id).collect();
    classes.sort_unstable();
    let mut values: BTreeMap<Id, (Val, &Node)> = BTreeMap::new();
    let mut done: BTreeSet<(Id, usize)> = BTreeSet::new();
    let mut seen = Seen::Nothing;
    loop {
        let before = done.len();
        for class in &classes {
            for (i, node) in egraph[*class].nodes.iter().enumerate() {
                let operands: Option<Vec<Val>> = node
                    .children
                    .iter()
                    .map(|c| values.get(&egraph.find(*c)).map(|v| v.0.clone()))
                    .collect();
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
    let same = match tolerance {
        None => same_bits(a, b),
        Some(t) => difference(a, b) <= t,
    };
    match same {
        true => Ok(()),
        false => Err(format!("{}, relative difference {:e}", first(a, b), difference(a, b))),
    }
}

/// The first elements that are not the same, with the place.
fn first(a: &Val, b: &Val) -> String {
    match (a, b) {
        (Val::Arr(a), Val::Arr(b)) if a.shape == b.shape => {
            let places = a.data.iter().zip(&b.data).enumerate();
            let mut unlike = places.filter(|(_, (x, y))| x.to_bits() != y.to_bits() && !(x.is_nan() && y.is_nan()));
            let (i, (x, y)) = unlike.next().unwrap_or((0, (&f64::NAN, &f64::NAN)));
            format!("element {i} of {:?} is {x:?} and {y:?}", a.shape)
        }
        _ => format!("{a:?} and {b:?}"),
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
