//! Kernels as text, and through the compiler where it is installed. `tests/cuda.rs` runs them.

use std::slice::from_ref;

use hypatia_runtime::kernels::region::{Instruction, Op, Read, Region, Rounding, Scalar};
use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};
use hypatia_runtime::plan::{Placed, Pool, Window};
use hypatia_runtime::step::ColumnKind;

use super::space::{Space, pack_width};
use super::*;
use crate::kernel::Kernel;
use crate::loading::testing::has;
use crate::nvrtc::{self, Arch};

fn gelu_of_sum(dtype: DType) -> Region {
    let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Gelu, [2])];
    Region::new(&[dtype; 2], code, &[3], Rounding::EveryOp).unwrap()
}

fn strided(dtype: DType, strides: &[isize]) -> Operand {
    aligned(dtype, strides, 16)
}

fn aligned(dtype: DType, strides: &[isize], alignment: usize) -> Operand {
    Operand {
        dtype,
        strides: strides.to_vec(),
        alignment,
    }
}

#[test]
fn dimensions_are_joined_where_all_operands_allow_it() {
    let dense = vec![24, 12, 4, 1];
    let space = Space::new(&[2, 2, 3, 4], &[dense.clone(), dense.clone()]);
    assert_eq!(space.sizes, [48]);
    let space = Space::new(&[2, 2, 3, 4], &[dense.clone(), vec![0, 0, 4, 1]]);
    assert_eq!(
        (space.sizes, space.strides),
        (vec![4, 12], vec![vec![12, 1], vec![0, 1]])
    );
    let space = Space::new(&[1, 1], &[vec![5, 5]]);
    assert_eq!((space.sizes.len(), space.len()), (0, 1));
}

#[test]
fn a_permuted_result_is_gone_through_in_its_own_order() {
    let columns_first = vec![1, 64];
    let space = Space::ordered_by(&[64, 32], &[columns_first.clone(), columns_first], 0);
    assert_eq!((space.sizes, space.strides[0].clone()), (vec![2048], vec![1]));
}

#[test]
fn packs_are_as_wide_as_strides_and_alignment_allow() {
    let width = |shape: &[usize], operands: &[Operand]| {
        let strides: Vec<_> = operands.iter().map(|o| o.strides.clone()).collect();
        pack_width(None, &Space::new(shape, &strides), &operands.iter().collect::<Vec<_>>())
    };
    let f32s = Operand::dense(DType::F32, &[64, 256]);
    let bf16s = Operand::dense(DType::BF16, &[64, 256]);
    assert_eq!(width(&[64, 256], from_ref(&f32s)), 4);
    assert_eq!(width(&[64, 256], &[bf16s.clone(), f32s.clone()]), 8);
    assert_eq!(width(&[64, 256], &[bf16s.clone(), strided(DType::BF16, &[0, 1])]), 8);
    assert_eq!(width(&[64, 256], &[strided(DType::F32, &[258, 1])]), 2);
    assert_eq!(
        width(
            &[64, 10],
            &[strided(DType::F32, &[10, 1]), strided(DType::F32, &[0, 1])]
        ),
        2
    );
    assert_eq!(
        width(
            &[64, 256],
            &[Operand {
                alignment: 4,
                ..f32s.clone()
            }]
        ),
        1
    );
    assert_eq!(width(&[64, 256], &[f32s, strided(DType::U8, &[1, 64])]), 4);
}

#[test]
fn the_source_can_be_read() {
    let shape = [64, 256];
    let kernel = pointwise(
        &gelu_of_sum(DType::BF16),
        &shape,
        &[Operand::dense(DType::BF16, &shape), strided(DType::BF16, &[0, 1])],
        &[Operand::dense(DType::BF16, &shape)],
    )
    .unwrap();
    insta::assert_snapshot!(kernel.source.strip_prefix(PRELUDE).unwrap());
    assert_eq!(
        (kernel.name.as_str(), kernel.blocks, kernel.numbers),
        ("pointwise_add_gelu", [8, 1, 1], vec![2048])
    );
}

