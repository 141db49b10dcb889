//! Regions beside a scalar evaluation in f64, over dtypes, strides and sizes.

use half::{bf16, f16};
use proptest::prelude::*;

use hypatia_core::ty::DType;

use super::program::TILE;
use super::*;
use crate::kernels::region::{Instruction, Op, Region, Rounding, Scalar};

fn one(op: Op) -> Instruction {
    Instruction::new(op, [0])
}

/// Runs a region of one output over dense inputs.
fn dense<I: Element, O: Element>(region: &Region, inputs: &[&[I]], zero: O) -> Vec<O> {
    let n = inputs[0].len();
    let mut out = vec![zero; n];
    let views: Vec<View> = inputs.iter().map(|x| View::new(x, &[1])).collect();
    region
        .run(2, &[n], &views, &mut [ViewMut::new(&mut out, &[1])])
        .unwrap();
    out
}

fn unary(op: Op, x: &[f32]) -> Vec<f32> {
    let region = Region::new(&[DType::F32], vec![one(op)], &[1], Rounding::EveryOp).unwrap();
    dense(&region, &[x], 0.0)
}

fn binary<I: Element, O: Element>(op: Op, a: &[I], b: &[I], zero: O) -> Vec<O> {
    let code = vec![Instruction::new(op, [0, 1])];
    let region = Region::new(&[I::DTYPE; 2], code, &[2], Rounding::EveryOp).unwrap();
    dense(&region, &[a, b], zero)
}

fn same(a: f32, b: f32) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

#[test]
fn sizes_around_tiles_and_lanes() {
    for n in [0, 1, 2, 15, 16, 17, 31, TILE - 1, TILE, TILE + 1, 3 * TILE + 7, 100_003] {
        let x: Vec<f32> = (0..n).map(|i| i as f32 - 7.0).collect();
        assert_eq!(
            unary(Op::Relu, &x),
            x.iter().map(|v| v.max(0.0)).collect::<Vec<_>>(),
            "{n}"
        );
    }
}

#[test]
fn extremes_propagate_nan() {
    let values = [f32::NAN, -1.0, 0.0, 2.0, f32::INFINITY, f32::NEG_INFINITY];
    for a in values {
        for b in values {
            let nan = a.is_nan() || b.is_nan();
            let most = if nan { f32::NAN } else { a.max(b) };
            let least = if nan { f32::NAN } else { a.min(b) };
            assert!(same(binary(Op::Maximum, &[a], &[b], 0.0f32)[0], most), "{a} {b}");
            assert!(same(binary(Op::Minimum, &[a], &[b], 0.0f32)[0], least), "{a} {b}");
        }
    }
    assert!(unary(Op::Relu, &[f32::NAN])[0].is_nan());
}

#[test]
fn clamp_follows_torch() {
    let bound = |x| Instruction::new(Op::Constant(Scalar::Float(x), DType::F32), []);
    let clamp = |low: f64, high: f64, x: &[f32]| {
        let code = vec![bound(low), bound(high), Instruction::new(Op::Clamp, [0, 1, 2])];
        dense(
            &Region::new(&[DType::F32], code, &[3], Rounding::EveryOp).unwrap(),
            &[x],
            0.0f32,
        )
    };
    let x = [-3.0, -1.0, 0.5, 7.0, f32::INFINITY];
    assert_eq!(clamp(-1.0, 2.0, &x), [-1.0, -1.0, 0.5, 2.0, 2.0]);
    assert_eq!(clamp(2.0, -1.0, &x), [-1.0; 5]);
    assert!(clamp(-1.0, 2.0, &[f32::NAN])[0].is_nan());
    // Bounds that are NaN never come here: `lower::plan::numbers` leaves them to torch.
}

