//! Generated kernels on a GPU, beside the CPU's kernels of the same regions. Without a GPU every test says so and
//! passes.

use std::slice::from_ref;

use hypatia::runtime::cpu::region::{Instruction, Op, Region, Rounding, Scalar, View, ViewMut};
use hypatia::runtime::cpu::rowwise::{RowOp, Rowwise};
use hypatia::runtime::cuda::codegen::{self, Operand, Split};
use hypatia::runtime::cuda::driver::{Buffer, Device};
use hypatia::runtime::cuda::gemm::{Budget, Epilogue, Gemm, Operands, Problem, Scratch, scratch_bytes, tune};
use hypatia::runtime::cuda::kernel::Kernel;
use hypatia::ty::DType;

#[allow(clippy::print_stderr)]
fn device() -> Option<&'static Device> {
    match Device::get(0) {
        Ok(device) => Some(device),
        Err(e) => {
            eprintln!("skipped, no GPU: {e}");
            None
        }
    }
}

/// Random elements: floats of a moderate size, small whole numbers, truth values.
fn draw(dtype: DType, len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f64::from(state) / f64::from(u32::MAX)
    };
    let mut bytes = vec![];
    for _ in 0..len {
        let x = next() * 8.0 - 4.0;
        match dtype {
            DType::Bool => bytes.push(u8::from(x > 0.0)),
            DType::U8 => bytes.push((x.abs() * 60.0) as u8),
            DType::I8 => bytes.push((x * 30.0) as i8 as u8),
            DType::I16 => bytes.extend(((x * 8000.0) as i16).to_ne_bytes()),
            DType::I32 => bytes.extend(((x * 5e8) as i32).to_ne_bytes()),
            DType::I64 => bytes.extend(((x * 2e18) as i64).to_ne_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(x).to_ne_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f64(x).to_ne_bytes()),
            DType::F32 => bytes.extend((x as f32).to_ne_bytes()),
            DType::F64 => bytes.extend(x.to_ne_bytes()),
        }
    }
    bytes
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    macro_rules! numbers {
        ($t:ty, $f:expr) => {
            bytes
                .chunks_exact(size_of::<$t>())
                .map(|b| $f(<$t>::from_ne_bytes(b.try_into().unwrap())))
                .collect()
        };
    }
    match dtype {
        DType::Bool | DType::U8 => bytes.iter().map(|b| f64::from(*b)).collect(),
        DType::I8 => numbers!(i8, f64::from),
        DType::I16 => numbers!(i16, f64::from),
        DType::I32 => numbers!(i32, f64::from),
        DType::I64 => numbers!(i64, |x| x as f64),
        DType::F16 => numbers!(half::f16, |x: half::f16| x.to_f64()),
        DType::BF16 => numbers!(half::bf16, |x: half::bf16| x.to_f64()),
        DType::F32 => numbers!(f32, f64::from),
        DType::F64 => numbers!(f64, |x| x),
    }
}

/// Elements that an operand reaches within a shape.
fn reach(operand: &Operand, shape: &[usize]) -> usize {
    let far: isize = shape
        .iter()
        .zip(&operand.strides)
        .map(|(n, s)| (*n as isize - 1).max(0) * s)
        .sum();
    far as usize + 1
}

