//! Row ops beside f64 and beside a plain loop in f32.

use half::bf16;

use super::*;
use crate::kernels::region::{Instruction, Op, Rounding};
use crate::kernels::rowwise::RowOp;

const SOFTMAX: RowOp = RowOp::Softmax { flushes: false };

const OPS: [RowOp; 8] = [
    SOFTMAX,
    RowOp::Softmax { flushes: true },
    RowOp::LogSoftmax,
    RowOp::LayerNorm { eps: 1e-5 },
    RowOp::RmsNorm { eps: 1e-6 },
    RowOp::Sum,
    RowOp::Mean,
    RowOp::Amax,
];

/// The definitions, in the arithmetic of f64 or rounded to f32 after every op.
fn plain(op: RowOp, x: &[f64], round: fn(f64) -> f64) -> Vec<f64> {
    let n = x.len() as f64;
    let sum = |v: &[f64]| v.iter().fold(0.0, |a, b| round(a + b));
    let most = x
        .iter()
        .copied()
        .fold(f64::NEG_INFINITY, |a, b| if a.is_nan() || a > b { a } else { b });
    let exps: Vec<f64> = x.iter().map(|v| round(round(v - most).exp())).collect();
    let total = sum(&exps);
    match op {
        RowOp::Softmax { .. } => exps.iter().map(|e| round(e / total)).collect(),
        RowOp::LogSoftmax => x.iter().map(|v| round(round(v - most) - round(total.ln()))).collect(),
        RowOp::LayerNorm { eps } => {
            let mean = round(sum(x) / n);
            let squares: Vec<f64> = x.iter().map(|v| round(round(v - mean) * round(v - mean))).collect();
            let scale = round(1.0 / round((sum(&squares) / n + eps).sqrt()));
            x.iter().map(|v| round(round(v - mean) * scale)).collect()
        }
        RowOp::RmsNorm { eps } => {
            let squares: Vec<f64> = x.iter().map(|v| round(v * v)).collect();
            let scale = round(1.0 / round((sum(&squares) / n + eps).sqrt()));
            x.iter().map(|v| round(v * scale)).collect()
        }
        RowOp::Sum => vec![sum(x)],
        RowOp::Mean => vec![round(sum(x) / n)],
        RowOp::Amax => vec![most],
    }
}

fn numbers(n: usize, offset: f32) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| offset + 4.0 * (next() + next() + next())).collect()
}

fn worst(got: &[f32], exact: &[f64]) -> f64 {
    got.iter()
        .zip(exact)
        .map(|(g, e)| (f64::from(*g) - e).abs())
        .fold(0.0, f64::max)
}

#[test]
fn as_accurate_as_a_plain_loop() {
    for width in [1, 2, 3, 15, 16, 17, 63, 64, 65, 768, 1000, 4096, 10_007] {
        for offset in [0.0, 100.0] {
            let rows = 5;
            let x = numbers(rows * width, offset);
            let full = [width as isize, 1];
            for op in OPS {
                let per_row = if op.reduces() { 1 } else { width };
                let mut out = vec![0f32; rows * per_row];
                let strides: &[isize] = if op.reduces() { &[1] } else { &full };
                let input = View::new(&x, &full);
                Rowwise::new(op, DType::F32)
                    .unwrap()
                    .run(2, &[rows, width], 1, &[input], &mut [ViewMut::new(&mut out, strides)])
                    .unwrap();
                for row in 0..rows {
                    let x: Vec<f64> = x[row * width..(row + 1) * width]
                        .iter()
                        .map(|v| f64::from(*v))
                        .collect();
                    let exact = plain(op, &x, |v| v);
                    let loops = plain(op, &x, |v| f64::from(v as f32));
                    let loop_error = loops.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    // Sums that cancel are judged by what is summed.
                    let scale = match op {
                        RowOp::Sum => x.iter().map(|v| v.abs()).sum(),
                        RowOp::Mean => x.iter().map(|v| v.abs()).sum::<f64>() / x.len() as f64,
                        _ => exact.iter().map(|v| v.abs()).fold(0.0, f64::max),
                    };
                    let error = worst(&out[row * per_row..(row + 1) * per_row], &exact);
                    assert!(
                        error <= loop_error + 2e-7 * scale,
                        "{op:?} {width} {offset}: {error} {loop_error}"
                    );
                }
            }
        }
    }
}

