//! Times packed linear layers with bias and ReLU: microseconds of the fastest call, GFLOP/s, and GB/s of weights.
//!
//! `cargo run --release --example linear [kind...]` with names out of the table of kinds.
#![allow(clippy::print_stdout)]

use half::bf16;
use hypatia_core::ty::DType;
use hypatia_runtime::cpu::linear::{Element, Epilogue, KINDS, Kind, LinearElement, Packed, Rows, RowsMut};
use hypatia_runtime::kernels::product::Activation;
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

fn fastest(mut call: impl FnMut()) -> Duration {
    let begin = Instant::now();
    let (mut least, mut calls) = (Duration::MAX, 0);
    while calls < 10 || begin.elapsed() < Duration::from_millis(150) {
        let start = Instant::now();
        call();
        least = least.min(start.elapsed());
        calls += 1;
    }
    least
}

fn numbers<T: Element>(len: usize) -> Vec<T> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::narrow((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn time<T: LinearElement>(kind: &'static Kind, (m, k, n): (usize, usize, usize)) {
    let (x, w, bias) = (numbers::<T>(m * k), numbers::<T>(n * k), numbers::<T>(n));
    let mut y = vec![T::narrow(0.0); m * n];
    // SAFETY: the weights live until the end.
    let packed = unsafe { Packed::in_place(kind, Rows::dense(&w, k), n, k) }.expect("plain numbers");
    let epilogue = Epilogue {
        bias: Some(&bias[..]),
        activation: Activation::Relu,
        ..Epilogue::default()
    };
    for threads in [1, 2] {
        let time = fastest(|| {
            let run = packed.run(threads, Rows::dense(&x, k), m, RowsMut::dense(&mut y, n), &epilogue);
            run.expect("sizes fit");
        });
        let ns = time.as_secs_f64() * 1e9;
        println!(
            "{:>18} {:>7} {threads:>3} {:>11.2} {:>8.1} {:>6.1}",
            format!("{m},{k},{n}"),
            kind.name(),
            ns / 1e3,
            (2 * m * k * n) as f64 / ns,
            (n * k * size_of::<T>()).max(packed.bytes()) as f64 / ns
        );
    }
}

fn main() {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |kind: &&Kind| kind.available() && (names.is_empty() || names.iter().any(|n| n == kind.name()));
    println!(
        "{:>18} {:>7} {:>3} {:>11} {:>8} {:>6}",
        "m,k,n", "kind", "thr", "us", "GFLOP/s", "GB/s"
    );
    for &shape in SHAPES {
        for kind in KINDS.iter().filter(wanted) {
            match kind.dtype() {
                DType::F32 => time::<f32>(kind, shape),
                _ => time::<bf16>(kind, shape),
            }
        }
    }
}