#[test]
fn sixteen_bits_round_after_every_op_unless_told() {
    // (x + y) - x: eager loses y where it is too small for a bf16 sum.
    let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Sub, [2, 0])];
    let run = |rounding| {
        let region = Region::new(&[DType::BF16; 2], code.clone(), &[3], rounding).unwrap();
        let (x, y) = ([bf16::from_f32(256.0)], [bf16::from_f32(0.5)]);
        dense(&region, &[&x, &y], bf16::ZERO)[0].to_f32()
    };
    assert_eq!(run(Rounding::EveryOp), 0.0);
    assert_eq!(run(Rounding::AtStores), 0.5);
}

#[test]
fn constants_of_sixteen_bits_are_not_rounded() {
    // torch: bf16(1) * 1.001 is computed in f32 and rounded once.
    let constant = Instruction::new(Op::Constant(Scalar::Float(1.0039), DType::BF16), []);
    let code = vec![constant, Instruction::new(Op::Mul, [0, 1])];
    let region = Region::new(&[DType::BF16], code, &[2], Rounding::EveryOp).unwrap();
    let x = bf16::from_f32(100.0);
    assert_eq!(dense(&region, &[&[x]], bf16::ZERO)[0], bf16::from_f32(100.0 * 1.0039));
}

fn cast<I: Element, O: Element>(x: &[I], zero: O) -> Vec<O> {
    let region = Region::new(&[I::DTYPE], vec![one(Op::Cast(O::DTYPE))], &[1], Rounding::EveryOp).unwrap();
    dense(&region, &[x], zero)
}

#[test]
fn casts() {
    assert_eq!(cast(&[1.9f32, -1.9, 300.0], 0u8), [1, 255, 44]);
    assert_eq!(cast(&[1e20f32, f32::NAN, -1e20], 0u8), [0; 3]);
    assert_eq!(cast(&[1e20f32, f32::NAN, -1.5], 0i64), [i64::MIN, i64::MIN, -1]);
    assert_eq!(cast(&[3e9f64, f64::NAN, -2.9], 0i32), [i32::MIN, i32::MIN, -2]);
    assert_eq!(cast(&[0.0f32, -0.0, 0.1, f32::NAN], false), [false, false, true, true]);
    assert_eq!(cast(&[300i64, -1, 128], 0i8), [44, -1, -128]);
    assert_eq!(cast(&[i64::MAX], 0f32), [i64::MAX as f32]);
    assert_eq!(cast(&[true, false], 0i32), [1, 0]);
    assert_eq!(cast(&[1.0f64 + 1e-12], 0f32), [1.0]);
    assert_eq!(cast(&[0.1f32], f16::ZERO), [f16::from_f32(0.1)]);
    assert_eq!(
        cast(&[f16::from_f32(0.1)], bf16::ZERO),
        [bf16::from_f32(f16::from_f32(0.1).to_f32())]
    );
    assert_eq!(cast(&[i16::MIN, 5], 0i64), [-32768, 5]);
}

#[test]
fn integers_wrap() {
    assert_eq!(binary(Op::Add, &[200u8], &[100u8], 0u8), [44]);
    assert_eq!(binary(Op::Mul, &[i32::MAX], &[2], 0i32), [-2]);
    assert_eq!(binary(Op::Lt, &[-1i64], &[0], false), [true]);
    let negative = Region::new(&[DType::U8], vec![one(Op::Neg)], &[1], Rounding::EveryOp).unwrap();
    assert_eq!(dense(&negative, &[&[1u8]], 0u8), [255]);
}

#[test]
fn selections() {
    let fill = Instruction::new(Op::Constant(Scalar::Float(-9.0), DType::F32), []);
    let code = vec![
        fill,
        Instruction::new(Op::MaskedFill, [0, 1, 2]),
        Instruction::new(Op::Where, [1, 0, 3]),
    ];
    let region = Region::new(&[DType::F32, DType::Bool], code, &[3, 4, 2], Rounding::EveryOp).unwrap();
    let (x, mask) = ([1.0f32, 2.0, 3.0], [true, false, true]);
    let (mut filled, mut chosen, mut constant) = ([0.0f32; 3], [0.0f32; 3], [0.0f32; 3]);
    let outputs = &mut [
        ViewMut::new(&mut filled, &[1]),
        ViewMut::new(&mut chosen, &[1]),
        ViewMut::new(&mut constant, &[1]),
    ];
    region
        .run(1, &[3], &[View::new(&x, &[1]), View::new(&mask, &[1])], outputs)
        .unwrap();
    assert_eq!(
        (filled, chosen, constant),
        ([-9.0, 2.0, -9.0], [1.0, 2.0, 3.0], [-9.0; 3])
    );
}

