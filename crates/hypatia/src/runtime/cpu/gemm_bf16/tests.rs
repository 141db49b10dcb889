use super::*;
use crate::runtime::cpu::linear::Activation;
use crate::runtime::cpu::linear::testing::{ACTIVATIONS, Case, SIZES, assert_close};
use proptest::prelude::*;

/// The engines of this machine.
fn engines() -> Vec<Engine> {
    let mut engines: Vec<_> = Level::ALL
        .into_iter()
        .filter(|l| *l <= lanes::level())
        .map(Engine::Wide)
        .collect();
    if !engines.contains(&engine()) {
        engines.push(engine());
    }
    engines
}

fn run<F: Format>(case: &Case<F::Value>, engine: Engine, threads: usize, e: &Epilogue<F::Value>) -> Vec<F::Value> {
    let packed = Tiles::<F>::pack(case.w(), case.n, case.k).unwrap();
    case.run(|y| packed.run(engine, threads, case.x(), case.m, y, e).unwrap())
}

fn check(case: &Case<bf16>, threads: usize, e: &Epilogue<bf16>) {
    for engine in engines() {
        assert_close(&run::<Whole>(case, engine, threads, e), &case.expected(e), 4.0);
    }
}

#[test]
fn every_size_on_every_engine() {
    for m in SIZES {
        for n in SIZES {
            for k in [0, 1, 32, 131] {
                let case = Case::new(m, n, k, 3);
                check(&case, 2, &case.epilogue(Activation::Relu, (m + n) % 2 == 0));
            }
        }
    }
}

#[test]
fn every_activation_with_all_that_follows() {
    for activation in ACTIVATIONS {
        for (m, n, k) in [(1, 70, 40), (45, 200, 33), (7, 10, 3)] {
            let case = Case::new(m, n, k, 1);
            check(&case, 2, &case.epilogue(activation, true));
        }
    }
}

#[test]
fn terms_in_several_passes() {
    for (m, n, k) in [
        (1, 70, 3000),
        (50, 130, 2 * Whole::DEPTH * STEP + 40),
        (300, 70, Whole::DEPTH * STEP),
    ] {
        let case = Case::new(m, n, k, 0);
        check(&case, 3, &case.epilogue(Activation::Gelu, true));
    }
}

/// With eager's rounding points a fused layer is, bit for bit, its ops one after the other.
#[test]
fn rounding_where_eager_rounds() {
    for engine in engines() {
        for activation in ACTIVATIONS {
            let case = Case::<bf16>::new(37, 70, 131, 2);
            let all = Epilogue {
                round_before_activation: true,
                ..case.epilogue(activation, true)
            };
            let linear = Epilogue {
                activation: Activation::None,
                residual: None,
                ..all
            };
            let active = Epilogue { residual: None, ..all };
            let (product, active) = (
                run::<Whole>(&case, engine, 1, &linear),
                run::<Whole>(&case, engine, 1, &active),
            );
            let fused = run::<Whole>(&case, engine, 2, &all);
            for (i, (fused, active)) in fused.iter().zip(&active).enumerate() {
                let other = case.residual[i / 70 * 72 + i % 70].widen();
                assert_eq!(fused.to_bits(), bf16::narrow(active.widen() + other).to_bits());
            }
            if activation == Activation::Relu {
                let expected = product.iter().map(|p| if p.widen() < 0.0 { bf16::ZERO } else { *p });
                assert!(expected.zip(&active).all(|(e, a)| e.to_bits() == a.to_bits()));
            }
        }
    }
}

#[test]
fn special_values_go_where_they_belong() {
    for engine in engines() {
        let mut case = Case::<bf16>::new(40, 35, 20, 0);
        case.x[20] = bf16::NAN;
        case.x[2 * 20 + 3] = bf16::INFINITY;
        case.w.iter_mut().for_each(|w| *w = bf16::narrow(w.widen().abs() + 0.5));
        let y = run::<Whole>(&case, engine, 2, &case.epilogue(Activation::Relu, false));
        for (i, row) in y.chunks(35).enumerate() {
            match i {
                1 => assert!(row.iter().all(|v| v.is_nan())),
                2 => assert!(row.iter().all(|v| *v == bf16::INFINITY)),
                _ => assert!(row.iter().all(|v| v.is_finite())),
            }
        }
    }
}

#[test]
fn splits_are_as_good_as_they_say() {
    if matches!(engine(), Engine::Wide(_)) {
        return;
    }
    for (m, n, k) in [
        (0, 5, 5),
        (1, 1, 1),
        (3, 17, 33),
        (40, 70, 131),
        (70, 40, 2100),
        (16, 96, 784),
    ] {
        let case = Case::<f32>::new(m, n, k, 2);
        for e in [
            case.epilogue(Activation::None, false),
            case.epilogue(Activation::GeluTanh, true),
        ] {
            let expected = case.expected(&e);
            assert_close(&run::<Six>(&case, engine(), 2, &e), &expected, 4.0);
            assert_close(&run::<Three>(&case, engine(), 2, &e), &expected, 128.0);
        }
    }
}

#[test]
fn splits_keep_infinities_and_the_largest_numbers() {
    if matches!(engine(), Engine::Wide(_)) {
        return;
    }
    let mut case = Case::<f32>::new(36, 20, 40, 0);
    case.w.fill(0.5);
    case.x[40] = f32::INFINITY;
    case.x[2 * 40] = f32::NAN;
    case.x[3 * 40..4 * 40].fill(0.0);
    case.x[3 * 40 + 7] = f32::MAX;
    let e = Epilogue::default();
    for precision in [Precision::Bf16x3, Precision::Bf16x6] {
        let packed = PackedSplit::pack(case.w(), 20, 40, precision).unwrap().unwrap();
        let y = case.run(|y| packed.run(2, case.x(), 36, y, &e).unwrap());
        assert!(y[20..40].iter().all(|v| *v == f32::INFINITY));
        assert!(y[40..60].iter().all(|v| v.is_nan()));
        assert!(y[60..80].iter().all(|v| (v / f32::MAX - 0.5).abs() < 1e-4));
        assert!(y[80..].iter().all(|v| v.is_finite()));
    }
    case.w[5] = f32::NAN;
    assert!(
        PackedSplit::pack(case.w(), 20, 40, Precision::Bf16x6)
            .unwrap()
            .is_none()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_size(m in 0usize..80, n in 0usize..200, k in 0usize..200, gap in 0usize..5, threads in 1usize..5) {
        let case = Case::new(m, n, k, gap);
        check(&case, threads, &case.epilogue(Activation::None, k % 2 == 0));
    }

    #[test]
    fn pieces_add_up(bits: u32) {
        let value = f32::from_bits(bits);
        if value.is_finite() {
            let sum: f32 = Six::split(value).iter().rev().map(|&p| bf16::from_bits(p).widen()).sum();
            prop_assert!((sum - value).abs() <= value.abs() * 1e-7 + 1e-39);
        }
    }
}