#[test]
fn a_norm_can_be_read() {
    let weight = vec![
        Instruction::new(Op::Mul, [0, 1]),
        Instruction::new(Op::Cast(DType::BF16), [2]),
    ];
    let norm = Rowwise::new(RowOp::RmsNorm { eps: 1e-6 }, DType::BF16)
        .unwrap()
        .with_epilogue(Region::new(&[DType::F32; 2], weight, &[3], Rounding::EveryOp).unwrap())
        .unwrap();
    let shape = [10, 768];
    let dense = Operand::dense(DType::BF16, &shape);
    let kernel = rows(
        &norm,
        &shape,
        1,
        &[dense.clone(), strided(DType::F32, &[0, 1])],
        &[dense],
    )
    .unwrap();
    insta::assert_snapshot!(kernel.source.strip_prefix(PRELUDE).unwrap());
}

/// Reads of what was padded along some dimensions, and by an index that is the same for the whole batch.
fn reads() -> Vec<Kernel> {
    let one = |dtype| Region::new(&[dtype], vec![], &[0], Rounding::EveryOp).unwrap();
    let within = |before: &[usize], sizes: &[usize], outside| Read::Within {
        before: before.to_vec(),
        sizes: sizes.to_vec(),
        outside,
    };
    let mut kernels = vec![];
    // Images with channels last, then first, then along all dimensions.
    for (dtype, shape, strides, before, sizes) in [
        (
            DType::BF16,
            [2, 10, 11, 32],
            [2304, 288, 32, 1],
            [0, 1, 1, 0],
            [2, 8, 9, 32],
        ),
        (
            DType::F16,
            [2, 32, 10, 12],
            [2304, 72, 9, 1],
            [0, 0, 1, 2],
            [2, 32, 8, 9],
        ),
        (
            DType::I32,
            [4, 33, 10, 11],
            [2304, 72, 9, 1],
            [1, 1, 0, 0],
            [2, 31, 8, 9],
        ),
    ] {
        let number = if dtype.is_float() {
            Scalar::Float(f64::NEG_INFINITY)
        } else {
            Scalar::Int(-3)
        };
        let (x, y) = (strided(dtype, &strides), Operand::dense(dtype, &shape));
        kernels.push(reading(&one(dtype), &shape, &[x], &[within(&before, &sizes, number)], &[y]).unwrap());
    }
    let code = vec![Instruction::new(Op::Add, [0, 2])];
    let sum = Region::new(&[DType::BF16, DType::I64, DType::BF16], code, &[3], Rounding::EveryOp).unwrap();
    let shape = [6, 16, 24];
    let at = |stride, size| vec![Read::At { index: 1, stride, size }, Read::Plain, Read::Plain];
    let dense = Operand::dense(DType::BF16, &shape);
    for (x, index, stride) in [
        ([640, 40, 0], [0, 24, 1], 1),
        ([960, 1, 0], [0, 1, 16], 24),
        ([96, 0, 1], [0, 24, 1], 24),
    ] {
        let inputs = [strided(DType::BF16, &x), strided(DType::I64, &index), dense.clone()];
        kernels.push(reading(&sum, &shape, &inputs, &at(stride, 40), from_ref(&dense)).unwrap());
    }
    kernels.push(longer_rows());
    kernels.extend(rolled());
    kernels.extend(beside());
    kernels
}

/// Images with channels last that are rolled along height and width, and rows that are rolled.
fn rolled() -> [Kernel; 2] {
    let one = Region::new(&[DType::BF16], vec![], &[0], Rounding::EveryOp).unwrap();
    [([2, 14, 14, 32], [0, 3, 11, 0]), ([2, 3, 4, 15], [0, 1, 0, 6])].map(|(shape, by)| {
        let dense = Operand::dense(DType::BF16, &shape);
        let reads = [Read::Rolled { by: by.to_vec() }];
        reading(&one, &shape, from_ref(&dense), &reads, from_ref(&dense)).unwrap()
    })
}