#[test]
fn powers() {
    for exponent in [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5] {
        let code = vec![
            Instruction::new(Op::Constant(Scalar::Float(exponent), DType::F32), []),
            Instruction::new(Op::Pow, [0, 1]),
        ];
        let region = Region::new(&[DType::F32], code, &[2], Rounding::EveryOp).unwrap();
        let x = [0.5f32, 1.0, 3.7, 1e-3];
        for (x, y) in x.iter().zip(dense(&region, &[&x], 0.0f32)) {
            let exact = f64::from(*x).powf(exponent);
            assert!((f64::from(y) - exact).abs() <= 2e-7 * exact, "{x} to {exponent}: {y}");
        }
    }
}

#[test]
fn a_product_and_a_sum_in_one_loop_round_twice() {
    let constant = |x| Instruction::new(Op::Constant(Scalar::Float(x), DType::F32), []);
    let x: Vec<f32> = (0..3000).map(|i| 1.0 + i as f32 * 1e-4).collect();
    let y: Vec<f32> = x.iter().map(|v| 1.0 / v).collect();
    let run = |product: [usize; 2], sum: [usize; 2], outputs: &[usize]| {
        let code = vec![
            constant(1.1),
            constant(-0.9),
            Instruction::new(Op::Mul, product),
            Instruction::new(Op::Add, sum),
        ];
        let region = Region::new(&[DType::F32; 2], code, outputs, Rounding::EveryOp).unwrap();
        let (mut out, mut other) = (vec![0f32; 3000], vec![0f32; 3000]);
        let inputs = [View::new(&x, &[1]), View::new(&y, &[1])];
        let views = [ViewMut::new(&mut out, &[1]), ViewMut::new(&mut other, &[1])];
        let mut views: Vec<ViewMut> = views.into_iter().take(outputs.len()).collect();
        region.run(1, &[3000], &inputs, &mut views).unwrap();
        (out, other)
    };
    let expect = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(&y).map(|(a, b)| f(*a, *b)).collect::<Vec<f32>>();
    assert_eq!(run([0, 1], [4, 0], &[5]).0, expect(&|a, b| a * b + a));
    assert_eq!(run([0, 1], [1, 4], &[5]).0, expect(&|a, b| a * b + b));
    assert_eq!(run([0, 0], [4, 1], &[5]).0, expect(&|a, b| a * a + b));
    assert_eq!(run([2, 0], [4, 1], &[5]).0, expect(&|a, b| a * 1.1 + b));
    assert_eq!(run([0, 2], [3, 4], &[5]).0, expect(&|a, _| a * 1.1 + -0.9));
    assert_eq!(run([0, 1], [4, 3], &[5]).0, expect(&|a, b| a * b + -0.9));
    assert_eq!(run([2, 3], [4, 1], &[5]).0, expect(&|_, b| 1.1 * -0.9 + b));
    assert_eq!(run([0, 1], [4, 4], &[5]).0, expect(&|a, b| a * b + a * b));
    // The product itself is an output, too.
    let (sum, product) = run([0, 1], [4, 0], &[5, 4]);
    assert_eq!((sum, product), (expect(&|a, b| a * b + a), expect(&|a, b| a * b)));
}

