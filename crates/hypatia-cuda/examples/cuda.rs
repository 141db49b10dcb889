//! Times what a plan on a GPU stands on: ways to run a chain of products whose operands move, and generated kernels.
//!
//! `cargo run --release --example cuda`; libraries are found through `HYPATIA_CUDA_LIBRARIES`.
#![allow(clippy::print_stdout)]

use std::slice::from_ref;
use std::time::Instant;

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand, Split};
use hypatia_cuda::driver::{Buffer, Device, Event, Graph, Stream};
use hypatia_cuda::gemm::{Budget, Epilogue, Gemm, Operands, Problem, Scratch, scratch_bytes, tune};
use hypatia_cuda::kernel::{Kernel, Loaded};
use hypatia_cuda::replay::Replay;
use hypatia_cuda::{Result, gemm, nvrtc};
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};
use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};
use hypatia_runtime::step::ColumnKind;

fn main() {
    let device = match Device::get(0) {
        Ok(device) => device,
        Err(e) => return println!("no GPU: {e}"),
    };
    let report = chains(device)
        .and_then(|()| kernels(device))
        .and_then(|()| splits(device));
    if let Err(e) = report {
        println!("{e}");
        std::process::exit(1);
    }
}

/// Name, input, hidden, hidden layers, output, batch.
const CHAINS: [(&str, usize, usize, usize, usize, usize); 4] = [
    ("tiny_b64", 784, 256, 2, 10, 64),
    ("medium4", 1024, 512, 4, 256, 256),
    ("large4", 784, 2048, 4, 1000, 512),
    ("xlarge6", 1024, 4096, 6, 1000, 512),
];

/// A chain of linear layers with ReLU between them, with two places for its input and its output.
struct Chain {
    layers: Vec<Gemm>,
    weights: Vec<Buffer>,
    biases: Vec<Buffer>,
    between: [Buffer; 2],
    inputs: [Buffer; 2],
    outputs: [Buffer; 2],
    staged: [Buffer; 2],
    workspace: Buffer,
    copies: [Loaded; 2],
}

impl Chain {
    fn new(device: &'static Device, sizes: &[usize], batch: usize, dtype: DType) -> Result<Chain> {
        let stream = device.stream(0);
        let budget = Budget::default();
        let mut layers = vec![];
        for (i, pair) in sizes.windows(2).enumerate() {
            let last = i + 2 == sizes.len();
            let problem = Problem::linear(dtype, batch, pair[1], pair[0]);
            let problem = problem.with_epilogue(if last { Epilogue::Bias } else { Epilogue::ReluBias });
            let scratch = Buffer::new(device, scratch_bytes(&problem, &budget))?;
            let place = Scratch {
                address: scratch.address(),
                bytes: scratch_bytes(&problem, &budget),
            };
            // SAFETY: fresh memory.
            let tuned = unsafe { tune(&problem, stream, place, &budget)? };
            layers.push(Gemm::new(device, problem, &tuned.best)?);
        }
        let room = |elements: usize| Buffer::of(device, &vec![0u8; elements * dtype.size()]);
        let widest = sizes.iter().max().copied().unwrap_or(1);
        let (first, last) = (sizes[0] * batch, sizes[sizes.len() - 1] * batch);
        Ok(Chain {
            weights: sizes.windows(2).map(|p| room(p[0] * p[1])).collect::<Result<_>>()?,
            biases: sizes[1..].iter().map(|n| room(*n)).collect::<Result<_>>()?,
            between: [room(widest * batch)?, room(widest * batch)?],
            inputs: [room(first)?, room(first)?],
            outputs: [room(last)?, room(last)?],
            staged: [room(first)?, room(last)?],
            workspace: Buffer::new(device, layers.iter().map(Gemm::workspace).max().unwrap_or(0))?,
            copies: [copy(dtype, first)?.load(device)?, copy(dtype, last)?.load(device)?],
            layers,
        })
    }

    /// Launches some of the layers; the input is the first's, the output the last's.
    fn launch(&self, stream: Stream, layers: std::ops::Range<usize>, input: u64, output: u64) -> Result<()> {
        for i in layers {
            let last = i + 1 == self.layers.len();
            let operands = Operands {
                left: if i == 0 {
                    input
                } else {
                    self.between[(i + 1) % 2].address()
                },
                right: self.weights[i].address(),
                bias: self.biases[i].address(),
                out: if last { output } else { self.between[i % 2].address() },
                workspace: self.workspace.address(),
                ..Operands::default()
            };
            // SAFETY: buffers of these sizes, which live as long as the chain.
            unsafe { self.layers[i].launch(stream, &operands)? };
        }
        Ok(())
    }
}

fn copy(dtype: DType, len: usize) -> Result<Kernel> {
    let region = Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?;
    let dense = Operand::dense(dtype, &[len]);
    codegen::pointwise(&region, &[len], from_ref(&dense), from_ref(&dense))
}

