//! What kernels of steps take, and in which order.

use hypatia_core::ty::DType;

use super::*;
use crate::kernels::region::{Instruction, Op, Region, Rounding};

/// A part of a value, so many elements behind its start.
fn part(value: ValueId, offset: usize) -> Operand {
    Operand {
        offset,
        ..Operand::dense(value, &[2, 3])
    }
}

fn sum() -> Region {
    let add = vec![Instruction::new(Op::Add, [0, 1])];
    Region::new(&[DType::F32; 2], add, &[2], Rounding::EveryOp).unwrap()
}

fn region(slices: Vec<Operand>) -> Task {
    Task::Region(Box::new(RegionStep {
        region: sum(),
        shape: vec![2, 3],
        inputs: vec![part(1, 6), part(0, 2)],
        reads: vec![],
        outputs: vec![4],
        slices,
        dense: vec![3, 1],
        placed: vec![],
    }))
}

#[test]
fn regions_take_inputs_and_then_what_they_write() {
    let whole = region(vec![]);
    assert_eq!(whole.operands(), [(1, 6), (0, 2), (4, 0)]);
    assert_eq!((whole.reads(), whole.writes()), (vec![1, 0], vec![4]));
    let sliced = region(vec![part(4, 12)]);
    assert_eq!(sliced.operands(), [(1, 6), (0, 2), (4, 12)]);
    assert_eq!(sliced.reads(), [1, 0]);
    // It changes an input.
    let changing = region(vec![part(3, 0)]);
    assert_eq!(changing.operands(), [(1, 6), (0, 2), (3, 0)]);
    assert_eq!(changing.reads(), [1, 0, 3]);
}

#[test]
fn windows_take_images_the_weight_and_what_follows_reads() {
    let step = |op| {
        Task::Depthwise(Box::new(DepthwiseStep {
            x: part(7, 5),
            op,
            window: Window {
                size: [1, 1],
                stride: [1, 1],
                padding: [0, 0],
                dilation: [1, 1],
            },
            after: sum(),
            inputs: vec![None, Some(part(2, 1))],
            shape: vec![1, 1, 2, 3],
            output: 9,
        }))
    };
    let conv = step(WindowOp::Conv(8));
    assert_eq!(conv.operands(), [(7, 5), (8, 0), (2, 1), (9, 0)]);
    assert_eq!((conv.reads(), conv.weights()), (vec![7, 2], vec![8]));
    let pool = step(WindowOp::Pool(Pool::Max));
    assert_eq!(pool.operands(), [(7, 5), (2, 1), (9, 0)]);
    assert!(pool.weights().is_empty());
}

#[test]
fn attention_takes_queries_keys_values_and_the_mask() {
    let step = |mask| {
        Task::Attention(Box::new(AttentionStep {
            q: part(1, 0),
            k: part(2, 3),
            v: part(2, 6),
            mask,
            scale: 1.0,
            y: 5,
        }))
    };
    assert_eq!(step(None).operands(), [(1, 0), (2, 3), (2, 6), (5, 0)]);
    assert_eq!(
        step(Some(part(3, 1))).operands(),
        [(1, 0), (2, 3), (2, 6), (3, 1), (5, 0)]
    );
}

#[test]
fn steps_of_several_kernels_take_nothing_alike() {
    let batch = Task::Batch(Box::new(BatchStep {
        left: part(0, 0),
        right: part(1, 0),
        y: 2,
    }));
    assert!(batch.operands().is_empty());
    assert_eq!((batch.reads(), batch.writes()), (vec![0, 1], vec![2]));
}

