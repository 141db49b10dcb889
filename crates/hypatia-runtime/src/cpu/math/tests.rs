//! Every function beside f64, at every level of the machine.

use super::*;
use crate::cpu::lanes::{Level, level};

type Exact = fn(f64) -> f64;

/// The functions, and what they are in f64.
const FUNCTIONS: [(&str, Exact); 13] = [
    ("exp", f64::exp),
    ("expm1", f64::exp_m1),
    ("log", f64::ln),
    ("log1p", f64::ln_1p),
    ("tanh", f64::tanh),
    ("erf", libm::erf),
    ("sigmoid", |x| 1.0 / (1.0 + (-x).exp())),
    ("silu", |x| x / (1.0 + (-x).exp())),
    ("gelu", |x| 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)),
    ("gelu_tanh", |x| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-2.0 * inner).exp())
    }),
    ("relu", |x| if x < 0.0 { 0.0 } else { x }),
    ("sqrt", f64::sqrt),
    ("rsqrt", |x| 1.0 / x.sqrt()),
];

/// The distance of two neighbours at this size.
fn ulp(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().clamp(-126.0, 127.0) as i32;
    2f64.powi(exponent - 23)
}

/// The error in units of the last place; infinite where only one is NaN or infinite.
fn error(got: f32, want: f64) -> f64 {
    if got.is_nan() && want.is_nan() || f64::from(got) == want || got == want as f32 {
        return 0.0;
    }
    let error = (f64::from(got) - want).abs() / ulp(want);
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Compares over numbers; reports the worst.
fn worst(name: &str, exact: Exact, at: Level, numbers: &[f32]) -> (f64, f32) {
    let mut values = numbers.to_vec();
    at_level(name, at, &mut values);
    numbers.iter().zip(&values).fold((0.0, 0.0), |worst, (&x, &got)| {
        let error = error(got, exact(f64::from(x)));
        if error > worst.0 { (error, x) } else { worst }
    })
}

fn check(numbers: &[f32]) {
    let mut failures = vec![];
    for (name, exact) in FUNCTIONS {
        for at in Level::ALL.into_iter().filter(|l| *l <= level()) {
            let (error, x) = worst(name, exact, at, numbers);
            if error > 2.0 {
                failures.push(format!("{name} at {at:?}: {error} ulp at {x:e}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Every `step`-th f32 there is.
fn every(step: usize) -> Vec<f32> {
    (0..=u32::MAX).step_by(step).map(f32::from_bits).collect()
}

#[test]
fn within_two_ulp_everywhere() {
    check(&every(9973));
}

#[test]
fn within_two_ulp_where_networks_live() {
    let around = (-200_000..200_000).map(|i| i as f32 * 1e-4);
    let tails = (-60_000..0).map(|i| i as f32 * 2e-3);
    check(&around.chain(tails).collect::<Vec<_>>());
}

#[test]
fn edges() {
    let mut numbers = vec![
        0.0,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::MAX,
        f32::INFINITY,
        f32::EPSILON,
        1.0,
    ];
    for centre in [
        0.5f32,
        0.95,
        1.0,
        2.0,
        4.0,
        5.5,
        6.0,
        9.0,
        9.25,
        14.5,
        17.0,
        18.0,
        30.0,
        87.3,
        88.7,
        89.0,
        103.9,
        104.0,
        2.0 / 3.0,
        4.0 / 3.0,
    ] {
        numbers.extend((0..41).map(|i| f32::from_bits(centre.to_bits() + i - 20)));
    }
    numbers.extend(numbers.clone().iter().map(|x| -x));
    numbers.push(f32::NAN);
    check(&numbers);
}

#[test]
#[ignore = "takes minutes without optimisation"]
fn within_two_ulp_at_half_a_million_points_an_octave() {
    let numbers = every(17);
    let failures: Vec<String> = FUNCTIONS
        .iter()
        .map(|(name, exact)| (name, worst(name, *exact, level(), &numbers)))
        .filter(|(_, (error, _))| *error > 2.0)
        .map(|(name, (error, x))| format!("{name}: {error} ulp at {x:e}"))
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn signs_of_zero_stay() {
    for name in ["expm1", "log1p", "tanh", "erf", "silu", "gelu", "gelu_tanh", "sqrt"] {
        let mut values = [-0.0f32, 0.0];
        at_level(name, level(), &mut values);
        assert!(
            values == [0.0, 0.0] && values[0].is_sign_negative() && values[1].is_sign_positive(),
            "{name}"
        );
    }
}

#[test]
fn exponentials_below_zero() {
    for i in 0..870_000 {
        let x = i as f32 * -1e-4;
        let error = error(single::exp_below::<true>(x), f64::from(x).exp());
        assert!(error <= 2.0, "{error} ulp at {x}");
    }
    assert_eq!(single::exp_below::<true>(-0.0), 1.0);
    assert_eq!(single::exp_below::<true>(-87.5), 0.0);
    assert_eq!(single::exp_below::<true>(f32::NEG_INFINITY), 0.0);
    assert!(single::exp_below::<true>(f32::NAN).is_nan());
}

#[test]
fn exponentials_far_below_zero() {
    for i in 0..1_050_000 {
        let x = i as f32 * -1e-4;
        let error = error(single::exp_deep::<true>(x), f64::from(x).exp());
        assert!(error <= 2.0, "{error} ulp at {x}");
    }
    assert_eq!(single::exp_deep::<true>(-0.0), 1.0);
    for x in [-104.5, -1e30, f32::NEG_INFINITY] {
        assert_eq!(single::exp_deep::<true>(x), 0.0);
    }
    assert!(single::exp_deep::<true>(f32::NAN).is_nan());
}

#[test]
fn all_lengths_are_served() {
    for len in [0, 1, 2, 15, 16, 17, 31, 33, 127, 1000] {
        let mut values: Vec<f32> = (0..len).map(|i| i as f32 / 100.0 - 1.0).collect();
        let expected: Vec<f32> = values.iter().map(|x| if *x < 0.0 { 0.0 } else { *x }).collect();
        relu(&mut values);
        assert_eq!(values, expected);
        let mut whole = values.clone();
        exp(&mut whole);
        for (x, y) in values.iter().zip(&whole) {
            let mut one = [*x];
            exp(&mut one);
            assert_eq!(one[0].to_bits(), y.to_bits());
        }
    }
}

#[test]
fn sines_of_all_sizes() {
    let mut numbers = every(99_991);
    numbers.extend((-100_000..100_000).map(|i| i as f32 * 1e-3));
    for (exact, f) in [(f64::sin as Exact, sin as fn(&mut [f32])), (f64::cos, cos)] {
        let mut values = numbers.clone();
        f(&mut values);
        for (&x, &got) in numbers.iter().zip(&values) {
            let error = error(got, exact(f64::from(x)));
            assert!(error <= 2.0, "{error} ulp at {x:e}");
        }
    }
}
