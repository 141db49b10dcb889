//! Split precision where fp32 is hard to follow: extreme, mixed and special numbers.

use super::*;
use crate::cpu::linear::Epilogue;
use crate::cpu::linear::testing::{Case, assert_close, run};
use crate::kernels::product::Activation;
use proptest::prelude::*;

fn six() -> Option<Form<f32>> {
    split_forms().into_iter().find(|form| form.name == "bf16x6")
}

/// A number of a random exponent, or one that is none.
fn number(exponents: std::ops::Range<i32>, seed: &mut u64) -> f32 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    let bits = *seed >> 24;
    let mantissa = 1.0 + (bits & 0x00ff_ffff) as f64 / f64::from(1 << 24);
    let span = (exponents.end - exponents.start) as u64;
    let exponent = exponents.start + ((bits >> 24) % span) as i32;
    let sign = if bits >> 39 & 1 == 0 { 1.0 } else { -1.0 };
    (sign * mantissa * f64::from(exponent).exp2()) as f32
}

/// Exponents of a row's activations.
const SCALES: [std::ops::Range<i32>; 9] = [
    -1..1,
    -149..-120,
    -126..-100,
    -110..-60,
    60..127,
    110..128,
    -140..10,
    -60..60,
    -149..128,
];

/// Each element as close as fp32 promises: errors of a plain loop, or roundings of the terms' magnitudes.
fn assert_as_good_as_fp32(case: &Case<f32>, result: &[f32], expected: &[(f64, f32, f64)]) {
    for (i, (y, &(exact, plain, size))) in result.iter().zip(expected).enumerate() {
        if !exact.is_finite() || !plain.is_finite() || size > f64::from(f32::MAX) / 4.0 {
            // What is infinite or NaN stays so. Finite sums that overflow may do so in one order of addition only.
            let is = |other: f32| y.is_nan() && other.is_nan() || *y == other;
            let same = is(plain) || is(exact as f32);
            assert!(same || size.is_finite(), "element {i}: {y} instead of {exact}");
            continue;
        }
        let error = (f64::from(*y) - exact).abs();
        let allowed = 2.0 * (f64::from(plain) - exact).abs()
            + 4.0 * f64::from(f32::EPSILON) * size
            + case.k as f64 * f64::from(f32::from_bits(1));
        assert!(
            error <= allowed,
            "element {i}: {y:e} for {exact:e}, error {error:e}, allowed {allowed:e}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn rows_of_any_scale(
        m in 1usize..50, n in 1usize..40, k in 1usize..150, seed: u64, low in -55i32..0, width in 1i32..70, specials: bool
    ) {
        let Some(form) = six() else { return Ok(()) };
        let mut seed = seed;
        let mut case = Case::<f32>::new(m, n, k, 1);
        case.w.iter_mut().for_each(|w| *w = number(low..low + width, &mut seed));
        for row in 0..m {
            let scale = &SCALES[(seed >> 33) as usize % SCALES.len()];
            for x in &mut case.x[row * (k + 1)..][..k] {
                *x = number(scale.clone(), &mut seed);
                if seed >> 60 == 0 {
                    *x = 0.0;
                }
            }
            if specials && seed >> 62 == 0 {
                case.x[row * (k + 1)] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX][(seed >> 50) as usize % 4];
            }
        }
        let e = Epilogue::default();
        assert_as_good_as_fp32(&case, &run(&form, &case, 2, &e), &case.expected(&e));
    }

    #[test]
    fn pieces_add_up(bits: u32) {
        let value = f32::from_bits(bits);
        if value.abs() >= 2f32.powi(-102) && value.abs() < 2f32.powi(125) {
            let pieces = Six::split([value; SIDE]).map(|p| bf16::from_bits(p[3]).widen());
            prop_assert_eq!(pieces[2] + pieces[1] + pieces[0], value);
            prop_assert!(pieces.iter().all(|p| *p == 0.0 || p.is_normal()));
        }
    }
}

/// Largest and mean error of a product over the root mean square of the exact one.
fn errors(result: impl Iterator<Item = f32>, expected: &[(f64, f32, f64)]) -> (f64, f64) {
    let count = expected.len() as f64;
    let rms = (expected.iter().map(|(exact, ..)| exact * exact).sum::<f64>() / count).sqrt();
    let errors: Vec<f64> = result
        .zip(expected)
        .map(|(y, (exact, ..))| (f64::from(y) - exact).abs() / rms)
        .collect();
    (
        errors.iter().copied().fold(0.0, f64::max),
        errors.iter().sum::<f64>() / count,
    )
}