#[test]
fn strided_rows_and_several_dimensions() {
    // Rows of two dimensions inside a larger tensor.
    let x = numbers(3 * 10 * 40, 0.0);
    let (shape, strides) = ([3, 7, 30], [400isize, 40, 1]);
    let mut out = vec![0f32; 3 * 7 * 30];
    Rowwise::new(SOFTMAX, DType::F32)
        .unwrap()
        .run(
            1,
            &shape,
            2,
            &[View::new(&x, &strides)],
            &mut [ViewMut::new(&mut out, &[210, 30, 1])],
        )
        .unwrap();
    for row in 0..3 {
        let values: Vec<f64> = (0..210)
            .map(|i| f64::from(x[row * 400 + i / 30 * 40 + i % 30]))
            .collect();
        assert!(worst(&out[row * 210..(row + 1) * 210], &plain(SOFTMAX, &values, |v| v)) < 1e-7);
    }
}

#[test]
fn residual_norm_and_scale() {
    let (rows, width) = (13, 771);
    let (x, r, w) = (
        numbers(rows * width, 0.0),
        numbers(rows * width + 1, 1.0),
        numbers(width, 2.0),
    );
    let r = &r[1..];
    let prologue = Region::new(
        &[DType::F32; 2],
        vec![Instruction::new(Op::Add, [0, 1])],
        &[2, 2],
        Rounding::EveryOp,
    );
    let epilogue = Region::new(
        &[DType::F32; 2],
        vec![Instruction::new(Op::Mul, [0, 1])],
        &[2],
        Rounding::EveryOp,
    );
    let norm = Rowwise::new(RowOp::RmsNorm { eps: 1e-6 }, DType::F32)
        .and_then(|n| n.with_prologue(prologue?))
        .and_then(|n| n.with_epilogue(epilogue?))
        .unwrap();
    let dense = [width as isize, 1];
    let (mut y, mut sum) = (vec![0f32; rows * width], vec![0f32; rows * width]);
    let inputs = [View::new(&x, &dense), View::new(r, &dense), View::new(&w, &[0, 1])];
    let outputs = &mut [ViewMut::new(&mut y, &dense), ViewMut::new(&mut sum, &dense)];
    norm.run(2, &[rows, width], 1, &inputs, outputs).unwrap();
    for row in 0..rows {
        let at = row * width..(row + 1) * width;
        let exact: Vec<f64> = at.clone().map(|i| f64::from(x[i] + r[i])).collect();
        assert!(at.clone().all(|i| sum[i] == x[i] + r[i]));
        let normed = plain(RowOp::RmsNorm { eps: 1e-6 }, &exact, |v| v);
        let scaled: Vec<f64> = normed.iter().zip(&w).map(|(a, b)| a * f64::from(*b)).collect();
        assert!(worst(&y[at], &scaled) < 4e-6);
    }
}

