//! Pointwise regions.

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand};
use hypatia_cuda::driver::Device;
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding, Scalar};

use crate::support::{Case, device, strided};

fn pointwise(
    device: &'static Device,
    what: &str,
    region: &Region,
    shape: &[usize],
    inputs: &[Operand],
    outputs: &[Operand],
    units: f64,
) {
    let case = Case {
        what: what.into(),
        kernel: &codegen::pointwise(region, shape, inputs, outputs).unwrap(),
        shape,
        inputs,
        outputs,
        units,
        scale: 4.0,
    };
    case.check(device, |from, to| region.run(1, shape, from, to));
}

#[test]
fn every_op_on_every_type() {
    use Op::*;
    let Some(device) = device() else { return };
    let floats = [
        Neg, Abs, Sign, Exp, Expm1, Log, Log1p, Sqrt, Rsqrt, Reciprocal, Square, Sin, Cos, Erf, Tanh, Sigmoid, Relu,
        Gelu, GeluTanh, Silu, Floor, Ceil,
    ];
    for dtype in DType::ALL {
        let (ones, pairs): (&[Op], &[Op]) = match dtype {
            DType::Bool => (&[Not], &[And, Or, Eq]),
            d if d.is_float() => (
                &floats,
                &[Add, Sub, Mul, Div, Pow, Maximum, Minimum, Eq, Ne, Lt, Le, Gt, Ge],
            ),
            _ => (
                &[Neg, Abs, Sign, Square, Relu],
                &[Add, Sub, Mul, Maximum, Minimum, Eq, Lt],
            ),
        };
        let mut code = vec![];
        let mut outputs = vec![];
        for op in ones.iter().chain(pairs) {
            let args = if ones.contains(op) { vec![0] } else { vec![0, 1] };
            code.push(Instruction::new(*op, args));
            outputs.push(1 + code.len());
        }
        for to in DType::ALL {
            // Beyond their range, integers are made of floats in another way than on a CPU.
            let whole = dtype.is_float() && to.is_int();
            if !whole || to == DType::I64 {
                code.push(Instruction::new(Cast(to), [0]));
                outputs.push(1 + code.len());
            }
        }
        let region = Region::new(&[dtype; 2], code, &outputs, Rounding::EveryOp).unwrap();
        let shape = [3, 1000];
        let dense = |d: &DType| Operand::dense(*d, &shape);
        let (inputs, results): (Vec<_>, Vec<_>) = (
            region.inputs().iter().map(dense).collect(),
            region.outputs().iter().map(dense).collect(),
        );
        pointwise(device, &dtype.to_string(), &region, &shape, &inputs, &results, 8.0);
    }
}

#[test]
fn special_values() {
    let Some(device) = device() else { return };
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1e-40, -1.0, 3e38];
    let code = vec![
        Instruction::new(Op::Relu, [0]),
        Instruction::new(Op::Maximum, [0, 1]),
        Instruction::new(Op::Minimum, [0, 1]),
        Instruction::new(Op::Constant(Scalar::Float(-1.0), DType::F32), []),
        Instruction::new(Op::Constant(Scalar::Float(1.0), DType::F32), []),
        Instruction::new(Op::Clamp, [0, 5, 6]),
        Instruction::new(Op::Cast(DType::BF16), [0]),
        Instruction::new(Op::Cast(DType::F16), [0]),
        Instruction::new(Op::Sign, [0]),
    ];
    let region = Region::new(&[DType::F32; 2], code, &[2, 3, 4, 7, 8, 9, 10], Rounding::EveryOp).unwrap();
    let (mut a, mut b) = (vec![], vec![]);
    for x in values {
        for y in values {
            a.extend(x.to_ne_bytes());
            b.extend(y.to_ne_bytes());
        }
    }
    let shape = [64];
    let dense = |d: &DType| Operand::dense(*d, &shape);
    let (inputs, outputs): (Vec<_>, Vec<_>) = (
        region.inputs().iter().map(dense).collect(),
        region.outputs().iter().map(dense).collect(),
    );
    let case = Case {
        what: "special values".into(),
        kernel: &codegen::pointwise(&region, &shape, &inputs, &outputs).unwrap(),
        shape: &shape,
        inputs: &inputs,
        outputs: &outputs,
        units: 0.0,
        scale: 0.0,
    };
    case.check_on(device, vec![a, b], |from, to| region.run(1, &shape, from, to));
}

#[test]
fn strides_broadcasts_mixed_types_and_odd_sizes() {
    let Some(device) = device() else { return };
    let code = vec![
        Instruction::new(Op::Cast(DType::F32), [1]),
        Instruction::new(Op::Add, [0, 3]),
        Instruction::new(Op::Where, [2, 4, 0]),
        Instruction::new(Op::Cast(DType::BF16), [5]),
    ];
    let types = [DType::F32, DType::BF16, DType::Bool];
    let region = Region::new(&types, code, &[6, 5], Rounding::EveryOp).unwrap();
    let cases: [(&[usize], [&[isize]; 5]); 8] = [
        (&[64, 256], [&[256, 1], &[0, 1], &[256, 1], &[256, 1], &[256, 1]]),
        (&[64, 256], [&[256, 1], &[1, 0], &[1, 64], &[256, 1], &[300, 1]]),
        (&[7, 13], [&[13, 1], &[0, 1], &[0, 0], &[13, 1], &[1, 7]]),
        (
            &[5, 3, 9, 4],
            [
                &[108, 36, 4, 1],
                &[0, 4, 0, 1],
                &[36, 12, 0, 1],
                &[108, 36, 4, 1],
                &[1, 180, 5, 45],
            ],
        ),
        (
            &[2, 8, 16, 32],
            [
                &[4096, 512, 32, 1],
                &[4096, 32, 256, 1],
                &[0, 0, 32, 1],
                &[4096, 512, 32, 1],
                &[4096, 1, 256, 8],
            ],
        ),
        (&[1], [&[1], &[0], &[1], &[1], &[1]]),
        (&[100_003], [&[1], &[2], &[1], &[1], &[3]]),
        (&[], [&[], &[], &[], &[], &[]]),
    ];
    for (shape, [a, b, c, d, e]) in cases {
        let inputs = [
            strided(DType::F32, a, 16),
            strided(DType::BF16, b, 16),
            strided(DType::Bool, c, 16),
        ];
        let outputs = [strided(DType::BF16, d, 16), strided(DType::F32, e, 16)];
        pointwise(device, &format!("{shape:?}"), &region, shape, &inputs, &outputs, 1.0);
    }
}
