//! One suite for every kind on every instruction set of the machine.

use super::testing::{ACTIVATIONS, Case, Form, Forms, SIZES, assert_close, run};
use super::*;
use proptest::prelude::*;

fn check<T: Forms>(case: &Case<T>, threads: usize, e: &Epilogue<T>) {
    let expected = case.expected(e);
    for form in T::forms() {
        assert_close(&form.name, &run(&form, case, threads, e), &expected, form.slack);
    }
}

fn every_size<T: Forms>() {
    for m in SIZES {
        for n in SIZES {
            for k in [0, 1, 32, 131] {
                let case = Case::<T>::new(m, n, k, 3);
                check(&case, 2, &case.epilogue(Activation::Relu, (m + n) % 2 == 0));
            }
        }
    }
}

fn every_activation_with_all_that_follows<T: Forms>() {
    for activation in ACTIVATIONS {
        for (m, n, k) in [(1, 70, 40), (1, 600, 300), (45, 200, 33), (13, 600, 33), (7, 10, 3)] {
            let case = Case::<T>::new(m, n, k, 1);
            check(&case, 2, &case.epilogue(activation, true));
        }
    }
}

fn terms_in_several_passes<T: Forms>() {
    for (m, n, k) in [
        (1, 70, 3000),
        (1, 1000, 500),
        (50, 130, 4136),
        (300, 70, 2048),
        (400, 70, 389),
        (20, 6200, 130),
    ] {
        let case = Case::<T>::new(m, n, k, 0);
        check(&case, 3, &case.epilogue(Activation::Gelu, true));
    }
}

fn special_values_go_where_they_belong<T: Forms>() {
    for form in T::forms() {
        let mut case = Case::<T>::new(40, 35, 20, 0);
        case.x[20] = T::narrow(f32::NAN);
        case.x[2 * 20 + 3] = T::narrow(f32::INFINITY);
        case.w.iter_mut().for_each(|w| *w = T::narrow(w.widen().abs() + 0.5));
        let y = run(&form, &case, 2, &case.epilogue(Activation::Relu, false));
        for (i, row) in y.chunks(35).enumerate() {
            match i {
                1 => assert!(row.iter().all(|v| v.widen().is_nan()), "{}", form.name),
                2 => assert!(row.iter().all(|v| v.widen() == f32::INFINITY), "{}", form.name),
                _ => assert!(row.iter().all(|v| v.widen().is_finite()), "{}", form.name),
            }
        }
    }
}

/// With eager's rounding points a fused layer is, bit for bit, its ops one after the other.
fn rounding_where_eager_rounds<T: Forms>() {
    let case = Case::<T>::new(37, 70, 131, 2);
    for (form, activation) in T::forms().iter().flat_map(|f| ACTIVATIONS.map(|a| (f, a))) {
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
        let (product, active) = (run(form, &case, 1, &linear), run(form, &case, 1, &active));
        let fused = run(form, &case, 2, &all);
        for (i, (fused, active)) in fused.iter().zip(&active).enumerate() {
            let other = case.residual[i / 70 * 72 + i % 70].widen();
            let apart = T::rounded(active.widen() + other);
            assert_eq!(fused.widen().to_bits(), apart.to_bits(), "{}", form.name);
        }
        if activation == Activation::Relu {
            let expected = product.iter().map(|p| p.widen().max(0.0));
            assert!(expected.zip(&active).all(|(e, a)| e == a.widen()), "{}", form.name);
        }
    }
}

macro_rules! for_both {
    ($($name:ident),*) => {
        mod in_fp32 {
            $(#[test] fn $name() { super::$name::<f32>() })*
        }
        mod in_bf16 {
            $(#[test] fn $name() { super::$name::<half::bf16>() })*
        }
    };
}
for_both!(
    every_size,
    every_activation_with_all_that_follows,
    terms_in_several_passes,
    special_values_go_where_they_belong,
    rounding_where_eager_rounds
);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_size(m in 0usize..80, n in 0usize..200, k in 0usize..200, gap in 0usize..5, threads in 1usize..5) {
        let case = Case::<f32>::new(m, n, k, gap);
        check(&case, threads, &case.epilogue(Activation::None, k % 2 == 0));
        let case = Case::<half::bf16>::new(m, n, k, gap);
        check(&case, threads, &case.epilogue(Activation::None, k % 2 == 0));
    }
}

#[test]
fn every_kind_is_tested() {
    fn named(forms: &[Form<impl LinearElement>], kind: &Kind) -> bool {
        forms.iter().any(|f| f.name.split(' ').next() == Some(kind.name()))
    }
    for kind in KINDS.iter().filter(|k| k.available()) {
        let tested = match kind.dtype() {
            hypatia_core::ty::DType::F32 => named(&f32::forms(), kind),
            _ => named(&bf16::forms(), kind),
        };
        assert!(tested, "{kind:?}");
    }
}

#[test]
fn wrong_operands_are_refused() {
    let (w, x, mut y) = ([0f32; 12], [0f32; 8], [0f32; 6]);
    let kind = Kind::named("f32", hypatia_core::ty::DType::F32).unwrap();
    let packed = Packed::pack(kind, Rows::dense(&w, 4), 3, 4).unwrap();
    assert_eq!((packed.kind(), packed.sizes()), (kind, (3, 4)));
    assert!(packed.bytes() >= 48);
    assert!(Packed::pack(kind, Rows::dense(&w, 4), 4, 4).is_err());
    assert!(Packed::pack(kind, Rows::dense(&[bf16::ZERO; 12], 4), 3, 4).is_err());
    let e = Epilogue::default();
    let mut run = |x: &[f32], short: usize, e: &Epilogue<f32>| {
        packed.run(1, Rows::dense(x, 4), 2, RowsMut::dense(&mut y[short..], 3), e)
    };
    assert!(run(&x, 0, &e).is_ok());
    assert!(run(&x[1..], 0, &e).is_err());
    assert!(run(&x, 1, &e).is_err());
    let bias = Some(&x[..2]);
    assert!(run(&x, 0, &Epilogue { bias, ..e }).is_err());
    let (x, mut y) = ([bf16::ZERO; 8], [bf16::ZERO; 6]);
    let e = Epilogue::default();
    assert!(
        packed
            .run(1, Rows::dense(&x, 4), 2, RowsMut::dense(&mut y, 3), &e)
            .is_err()
    );
}

#[test]
fn operands_are_measured_without_overflow() {
    let mut data = [0f32; 10];
    let rows = |stride| Rows {
        data: &[0f32; 10],
        stride,
    };
    assert!(rows(3).check("x", 3, 4).is_ok());
    assert!(rows(4).check("x", 3, 3).is_err());
    assert!(rows(0).check("x", 1000, 10).is_ok());
    assert!(rows(usize::MAX).check("x", 3, 1).is_err());
    assert!(rows(5).check("x", 0, usize::MAX).is_ok());
    let mut overlapping = |rows| {
        let y = RowsMut {
            data: &mut data,
            stride: 3,
        };
        y.check(rows, 4)
    };
    assert!(overlapping(3).is_err());
    assert!(overlapping(1).is_ok());
}