/// Microseconds of a call: of the host alone, and of everything when calls are queued.
fn time(stream: Stream, mut call: impl FnMut(usize) -> Result<()>) -> Result<(f64, f64)> {
    for i in 0..20 {
        call(i)?;
    }
    stream.synchronize()?;
    let (mut host, mut wall) = (vec![], vec![]);
    for _ in 0..15 {
        let start = Instant::now();
        // Few enough that the queue does not fill up.
        for i in 0..40 {
            call(i)?;
        }
        host.push(start.elapsed().as_secs_f64() * 1e6 / 40.0);
        stream.synchronize()?;
        wall.push(start.elapsed().as_secs_f64() * 1e6 / 40.0);
    }
    host.sort_by(f64::total_cmp);
    wall.sort_by(f64::total_cmp);
    Ok((host[7], wall[7]))
}

fn chains(device: &'static Device) -> Result<()> {
    let _current = device.enter()?;
    let (blas, (major, minor)) = (gemm::version()?, nvrtc::version()?);
    println!("{}, cuBLASLt {blas}, NVRTC {major}.{minor}", device.name());
    println!("\nWays to run a chain of linear layers, bf16; input and output alternate between two places.");
    println!("Microseconds of a call: host alone / everything, calls queued; medians.\n");
    println!(
        "| chain | kernel by kernel | a graph for each set of addresses | recorded and updated every time | copies in and out with changed arguments | first and last by themselves | recorded and instantiated every time |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (name, input, hidden, layers, output, batch) in CHAINS {
        let sizes: Vec<usize> = [input]
            .into_iter()
            .chain(vec![hidden; layers])
            .chain([output])
            .collect();
        let chain = Chain::new(device, &sizes, batch, DType::BF16)?;
        let stream = device.stream(0);
        let all = 0..chain.layers.len();
        let at = |i: usize| (chain.inputs[i % 2].address(), chain.outputs[i % 2].address());
        let direct = time(stream, |i| chain.launch(stream, all.clone(), at(i).0, at(i).1))?;
        let replay = Replay::new(8);
        let cached = time(stream, |i| {
            let (x, y) = at(i);
            // SAFETY: the chain outlives the replay.
            unsafe { replay.run(stream, &[x, y], |s| chain.launch(s, all.clone(), x, y)) }
        })?;
        let record = |i: usize| Graph::record(device, |s| chain.launch(s, all.clone(), at(i).0, at(i).1));
        let mut updated = record(0)?.instantiate()?;
        let update = time(stream, |i| {
            updated.update(&record(i)?)?;
            // SAFETY: as above.
            unsafe { updated.launch(stream) }
        })?;
        let (x, y) = (chain.staged[0].address(), chain.staged[1].address());
        let staged = Graph::record(device, |s| {
            // SAFETY: buffers of these sizes.
            unsafe { chain.copies[0].launch(s, &[at(0).0, x])? };
            chain.launch(s, all.clone(), x, y)?;
            // SAFETY: as above.
            unsafe { chain.copies[1].launch(s, &[y, at(0).1]) }
        })?;
        let nodes = staged.kernels()?;
        let (first, last) = (nodes[0], nodes[nodes.len() - 1]);
        let mut executable = staged.instantiate()?;
        let copies = time(stream, |i| {
            let (from, to) = at(i);
            // SAFETY: the nodes are copies of this graph.
            unsafe {
                executable.set_arguments(first, &chain.copies[0].arguments(&[from, x]))?;
                executable.set_arguments(last, &chain.copies[1].arguments(&[y, to]))?;
                executable.launch(stream)
            }
        })?;
        let end = chain.layers.len() - 1;
        let mut middle = Graph::record(device, |s| chain.launch(s, 1..end, 0, 0))?.instantiate()?;
        let ends = time(stream, |i| {
            chain.launch(stream, 0..1, at(i).0, 0)?;
            // SAFETY: as above.
            unsafe { middle.launch(stream)? };
            chain.launch(stream, end..end + 1, 0, at(i).1)
        })?;
        let fresh = time(stream, |i| {
            let mut graph = record(i)?.instantiate()?;
            // SAFETY: as above.
            unsafe { graph.launch(stream) }
        })?;
        let cells = [direct, cached, update, copies, ends, fresh].map(|(h, w)| format!("{h:.1} / {w:.1}"));
        println!("| {name} | {} |", cells.join(" | "));
    }
    Ok(())
}