#[test]
fn memory_may_be_written_in_place() {
    let code = vec![one(Op::Square), Instruction::new(Op::Add, [1, 0])];
    let region = Region::new(&[DType::F32], code, &[2], Rounding::EveryOp).unwrap();
    let mut x: Vec<f32> = (0..5000).map(|i| i as f32 * 0.01).collect();
    let expected: Vec<f32> = x.iter().map(|v| v * v + v).collect();
    let data: *mut u8 = x.as_mut_ptr().cast();
    // SAFETY: the whole of a live vector, with the same strides.
    let (input, output) = unsafe {
        (
            View::from_raw(data, DType::F32, &[1]),
            ViewMut::from_raw(data, DType::F32, &[1]),
        )
    };
    region.run(2, &[5000], &[input], &mut [output]).unwrap();
    assert_eq!(x, expected);
}

#[test]
fn one_loop_from_memory_to_memory() {
    // Long tiles, their ends, strides in between, and in place.
    for n in [15 * TILE, 16 * TILE + 16, 33 * TILE + 5] {
        let x: Vec<f32> = (0..n).map(|i| (i % 1013) as f32 * 0.01 - 5.0).collect();
        let expected: Vec<f32> = x.iter().map(|v| v * v).collect();
        let region = Region::new(&[DType::F32], vec![one(Op::Square)], &[1], Rounding::EveryOp).unwrap();
        assert_eq!(dense(&region, &[&x], 0f32), expected);
        let mut gaps = vec![0f32; 2 * n];
        let output = &mut [ViewMut::new(&mut gaps, &[2])];
        region.run(2, &[n], &[View::new(&x, &[1])], output).unwrap();
        assert!(gaps.iter().step_by(2).eq(&expected));
        let mut same = x.clone();
        let data: *mut u8 = same.as_mut_ptr().cast();
        // SAFETY: the whole of a live vector, with the same strides.
        let (input, output) = unsafe {
            (
                View::from_raw(data, DType::F32, &[1]),
                ViewMut::from_raw(data, DType::F32, &[1]),
            )
        };
        region.run(2, &[n], &[input], &mut [output]).unwrap();
        assert_eq!(same, expected);
    }
}

#[test]
fn a_rounded_value_that_is_stored_and_used() {
    // The sum is an output, and what is subtracted from is its rounded value.
    let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Sub, [2, 0])];
    let region = Region::new(&[DType::BF16; 2], code, &[2, 3], Rounding::EveryOp).unwrap();
    let (x, y) = ([bf16::from_f32(256.0)], [bf16::from_f32(0.5)]);
    let (mut sum, mut difference) = ([bf16::ZERO], [bf16::ONE]);
    let outputs = &mut [ViewMut::new(&mut sum, &[1]), ViewMut::new(&mut difference, &[1])];
    region
        .run(1, &[1], &[View::new(&x, &[1]), View::new(&y, &[1])], outputs)
        .unwrap();
    assert_eq!((sum[0].to_f32(), difference[0].to_f32()), (256.0, 0.0));
}

#[test]
fn mistakes_are_refused() {
    let new = |op, args: &[usize]| {
        Region::new(
            &[DType::F32, DType::I64],
            vec![Instruction::new(op, args.to_vec())],
            &[2],
            Rounding::EveryOp,
        )
    };
    assert!(new(Op::Add, &[0, 1]).is_err());
    assert!(new(Op::Add, &[0]).is_err());
    assert!(new(Op::Exp, &[1]).is_err());
    assert!(new(Op::Neg, &[2]).is_err());
    assert!(Region::new(&[DType::F32], vec![], &[1], Rounding::EveryOp).is_err());
    let region = Region::new(&[DType::F32], vec![one(Op::Neg)], &[1], Rounding::EveryOp).unwrap();
    let (x, mut out) = ([0.0f32; 4], [0.0f32; 4]);
    let mut run = |shape: &[usize], from: &[isize], to: &[isize]| {
        region.run(1, shape, &[View::new(&x, from)], &mut [ViewMut::new(&mut out, to)])
    };
    assert!(run(&[2, 2], &[2, 1], &[2, 1]).is_ok());
    assert!(run(&[2, 2], &[3, 1], &[2, 1]).is_err());
    assert!(run(&[2, 2], &[-1, 1], &[2, 1]).is_err());
    assert!(run(&[2, 2], &[2, 1], &[1, 1]).is_err());
    assert!(run(&[2, 2], &[2, 1], &[0, 1]).is_err());
    assert!(run(&[2, 2], &[2], &[2, 1]).is_err());
}