/// Parts put together: channels, of which packs are whole, or of which they are not, and rows.
fn beside() -> [Kernel; 3] {
    let one = Region::new(&[DType::BF16; 3], vec![], &[0], Rounding::EveryOp).unwrap();
    let cases = [
        ([2, 5, 6, 88], 3, [64, 16, 8]),
        ([2, 5, 6, 35], 3, [10, 20, 5]),
        ([2, 5, 9, 64], 2, [1, 6, 2]),
    ];
    cases.map(|(shape, dim, lengths)| {
        let mut before = vec![0; 4];
        let (mut inputs, mut reads) = (vec![], vec![]);
        for (i, length) in lengths.into_iter().enumerate() {
            let mut sizes = shape.to_vec();
            sizes[dim] = length;
            inputs.push(Operand::dense(DType::BF16, &sizes));
            let (before_it, outside) = (before.clone(), Scalar::Float(0.0));
            reads.push(match i {
                2 => Read::Within {
                    before: before_it,
                    sizes,
                    outside,
                },
                _ => Read::Beside {
                    before: before_it,
                    sizes,
                    other: i + 1,
                },
            });
            before[dim] += length;
        }
        let y = Operand::dense(DType::BF16, &shape);
        reading(&one, &shape, &inputs, &reads, &[y]).unwrap()
    })
}

