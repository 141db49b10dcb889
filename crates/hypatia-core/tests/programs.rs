//! Whole programs through the pipeline: what comes out, that it is the same every time, that
//! it computes the same, and that its proof holds.

use hypatia_core::cost::Target;
use hypatia_core::eval::difference;
use hypatia_core::eval::{Mode, Val};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Program;
use hypatia_core::ir::text::{Weights, parse, print};
use hypatia_core::ops::op_id;
use hypatia_core::random::Random;
use hypatia_core::{Error, Optimized, Options, optimize};

/// Programs that each show one thing the optimizer can do.
const PROGRAMS: &[(&str, &str)] = &[
    ("linear_relu", "(relu (linear w:[512,784] b:[512] x:[64,784]))"),
    (
        "mlp2",
        "(linear w2:[10,256] b2:[10] (relu (linear w1:[256,784] b1:[256] x:[64,784])))",
    ),
    (
        "mlp3_without_bias",
        "(linear w3:[10,256] none (relu (linear w2:[256,256] b2:[256] (relu (linear w1:[256,784] none x:[64,784])))))",
    ),
    (
        "captured_linear",
        "(reshape (addmm b:[32] (reshape x:[2,6,16] [12,16]) (permute w:[32,16] [1,0])) [2,6,32])",
    ),
    (
        "qkv",
        "(tuple (linear w1:[64,64] b1:[64] x:[4,64]) (linear w2:[32,64] b2:[32] x) (linear w3:[16,64] none x))",
    ),
    (
        "swiglu",
        "(linear w3:[64,172] none (mul (silu (linear w1:[172,64] none x:[2,5,64])) (linear w2:[172,64] none x)))",
    ),
    (
        "lora",
        "(add (linear w:[256,256] b:[256] x:[128,256]) (mul (linear w1:[256,8] none (linear w2:[8,256] none x)) 2.0))",
    ),
    ("chain", "(mm (mm a:[64,512] c:[512,512]) d:[512,4])"),
    (
        "shared_input_sum",
        "(add (linear w1:[64,64] none x:[512,64]) (linear w2:[64,64] none x))",
    ),
    (
        "shared_weight_sum",
        "(add (linear w:[64,64] none x:[512,64]) (linear w none y:[512,64]))",
    ),
    ("sum_of_product", "(sum (linear w:[64,64] none x:[512,64]) [-2] false)"),
    ("slice_before", "(slice (linear w:[64,64] b:[64] x:[512,64]) -2 0 8 1)"),
    (
        "conv_bn_relu",
        "(relu (batch_norm (conv x:[1,8,16,16] w:[16,8,3,3] none [1,1] [1,1] [1,1] 1) \
         w1:[16] b1:[16] w2:[16] w3:[16] 1e-5))",
    ),
    (
        "norm_affine",
        "(linear w:[64,32] b:[64] (layer_norm x:[8,32] [32] w1:[32] b1:[32] 1e-5))",
    ),
    ("symbolic_batch", "(relu (linear w:[512,784] b:[512] x:[s0,784]))"),
    ("softmax_shift", "(softmax (add x:[4,8] 3.0) -1)"),
];

fn run(text: &str, weights: Weights) -> Optimized {
    let program = parse(text, weights).unwrap();
    optimize(&program, &Options::default()).unwrap()
}

#[test]
fn programs_come_out_as_recorded() {
    let mut out = String::new();
    for (name, text) in PROGRAMS {
        let o = run(text, Weights::Frozen);
        out.push_str(
            &format!("{name}\n  in   {}\n  out  {}\n", print(&o.input), print(&o.output)).replace("\n(", "\n       ("),
        );
    }
    insta::assert_snapshot!(out);
}

#[test]
fn the_same_program_gives_the_same_result() {
    for (name, text) in PROGRAMS {
        let (a, b) = (run(text, Weights::Frozen), run(text, Weights::Frozen));
        assert_eq!(print(&a.output), print(&b.output), "{name}");
        assert_eq!(a.size, b.size, "{name}");
    }
}