type Exact = fn(f64) -> f64;

fn every_unary() -> [(Op, Exact); 8] {
    [
        (Op::Neg, |x| -x),
        (Op::Abs, f64::abs),
        (Op::Square, |x| x * x),
        (Op::Floor, f64::floor),
        (Op::Ceil, f64::ceil),
        (Op::Exp, f64::exp),
        (Op::Reciprocal, |x| 1.0 / x),
        (Op::Tanh, f64::tanh),
    ]
}

#[test]
fn unary_ops_in_every_float_type() {
    let x: Vec<f64> = (-40..40).map(|i| i as f64 / 8.0 + 1.0 / 16.0).collect();
    for (op, exact) in every_unary() {
        let run = |dtype: DType| Region::new(&[dtype], vec![one(op)], &[1], Rounding::EveryOp).unwrap();
        let single: Vec<f32> = x.iter().map(|v| *v as f32).collect();
        let brain: Vec<bf16> = x.iter().map(|v| bf16::from_f64(*v)).collect();
        let half: Vec<f16> = x.iter().map(|v| f16::from_f64(*v)).collect();
        let double = dense(&run(DType::F64), &[&x], 0f64);
        for (i, got) in dense(&run(DType::F32), &[&single], 0f32).iter().enumerate() {
            let want = exact(x[i]);
            assert!((double[i] - want).abs() <= want.abs() * 1e-14, "{op:?}");
            assert!(
                (f64::from(*got) - want).abs() <= want.abs() * 2.5e-7,
                "{op:?} of {}",
                x[i]
            );
        }
        for (got, v) in dense(&run(DType::BF16), &[&brain], bf16::ZERO).iter().zip(&brain) {
            let want = exact(v.to_f64());
            assert!((got.to_f64() - want).abs() <= want.abs() * 0.00392, "{op:?} of {v}");
        }
        for (got, v) in dense(&run(DType::F16), &[&half], f16::ZERO).iter().zip(&half) {
            let want = exact(v.to_f64());
            assert!(
                (got.to_f64() - want).abs() <= want.abs() * 4.9e-4 + 3e-8,
                "{op:?} of {v}"
            );
        }
    }
}

/// A random instruction: an op by number, and operands by numbers taken modulo the values there are.
fn drawn(values: usize, (op, a, b, c): (u8, usize, usize, usize)) -> Instruction {
    let (a, b, c) = (a % values, b % values, c % values);
    match op {
        0 => Instruction::new(Op::Constant(Scalar::Float(a as f64 - 2.5), DType::F32), []),
        1 => Instruction::new(Op::Neg, [a]),
        2 => Instruction::new(Op::Cast(DType::F32), [a]),
        3 => Instruction::new(Op::Clamp, [a, b, c]),
        4 => Instruction::new(Op::Maximum, [a, b]),
        5 => Instruction::new(Op::Sub, [a, b]),
        6 | 7 => Instruction::new(Op::Mul, [a, b]),
        _ => Instruction::new(Op::Add, [a, b]),
    }
}

fn evaluate(code: &[Instruction], inputs: &[f32]) -> Vec<f32> {
    let mut values = inputs.to_vec();
    for i in code {
        let v = |k: usize| values[i.args[k]];
        values.push(match i.op {
            Op::Constant(Scalar::Float(x), _) => x as f32,
            Op::Neg => -v(0),
            Op::Cast(_) => v(0),
            Op::Clamp => v(0).max(v(1)).min(v(2)),
            Op::Maximum => v(0).max(v(1)),
            Op::Sub => v(0) - v(1),
            Op::Mul => v(0) * v(1),
            _ => v(0) + v(1),
        });
    }
    values
}

