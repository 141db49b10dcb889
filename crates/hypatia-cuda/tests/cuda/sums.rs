//! Column sums and losses.

use std::slice::from_ref;

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand};
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};
use hypatia_runtime::step::ColumnKind;

use crate::support::{decode, device, draw, run};

#[test]
fn column_sums() {
    let Some(device) = device() else { return };
    for (kind, rows, columns, dtype) in [
        (ColumnKind::Sum, 1, 1, DType::F32),
        (ColumnKind::Sum, 1000, 264, DType::BF16),
        (ColumnKind::Sum, 5000, 100, DType::F32),
        (ColumnKind::Sum, 513, 7, DType::F16),
        (ColumnKind::Mean, 49, 1280, DType::BF16),
        (ColumnKind::Mean, 3136, 96, DType::F16),
        (ColumnKind::Mean, 12544, 33, DType::F32),
        (ColumnKind::Norm, 196, 384, DType::BF16),
        (ColumnKind::Norm, 3136, 50, DType::F64),
    ] {
        let shape = [rows, columns];
        let dense = Operand::dense(dtype, &shape);
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut code = vec![Instruction::new(Op::Cast(wide), [0]), Instruction::new(Op::Relu, [0])];
        if kind == ColumnKind::Norm {
            code.push(Instruction::new(Op::Square, [1]));
        }
        let summed = if kind == ColumnKind::Norm { 3 } else { 1 };
        let region = Region::new(&[dtype], code, &[summed, 2], Rounding::EveryOp).unwrap();
        let made = codegen::columns(kind, &region, &shape, 1, from_ref(&dense), from_ref(&dense), dtype).unwrap();
        let input = draw(dtype, rows * columns, 3);
        let room = |bytes: usize| vec![0x5a; bytes];
        let buffers = [
            input.clone(),
            room(made.partial_bytes),
            room(input.len()),
            room(columns * dtype.size()),
        ];
        let out = match &made.finish {
            Some(finish) => run(device, &[(&made.chunks, vec![0, 1, 2]), (finish, vec![1, 3])], &buffers),
            None => run(device, &[(&made.chunks, vec![0, 3, 2])], &buffers),
        };
        let (x, relu, sums) = (decode(dtype, &input), decode(dtype, &out[2]), decode(dtype, &out[3]));
        for c in 0..columns {
            let column = || (0..rows).map(|r| x[r * columns + c]);
            let (sum, size): (f64, f64) = match kind {
                ColumnKind::Sum => (column().sum(), column().map(f64::abs).sum()),
                ColumnKind::Mean => {
                    let count = rows as f64;
                    (
                        column().sum::<f64>() / count,
                        column().map(f64::abs).sum::<f64>() / count,
                    )
                }
                ColumnKind::Norm => {
                    let norm = column().map(|x| x * x).sum::<f64>().sqrt();
                    (norm, norm)
                }
            };
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
