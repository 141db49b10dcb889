use super::*;
use crate::runtime::cpu::linear::testing::{ACTIVATIONS, Case, SIZES, assert_close};
use proptest::prelude::*;

fn run(case: &Case<f32>, level: Level, threads: usize, e: &Epilogue<f32>) -> Vec<f32> {
    let packed = PackedF32::pack(case.w(), case.n, case.k).unwrap();
    case.run(|y| packed.run_at(level, threads, case.x(), case.m, y, e).unwrap())
}

fn check(case: &Case<f32>, threads: usize, e: &Epilogue<f32>) {
    for level in Level::ALL.into_iter().filter(|l| *l <= lanes::level()) {
        assert_close(&run(case, level, threads, e), &case.expected(e), 4.0);
    }
}

#[test]
fn every_size_at_every_level() {
    for m in SIZES {
        for n in SIZES {
            for k in [0, 1, 16, 131] {
                let case = Case::new(m, n, k, 3);
                check(&case, 2, &case.epilogue(Activation::Relu, (m + n) % 2 == 0));
            }
        }
    }
}

#[test]
fn every_activation_with_all_that_follows() {
    for activation in ACTIVATIONS {
        for (m, n, k) in [(1, 70, 40), (13, 600, 33), (7, 10, 3)] {
            let case = Case::new(m, n, k, 1);
            check(&case, 2, &case.epilogue(activation, true));
        }
    }
}

#[test]
fn terms_in_several_passes() {
    for (m, n, k) in [(1, 70, 2 * DEPTH + 1), (9, 130, 3 * DEPTH), (400, 70, DEPTH + 5)] {
        let case = Case::new(m, n, k, 0);
        check(&case, 3, &case.epilogue(Activation::Gelu, true));
    }
}

#[test]
fn special_values_go_where_they_belong() {
    for level in Level::ALL.into_iter().filter(|l| *l <= lanes::level()) {
        let mut case = Case::<f32>::new(9, 35, 20, 0);
        case.x[20] = f32::NAN;
        case.x[2 * 20 + 3] = f32::INFINITY;
        case.x[4 * 20..5 * 20].fill(1e-45);
        case.w.iter_mut().for_each(|w| *w = w.abs() + 0.5);
        let e = case.epilogue(Activation::Relu, false);
        let y = run(&case, level, 2, &e);
        for (i, row) in y.chunks(35).enumerate() {
            match i {
                1 => assert!(row.iter().all(|v| v.is_nan())),
                2 => assert!(row.iter().all(|v| *v == f32::INFINITY)),
                4 => assert!(row.iter().all(|v| *v > 0.0 && *v < 1e-40)),
                _ => assert!(row.iter().all(|v| v.is_finite())),
            }
        }
    }
}

#[test]
fn short_operands_are_refused() {
    let (w, x, mut y) = ([0f32; 12], [0f32; 8], [0f32; 6]);
    let packed = PackedF32::pack(Rows::dense(&w, 4), 3, 4).unwrap();
    assert!(PackedF32::pack(Rows::dense(&w, 4), 4, 4).is_err());
    let e = Epilogue::default();
    assert!(
        packed
            .run(1, Rows::dense(&x, 4), 2, RowsMut::dense(&mut y, 3), &e)
            .is_ok()
    );
    assert!(
        packed
            .run(1, Rows::dense(&x[1..], 4), 2, RowsMut::dense(&mut y, 3), &e)
            .is_err()
    );
    assert!(
        packed
            .run(1, Rows::dense(&x, 4), 2, RowsMut::dense(&mut y[1..], 3), &e)
            .is_err()
    );
    let short = Epilogue {
        bias: Some(&x[..2]),
        ..e
    };
    assert!(
        packed
            .run(1, Rows::dense(&x, 4), 2, RowsMut::dense(&mut y, 3), &short)
            .is_err()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_size(m in 0usize..80, n in 0usize..200, k in 0usize..200, gap in 0usize..5, threads in 1usize..5) {
        let case = Case::new(m, n, k, gap);
        check(&case, threads, &case.epilogue(Activation::None, k % 2 == 0));
    }
}
