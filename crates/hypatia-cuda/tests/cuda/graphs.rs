//! Graphs and replays.

use std::slice::from_ref;

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::{self, Operand};
use hypatia_cuda::driver::{Buffer, Device, Graph};
use hypatia_cuda::kernel::Loaded;
use hypatia_cuda::replay::Replay;
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};

use crate::support::{decode, device};

/// A kernel that doubles 64 numbers, and buffers with the number given.
fn doubling(device: &'static Device) -> Loaded {
    let code = vec![Instruction::new(Op::Add, [0, 0])];
    let region = Region::new(&[DType::F32], code, &[1], Rounding::EveryOp).unwrap();
    let dense = Operand::dense(DType::F32, &[64]);
    let kernel = codegen::pointwise(&region, &[64], from_ref(&dense), from_ref(&dense)).unwrap();
    kernel.load(device).unwrap()
}

fn full_of(device: &'static Device, number: f32) -> Buffer {
    Buffer::of(device, &number.to_ne_bytes().repeat(64)).unwrap()
}

fn holds(buffer: &Buffer, number: f32) -> bool {
    decode(DType::F32, &buffer.read().unwrap())
        .iter()
        .all(|x| *x == f64::from(number))
}

#[test]
fn replays_follow_the_addresses() {
    let Some(device) = device() else { return };
    let kernel = doubling(device);
    let replay = Replay::new(2);
    let run = |input: &Buffer, output: &Buffer| {
        let _current = device.enter().unwrap();
        let stream = device.stream(0);
        let addresses = [input.address(), output.address()];
        // SAFETY: buffers of 64 numbers, which outlive the wait.
        unsafe {
            replay
                .run(stream, &addresses, |s| kernel.launch(s, &addresses))
                .unwrap()
        };
        stream.synchronize().unwrap();
    };
    let inputs: Vec<Buffer> = (1..=4).map(|i| full_of(device, i as f32)).collect();
    for round in 0..6 {
        for (i, input) in inputs.iter().enumerate().take(if round < 3 { 2 } else { 4 }) {
            let output = full_of(device, -1.0);
            run(input, &output);
            run(input, &output);
            run(input, &output);
            assert!(holds(&output, 2.0 * (i + 1) as f32), "round {round}, input {i}");
        }
        assert!(replay.len() <= 2);
    }
    assert!(!replay.is_empty());
    std::thread::scope(|scope| {
        for number in 5..9 {
            let run = &run;
            scope.spawn(move || {
                let (input, output) = (full_of(device, number as f32), full_of(device, -1.0));
                (0..20).for_each(|_| run(&input, &output));
                assert!(holds(&output, 2.0 * number as f32));
            });
        }
    });
}

#[test]
fn graphs_take_other_arguments() {
    let Some(device) = device() else { return };
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let kernel = doubling(device);
    let [a, b, c] = [1.0, 2.0, 3.0].map(|x| full_of(device, x));
    let outputs = [0.0; 3].map(|x| full_of(device, x));
    let record = |from: &Buffer, to: &Buffer| {
        let addresses = [from.address(), to.address()];
        // SAFETY: buffers of 64 numbers, which outlive the graphs.
        Graph::record(device, |s| unsafe { kernel.launch(s, &addresses) }).unwrap()
    };
    let first = record(&a, &outputs[0]);
    let mut executable = first.instantiate().unwrap();
    // SAFETY: as above.
    unsafe { executable.launch(stream).unwrap() };
    let nodes = first.kernels().unwrap();
    assert_eq!(nodes.len(), 1);
    let arguments = kernel.arguments(&[b.address(), outputs[1].address()]);
    // SAFETY: the arguments are buffers of the size that the kernel was made for.
    unsafe {
        executable.set_arguments(nodes[0], &arguments).unwrap();
        executable.launch(stream).unwrap();
    }
    executable.update(&record(&c, &outputs[2])).unwrap();
    // SAFETY: as above.
    unsafe { executable.launch(stream).unwrap() };
    stream.synchronize().unwrap();
    for (i, output) in outputs.iter().enumerate() {
        assert!(holds(output, 2.0 * (i + 1) as f32), "{i}");
    }
    // Nothing is run while recording, and a failure leaves the recorder usable.
    let error = hypatia_cuda::Error::Unsupported("on purpose".into());
    assert_eq!(Graph::record(device, |_| Err(error.clone())).unwrap_err(), error);
    let untouched = full_of(device, 7.0);
    record(&a, &untouched);
    stream.synchronize().unwrap();
    assert!(holds(&untouched, 7.0));
}

#[test]
fn what_would_fault_is_refused() {
    let Some(device) = device() else { return };
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let kernel = doubling(device);
    let (input, output) = (full_of(device, 3.0), full_of(device, 0.0));
    let (from, to) = (input.address(), output.address());
    for addresses in [&[from + 4, to][..], &[0, to], &[from], &[from, to, to]] {
        // SAFETY: refused before anything is launched.
        assert!(unsafe { kernel.launch(stream, addresses) }.is_err());
    }
    // SAFETY: buffers of 64 numbers.
    unsafe { kernel.launch(stream, &[from, to]).unwrap() };
    stream.synchronize().unwrap();
    assert!(holds(&output, 6.0));
}
