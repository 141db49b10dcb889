//! Row ops.

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand};
use hypatia_cuda::driver::Device;
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};
use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};

use crate::support::{Case, device, strided};

const OPS: [RowOp; 7] = [
    RowOp::Softmax { flushes: false },
    RowOp::LogSoftmax,
    RowOp::LayerNorm { eps: 1e-5 },
    RowOp::RmsNorm { eps: 1e-6 },
    RowOp::Sum,
    RowOp::Mean,
    RowOp::Amax,
];

fn rowwise(
    device: &'static Device,
    what: &str,
    op: &Rowwise,
    shape: &[usize],
    reduced: usize,
    inputs: &[Operand],
    outputs: &[Operand],
) {
    // Sums of numbers of both signs are judged by what is summed.
    let width: usize = shape[shape.len() - reduced..].iter().product();
    let scale = match op.op() {
        RowOp::Sum => 2.0 * width as f64,
        RowOp::LogSoftmax | RowOp::Mean | RowOp::Amax => 4.0,
        _ => 0.1,
    };
    let case = Case {
        what: format!("{what} {:?}", op.op()),
        kernel: &codegen::rows(op, shape, reduced, inputs, outputs).unwrap(),
        shape,
        inputs,
        outputs,
        units: 8.0,
        scale,
    };
    case.check(device, |from, to| op.run(1, shape, reduced, from, to));
}

#[test]
fn row_ops_of_all_widths() {
    let Some(device) = device() else { return };
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for width in [1, 2, 7, 32, 100, 768, 1000, 1024, 1025, 4096, 10_007, 50_257, 70_000] {
            // A few of the wide ones are enough.
            let ops = if width > 20_000 && dtype != DType::F32 {
                &OPS[..3]
            } else {
                &OPS[..]
            };
            for op in ops {
                let shape = [5, width];
                let input = Operand::dense(dtype, &shape);
                let output = if op.reduces() {
                    strided(dtype, &[1], 16)
                } else {
                    input.clone()
                };
                let rowwise_op = Rowwise::new(*op, dtype).unwrap();
                rowwise(
                    device,
                    &format!("{dtype} {width}"),
                    &rowwise_op,
                    &shape,
                    1,
                    &[input],
                    &[output],
                );
            }
        }
    }
}

#[test]
fn row_ops_between_regions_and_over_strides() {
    let Some(device) = device() else { return };
    let sum = vec![
        Instruction::new(Op::Add, [0, 1]),
        Instruction::new(Op::Cast(DType::F32), [2]),
    ];
    let affine = vec![
        Instruction::new(Op::Mul, [0, 1]),
        Instruction::new(Op::Add, [3, 2]),
        Instruction::new(Op::Cast(DType::BF16), [4]),
    ];
    for (width, rows) in [(768, 6), (1001, 5), (9000, 3), (40_002, 2)] {
        for op in OPS {
            let before = Region::new(&[DType::BF16; 2], sum.clone(), &[3, 2], Rounding::EveryOp).unwrap();
            let after = Region::new(&[DType::F32; 3], affine.clone(), &[5], Rounding::EveryOp).unwrap();
            let op = Rowwise::new(op, DType::BF16).unwrap();
            let op = op.with_prologue(before).unwrap().with_epilogue(after).unwrap();
            // Rows of two dimensions, the other operand of which is repeated and permuted.
            let shape = [2, rows, width];
            let long = width as isize;
            let dense = Operand::dense(DType::BF16, &shape);
            let other = strided(DType::BF16, &[long, 0, 1], 2);
            let reduces = op.op().reduces();
            let (weight, bias, out) = if reduces {
                (
                    strided(DType::F32, &[0, 1], 4),
                    strided(DType::F32, &[1, 0], 4),
                    strided(DType::BF16, &[1, 2], 2),
                )
            } else {
                let wide = strided(DType::F32, &[0, 0, 1], 16);
                (
                    wide,
                    strided(DType::F32, &[0, 1, 0], 4),
                    Operand::dense(DType::BF16, &shape),
                )
            };
            let inputs = [dense.clone(), other, weight, bias];
            rowwise(device, &format!("{shape:?}"), &op, &shape, 1, &inputs, &[out, dense]);
        }
    }
    // Two dimensions as one row, with a gap between them.
    let softmax = Rowwise::new(RowOp::Softmax { flushes: false }, DType::F32).unwrap();
    let (input, output) = (
        strided(DType::F32, &[1000, 40, 1], 16),
        Operand::dense(DType::F32, &[3, 20, 32]),
    );
    rowwise(device, "gaps", &softmax, &[3, 20, 32], 2, &[input], &[output]);
}