/// Terabytes that a kernel moves in a second.
fn speed(device: &'static Device, kernel: &Kernel, operands: &[usize]) -> Result<(f64, f64)> {
    let loaded = kernel.load(device)?;
    let stream = device.stream(0);
    let buffers: Vec<Buffer> = operands
        .iter()
        .map(|bytes| Buffer::of(device, &vec![1u8; *bytes]))
        .collect::<Result<_>>()?;
    let addresses: Vec<u64> = buffers.iter().map(Buffer::address).collect();
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        start.record(stream)?;
        // SAFETY: buffers of the operands' sizes.
        unsafe { loaded.launch(stream, &addresses)? };
        end.record(stream)?;
        best = best.min(end.since(&start)?);
    }
    Ok((best, operands.iter().sum::<usize>() as f64 / best / 1e6))
}

fn kernels(device: &'static Device) -> Result<()> {
    let _current = device.enter()?;
    println!("\nGenerated kernels: microseconds (fastest of 20), TB/s of operands read and written once.\n");
    println!("| kernel | shape | µs | TB/s |\n|---|---|---|---|");
    let (rows, columns) = (65_536, 4096);
    let shape = [rows, columns];
    for dtype in [DType::F32, DType::BF16] {
        let bytes = rows * columns * dtype.size();
        let dense = Operand::dense(dtype, &shape);
        let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Gelu, [2])];
        let region = Region::new(&[dtype; 2], code, &[3], Rounding::EveryOp)?;
        let row =
            |name: &str, (us, speed): (f64, f64)| println!("| {name} {dtype} | {shape:?} | {us:.0} | {speed:.2} |");
        let kernel = codegen::pointwise(&region, &shape, &[dense.clone(), dense.clone()], from_ref(&dense))?;
        row("gelu(x + y)", speed(device, &kernel, &[bytes; 3])?);
        let bias = Operand {
            strides: vec![0, 1],
            ..dense.clone()
        };
        let kernel = codegen::pointwise(&region, &shape, &[dense.clone(), bias], from_ref(&dense))?;
        row(
            "gelu(x + bias)",
            speed(device, &kernel, &[bytes, columns * dtype.size(), bytes])?,
        );
        for op in [
            RowOp::Softmax { flushes: false },
            RowOp::LayerNorm { eps: 1e-5 },
            RowOp::RmsNorm { eps: 1e-6 },
        ] {
            let op = Rowwise::new(op, dtype)?;
            let kernel = codegen::rows(&op, &shape, 1, from_ref(&dense), from_ref(&dense))?;
            row(&kernel.name, speed(device, &kernel, &[bytes; 2])?);
        }
        let region = Region::widening(dtype)?;
        let made = codegen::columns(&[ColumnKind::Sum], &region, &shape, 1, from_ref(&dense), &[dtype])?;
        row(
            "column sums, first part",
            speed(device, &made.chunks, &[bytes, made.partial_bytes])?,
        );
        let loss = codegen::cross_entropy(&dense, shape, -100, Some(true))?;
        row(
            "cross_entropy",
            speed(device, &loss.rows, &[bytes, rows * 8, rows * 4, rows * 4])?,
        );
    }
    Ok(())
}

/// A problem and the memory that it is tuned in, which also serves its runs.
fn tuned(device: &'static Device, problem: Problem) -> Result<(Gemm, f64)> {
    let budget = Budget::default();
    let bytes = scratch_bytes(&problem, &budget);
    let memory = Buffer::new(device, bytes)?;
    let address = memory.address();
    // SAFETY: fresh memory.
    let found = unsafe { tune(&problem, device.stream(0), Scratch { address, bytes }, &budget)? };
    Ok((Gemm::new(device, problem, &found.best)?, found.best.microseconds))
}

fn splits(device: &'static Device) -> Result<()> {
    let _current = device.enter()?;
    println!("\nLinear layers of f32 with bias and ReLU: microseconds; the split of the activation is included.\n");
    println!("| M×K→N | true f32 | tf32 | bf16x3 | bf16x6 | 3xTF32 |\n|---|---|---|---|---|---|");
    for (m, k, n) in [
        (64, 784, 256),
        (256, 1024, 512),
        (1024, 784, 2048),
        (512, 1024, 4096),
        (512, 4096, 4096),
        (8192, 4096, 4096),
    ] {
        let layer = Problem::linear(DType::F32, m, n, k).with_epilogue(Epilogue::ReluBias);
        let mut cells = vec![
            tuned(device, layer)?.1,
            tuned(device, Problem { tf32: true, ..layer })?.1,
        ];
        for split in Split::ALL {
            let (_, us) = tuned(device, split.problem(&layer)?)?;
            let bytes = m * k * split.times() * split.dtype().size();
            cells.push(us + speed(device, &split.kernel(false, m, k)?, &[m * k * 4, bytes])?.0);
        }
        let cells: Vec<String> = cells
            .iter()
            .map(|us| format!("{us:.1} ({:.2}x)", cells[0] / us))
            .collect();
        println!("| {m}×{k}→{n} | {} |", cells.join(" | "));
    }
    Ok(())
}