fn evaluate(program: &Program, inputs: &[Val]) -> Val {
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(inputs[*i as usize].clone()),
        other => Err(Error::Graph(format!("{other:?} is no input"))),
    };
    program.eval(&leaf, Mode::Real).unwrap()[&program.root].clone()
}

#[test]
fn programs_compute_the_same_and_proofs_hold() {
    for weights in [Weights::Frozen, Weights::Live] {
        for (name, text) in PROGRAMS.iter().filter(|(n, _)| *n != "symbolic_batch") {
            let o = run(text, weights);
            let mut random = Random(7);
            let inputs: Option<Vec<Val>> = o.input.leaves.inputs.iter().map(|i| random.value(&i.ty)).collect();
            let mut inputs = inputs.unwrap();
            if *name == "conv_bn_relu" {
                // A variance is not negative.
                let Val::Arr(var) = &inputs[4] else { panic!("{name}") };
                inputs[4] = Val::arr(var.map(f64::abs));
            }
            let d = difference(&evaluate(&o.input, &inputs), &evaluate(&o.output, &inputs));
            assert!(d < 1e-9, "{name}: {d}");
            assert!(o.cost_after <= o.cost_before, "{name}");
            assert!(o.lower_bound <= o.cost_after * (1.0 + 1e-9), "{name}");
            let replay = o.proof.unwrap().replay(1, 1e9).unwrap();
            assert!(replay.holds(), "{name}: {:?}", replay.failures);
        }
    }
}

#[test]
fn weights_are_touched_only_when_frozen() {
    let qkv = PROGRAMS.iter().find(|(n, _)| *n == "qkv").unwrap().1;
    let merged = |w| run(qkv, w).output.op_names().contains(&"cat");
    assert!(merged(Weights::Frozen));
    assert!(!merged(Weights::Live));
}

#[test]
fn deep_programs_do_not_overflow() {
    let mut text = "x:[4,8]".to_string();
    for i in 0..400 {
        text = format!("(relu (linear w{i}:[8,8] b{i}:[8] {text}))");
    }
    let o = run(&text, Weights::Frozen);
    assert!(o.proof.unwrap().replay(0, 1e9).unwrap().connected);
}

#[test]
fn measured_times_outrank_the_model() {
    let program = parse(PROGRAMS[0].1, Weights::Frozen).unwrap();
    let operands: Vec<_> = program.leaves.inputs.iter().map(|i| i.ty.clone()).collect();
    let mut options = Options::default();
    options.measured.insert(op_id("fused_linear_relu"), &operands, 1e6);
    let slow = optimize(&program, &options).unwrap();
    assert_eq!(slow.output.op_names(), ["linear", "relu"]);
    options.measured.insert(op_id("fused_linear_relu"), &operands, 1.0);
    let fast = optimize(&program, &options).unwrap();
    assert_eq!(
        (fast.output.op_names(), fast.cost_after),
        (vec!["fused_linear_relu"], 1.0)
    );
}

#[test]
fn every_target_has_a_name_that_finds_it() {
    for target in Target::all() {
        assert_eq!(Target::named(&target.name), Some(target));
    }
    assert_eq!(Target::named("abacus"), None);
}

#[test]
fn rates_of_a_target_are_positive() {
    let [cpu, ..] = Target::all();
    assert!(cpu.is_sound());
    for broken in [
        Target {
            vector: 0.0,
            ..cpu.clone()
        },
        Target {
            bandwidth: f64::NAN,
            ..cpu.clone()
        },
        Target {
            launch: -1.0,
            ..cpu.clone()
        },
        Target {
            matrix16: f64::INFINITY,
            ..cpu
        },
    ] {
        assert!(!broken.is_sound(), "{broken:?}");
    }
}
