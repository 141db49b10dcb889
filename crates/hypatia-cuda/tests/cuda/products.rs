//! Products of f32 in pieces.

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::Split;
use hypatia_cuda::driver::{Buffer, Device};
use hypatia_cuda::gemm::{Budget, Epilogue, Gemm, Operands, Problem, Scratch, scratch_bytes, tune};

use crate::support::{decode, device, draw};

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
