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
    /// With infinities, and numbers that f64 has room around.
    Usual,
    /// At the limits of the dtype.
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
        Specials::Usual
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
            let odd = specials != Specials::None && random.below(4) == 0;
            let v = match odd {
                true if specials == Specials::NanAndZeros => SPECIALS[random.below(3)],
                true if specials == Specials::Usual => SPECIALS[random.below(SPECIALS.len())],
                true if t.dtype.is_float() => special(t.dtype, random),
                true => limit(t.dtype, random),
                false if t.dtype.is_float() => random.unit() * 2.0,
                false => random.below(7) as f64 - 3.0,
            };
            let v = if *positive {
                v.abs() + f64::from(u8::from(v == 0.0))
            } else {
                v
            };
            t.dtype.round(if v.is_finite() || t.dtype.is_float() { v } else { 1.0 })
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
    1.0,
    -3.0e38,
    1e-45,
];

/// A number that is special in a floating type: no number, a zero, the greatest, the least, the least normal one.
fn special(dtype: DType, random: &mut Random) -> f64 {
    let (greatest, normal, least) = match dtype {
        DType::F64 => (f64::MAX, f64::MIN_POSITIVE, f64::from_bits(1)),
        DType::F16 => (65504.0, 2f64.powi(-14), 2f64.powi(-24)),
        DType::BF16 => (f64::from_bits(0x47ef_e000_0000_0000), 2f64.powi(-126), 2f64.powi(-133)),
        _ => (f64::from(f32::MAX), 2f64.powi(-126), 2f64.powi(-149)),
    };
    let size = match random.below(12) {
        i @ 0..7 => return SPECIALS[i],
        7 => greatest,
        8 => greatest / 4.0,
        9 => normal,
        10 => normal / 4.0,
        _ => least,
    };
    if random.below(2) == 0 { size } else { -size }
}

/// A number at the limits of an integer type. Those of 64 bits are such as f64 has.
fn limit(dtype: DType, random: &mut Random) -> f64 {
    let bits = 8 * dtype.size() as i32;
    let (least, most) = match dtype {
        DType::Bool => (0.0, 1.0),
        DType::U8 => (0.0, 255.0),
        DType::I64 => (-(2f64.powi(63)), 2f64.powi(62)),
        _ => (-(2f64.powi(bits - 1)), 2f64.powi(bits - 1) - 1.0),
    };
    match random.below(5) {
        0 | 1 => least,
        2 => most,
        3 => (least / 2.0).trunc(),
        _ => 1.0,
    }
}

/// What eager computes as a finite number is one under every rule that only rounds less: the value of every alternative of
/// the program, on inputs at the limits of their types.
pub(super) fn stays_finite(egraph: &EGraph, sample: &Sample, inputs: &[Val]) -> Result<(), String> {
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(inputs[*i as usize].clone()),
        other => Err(crate::Error::Graph(format!("{other:?} has no value"))),
    };
    let program = &sample.program;
    // The evaluation itself has no room beyond f64.
    let f64_inside = |ty: &Ty| ty.tensor().is_some_and(|t| t.dtype == DType::F64);
    if program.reachable().iter().any(|id| f64_inside(program.ty(*id))) {
        return Ok(());
    }
    let Ok(mut values) = program.eval(&leaf, Mode::Rounded) else {
        return Ok(());
    };
    let Some(eager) = values.remove(&program.root) else {
        return Ok(());
    };
    let Some(root) = egraph.lookup_expr(&program.expr().0) else {
        return Ok(());
    };
    for (value, node) in alternatives(egraph, root, inputs) {
        if let Some(place) = lost(&eager, &value) {
            return Err(format!("{node}: eager is finite, {place}"));
        }
    }
    Ok(())
}

/// The values of the nodes of a class, as they are stored.
fn alternatives<'e>(egraph: &'e EGraph, class: Id, inputs: &[Val]) -> Vec<(Val, &'e Node)> {
    let mut found = vec![];
    let record = |id: Id, node: &'e Node, value: &Val| {
        if id == class {
            found.push((value.clone(), node));
        }
        Ok(())
    };
    // What cannot be evaluated is found elsewhere.
    let _ = evaluate(egraph, inputs, Mode::Rounded, record);
    found
}

fn lost(eager: &Val, other: &Val) -> Option<String> {
    match (eager, other) {
        (Val::Arr(a), Val::Arr(b)) => {
            let mut pairs = a.data.iter().zip(&b.data);
            let (x, y) = pairs.find(|(x, y)| x.is_finite() && !y.is_finite())?;
            Some(format!("{x:?} and not {y:?}"))
        }
        (Val::Tuple(a), Val::Tuple(b)) => a.iter().zip(b).find_map(|(a, b)| lost(a, b)),
        _ => None,
    }
}

/// What a comparison could have shown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Seen {
    Nothing,
    /// Equal values, but empty, zero or not finite.
    Something,
    Numbers,
}

/// Compares the nodes of every class.
pub(super) fn compare(egraph: &EGraph, inputs: &[Val], mode: Mode, tolerance: Option<f64>) -> Result<Seen, String> {
    let mut values: BTreeMap<Id, (Val, &Node)> = BTreeMap::new();
    let mut seen = Seen::Nothing;
    evaluate(egraph, inputs, mode, |class, node, value| {
        match values.get(&class) {
            None => {
                values.insert(class, (value.clone(), node));
            }
            Some((other, by)) => {
                agree(other, value, tolerance).map_err(|e| format!("{by} and {node}: {e}"))?;
                seen = seen.max(if telling(other) { Seen::Numbers } else { Seen::Something });
            }
        }
        Ok(())
    })?;
    Ok(seen)
}

/// Evaluates every node of every class from the values of its operands' classes, each the first that was found.
fn evaluate<'e>(
    egraph: &'e EGraph,
    inputs: &[Val],
    mode: Mode,
    mut found: impl FnMut(Id, &'e Node, &Val) -> Result<(), String>,
) -> Result<(), String> {
    let mut classes: Vec<Id> = egraph.classes().map(|c| c.id).collect();
    classes.sort_unstable();
    let mut values: BTreeMap<Id, Val> = BTreeMap::new();
    let mut done: BTreeSet<(Id, usize)> = BTreeSet::new();
    loop {
        let before = done.len();
        for class in &classes {
            for (i, node) in egraph[*class].nodes.iter().enumerate() {
                let operands: Option<Vec<Val>> = node
                    .children
                    .iter()
                    .map(|c| values.get(&egraph.find(*c)).cloned())
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
                found(*class, node, &value)?;
                values.entry(*class).or_insert(value);
            }
        }
        if done.len() == before {
            return Ok(());
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