/// Products in fp32 as libraries make them: fused multiplications and additions in blocks of terms.
fn blocked(case: &Case<f32>) -> Vec<f32> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).fold(0f32, |sum, (x, w)| x.mul_add(*w, sum));
    let row = |x: &[f32], w: &[f32]| x.chunks(384).zip(w.chunks(384)).map(|(x, w)| dot(x, w)).sum::<f32>();
    let rows = case.x.chunks(case.k);
    rows.flat_map(|x| case.w.chunks(case.k).map(move |w| row(x, w)))
        .collect()
}

#[test]
fn six_products_are_closer_than_fp32() {
    let Some(form) = six() else { return };
    for (m, n, k) in [
        (33, 40, 64),
        (64, 48, 256),
        (40, 40, 784),
        (33, 33, 2048),
        (17, 17, 8192),
    ] {
        for scales in [-1..1, -30..-10, -40..20] {
            let mut case = Case::<f32>::new(m, n, k, 0);
            let mut seed = k as u64;
            case.x.iter_mut().for_each(|x| *x = number(scales.clone(), &mut seed));
            let e = Epilogue::default();
            let expected = case.expected(&e);
            let (most, mean) = errors(run(&form, &case, 2, &e).into_iter(), &expected);
            let plain = errors(blocked(&case).into_iter(), &expected);
            // The largest of a thousand errors is luck where a few terms are the whole sum.
            let fine = most <= 1.2 * plain.0 && mean <= plain.1;
            assert!(fine, "{m},{n},{k}: {most:e} {mean:e} beside {plain:?}");
        }
    }
}

#[test]
fn weights_that_pieces_cannot_stand_for_are_refused() {
    let usual = [0.5f32, -0.0, 1e-9, 30.0];
    let range = |odd: f32| Six::range(&[&usual, &[odd; 4]]);
    assert!(range(1.0).is_some());
    for odd in [f32::NAN, f32::INFINITY, 1e-45, -1e-38, 1e-20, 1e30, f32::MAX] {
        assert_eq!(range(odd), None, "{odd:e}");
    }
    assert!(Six::range(&[&[0.0; 4]]).is_some());
    assert!(Six::range(&[]).is_some());
}

/// One row out of range must not touch its neighbours in the tile, in any part of the epilogue.
#[test]
fn only_odd_rows_are_mended() {
    let Some(form) = six() else { return };
    let plain = Case::<f32>::new(70, 600, 100, 0);
    let e = plain.epilogue(Activation::Gelu, true);
    let before = run(&form, &plain, 1, &e);
    let mut case = Case::<f32>::new(70, 600, 100, 0);
    for row in [0, 17, 31, 69] {
        case.x[row * 100 + 50] = 1e-44;
    }
    let e = case.epilogue(Activation::Gelu, true);
    let after = run(&form, &case, 1, &e);
    for (i, (b, a)) in before.chunks(600).zip(after.chunks(600)).enumerate() {
        assert_eq!(b == a, ![0, 17, 31, 69].contains(&i), "row {i}");
        assert!(b.iter().zip(a).all(|(b, a)| (b - a).abs() < 3.0), "row {i}");
    }
}

/// Many rows of long sums are made in another order.
#[test]
fn long_sums_of_many_rows() {
    let blocking = Whole::blocking(4136usize.div_ceil(STEP), 300);
    assert!(blocking.depth < Whole::blocking(64, 300).depth);
    for (gap, all) in [(0, false), (3, true)] {
        let case = Case::<bf16>::new(300, 70, 4136, gap);
        let e = case.epilogue(Activation::Gelu, all);
        let expected = case.expected(&e);
        for form in forms() {
            assert_close(&form.name, &run(&form, &case, 1, &e), &expected, form.slack);
        }
    }
}

/// A thread keeps packed rows for the next columns: of this call, not of the last one, and with what is odd in them.
#[test]
fn rows_are_packed_once_for_all_columns_of_a_call() {
    let Some(form) = six() else { return };
    let (m, n, k) = (40, 8 * PART_COLUMNS + 33, 7);
    for (threads, odd) in [(1, None), (1, Some(1e-44)), (2, Some(f32::INFINITY)), (2, None)] {
        let mut case = Case::<f32>::new(m, n, k, 1);
        case.x.iter_mut().for_each(|x| *x += threads as f32);
        if let Some(odd) = odd {
            case.x[33 * (k + 1) + 3] = odd;
        }
        let e = case.epilogue(Activation::Relu, true);
        assert_as_good_as_fp32(&case, &run(&form, &case, threads, &e), &case.expected(&e));
    }
}