/// A launch: kernels with the numbers of their buffers.
type Launches<'a> = &'a [(&'a Kernel, Vec<usize>)];

/// Runs kernels over buffers and returns what is in them then.
fn run(device: &'static Device, launches: Launches, buffers: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let held: Vec<Buffer> = buffers.iter().map(|b| Buffer::of(device, b).unwrap()).collect();
    for (kernel, which) in launches {
        let addresses: Vec<u64> = which.iter().map(|i| held[*i].address()).collect();
        let loaded = kernel.load(device).unwrap_or_else(|e| panic!("{e}\n{}", kernel.source));
        // SAFETY: the buffers are as long as the operands reach, and are read back below.
        unsafe { loaded.launch(stream, &addresses).unwrap() };
    }
    stream.synchronize().unwrap();
    held.iter().map(|b| b.read().unwrap()).collect()
}

/// Results of both, side by side; floats may differ by a few units in the last place of the larger of the result and
/// `scale`.
fn compare(what: &str, dtype: DType, gpu: &[u8], cpu: &[u8], units: f64, scale: f64) {
    let (got, want) = (decode(dtype, gpu), decode(dtype, cpu));
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let allowed = units * 2.0 * dtype.epsilon() * w.abs().max(scale);
        let fine = g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= allowed;
        assert!(fine, "{what}, element {i}: {g} on the GPU, {w} on the CPU");
    }
}

fn pointwise(
    device: &'static Device,
    what: &str,
    region: &Region,
    shape: &[usize],
    inputs: &[Operand],
    outputs: &[Operand],
    units: f64,
) {
    let kernel = codegen::pointwise(region, shape, inputs, outputs).unwrap();
    let drawn: Vec<Vec<u8>> = (1..)
        .zip(inputs)
        .map(|(seed, o)| draw(o.dtype, reach(o, shape), seed))
        .collect();
    let poison: Vec<Vec<u8>> = outputs
        .iter()
        .map(|o| vec![0x5a; reach(o, shape) * o.dtype.size()])
        .collect();
    let buffers: Vec<Vec<u8>> = drawn.iter().chain(&poison).cloned().collect();
    let made = run(device, &[(&kernel, (0..buffers.len()).collect())], &buffers);
    let mut expected = poison;
    let views: Vec<View> = drawn
        .iter()
        .zip(inputs)
        // SAFETY: as long as the operand reaches.
        .map(|(b, o)| unsafe { View::from_raw(b.as_ptr(), o.dtype, &o.strides) })
        .collect();
    let mut targets: Vec<ViewMut> = expected
        .iter_mut()
        .zip(outputs)
        // SAFETY: as above.
        .map(|(b, o)| unsafe { ViewMut::from_raw(b.as_mut_ptr(), o.dtype, &o.strides) })
        .collect();
    region.run(1, shape, &views, &mut targets).unwrap();
    drop(targets);
    for (i, output) in outputs.iter().enumerate() {
        compare(
            &format!("{what}, output {i}"),
            output.dtype,
            &made[inputs.len() + i],
            &expected[i],
            units,
            4.0,
        );
    }
}

fn strided(dtype: DType, strides: &[isize], alignment: usize) -> Operand {
    Operand {
        dtype,
        strides: strides.to_vec(),
        alignment,
    }
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
    let kernel = codegen::pointwise(&region, &shape, &inputs, &outputs).unwrap();
    let mut buffers = vec![a.clone(), b.clone()];
    buffers.extend(outputs.iter().map(|o| vec![0x5a; 64 * o.dtype.size()]));
    let made = run(device, &[(&kernel, (0..9).collect())], &buffers);
    let mut expected: Vec<Vec<u8>> = buffers[2..].to_vec();
    // SAFETY: 64 elements each.
    let views = [&a, &b].map(|v| unsafe { View::from_raw(v.as_ptr(), DType::F32, &[1]) });
    let mut targets: Vec<ViewMut> = expected
        .iter_mut()
        .zip(&outputs)
        // SAFETY: as above.
        .map(|(t, o)| unsafe { ViewMut::from_raw(t.as_mut_ptr(), o.dtype, &[1]) })
        .collect();
    region.run(1, &shape, &views, &mut targets).unwrap();
    drop(targets);
    for (i, output) in outputs.iter().enumerate() {
        compare(
            &format!("output {i}"),
            output.dtype,
            &made[2 + i],
            &expected[i],
            0.0,
            0.0,
        );
    }
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

const OPS: [RowOp; 7] = [
    RowOp::Softmax,
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
    let kernel = codegen::rows(op, shape, reduced, inputs, outputs).unwrap();
    let shape_of = |o: &Operand| shape[..o.strides.len()].to_vec();
    let drawn: Vec<Vec<u8>> = (1..)
        .zip(inputs)
        .map(|(seed, o)| draw(o.dtype, reach(o, &shape_of(o)), seed))
        .collect();
    let poison: Vec<Vec<u8>> = outputs
        .iter()
        .map(|o| vec![0x5a; reach(o, &shape_of(o)) * o.dtype.size()])
        .collect();
    let buffers: Vec<Vec<u8>> = drawn.iter().chain(&poison).cloned().collect();
    let made = run(device, &[(&kernel, (0..buffers.len()).collect())], &buffers);
    let mut expected = poison;
    let views: Vec<View> = drawn
        .iter()
        .zip(inputs)
        // SAFETY: as long as the operand reaches.
        .map(|(b, o)| unsafe { View::from_raw(b.as_ptr(), o.dtype, &o.strides) })
        .collect();
    let mut targets: Vec<ViewMut> = expected
        .iter_mut()
        .zip(outputs)
        // SAFETY: as above.
        .map(|(b, o)| unsafe { ViewMut::from_raw(b.as_mut_ptr(), o.dtype, &o.strides) })
        .collect();
    op.run(1, shape, reduced, &views, &mut targets).unwrap();
    drop(targets);
    // Sums of numbers of both signs are judged by what is summed.
    let width: usize = shape[shape.len() - reduced..].iter().product();
    let scale = match op.op() {
        RowOp::Sum => 2.0 * width as f64,
        RowOp::LogSoftmax | RowOp::Mean | RowOp::Amax => 4.0,
        _ => 0.1,
    };
    for (i, output) in outputs.iter().enumerate() {
        let what = format!("{what} {:?}, output {i}", op.op());
        compare(&what, output.dtype, &made[inputs.len() + i], &expected[i], 8.0, scale);
    }
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
    let softmax = Rowwise::new(RowOp::Softmax, DType::F32).unwrap();
    let (input, output) = (
        strided(DType::F32, &[1000, 40, 1], 16),
        Operand::dense(DType::F32, &[3, 20, 32]),
    );
    rowwise(device, "gaps", &softmax, &[3, 20, 32], 2, &[input], &[output]);
}

#[test]
fn column_sums() {
    let Some(device) = device() else { return };
    for (rows, columns, dtype) in [
        (1, 1, DType::F32),
        (1000, 264, DType::BF16),
        (5000, 100, DType::F32),
        (513, 7, DType::F16),
    ] {
        let shape = [rows, columns];
        let dense = Operand::dense(dtype, &shape);
        let code = vec![
            Instruction::new(Op::Cast(DType::F32), [0]),
            Instruction::new(Op::Relu, [0]),
        ];
        let region = Region::new(&[dtype], code, &[1, 2], Rounding::EveryOp).unwrap();
        let made = codegen::columns(&region, &shape, 1, from_ref(&dense), from_ref(&dense), dtype).unwrap();
        let input = draw(dtype, rows * columns, 3);
        let room = |bytes: usize| vec![0x5a; bytes];
        let buffers = [
            input.clone(),
            room(made.partial_bytes),
            room(input.len()),
            room(columns * dtype.size()),
        ];
        let out = run(
            device,
            &[(&made.chunks, vec![0, 1, 2]), (&made.finish, vec![1, 3])],
            &buffers,
        );
        let (x, relu, sums) = (decode(dtype, &input), decode(dtype, &out[2]), decode(dtype, &out[3]));
        for c in 0..columns {
            let column = || (0..rows).map(|r| x[r * columns + c]);
            let (sum, size): (f64, f64) = (column().sum(), column().map(f64::abs).sum());
            let allowed = 1e-6 * size + dtype.epsilon() * 2.0 * sum.abs();
            assert!(
                (sums[c] - sum).abs() <= allowed,
                "{shape:?} {dtype} column {c}: {} not {sum}",
                sums[c]
            );
        }
        assert!(x.iter().zip(&relu).all(|(x, y)| x.max(0.0) == *y));
    }
}

#[test]
fn cross_entropy() {
    let Some(device) = device() else { return };
    for (rows, classes, dtype) in [
        (1, 10, DType::F32),
        (100, 1000, DType::BF16),
        (33, 50_257, DType::F32),
        (9, 3, DType::F64),
    ] {
        let shape = [rows, classes];
        let x = draw(dtype, rows * classes, 5);
        let targets: Vec<i64> = (0..rows)
            .map(|r| if r % 4 == 3 { -100 } else { (r * 7919 % classes) as i64 })
            .collect();
        let bytes: Vec<u8> = targets.iter().flat_map(|t| t.to_ne_bytes()).collect();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        for mean in [true, false] {
            let loss = codegen::cross_entropy(&Operand::dense(dtype, &shape), shape, -100, Some(mean)).unwrap();
            let room = vec![0x5a; rows * wide.size()];
            let buffers = [x.clone(), bytes.clone(), room.clone(), room, vec![0x5a; dtype.size()]];
            let finish = loss.finish.unwrap();
            let out = run(
                device,
                &[(&loss.rows, vec![0, 1, 2, 3]), (&finish, vec![2, 1, 4])],
                &buffers,
            );
            let values = decode(dtype, &x);
            let logs: Vec<f64> = values
                .chunks(classes)
                .map(|row| row.iter().map(|v| v.exp()).sum::<f64>().ln())
                .collect();
            let counted: Vec<usize> = (0..rows).filter(|r| targets[*r] >= 0).collect();
            let losses = counted
                .iter()
                .map(|r| logs[*r] - values[r * classes + targets[*r] as usize]);
            let sum: f64 = losses.sum();
            let want = if mean { sum / counted.len() as f64 } else { sum };
            let got = decode(dtype, &out[4])[0];
            let allowed = 4.0 * dtype.epsilon().max(1e-7) * want.abs();
            assert!((got - want).abs() <= allowed, "{shape:?} {dtype}: {got} not {want}");
            for (got, want) in decode(wide, &out[3]).iter().zip(&logs) {
                assert!((got - want).abs() <= 1e-6 * want.abs().max(1.0), "{got} {want}");
            }
        }
    }
}

/// A product that is ready, with the workspace that it needs.
fn prepared(device: &'static Device, problem: Problem) -> (Gemm, Buffer) {
    let budget = Budget::default();
    let bytes = scratch_bytes(&problem, &budget);
    let memory = Buffer::new(device, bytes).unwrap();
    let scratch = Scratch {
        address: memory.address(),
        bytes,
    };
    // SAFETY: fresh memory.
    let tuned = unsafe { tune(&problem, device.stream(0), scratch, &budget).unwrap() };
    let gemm = Gemm::new(device, problem, &tuned.best).unwrap();
    let workspace = Buffer::new(device, gemm.workspace()).unwrap();
    (gemm, workspace)
}

#[test]
fn split_products_are_nearly_f32() {
    let Some(device) = device() else { return };
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let (m, n, k) = (70, 129, 784);
    let problem = Problem::linear(DType::F32, m, n, k).with_epilogue(Epilogue::ReluBias);
    let [x, w, b] = [(m * k, 1), (n * k, 2), (n, 3)].map(|(len, seed)| draw(DType::F32, len, seed));
    let [xs, ws, bs] = [&x, &w, &b].map(|v| decode(DType::F32, v));
    let exact: Vec<f64> = (0..m * n)
        .map(|i| {
            let (r, c) = (i / n, i % n);
            let dot: f64 = (0..k).map(|s| xs[r * k + s] * ws[c * k + s]).sum();
            (dot + bs[c]).max(0.0)
        })
        .collect();
    let size = (exact.iter().map(|v| v * v).sum::<f64>() / exact.len() as f64).sqrt();
    let [x, w, b] = [&x, &w, &b].map(|v| Buffer::of(device, v).unwrap());
    let out = Buffer::new(device, m * n * 4).unwrap();
    let mut errors = vec![];
    for split in [None].into_iter().chain(Split::ALL.map(Some)) {
        let chosen = split.map_or(problem, |s| s.problem(&problem).unwrap());
        let (gemm, workspace) = prepared(device, chosen);
        let pieces = |rows: usize, right: bool, from: &Buffer| {
            split.map(|s| {
                let to = Buffer::new(device, rows * k * s.times() * s.dtype().size()).unwrap();
                let kernel = s.kernel(right, rows, k).unwrap().load(device).unwrap();
                // SAFETY: buffers of the kernel's sizes.
                unsafe { kernel.launch(stream, &[from.address(), to.address()]).unwrap() };
                to
            })
        };
        let (left, right) = (pieces(m, false, &x), pieces(n, true, &w));
        let operands = Operands {
            left: left.as_ref().unwrap_or(&x).address(),
            right: right.as_ref().unwrap_or(&w).address(),
            bias: b.address(),
            out: out.address(),
            workspace: workspace.address(),
            ..Operands::default()
        };
        // SAFETY: buffers of the problem's sizes.
        unsafe { gemm.launch(stream, &operands).unwrap() };
        stream.synchronize().unwrap();
        let got = decode(DType::F32, &out.read().unwrap());
        let worst = got.iter().zip(&exact).map(|(g, e)| (g - e).abs()).fold(0.0, f64::max) / size;
        errors.push(worst);
    }
    let [plain, three, six, tf32] = errors[..] else {
        unreachable!()
    };
    assert!(plain < 1e-5 && six < 3e-5 && three < 2e-4 && tf32 < 5e-5, "{errors:?}");
}