#[test]
fn parts_that_are_put_together_can_be_read() {
    let texts = beside().map(|k| k.source.strip_prefix(PRELUDE).unwrap().to_owned());
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn rolled_reads_can_be_read() {
    let texts = rolled().map(|k| k.source.strip_prefix(PRELUDE).unwrap().to_owned());
    insta::assert_snapshot!(texts.join("\n"));
}

/// A row that is written into a cache where a tensor says.
fn placed() -> crate::Result<Kernel> {
    let region = Region::new(&[DType::BF16, DType::I64], vec![], &[0], Rounding::EveryOp).unwrap();
    let row = Operand::dense(DType::BF16, &[2, 8, 1, 64]);
    let at = strided(DType::I64, &[0; 4]);
    let cache = strided(DType::BF16, &[8 * 100 * 64, 100 * 64, 64, 1]);
    let place = Placed {
        by: 1,
        stride: 64,
        size: 100,
    };
    pointwise::made(&region, &[2, 8, 1, 64], &[row, at], &[], &[cache], &[place])
}

#[test]
fn rows_can_be_written_where_a_tensor_says() {
    let kernel = placed().unwrap();
    insta::assert_snapshot!(kernel.source.strip_prefix(PRELUDE).unwrap());
    let region = Region::new(&[DType::F32], vec![], &[0], Rounding::EveryOp).unwrap();
    let dense = Operand::dense(DType::F32, &[4]);
    let place = Placed {
        by: 0,
        stride: 1,
        size: 4,
    };
    let operands = (from_ref(&dense), from_ref(&dense));
    assert!(pointwise::made(&region, &[4], operands.0, &[], operands.1, &[place]).is_err());
}

/// A gradient of logits that gets longer rows, so that products of 16 bits read them fast.
fn longer_rows() -> Kernel {
    let code = vec![
        Instruction::new(Op::Mul, [0, 1]),
        Instruction::new(Op::Cast(DType::BF16), [2]),
    ];
    let scaled = Region::new(&[DType::F32; 2], code, &[3], Rounding::EveryOp).unwrap();
    let within = Read::Within {
        before: vec![0, 0],
        sizes: vec![4096, 50257],
        outside: Scalar::Float(0.0),
    };
    let inputs = [strided(DType::F32, &[50257, 1]), strided(DType::F32, &[1, 0])];
    let (shape, reads) = ([4096, 50264], [within, Read::Plain]);
    let y = Operand::dense(DType::BF16, &shape);
    reading(&scaled, &shape, &inputs, &reads, &[y]).unwrap()
}

#[test]
fn longer_rows_are_written_16_bytes_at_a_time() {
    insta::assert_snapshot!(longer_rows().source.strip_prefix(PRELUDE).unwrap());
}

#[test]
fn reads_within_bounds_and_by_index_can_be_read() {
    let kernels = reads();
    let texts = [0, 1, 3].map(|i| kernels[i].source.strip_prefix(PRELUDE).unwrap());
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_pooling_can_be_read() {
    let difference = vec![Instruction::new(Op::Sub, [0, 1])];
    let after = Region::new(&[DType::BF16; 2], difference, &[2], Rounding::EveryOp).unwrap();
    let images = Operand::dense(DType::BF16, &[16, 56, 56, 48]);
    let kernel = Depthwise {
        pool: Some(Pool::Mean { counts_padding: false }),
        window: Window {
            size: [3; 2],
            stride: [1; 2],
            padding: [1; 2],
            dilation: [1; 2],
        },
        image: [56, 56],
        shape: [16, 56, 56, 48],
        x: images.clone(),
        after: &after,
        inputs: vec![None, Some(images)],
    };
    let kernel = kernel.kernel().unwrap();
    let source = kernel.source.strip_prefix(PRELUDE).unwrap();
    insta::assert_snapshot!(source.replace(include_str!("pool.cu"), "// (pool.cu)\n"));
    assert_eq!(kernel.name, "avg_pool_sub");
    // Images, those again, and the result.
    assert_eq!(kernel.alignments.len(), 3);
}

#[test]
fn the_batch_size_is_no_part_of_the_source() {
    let source = |rows: usize| {
        let shape = [rows, 256];
        let dense = Operand::dense(DType::F32, &shape);
        let bias = strided(DType::F32, &[0, 1]);
        pointwise(&gelu_of_sum(DType::F32), &shape, &[dense.clone(), bias], &[dense]).unwrap()
    };
    assert_eq!(source(64).source, source(65).source);
    assert_ne!(source(64).numbers, source(65).numbers);
}

#[test]
fn mistakes_are_refused() {
    let region = gelu_of_sum(DType::F32);
    let dense = Operand::dense(DType::F32, &[4, 4]);
    let half = Operand::dense(DType::F16, &[4, 4]);
    assert!(pointwise(&region, &[4, 4], from_ref(&dense), from_ref(&dense)).is_err());
    assert!(pointwise(&region, &[4, 4], &[dense.clone(), half], from_ref(&dense)).is_err());
    assert!(pointwise(&region, &[4], &[dense.clone(), dense.clone()], from_ref(&dense)).is_err());
    let by_itself = [
        Read::At {
            index: 0,
            stride: 1,
            size: 4,
        },
        Read::Plain,
    ];
    let outside = Read::Within {
        before: vec![2, 0],
        sizes: vec![3, 4],
        outside: Scalar::Float(0.0),
    };
    let beside_itself = Read::Beside {
        before: vec![0, 0],
        sizes: vec![2, 4],
        other: 0,
    };
    for reads in [
        &by_itself[..],
        &[outside, Read::Plain],
        &[beside_itself, Read::Plain],
        &[Read::Plain],
    ] {
        let inputs = [dense.clone(), dense.clone()];
        assert!(reading(&region, &[4, 4], &inputs, reads, from_ref(&dense)).is_err());
    }
    let sum = Rowwise::new(RowOp::Sum, DType::F32).unwrap();
    assert!(rows(&sum, &[4, 4], 3, from_ref(&dense), from_ref(&dense)).is_err());
    assert!(rows(&sum, &[4, 0], 1, from_ref(&dense), &[strided(DType::F32, &[1])]).is_err());
    assert!(cross_entropy(&strided(DType::I64, &[4, 1]), [4, 4], -100, None).is_err());
}

#[test]
fn nothing_is_launched_for_no_elements() {
    let shape = [0, 256];
    let dense = Operand::dense(DType::F32, &shape);
    let kernel = pointwise(
        &gelu_of_sum(DType::F32),
        &shape,
        &[dense.clone(), dense.clone()],
        &[dense],
    )
    .unwrap();
    assert_eq!(kernel.blocks[0], 0);
}

/// Regions that together use every op on every class of types.
fn every_op() -> Vec<Region> {
    use Op::*;
    let floats = [
        Neg, Abs, Sign, Exp, Expm1, Log, Log1p, Sqrt, Rsqrt, Reciprocal, Square, Sin, Cos, Erf, Tanh, Sigmoid, Relu,
        Gelu, GeluTanh, Silu, Floor, Ceil,
    ];
    let binary = [Add, Sub, Mul, Div, Pow, Maximum, Minimum];
    let compare = [Eq, Ne, Lt, Le, Gt, Ge];
    let mut regions = vec![];
    for dtype in DType::ALL {
        let mut code: Vec<Instruction> = vec![];
        let mut outputs = vec![];
        let (ones, pairs): (&[Op], &[Op]) = match dtype {
            DType::Bool => (&[Not], &[And, Or]),
            d if d.is_float() => (&floats, &binary),
            _ => (&[Neg, Abs, Sign, Square, Relu], &[Add, Sub, Mul, Maximum, Minimum]),
        };
        let numbers = if dtype == DType::Bool { &[][..] } else { &compare[..] };
        let mut emit = |op: Op, args: &[usize]| {
            code.push(Instruction::new(op, args.iter().copied()));
            2 + code.len() - 1
        };
        for op in ones {
            outputs.push(emit(*op, &[0]));
        }
        for op in pairs.iter().chain(numbers) {
            outputs.push(emit(*op, &[0, 1]));
        }
        if dtype != DType::Bool {
            let scalar = if dtype.is_float() {
                Scalar::Float(2.5)
            } else {
                Scalar::Int(-7)
            };
            let constant = emit(Constant(scalar, dtype), &[]);
            let mask = emit(Lt, &[0, constant]);
            outputs.push(emit(Clamp, &[0, constant, 1]));
            outputs.push(emit(Where, &[mask, 0, constant]));
            outputs.push(emit(MaskedFill, &[0, mask, constant]));
        }
        for to in DType::ALL {
            outputs.push(emit(Cast(to), &[0]));
        }
        if dtype.is_float() {
            for exponent in [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, f64::INFINITY, f64::NAN] {
                let exponent = emit(Constant(Scalar::Float(exponent), dtype), &[]);
                outputs.push(emit(Pow, &[0, exponent]));
            }
        }
        regions.push(Region::new(&[dtype; 2], code, &outputs, Rounding::EveryOp).unwrap());
    }
    regions
}

fn samples() -> Vec<Kernel> {
    let mut kernels = vec![];
    for region in every_op() {
        let shape = [6, 64];
        // One element at a time: what is compiled is long enough.
        let operand = |d: &DType| aligned(*d, &[64, 1], d.size());
        let operands = |types: &[DType]| types.iter().map(operand).collect::<Vec<_>>();
        kernels.push(pointwise(&region, &shape, &operands(region.inputs()), &operands(region.outputs())).unwrap());
    }
    kernels.push(placed().unwrap());
    // Three dimensions, broadcast, permuted, with gaps, and too long for 32 bits.
    let region = gelu_of_sum(DType::F32);
    for (shape, strides) in [
        ([4, 6, 10], [[60, 10, 1], [0, 1, 6], [60, 10, 1]]),
        ([4, 6, 10], [[1, 4, 24], [0, 0, 0], [1, 4, 24]]),
        ([1 << 20, 64, 32], [[2048, 32, 1], [64, 1, 0], [4096, 64, 2]]),
    ] {
        let [a, b, c] = strides.map(|s| strided(DType::F32, &s));
        kernels.push(pointwise(&region, &shape, &[a, b], &[c]).unwrap());
    }
    let ops = [
        RowOp::Softmax { flushes: false },
        RowOp::LogSoftmax,
        RowOp::LayerNorm { eps: 1e-5 },
        RowOp::RmsNorm { eps: 1e-6 },
        RowOp::Sum,
        RowOp::Mean,
        RowOp::Amax,
    ];
    for (dtype, width) in [
        (DType::BF16, 768),
        (DType::F32, 1001),
        (DType::F64, 4096),
        (DType::F16, 50257),
    ] {
        for op in ops {
            let shape = [8, width];
            let (input, whole) = (Operand::dense(dtype, &shape), Operand::dense(dtype, &shape));
            let output = if op.reduces() { strided(dtype, &[1]) } else { whole };
            kernels.push(rows(&Rowwise::new(op, dtype).unwrap(), &shape, 1, &[input], &[output]).unwrap());
        }
    }
    kernels.push(normalised_sum());
    let widened = Region::widening(DType::BF16).unwrap();
    let shape = [1000, 264];
    let dense = Operand::dense(DType::BF16, &shape);
    let moments = ColumnKind::Moments { correction: 0 };
    for (kinds, out) in [
        (&[ColumnKind::Sum][..], &[DType::BF16][..]),
        (&[moments], &[DType::F32, DType::F32]),
    ] {
        let made = columns(kinds, &widened, &shape, 1, from_ref(&dense), out).unwrap();
        kernels.extend([made.chunks].into_iter().chain(made.finish));
    }
    // Elements of a column that lie side by side, and with gaps.
    for (shape, rows, strides) in [
        (vec![12_544, 16], 1, vec![1, 12_544]),
        (vec![7, 5, 3], 2, vec![1, 7, 35]),
        (vec![784, 8, 16, 4], 2, vec![32, 1, 25_088, 8]),
    ] {
        let x = Operand {
            strides,
            ..Operand::dense(DType::BF16, &shape)
        };
        let made = columns(&[moments], &widened, &shape, rows, &[x], &[DType::F32, DType::F32]).unwrap();
        assert!(made.chunks.source.contains("packs"), "{shape:?}");
        kernels.extend([made.chunks].into_iter().chain(made.finish));
    }
    let few = [Operand::dense(DType::BF16, &[49, 24])];
    let means = columns(&[ColumnKind::Mean], &widened, &[49, 24], 1, &few, &[DType::BF16]).unwrap();
    assert_eq!(means.finish, None);
    kernels.push(means.chunks);
    for split in Split::ALL {
        kernels.extend([split.kernel(false, 3, 784).unwrap(), split.kernel(true, 3, 33).unwrap()]);
    }
    kernels.extend(reads());
    for mean in [true, false] {
        let loss = cross_entropy(&dense, shape, -100, Some(mean)).unwrap();
        kernels.extend([loss.rows].into_iter().chain(loss.finish));
    }
    kernels
}

/// layer_norm(x + y) · w + b, with the sum kept, as a transformer block has it.
fn normalised_sum() -> Kernel {
    let sum = vec![
        Instruction::new(Op::Add, [0, 1]),
        Instruction::new(Op::Cast(DType::F32), [2]),
    ];
    let affine = vec![
        Instruction::new(Op::Cast(DType::F32), [1]),
        Instruction::new(Op::Mul, [0, 3]),
        Instruction::new(Op::Cast(DType::F32), [2]),
        Instruction::new(Op::Add, [4, 5]),
        Instruction::new(Op::Cast(DType::BF16), [6]),
    ];
    let types = [DType::F32, DType::BF16, DType::BF16];
    let norm = Rowwise::new(RowOp::LayerNorm { eps: 1e-5 }, DType::BF16)
        .unwrap()
        .with_prologue(Region::new(&[DType::BF16; 2], sum, &[3, 2], Rounding::EveryOp).unwrap())
        .unwrap()
        .with_epilogue(Region::new(&types, affine, &[7], Rounding::AtStores).unwrap())
        .unwrap();
    let shape = [2, 128, 768];
    let dense = Operand::dense(DType::BF16, &shape);
    let weight = strided(DType::BF16, &[0, 0, 1]);
    let inputs = [dense.clone(), dense.clone(), weight.clone(), weight];
    rows(&norm, &shape, 1, &inputs, &[dense.clone(), dense]).unwrap()
}

#[test]
fn every_kernel_waits_before_it_reads() {
    for kernel in samples() {
        let (_, body) = kernel.source.split_once(") {\n    begin();\n").expect(&kernel.name);
        assert!(!body.contains("__global__"), "{}", kernel.name);
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if !has("NVRTC", nvrtc::version().err()) {
        return;
    }
    for arch in [Arch::new(8, 0), Arch::new(9, 0), Arch::new(10, 0)] {
        // One source of all, since what they share takes longer than a kernel does.
        let mut source = PRELUDE.to_owned();
        for (i, kernel) in samples().iter().enumerate() {
            let text = kernel.source.strip_prefix(PRELUDE).unwrap();
            source += &text.replace(&format!(" {}(", kernel.name), &format!(" kernel{i}("));
        }
        let code = nvrtc::compile("samples", &source, arch).unwrap_or_else(|e| panic!("{arch}: {e}"));
        assert!(code.starts_with(b"\x7fELF"));
    }
}

#[test]
fn norms_of_training_steps_compile_for_every_architecture() {
    if !has("NVRTC", nvrtc::version().err()) {
        return;
    }
    let arches = [Arch::new(8, 0), Arch::new(9, 0), Arch::new(10, 0)];
    let widths = [
        (DType::BF16, 768, true),
        (DType::F16, 1, true),
        (DType::F32, 8192, true),
        (DType::BF16, 4100, false),
        (DType::F32, 1001, false),
    ];
    for (i, (dtype, width, centered)) in widths.into_iter().enumerate() {
        let norm = Norm {
            dtype,
            rows: 9,
            width,
            centered,
        };
        let backward = norm.backward().unwrap();
        assert_eq!(backward.rows.source, backward.finish.source);
        for kernel in [norm.forward(1e-5).unwrap(), backward.rows] {
            let arch = arches[i % arches.len()];
            let code = nvrtc::compile(&kernel.name, &kernel.source, arch);
            code.unwrap_or_else(|e| panic!("{dtype} {width} for {arch}: {e}"));
        }
    }
    let wide = Norm {
        dtype: DType::F32,
        rows: 9,
        width: 8193,
        centered: true,
    };
    assert!(wide.forward(1e-5).is_err());
}

#[test]
fn a_kernel_that_does_not_compile_says_why() {
    if !has("NVRTC", nvrtc::version().err()) {
        return;
    }
    let error = nvrtc::compile("broken", "int f() { return nonsense; }", Arch::OLDEST).unwrap_err();
    assert!(error.to_string().contains("nonsense"), "{error}");
}

#[test]
fn only_linear_layers_are_split() {
    use crate::gemm::Problem;
    let layer = Problem::linear(DType::F32, 64, 256, 784);
    let split = Split::Bf16x6.problem(&layer).unwrap();
    assert_eq!(
        (split.k, split.left.ld, split.input, split.output),
        (6 * 784, 6 * 784, DType::BF16, DType::F32)
    );
    assert!(Split::Bf16x6.problem(&layer.with_batch(2)).is_err());
    assert!(
        Split::Bf16x6
            .problem(&Problem::linear(DType::BF16, 64, 256, 784))
            .is_err()
    );
    assert!(
        Split::Bf16x6
            .problem(&Problem::new(DType::F32, [64, 256, 784], [false, false]))
            .is_err()
    );
}
