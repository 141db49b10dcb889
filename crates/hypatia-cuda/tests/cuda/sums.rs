//! Column sums and losses.

use std::slice::from_ref;

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand};
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding, Scalar};
use hypatia_runtime::step::ColumnKind;

use crate::support::{decode, device, draw, run};

const MOMENTS: ColumnKind = ColumnKind::Moments { correction: 1 };

#[test]
fn column_sums() {
    let Some(device) = device() else { return };
    for (kinds, rows, columns, dtype) in [
        (&[ColumnKind::Sum][..], 1, 1, DType::F32),
        (&[ColumnKind::Sum], 1000, 264, DType::BF16),
        (&[ColumnKind::Sum], 5000, 100, DType::F32),
        (&[ColumnKind::Sum], 513, 7, DType::F16),
        (&[ColumnKind::Mean], 49, 1280, DType::BF16),
        (&[ColumnKind::Mean], 3136, 96, DType::F16),
        (&[ColumnKind::Mean], 12544, 33, DType::F32),
        (&[ColumnKind::Norm], 196, 384, DType::BF16),
        (&[ColumnKind::Norm], 3136, 50, DType::F64),
        (&[MOMENTS], 2, 1, DType::F32),
        (&[MOMENTS], 49, 2048, DType::BF16),
        (&[MOMENTS], 100_352, 64, DType::BF16),
        (&[MOMENTS], 401, 7, DType::F64),
        (&[MOMENTS, ColumnKind::Sum], 12544, 33, DType::F32),
        (&[ColumnKind::Sum, ColumnKind::Mean, MOMENTS], 7000, 24, DType::F16),
        (&[ColumnKind::Sum, ColumnKind::Sum], 401_408, 64, DType::BF16),
    ] {
        let shape = [rows, columns];
        let dense = Operand::dense(dtype, &shape);
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        // Far from zero, so that moments about it would be nothing but roundings.
        let shift = if kinds == [MOMENTS] { 1000.0 } else { 0.0 };
        let mut code = vec![
            Instruction::new(Op::Cast(wide), [0]),
            Instruction::new(Op::Constant(Scalar::Float(shift), wide), []),
            Instruction::new(Op::Add, [1, 2]),
        ];
        if kinds == [ColumnKind::Norm] {
            code.push(Instruction::new(Op::Square, [3]));
        }
        let last = code.len();
        let region = Region::new(&[dtype], code, &vec![last; kinds.len()], Rounding::EveryOp).unwrap();
        let numbers: usize = kinds.iter().map(|k| k.results()).sum();
        let types = vec![wide; numbers];
        let made = codegen::columns(kinds, &region, &shape, 1, from_ref(&dense), &types).unwrap();
        let input = draw(dtype, rows * columns, 3);
        let mut buffers = vec![input.clone(), vec![0x5a; made.partial_bytes]];
        buffers.extend(vec![vec![0x5a; columns * wide.size()]; numbers]);
        let results: Vec<usize> = (2..2 + numbers).collect();
        let out = match &made.finish {
            Some(finish) => {
                let reads = [vec![1], results.clone()].concat();
                run(device, &[(&made.chunks, vec![0, 1]), (finish, reads)], &buffers)
            }
            None => run(device, &[(&made.chunks, [vec![0], results.clone()].concat())], &buffers),
        };
        let x = decode(dtype, &input);
        let round = |v: f64| if wide == DType::F32 { f64::from(v as f32) } else { v };
        for c in 0..columns {
            let column: Vec<f64> = (0..rows).map(|r| round(x[r * columns + c] + shift)).collect();
            let mut at = 2;
            for kind in kinds {
                for (want, size) in wanted(*kind, &column) {
                    let got = decode(wide, &out[at])[c];
                    let allowed = 2e-6 * size + wide.epsilon() * 2.0 * want.abs();
                    let same = (got - want).abs() <= allowed || got.is_nan() && want.is_nan();
                    assert!(same, "{kinds:?} {shape:?} {dtype} column {c}: {got} not {want}");
                    at += 1;
                }
            }
        }
    }
}

/// What is made of a column, and the size of what it is made of.
fn wanted(kind: ColumnKind, column: &[f64]) -> Vec<(f64, f64)> {
    let count = column.len() as f64;
    let (sum, size) = (column.iter().sum::<f64>(), column.iter().map(|x| x.abs()).sum::<f64>());
    match kind {
        ColumnKind::Sum => vec![(sum, size)],
        ColumnKind::Mean => vec![(sum / count, size / count)],
        ColumnKind::Norm => {
            let norm = column.iter().map(|x| x * x).sum::<f64>().sqrt();
            vec![(norm, norm)]
        }
        ColumnKind::Moments { correction } => {
            let mean = sum / count;
            let spread = column.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (count - f64::from(correction));
            vec![(mean, size / count), (spread, spread)]
        }
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