/// A norm with factors and summands for each column, in a dtype.
#[test]
fn rows_of_sums_are_as_if_they_had_been_added_before() {
    let add = || {
        Region::new(
            &[DType::F32; 2],
            vec![Instruction::new(Op::Add, [0, 1])],
            &[2],
            Rounding::EveryOp,
        )
    };
    for (op, width) in OPS.iter().flat_map(|&op| [1, 17, 64, 200, 1030, 5000].map(|w| (op, w))) {
        let (rows, shape) = (5, [5, width]);
        let strides = [width as isize, 1];
        let (a, b) = (numbers(rows * width, 1.0), numbers(rows * width, -3.5));
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let results = if op.reduces() { rows } else { rows * width };
        let steps = if op.reduces() { &[1isize][..] } else { &strides[..] };
        let mut expected = vec![0f32; results];
        let alone = Rowwise::new(op, DType::F32).unwrap();
        let into = &mut [ViewMut::new(&mut expected, steps)];
        alone.run(2, &shape, 1, &[View::new(&sum, &strides)], into).unwrap();
        let whole = Rowwise::new(op, DType::F32)
            .and_then(|r| r.with_prologue(add()?))
            .unwrap();
        // Into other memory, over the first and over the second summand.
        for place in 0..3 {
            let mut memory = [a.clone(), b.clone(), vec![0f32; results]];
            let [x, y, z] = [0, 1, 2].map(|i| memory[i].as_mut_ptr().cast::<u8>());
            let target = [z, x, y][place];
            // SAFETY: the vectors live on; a result over a summand has its places.
            unsafe {
                let from = [x, y].map(|d| View::from_raw(d, DType::F32, &strides));
                let mut to = [ViewMut::from_raw(target, DType::F32, steps)];
                if place == 0 || !op.reduces() {
                    whole.run(2, &shape, 1, &from, &mut to).unwrap();
                    let got = std::slice::from_raw_parts(target.cast::<f32>(), results);
                    assert_eq!(got, expected, "{op:?} of {width}, place {place}");
                }
            }
        }
    }
}

fn affine_norm(dtype: DType) -> Rowwise {
    let widen = |i| Instruction::new(Op::Cast(DType::F32), [i]);
    let code = vec![
        widen(1),
        Instruction::new(Op::Mul, [0, 3]),
        widen(2),
        Instruction::new(Op::Add, [4, 5]),
        Instruction::new(Op::Cast(dtype), [6]),
    ];
    let epilogue = Region::new(&[DType::F32, dtype, dtype], code, &[7], Rounding::AtStores);
    Rowwise::new(RowOp::LayerNorm { eps: 1e-5 }, dtype)
        .and_then(|n| n.with_epilogue(epilogue?))
        .unwrap()
}

#[test]
fn scale_and_shift_of_any_layout() {
    for width in [7, 40, 64, 130] {
        scale_and_shift(5, width);
    }
}

fn scale_and_shift(rows: usize, width: usize) {
    let (x, w, b) = (
        numbers(rows * width, 0.0),
        numbers(rows * width, 1.0),
        numbers(2 * width, 0.0),
    );
    let norm = affine_norm(DType::F32);
    let dense = [width as isize, 1];
    // One row for all; every second element; a row each; one number for all.
    for (scale, shift) in [
        ([0isize, 1], [0isize, 1]),
        ([0, 1], [0, 2]),
        (dense, [0, 1]),
        ([0, 0], [0, 1]),
    ] {
        let mut y = vec![0f32; rows * width];
        let inputs = [View::new(&x, &dense), View::new(&w, &scale), View::new(&b, &shift)];
        norm.run(1, &[rows, width], 1, &inputs, &mut [ViewMut::new(&mut y, &dense)])
            .unwrap();
        for row in 0..rows {
            let values: Vec<f64> = (0..width).map(|i| f64::from(x[row * width + i])).collect();
            let normed = plain(RowOp::LayerNorm { eps: 1e-5 }, &values, |v| v);
            let at = |strides: [isize; 2], i: usize| (row as isize * strides[0] + i as isize * strides[1]) as usize;
            let exact: Vec<f64> = (0..width)
                .map(|i| normed[i] * f64::from(w[at(scale, i)]) + f64::from(b[at(shift, i)]))
                .collect();
            assert!(worst(&y[row * width..(row + 1) * width], &exact) < 4e-6);
        }
    }
}

