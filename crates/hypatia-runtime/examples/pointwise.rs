//! Times fused pointwise regions and row ops: milliseconds and memory traffic on one and two threads.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use hypatia_core::ty::DType;
use hypatia_runtime::Result;
use hypatia_runtime::cpu::region::{View, ViewMut};
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding, Scalar};
use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};

const COUNT: usize = 4 << 20;
const ROWS: usize = 4096;
const WIDTH: usize = COUNT / ROWS;

/// A call on a number of threads, with room for two results.
type Work<'a> = dyn FnMut(usize, &mut [f32], &mut [f32]) -> Result<()> + 'a;

/// The least time of a call in milliseconds: what disturbs a call only makes it longer.
fn time(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..40 {
        let start = Instant::now();
        f()?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(least)
}

/// Ten ops: a polynomial with activations in between.
fn chain() -> Vec<Instruction> {
    let constant = |x| Instruction::new(Op::Constant(Scalar::Float(x), DType::F32), []);
    vec![
        constant(1.5),
        constant(0.25),
        Instruction::new(Op::Mul, [0, 1]),
        Instruction::new(Op::Add, [3, 2]),
        Instruction::new(Op::Sigmoid, [4]),
        Instruction::new(Op::Mul, [5, 0]),
        Instruction::new(Op::Square, [6]),
        Instruction::new(Op::Sub, [7, 2]),
        Instruction::new(Op::Tanh, [8]),
        Instruction::new(Op::Maximum, [9, 6]),
        Instruction::new(Op::Relu, [10]),
        Instruction::new(Op::Add, [11, 0]),
    ]
}

fn main() -> Result<()> {
    let x: Vec<f32> = (0..COUNT).map(|i| (i % 1009) as f32 / 200.0 - 2.5).collect();
    let y: Vec<f32> = (0..COUNT).map(|i| (i % 911) as f32 / 300.0 - 1.5).collect();
    let mut out = vec![0f32; COUNT];
    let mut sum = vec![0f32; COUNT];
    let (flat, rows, row) = ([1isize], [WIDTH as isize, 1], [0isize, 1]);
    let shape = [ROWS, WIDTH];
    let f32s = |n: usize| vec![DType::F32; n];

    let ten = Region::new(&f32s(1), chain(), &[12], Rounding::EveryOp)?;
    let code = vec![Instruction::new(Op::Gelu, [0]), Instruction::new(Op::Add, [2, 1])];
    let gelu = Region::new(&f32s(2), code, &[3], Rounding::EveryOp)?;
    let code = vec![Instruction::new(Op::Mul, [0, 1]), Instruction::new(Op::Add, [3, 2])];
    let affine = Region::new(&f32s(3), code, &[4], Rounding::EveryOp)?;
    let layer_norm = Rowwise::new(RowOp::LayerNorm { eps: 1e-5 }, DType::F32)?.with_epilogue(affine)?;
    let softmax = Rowwise::new(RowOp::Softmax { flushes: false }, DType::F32)?;
    let add = Region::new(
        &f32s(2),
        vec![Instruction::new(Op::Add, [0, 1])],
        &[2, 2],
        Rounding::EveryOp,
    )?;
    let scale = Region::new(
        &f32s(2),
        vec![Instruction::new(Op::Mul, [0, 1])],
        &[2],
        Rounding::EveryOp,
    )?;
    let rms_norm = Rowwise::new(RowOp::RmsNorm { eps: 1e-6 }, DType::F32)?
        .with_prologue(add)?
        .with_epilogue(scale)?;

    println!("{:<22} {:>9} {:>9} {:>9} {:>9}", "", "1: ms", "GB/s", "2: ms", "GB/s");
    let mut line = |name: &str, tensors: f64, f: &mut Work| {
        let one = time(|| f(1, &mut out, &mut sum))?;
        let two = time(|| f(2, &mut out, &mut sum))?;
        let rate = |ms: f64| tensors * (4 * COUNT) as f64 / ms / 1e6;
        println!("{name:<22} {one:>9.3} {:>9.1} {two:>9.3} {:>9.1}", rate(one), rate(two));
        Result::Ok(())
    };
    line("ten ops", 2.0, &mut |threads, out, _| {
        ten.run(
            threads,
            &[COUNT],
            &[View::new(&x, &flat)],
            &mut [ViewMut::new(out, &flat)],
        )
    })?;
    line("gelu, add", 3.0, &mut |threads, out, _| {
        let inputs = [View::new(&x, &flat), View::new(&y, &flat)];
        gelu.run(threads, &[COUNT], &inputs, &mut [ViewMut::new(out, &flat)])
    })?;
    line("layer_norm", 2.0, &mut |threads, out, _| {
        let inputs = [View::new(&x, &rows), View::new(&y, &row), View::new(&y, &row)];
        layer_norm.run(threads, &shape, 1, &inputs, &mut [ViewMut::new(out, &rows)])
    })?;
    line("softmax", 2.0, &mut |threads, out, _| {
        softmax.run(
            threads,
            &shape,
            1,
            &[View::new(&x, &rows)],
            &mut [ViewMut::new(out, &rows)],
        )
    })?;
    line("residual, rms_norm", 4.0, &mut |threads, out, sum| {
        let inputs = [View::new(&x, &rows), View::new(&y, &rows), View::new(&y, &row)];
        let outputs = &mut [ViewMut::new(out, &rows), ViewMut::new(sum, &rows)];
        rms_norm.run(threads, &shape, 1, &inputs, outputs)
    })
}
