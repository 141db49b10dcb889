//! Native plans compute what the reference evaluation does.

use std::collections::BTreeMap;
use std::sync::Arc;

use egg::Id;
use hypatia::eval::{Mode, Val};
use hypatia::ir::node::Op;
use hypatia::ir::text::{Weights, parse};
use hypatia::lower::plan::lower;
use hypatia::random::Random;
use hypatia::runtime::plan::Memory;
use hypatia::{Error, Options, optimize};

/// Programs that have a plan, with the number of its steps.
const PLANNED: &[(&str, usize)] = &[
    ("(tuple (relu (linear w:[33,17] b:[33] x:[5,17])))", 1),
    (
        "(tuple (linear w2:[10,40] b2:[10] (relu (linear w1:[40,20] b1:[40] x:[7,20]))))",
        2,
    ),
    (
        "(tuple (add r:[7,20] (linear w2:[20,40] none (gelu (linear w1:[40,20] b1:[40] x:[7,20])))))",
        2,
    ),
    (
        "(tuple (linear w3:[8,24] none (mul (silu (linear w1:[24,16] none x:[2,5,16])) (linear w2:[24,16] none x))))",
        4,
    ),
    ("(tuple (relu (addmm b:[9] x:[5,7] w:[7,9])) (mm y:[2,7] w))", 2),
    ("(tuple (add (mul (exp x:[3,4,5]) y:[4,1]) 1.5))", 1),
    ("(tuple (where (gt x:[9] 0.25) (sub x 1.0) (clamp x none 0.0)))", 1),
    ("(tuple (tanh x:[6,7]) (sigmoid x))", 2),
    ("(tuple (softmax x:[3,5,7] -1) (log_softmax x -1))", 2),
    ("(tuple (layer_norm x:[4,6] [6] w:[6] b:[6] 1e-5))", 1),
    ("(tuple (layer_norm (add x:[4,6] r:[4,6]) [6] w:[6] none 1e-5))", 1),
    ("(tuple (rms_norm (mul x:[2,3,6] 0.5) [6] w:[6] 1e-5))", 1),
    (
        "(tuple (sum x:[4,6] [-1] false) (mean (exp x) [-1] true) (amax x [-2,-1] false))",
        3,
    ),
];

fn bytes(value: &Val) -> Vec<f32> {
    match value {
        Val::Arr(a) => a.data.iter().map(|v| *v as f32).collect(),
        _ => vec![],
    }
}

fn run(text: &str, threads: usize) -> (Vec<Vec<f32>>, Vec<Vec<f64>>, usize) {
    let program = parse(text, Weights::Frozen).unwrap();
    let results = program.node(program.root).children.len();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let lowered = lower(&optimized, results).unwrap();
    let mut random = Random(7);
    let given: Vec<Val> = (program.leaves.inputs.iter())
        .map(|i| random.value(&i.ty).unwrap())
        .collect();
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(given[*i as usize].clone()),
        _ => Err(Error::Graph("no input".into())),
    };
    let values: BTreeMap<Id, Val> = optimized.output.eval(&leaf, Mode::Real).unwrap();
    let memory = |ids: &[Id]| -> Vec<Vec<f32>> { ids.iter().map(|id| bytes(&values[id])).collect() };
    let (mut constants, mut inputs) = (memory(&lowered.constants), memory(&lowered.inputs));
    let pointers =
        |list: &mut Vec<Vec<f32>>| -> Vec<Memory> { list.iter_mut().map(|v| Memory(v.as_mut_ptr().cast())).collect() };
    let steps = lowered.plan.steps.len();
    let sizes: Vec<usize> = (lowered.plan.outputs.iter())
        .map(|id| lowered.plan.values[*id].numel())
        .collect();
    let mut outputs: Vec<Vec<f32>> = sizes.iter().map(|n| vec![f32::NAN; *n]).collect();
    // SAFETY: every vector has its value's size, and all live on.
    unsafe {
        let runnable = Arc::new(lowered.plan).bind(&pointers(&mut constants)).unwrap();
        constants.iter_mut().for_each(|c| c.fill(f32::NAN));
        for _ in 0..2 {
            runnable
                .run(threads, &pointers(&mut inputs), &pointers(&mut outputs))
                .unwrap();
        }
    }
    let expected = (program.node(program.root).children.iter())
        .map(|id| match &program.eval(&leaf, Mode::Real).unwrap()[id] {
            Val::Arr(a) => a.data.clone(),
            _ => vec![],
        })
        .collect();
    (outputs, expected, steps)
}

#[test]
fn plans_compute_what_the_program_means() {
    for (text, steps) in PLANNED {
        for threads in [1, 2] {
            let (outputs, expected, made) = run(text, threads);
            assert_eq!(made, *steps, "{text}");
            for (ours, right) in outputs.iter().zip(&expected) {
                let scale = right.iter().fold(1.0f64, |m, v| m.max(v.abs()));
                for (a, b) in ours.iter().zip(right) {
                    assert!((f64::from(*a) - b).abs() <= 1e-5 * scale, "{text}: {a} instead of {b}");
                }
            }
        }
    }
}

#[test]
fn what_has_no_plan_says_why() {
    let cases = [
        ("(tuple (softmax x:[4,4] -2))", "the op softmax"),
        ("(tuple (linear w:[4,s] none x:[2,s]))", "not known"),
        ("(tuple (relu (linear y:[4,4] none x:[2,4])))", "the op linear"),
        ("(tuple x:[3])", "no step writes"),
    ];
    for (text, why) in cases {
        let program = parse(text, Weights::Frozen).unwrap();
        let optimized = optimize(&program, &Options::default()).unwrap();
        let error = lower(&optimized, 1).unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}