#[test]
fn sixteen_bits_scale_and_shift_before_they_round() {
    let (rows, width) = (3, 200);
    let narrow = |v: Vec<f32>| v.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (x, w, b) = (
        narrow(numbers(rows * width, 0.0)),
        narrow(numbers(width, 1.0)),
        narrow(numbers(width, 0.0)),
    );
    let dense = [width as isize, 1];
    let mut y = vec![bf16::ZERO; rows * width];
    let inputs = [View::new(&x, &dense), View::new(&w, &[0, 1]), View::new(&b, &[0, 1])];
    affine_norm(DType::BF16)
        .run(1, &[rows, width], 1, &inputs, &mut [ViewMut::new(&mut y, &dense)])
        .unwrap();
    for row in 0..rows {
        let at = row * width..(row + 1) * width;
        let values: Vec<f64> = x[at.clone()].iter().map(|v| v.to_f64()).collect();
        let normed = plain(RowOp::LayerNorm { eps: 1e-5 }, &values, |v| v);
        for (i, got) in y[at].iter().enumerate() {
            let want = normed[i] * w[i].to_f64() + b[i].to_f64();
            assert!(
                (got.to_f64() - want).abs() <= want.abs() * 0.00391 + 1e-5,
                "{got} {want}"
            );
        }
    }
}

#[test]
fn a_norm_may_replace_its_rows() {
    for width in [5, 48, 300] {
        norm_replaces(9, width);
    }
}

fn norm_replaces(rows: usize, width: usize) {
    let mut x = numbers(rows * width, 0.0);
    let (w, b) = (numbers(width, 1.0), numbers(width, 0.0));
    let dense = [width as isize, 1];
    let norm = affine_norm(DType::F32);
    let mut expected = vec![0f32; rows * width];
    let inputs = [View::new(&x, &dense), View::new(&w, &[0, 1]), View::new(&b, &[0, 1])];
    norm.run(
        2,
        &[rows, width],
        1,
        &inputs,
        &mut [ViewMut::new(&mut expected, &dense)],
    )
    .unwrap();
    let data: *mut u8 = x.as_mut_ptr().cast();
    // SAFETY: the whole of a live vector, with the same strides.
    let (input, output) = unsafe {
        (
            View::from_raw(data, DType::F32, &dense),
            ViewMut::from_raw(data, DType::F32, &dense),
        )
    };
    let inputs = [input, View::new(&w, &[0, 1]), View::new(&b, &[0, 1])];
    norm.run(2, &[rows, width], 1, &inputs, &mut [output]).unwrap();
    assert_eq!(x, expected);
}

#[test]
fn a_norm_of_rows_that_begin_unlike_they_go_on() {
    // The first elements say nothing about the mean, or there is no spread at all.
    for (begin, rest) in [(0.0, 1e4f32), (1e6, 0.0), (-3e3, 3e3)] {
        let mut x = numbers(1000, rest);
        x[..64].fill(begin);
        let mut short = numbers(50, rest);
        short[..25].fill(begin);
        for x in [x, vec![begin + 0.1; 777], short, vec![begin + 0.1; 33]] {
            let mut y = vec![0f32; x.len()];
            Rowwise::new(RowOp::LayerNorm { eps: 1e-5 }, DType::F32)
                .unwrap()
                .run(
                    1,
                    &[x.len()],
                    1,
                    &[View::new(&x, &[1])],
                    &mut [ViewMut::new(&mut y, &[1])],
                )
                .unwrap();
            let values: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let exact = plain(RowOp::LayerNorm { eps: 1e-5 }, &values, |v| v);
            let scale = exact.iter().fold(0.0f64, |a, b| a.max(b.abs()));
            assert!(worst(&y, &exact) <= 3e-7 * scale + 1e-9, "{begin} {rest}");
        }
    }
}