#[test]
fn multiplications_are_those_of_products_and_windows() {
    let value = |shape: &[usize]| Value {
        shape: shape.to_vec(),
        dtype: DType::F32,
    };
    let torch = |name: &str, reads: &[&[usize]], result: &[usize]| {
        let mut values: Vec<Value> = reads.iter().map(|shape| value(shape)).collect();
        values.push(value(result));
        let step = Task::Torch(TorchStep {
            name: name.into(),
            call: 0,
            reads: reads
                .iter()
                .enumerate()
                .map(|(i, shape)| Operand::dense(i, shape))
                .collect(),
            writes: vec![reads.len()],
        });
        step.multiplications(&values)
    };
    assert_eq!(torch("aten.mm.default", &[&[2, 3], &[3, 5]], &[2, 5]), 30.0);
    assert_eq!(torch("aten.addmm.out", &[&[5], &[2, 3], &[3, 5]], &[2, 5]), 30.0);
    // Eight channels in two groups: four of them are read for each of 6 results in 10 x 10 places.
    let convolved = torch(
        "aten.convolution.default",
        &[&[1, 8, 10, 10], &[6, 4, 3, 3]],
        &[1, 6, 10, 10],
    );
    assert_eq!(convolved, 600.0 * 36.0);
    assert_eq!(torch("aten.cumsum.default", &[&[2, 3]], &[2, 3]), 0.0);
    assert_eq!(region(vec![]).multiplications(&[]), 0.0);
}

#[test]
fn parts_and_tables_are_moved_as_far_as_they_are_read() {
    let value = |shape: &[usize], dtype| Value {
        shape: shape.to_vec(),
        dtype,
    };
    let plan = Plan {
        values: vec![
            value(&[30000, 64], DType::F32),
            value(&[8], DType::I64),
            value(&[8, 64], DType::F32),
        ],
        ..Plan::default()
    };
    let looked_up = Task::Torch(TorchStep {
        name: "aten.embedding.default".into(),
        call: 0,
        reads: vec![Operand::dense(0, &[30000, 64]), Operand::dense(1, &[8])],
        writes: vec![2],
    });
    assert_eq!(plan.moved(&looked_up), 2 * 8 * 64 * 4 + 8 * 8);
    // Rows that are repeated are read once.
    let repeated = Operand {
        strides: vec![0, 1],
        ..Operand::dense(0, &[8, 64])
    };
    let part = Task::Region(Box::new(RegionStep {
        region: sum(),
        shape: vec![8, 64],
        inputs: vec![repeated, Operand::dense(2, &[8, 64])],
        reads: vec![],
        outputs: vec![2],
        slices: vec![],
        dense: vec![64, 1],
        placed: vec![],
    }));
    assert_eq!(plan.moved(&part), 64 * 4 + 8 * 64 * 4);
}

#[test]
fn demands_count_operations_runs_and_elements_apart() {
    let shape = vec![4, 8];
    let value = || Value {
        shape: vec![4, 8],
        dtype: DType::F32,
    };
    let plan = Plan {
        values: vec![value(), value(), value()],
        constants: vec![1],
        ..Plan::default()
    };
    let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Gelu, [2])];
    let of = |strides: Vec<isize>| {
        let operand = Operand {
            strides,
            ..Operand::dense(0, &[4, 8])
        };
        Task::Region(Box::new(RegionStep {
            region: Region::new(&[DType::F32; 2], code.clone(), &[3], Rounding::EveryOp).unwrap(),
            shape: shape.clone(),
            inputs: vec![operand, Operand::dense(1, &[4, 8])],
            reads: vec![],
            outputs: vec![2],
            slices: vec![],
            dense: vec![8, 1],
            placed: vec![],
        }))
    };
    let dense = of(vec![8, 1]);
    assert_eq!(dense.kind(), "region");
    let demand = plan.demand(&dense);
    // An addition and a GELU of each element; the second operand is a constant.
    assert_eq!((demand.vector, demand.results), (32.0 * 21.0, 32.0));
    assert_eq!((demand.runs, demand.apart, demand.constants), (0.0, 0.0, 128.0));
    let gaps = plan.demand(&of(vec![16, 1]));
    assert_eq!((gaps.runs, gaps.apart), (4.0, 0.0));
    let turned = plan.demand(&of(vec![1, 4]));
    assert_eq!((turned.runs, turned.apart), (4.0, 32.0));
    // One row for all.
    assert_eq!(plan.demand(&of(vec![0, 1])).runs, 0.0);
}