proptest! {
    /// Registers are given and taken back rightly, whatever the program.
    #[test]
    fn any_program(
        drawn_code in prop::collection::vec((0u8..11, 0usize..64, 0usize..64, 0usize..64), 1..24),
        outputs in prop::collection::vec(0usize..64, 1..4),
        n in 1usize..2100,
    ) {
        let code: Vec<Instruction> = (2..).zip(drawn_code).map(|(values, d)| drawn(values, d)).collect();
        let outputs: Vec<usize> = outputs.iter().map(|o| o % (2 + code.len())).collect();
        let x: Vec<f32> = (0..n).map(|i| (i % 97) as f32 * 0.125 - 6.0).collect();
        let y: Vec<f32> = (0..n).map(|i| (i % 89) as f32 * 0.25 - 11.0).collect();
        let region = Region::new(&[DType::F32; 2], code.clone(), &outputs, Rounding::EveryOp).unwrap();
        let mut results = vec![vec![0f32; n]; outputs.len()];
        let mut views: Vec<ViewMut> = results.iter_mut().map(|r| ViewMut::new(r, &[1])).collect();
        region.run(1, &[n], &[View::new(&x, &[1]), View::new(&y, &[1])], &mut views).unwrap();
        drop(views);
        for i in 0..n {
            let values = evaluate(&code, &[x[i], y[i]]);
            // Beyond infinity the two notions of a maximum part company.
            if values.iter().all(|v| v.is_finite()) {
                for (result, &output) in results.iter().zip(&outputs) {
                    prop_assert_eq!(result[i], values[output]);
                }
            }
        }
    }

    /// Strided, broadcast and permuted operands against plain indexing.
    #[test]
    fn any_strides(
        shape in prop::collection::vec(1usize..9, 0..4),
        order in Just([0usize, 1, 2, 3]).prop_shuffle(),
        repeated in prop::collection::vec(any::<bool>(), 4),
        gap in 1isize..4,
        threads in 1usize..3,
    ) {
        let mut shape = shape;
        if let Some(last) = shape.last_mut() {
            *last *= 37;
        }
        let rank = shape.len();
        // A permuted layout with gaps for one input and the output, a broadcast one for the other input.
        let (mut strides, mut next) = (vec![0isize; rank], gap);
        for d in order.into_iter().filter(|d| *d < rank) {
            strides[d] = next;
            next *= shape[d] as isize;
        }
        let mut broadcast = strides.clone();
        for (d, stride) in broadcast.iter_mut().enumerate() {
            *stride = if repeated[d] { 0 } else { *stride };
        }
        let a: Vec<f32> = (0..next).map(|i| i as f32).collect();
        let b: Vec<bf16> = (0..next).map(|i| bf16::from_f32((i % 251) as f32)).collect();
        let mut out = vec![-1f64; next as usize];
        let code = vec![
            Instruction::new(Op::Cast(DType::F32), [1]),
            Instruction::new(Op::Add, [0, 2]),
            Instruction::new(Op::Cast(DType::F64), [3]),
        ];
        let region = Region::new(&[DType::F32, DType::BF16], code, &[4], Rounding::EveryOp).unwrap();
        let inputs = [View::new(&a, &strides), View::new(&b, &broadcast)];
        region.run(threads, &shape, &inputs, &mut [ViewMut::new(&mut out, &strides)]).unwrap();
        let mut expected = vec![-1f64; next as usize];
        for position in 0..shape.iter().product() {
            let (mut rest, mut at, mut other) = (position, 0, 0);
            for d in (0..rank).rev() {
                at += (rest % shape[d]) as isize * strides[d];
                other += (rest % shape[d]) as isize * broadcast[d];
                rest /= shape[d];
            }
            expected[at as usize] = f64::from(a[at as usize] + b[other as usize].to_f32());
        }
        prop_assert_eq!(out, expected);
    }
}