#[test]
fn sixteen_bits_round_once() {
    let x: Vec<bf16> = numbers(4 * 100, 0.0).iter().map(|v| bf16::from_f32(*v)).collect();
    let mut out = vec![bf16::ZERO; 400];
    Rowwise::new(RowOp::LayerNorm { eps: 1e-5 }, DType::BF16)
        .unwrap()
        .run(
            1,
            &[4, 100],
            1,
            &[View::new(&x, &[100, 1])],
            &mut [ViewMut::new(&mut out, &[100, 1])],
        )
        .unwrap();
    for row in 0..4 {
        let values: Vec<f64> = x[row * 100..(row + 1) * 100].iter().map(|v| v.to_f64()).collect();
        for (got, want) in out[row * 100..]
            .iter()
            .zip(plain(RowOp::LayerNorm { eps: 1e-5 }, &values, |v| v))
        {
            assert!((got.to_f64() - want).abs() <= want.abs() * 0.00391 + 1e-7);
        }
    }
}

#[test]
fn not_a_number_and_infinities() {
    let run = |op: RowOp, x: &[f32]| {
        let mut out = vec![0f32; if op.reduces() { 1 } else { x.len() }];
        let strides: &[isize] = if op.reduces() { &[] } else { &[1] };
        let rowwise = Rowwise::new(op, DType::F32).unwrap();
        rowwise
            .run(
                1,
                &[x.len()],
                1,
                &[View::new(x, &[1])],
                &mut [ViewMut::new(&mut out, strides)],
            )
            .unwrap();
        out
    };
    let nan = [1.0, f32::NAN, 2.0];
    for op in OPS {
        assert!(run(op, &nan).iter().all(|v| v.is_nan()), "{op:?}");
    }
    assert_eq!(run(SOFTMAX, &[0.0, f32::NEG_INFINITY]), [1.0, 0.0]);
    assert!(run(SOFTMAX, &[f32::NEG_INFINITY; 2]).iter().all(|v| v.is_nan()));
    for (width, flushes) in [(2, false), (200, false), (2, true), (200, true)] {
        // Of registers and of memory.
        let mut x = vec![f32::NEG_INFINITY; width];
        (x[0], x[1]) = (0.0, -98.0);
        let out = run(RowOp::Softmax { flushes }, &x);
        let least = if flushes { 0.0 } else { (-98f64).exp() as f32 };
        assert_eq!(
            (out[0], out[1], out[width - 1]),
            (1.0, least, if width > 2 { 0.0 } else { least })
        );
    }
    assert_eq!(run(RowOp::Amax, &[1.0, f32::INFINITY]), [f32::INFINITY]);
    assert_eq!(run(RowOp::Amax, &[f32::NEG_INFINITY]), [f32::NEG_INFINITY]);
}

#[test]
fn empty_rows() {
    let sum = Rowwise::new(RowOp::Sum, DType::F32).unwrap();
    let mut out = [1f32; 2];
    sum.run(
        1,
        &[2, 0],
        1,
        &[View::new::<f32>(&[], &[1, 1])],
        &mut [ViewMut::new(&mut out, &[1])],
    )
    .unwrap();
    assert_eq!(out, [0.0; 2]);
    let most = Rowwise::new(RowOp::Amax, DType::F32).unwrap();
    let refused = most.run(
        1,
        &[2, 0],
        1,
        &[View::new::<f32>(&[], &[1, 1])],
        &mut [ViewMut::new(&mut out, &[1])],
    );
    assert!(refused.is_err());
    let norm = Rowwise::new(SOFTMAX, DType::F32).unwrap();
    norm.run(
        1,
        &[0, 3],
        1,
        &[View::new::<f32>(&[], &[3, 1])],
        &mut [ViewMut::new::<f32>(&mut [], &[3, 1])],
    )
    .unwrap();
}

#[test]
fn mistakes_are_refused() {
    assert!(Rowwise::new(RowOp::Sum, DType::I64).is_err());
    let norm = Rowwise::new(SOFTMAX, DType::F32).unwrap();
    let (x, mut out) = ([0f32; 4], [0f64; 4]);
    assert!(
        norm.run(
            1,
            &[2, 2],
            1,
            &[View::new(&x, &[2, 1])],
            &mut [ViewMut::new(&mut out, &[2, 1])]
        )
        .is_err()
    );
    assert!(norm.run(1, &[4], 2, &[View::new(&x, &[1])], &mut []).is_err());
}
