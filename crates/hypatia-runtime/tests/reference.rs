//! The reference device and the CPU compute what programs mean: the same samples go through both, by one interface.

mod programs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use egg::Id;
use hypatia_core::eval::{Mode, Val};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::random::Random;
use hypatia_core::ty::DType;
use hypatia_core::{Options, optimize};
use hypatia_runtime::device::{Abilities, Convolutions, Device, Images, Registered};
use hypatia_runtime::lower::plan::{Lowered, Wish, lower};
use hypatia_runtime::plan::{Cpu, Memory, Setting};
use hypatia_runtime::reference::{self, Reference};
use hypatia_runtime::tuning::Database;
use hypatia_runtime::{Error, cpu};

use programs::{PLANNED, VIEWED};

const CPU: &[Registered] = &[("cpu", &cpu::ABILITIES)];
const REFERENCE: &[Registered] = &[("cpu", &reference::ABILITIES)];
const IMAGES: &[Registered] = &[(
    "cpu",
    &Abilities {
        channels_last: Some(Images {
            dtypes: &[DType::BF16],
            linear: &[DType::BF16],
            by: Convolutions::Cudnn,
        }),
        ..reference::ABILITIES
    },
)];

/// A plan with numbers for its constants and inputs, and what the program's results are.
struct Sample {
    plan: Arc<hypatia_runtime::plan::Plan>,
    constants: Vec<Vec<f32>>,
    inputs: Vec<Vec<f32>>,
    expected: Vec<Vec<f64>>,
}

fn lowered(text: &str, devices: &'static [Registered]) -> Lowered {
    let program = parse(text, Weights::Frozen).unwrap();
    let results = program.node(program.root).children.len();
    let optimized = optimize(&program, &Options::default()).unwrap();
    lower(&optimized, results, &Wish::on(devices)).unwrap()
}

fn numbers(value: &Val) -> Vec<f64> {
    match value {
        Val::Arr(a) => a.data.clone(),
        _ => vec![],
    }
}

/// Numbers of 16 bits as they lie in memory, two in the place of one.
fn pairs(numbers: &[f64]) -> Vec<f32> {
    let bits = |v: &f64| u32::from(half::bf16::from_f64(*v).to_bits());
    let pair = |p: &[f64]| f32::from_bits(bits(&p[0]) | p.get(1).map_or(0, bits) << 16);
    numbers.chunks(2).map(pair).collect()
}

fn sample(text: &str, devices: &'static [Registered]) -> Sample {
    let program = parse(text, Weights::Frozen).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let lowered = lowered(text, devices);
    let mut random = Random(11);
    let inputs = program.leaves.inputs.iter();
    let given: Vec<Val> = inputs.map(|i| random.value(&i.ty).unwrap()).collect();
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(given[*i as usize].clone()),
        _ => Err(hypatia_core::Error::Graph("no input".into())),
    };
    let chosen: BTreeMap<Id, Val> = optimized.output.eval(&leaf, Mode::Real).unwrap();
    let meant = program.eval(&leaf, Mode::Real).unwrap();
    let single = |id: &Id| {
        let numbers = numbers(&chosen[id]);
        match optimized.output.ty(*id).tensor().map(|t| t.dtype) {
            Some(DType::BF16) => pairs(&numbers),
            _ => numbers.iter().map(|v| *v as f32).collect(),
        }
    };
    let results = program.node(program.root).children.iter();
    Sample {
        constants: lowered.constants.iter().map(single).collect(),
        inputs: lowered.inputs.iter().map(single).collect(),
        expected: results.map(|id| numbers(&meant[id])).collect(),
        plan: Arc::new(lowered.plan),
    }
}

fn memory(list: &mut [Vec<f32>]) -> Vec<Memory> {
    list.iter_mut().map(|v| Memory(v.as_mut_ptr().cast())).collect()
}

