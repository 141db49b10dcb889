//! Times packed linear layers with bias and ReLU: median microseconds of a call, GFLOP/s, and GB/s of weights.
//!
//! `cargo run --release --example linear [form...]` with forms out of f32, bf16, bf16x3, bf16x6.
#![allow(clippy::print_stdout)]

use half::bf16;
use hypatia::runtime::cpu::linear::{
    Activation, Epilogue, PackedBf16, PackedF32, PackedSplit, Precision, Rows, RowsMut,
};
use std::time::{Duration, Instant};

/// Rows, terms, columns.
const SHAPES: &[(usize, usize, usize)] = &[
    (64, 784, 256),
    (256, 784, 256),
    (128, 512, 512),
    (256, 1024, 512),
    (512, 2048, 2048),
    (512, 4096, 4096),
    (1, 2048, 2048),
    (4, 2048, 2048),
    (16, 2048, 2048),
    (1, 64, 64),
    // The layers of the benchmark's MLPs that are not above.
    (64, 256, 256),
    (64, 256, 10),
    (256, 256, 256),
    (256, 256, 10),
    (128, 512, 128),
    (256, 784, 512),
    (256, 512, 512),
    (256, 512, 128),
    (256, 512, 256),
    (512, 784, 2048),
    (512, 2048, 1000),
    (1024, 784, 2048),
    (1024, 2048, 2048),
    (1024, 2048, 1000),
    (512, 1024, 4096),
    (512, 4096, 1000),
];

fn median(mut call: impl FnMut()) -> Duration {
    let begin = Instant::now();
    let mut warm = 0;
    while warm < 3 || begin.elapsed() < Duration::from_millis(50) {
        call();
        warm += 1;
    }
    let mut times = vec![];
    let begin = Instant::now();
    while times.len() < 7 || begin.elapsed() < Duration::from_millis(250) {
        let start = Instant::now();
        call();
        times.push(start.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn epilogue<T>(bias: &[T]) -> Epilogue<'_, T> {
    Epilogue {
        bias: Some(bias),
        activation: Activation::Relu,
        ..Epilogue::default()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let forms: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |form: &str| forms.is_empty() || forms.iter().any(|f| f == form);
    println!(
        "{:>18} {:>7} {:>3} {:>11} {:>8} {:>6}",
        "m,k,n", "form", "thr", "us", "GFLOP/s", "GB/s"
    );
    for &(m, k, n) in SHAPES {
        let (x, w, bias) = (numbers(m * k), numbers(n * k), numbers(n));
        let narrow = |v: &[f32]| v.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
        let show = |form: &str, threads: usize, bytes: usize, time: Duration| {
            let ns = time.as_secs_f64() * 1e9;
            println!(
                "{:>18} {form:>7} {threads:>3} {:>11.2} {:>8.1} {:>6.1}",
                format!("{m},{k},{n}"),
                ns / 1e3,
                (2 * m * k * n) as f64 / ns,
                bytes as f64 / ns
            );
        };
        let mut y = vec![0f32; m * n];
        if wanted("f32") {
            let packed = PackedF32::pack(Rows::dense(&w, k), n, k)?;
            for threads in [1, 2] {
                let time = median(|| {
                    let run = packed.run(
                        threads,
                        Rows::dense(&x, k),
                        m,
                        RowsMut::dense(&mut y, n),
                        &epilogue(&bias),
                    );
                    run.expect("sizes fit");
                });
                show("f32", threads, n * k * 4, time);
            }
        }
        if wanted("bf16") {
            let (x, w, bias, mut y) = (narrow(&x), narrow(&w), narrow(&bias), vec![bf16::ZERO; m * n]);
            let packed = PackedBf16::pack(Rows::dense(&w, k), n, k)?;
            for threads in [1, 2] {
                let time = median(|| {
                    let run = packed.run(
                        threads,
                        Rows::dense(&x, k),
                        m,
                        RowsMut::dense(&mut y, n),
                        &epilogue(&bias),
                    );
                    run.expect("sizes fit");
                });
                show("bf16", threads, n * k * 2, time);
            }
        }
        for (form, precision) in [("bf16x3", Precision::Bf16x3), ("bf16x6", Precision::Bf16x6)] {
            if !wanted(form) {
                continue;
            }
            if let Some(packed) = PackedSplit::pack(Rows::dense(&w, k), n, k, precision)? {
                for threads in [1, 2] {
                    let time = median(|| {
                        let y = RowsMut::dense(&mut y, n);
                        let run = packed.run(threads, Rows::dense(&x, k), m, y, &epilogue(&bias));
                        run.expect("sizes fit");
                    });
                    show(form, threads, packed.bytes(), time);
                }
            }
        }
    }
    Ok(())
}