/// The results of a sample on a device.
fn run<D>(device: &D, setting: D::Setting<'_>, queue: D::Queue, sample: &mut Sample) -> Vec<Vec<f32>>
where
    D: Device<Address = Memory, Error = Error>,
{
    let plan = sample.plan.clone();
    let sizes = plan.outputs.iter().map(|id| plan.values[*id].numel());
    let mut outputs: Vec<Vec<f32>> = sizes.map(|n| vec![f32::NAN; n]).collect();
    // SAFETY: every vector has its value's size, and all live on.
    unsafe {
        let constants = memory(&mut sample.constants);
        let bound = device.bind(plan, &constants, vec![], setting).unwrap();
        let (inputs, results) = (memory(&mut sample.inputs), memory(&mut outputs));
        device.run(&bound, queue, &inputs, &results).unwrap();
    }
    outputs
}

fn compare(what: &str, outputs: &[Vec<f32>], expected: &[Vec<f64>], most: f64) {
    assert_eq!(outputs.len(), expected.len(), "{what}");
    for (ours, right) in outputs.iter().zip(expected) {
        assert_eq!(ours.len(), right.len(), "{what}");
        let scale = right.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        for (a, b) in ours.iter().zip(right) {
            assert!((f64::from(*a) - b).abs() <= most * scale, "{what}: {a} instead of {b}");
        }
    }
}

#[test]
fn the_reference_device_computes_what_programs_mean() {
    for (text, _) in PLANNED.iter().chain(VIEWED) {
        let mut sample = sample(text, REFERENCE);
        assert_eq!(sample.plan.device, Reference.name());
        let outputs = run(&Reference, (), (), &mut sample);
        // Inputs and results are rounded to fp32, nothing in between.
        compare(text, &outputs, &sample.expected, 1e-6);
    }
}

#[test]
fn the_cpu_computes_what_the_reference_device_does_on_its_plans() {
    let database = Database::in_memory();
    for (text, _) in PLANNED.iter().chain(VIEWED) {
        let mut sample = sample(text, CPU);
        let right = run(&Reference, (), (), &mut sample);
        compare(text, &right, &sample.expected, 1e-6);
        let setting = Setting {
            threads: 2,
            database: &database,
            limit: Duration::ZERO,
            most: None,
            without: &[],
            like: None,
        };
        let outputs = run(&Cpu, setting, 2, &mut sample);
        let right: Vec<Vec<f64>> = right
            .iter()
            .map(|r| r.iter().map(|v| f64::from(*v)).collect())
            .collect();
        compare(text, &outputs, &right, 1e-5);
    }
}

#[test]
fn images_with_channels_last_mean_the_same() {
    let convolved = "(let a (conv (cast x:[2,6,5,4] bf16) w:bf16[8,6,1,1] b:bf16[8] [1,1] [0,0] [1,1] 1))";
    for rest in [
        "(relu (batch_norm a g:[8] h:[8] m:[8] (exp v:[8]) 1e-5))",
        "(relu (batch_norm a none none m:[8] (exp v:[8]) 1e-5))",
        "(getitem (native_batch_norm a g:bf16[8] h:bf16[8] m:bf16[8] (exp v:bf16[8]) 1e-5 0.1) 0)",
        "(batch_norm (sub (cast y:[2,8,5,4] bf16) a) g:[8] h:[8] m:[8] (exp v:[8]) 1e-5)",
        "(neg (mul (getitem (split a [3,3,2] -3) 0) (slice a -3 3 6 1)))",
        "(leaky_relu (slice a -2 1 4 1) 0.2)",
        "(tanh (permute a [0,2,3,1]))",
        "(add a (permute (silu (cast y:[2,5,4,8] bf16)) [0,3,1,2]))",
        "(conv (hardswish a) u:bf16[4,8,1,1] none [1,1] [0,0] [1,1] 1)",
    ] {
        let text = format!("{convolved}\n(tuple (cast {rest} f32))");
        let mut sample = sample(&text, IMAGES);
        let outputs = run(&Reference, (), (), &mut sample);
        // Constants are rounded to 16 bits.
        compare(&text, &outputs, &sample.expected, 2e-2);
    }
}

#[test]
fn what_the_reference_device_cannot_run_says_so() {
    let lowered = lowered("(tuple (softmax x:[4,4] -2))", REFERENCE);
    // SAFETY: there are no constants.
    let bound = unsafe { Reference.bind(Arc::new(lowered.plan), &[], vec![], ()) };
    assert!(matches!(bound, Err(Error::Unsupported(why)) if why.contains("aten._softmax.default")));
}

#[test]
fn plans_know_their_device() {
    let lowered = lowered("(tuple (relu x:[4,4]))", REFERENCE);
    let setting = Setting {
        threads: 1,
        database: &Database::in_memory(),
        limit: Duration::ZERO,
        most: None,
        without: &[],
        like: None,
    };
    // SAFETY: there are no constants.
    let bound = unsafe { Cpu.bind(Arc::new(lowered.plan), &[], vec![], setting) };
    assert!(bound.is_err_and(|e| e.to_string().contains("reference")));
    let program = parse("(tuple (relu x:[4,4]))", Weights::Frozen).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let error = lower(&optimized, 1, &Wish::on(&[])).unwrap_err();
    assert!(error.to_string().contains("cpu"), "{error}");
}
