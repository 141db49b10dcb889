//! Native plans compute what the reference evaluation does.

mod programs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use egg::Id;
use hypatia_core::eval::{Mode, Val};
use hypatia_core::ir::kept::Kept;
use hypatia_core::ir::node::Op;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::random::Random;
use hypatia_core::{Options, optimize};
use hypatia_runtime::device::Registered;
use hypatia_runtime::lower::plan::{Lowered, Owner, Wanted, Wish, lower, lower_program};
use hypatia_runtime::plan::{Memory, Setting, Task};
use hypatia_runtime::tuning::Database;
use hypatia_runtime::{Error, cpu};

use programs::{PLANNED, VIEWED};

const CPU: &[Registered] = &[("cpu", &cpu::ABILITIES)];

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
    let lowered = lower(&optimized, results, &Wish::on(CPU)).unwrap();
    let mut random = Random(7);
    let given: Vec<Val> = (program.leaves.inputs.iter())
        .map(|i| random.value(&i.ty).unwrap())
        .collect();
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(given[*i as usize].clone()),
        _ => Err(hypatia_core::Error::Graph("no input".into())),
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
        let plan = Arc::new(lowered.plan);
        let setting = Setting {
            threads,
            database: &Database::in_memory(),
            limit: Duration::from_secs(1),
            most: None,
            without: &[],
            like: None,
        };
        let runnable = plan.bind(&pointers(&mut constants), vec![], setting).unwrap();
        let kept = runnable.kept();
        let packed = |i: &usize| !kept.contains(i);
        (0..constants.len())
            .filter(packed)
            .for_each(|i| constants[i].fill(f32::NAN));
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
        check(text, *steps);
    }
}

fn check(text: &str, steps: usize) {
    for threads in [1, 2] {
        let (outputs, expected, made) = run(text, threads);
        assert_eq!(made, steps, "{text}");
        for (ours, right) in outputs.iter().zip(&expected) {
            let scale = right.iter().fold(1.0f64, |m, v| m.max(v.abs()));
            for (a, b) in ours.iter().zip(right) {
                assert!((f64::from(*a) - b).abs() <= 1e-5 * scale, "{text}: {a} instead of {b}");
            }
        }
    }
}

#[test]
fn views_are_read_where_they_are() {
    for (text, steps) in VIEWED {
        check(text, *steps);
    }
}

#[test]
fn sizes_are_put_in_when_a_plan_is_made() {
    let program = parse(
        "(tuple (relu (linear w:[6,4] b:[6] (permute x:[2,s,4] [1,0,2]))))",
        Weights::Frozen,
    )
    .unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    assert!(lower(&optimized, 1, &Wish::on(CPU)).is_err());
    for rows in [1, 3, 64] {
        let lowered = lower(&optimized, 1, &Wish::on(CPU).at(&BTreeMap::from([("s".into(), rows)]))).unwrap();
        let shapes: Vec<&[usize]> = lowered.plan.values.iter().map(|v| &v.shape[..]).collect();
        assert!(shapes.contains(&&[rows as usize, 2, 6][..]), "{shapes:?}");
        assert_eq!(
            lowered.plan.steps.len(),
            if rows == 1 { 1 } else { 2 },
            "a copy and a product"
        );
    }
}

#[test]
fn the_rest_is_a_call_into_torch() {
    for (text, name) in [
        ("(tuple (softmax x:[4,4] -2))", "aten._softmax.default"),
        ("(tuple (relu (linear y:[4,4] none x:[2,4])))", "aten.linear.default"),
        // Wide products are torch's.
        ("(tuple (mm x:[256,256] y:[256,256]))", "aten.mm.default"),
    ] {
        let program = parse(text, Weights::Live).unwrap();
        let optimized = optimize(&program, &Options::default()).unwrap();
        let lowered = lower(&optimized, 1, &Wish::on(CPU)).unwrap();
        assert_eq!(lowered.plan.steps[0].name(), name, "{text}");
        assert_eq!(lowered.calls[0].target, name, "{text}");
    }
}

#[test]
fn a_linear_layer_with_a_bias_is_one_product_over_rows() {
    let text = "(tuple (relu (linear y:[6,4] b:[6] x:[2,3,4])))";
    let program = parse(text, Weights::Live).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let lowered = lower(&optimized, 1, &Wish::on(CPU)).unwrap();
    assert_eq!(lowered.calls[0].target, "aten.addmm.default");
    let Task::Torch(call) = &lowered.plan.steps[0] else {
        panic!("{:?}", lowered.plan.steps[0]);
    };
    let shapes: Vec<_> = call.reads.iter().map(|read| read.shape.clone()).collect();
    assert_eq!(shapes, [vec![4, 6], vec![6], vec![6, 4]]);
    assert_eq!(lowered.plan.values[call.writes[0]].shape, [6, 6]);
}

#[test]
fn convolutions_with_a_window_of_one_are_layers_over_channels() {
    let first = "(relu (conv x:[2,6,5,4] w1:[8,6,1,1] b1:[8] [1,1] [0,0] [1,1] 1))";
    // The image is turned, and so is the result.
    check(
        &format!("(tuple (conv {first} w2:[3,8,1,1] none [1,1] [0,0] [1,1] 1))"),
        4,
    );
}

#[test]
fn images_have_channels_last() {
    let text = "(let a (relu (conv x:[2,3,9,8] w1:[8,3,3,3] b1:[8] [1,1] [1,1] [1,1] 1)))
(let c (silu (conv a w2:[4,8,1,1] none [1,1] [0,0] [1,1] 1)))
(tuple (group_norm (conv c w3:[4,1,3,3] none [1,1] [1,1] [1,1] 4) 2 none none 1e-5))";
    let lowered = returned(text, vec![]).unwrap();
    let names: Vec<String> = lowered.plan.steps.iter().map(Task::name).collect();
    let calls: Vec<_> = lowered.calls.iter().map(|c| (c.target.as_str(), c.onednn)).collect();
    let convolution = ("aten.convolution.default", Some("f32"));
    assert_eq!(
        calls,
        [convolution, convolution, ("aten.group_norm.default", None)],
        "{names:?}"
    );
    // The window of one is a layer over channels; oneDNN adds biases and reads the model's own weights.
    assert!(names.contains(&"linear + silu".to_owned()), "{names:?}");
    assert!(lowered.orders.iter().all(Option::is_none));
    for step in &lowered.plan.steps {
        if let Task::Torch(t) = step {
            // Torch's norm of groups is less precise over channels last.
            let innermost = if t.name == "aten.group_norm.default" { 3 } else { 1 };
            assert_eq!(t.reads[0].strides[innermost], 1, "{names:?}");
        }
    }
}

#[test]
fn what_has_no_plan_says_why() {
    let cases = [("(tuple (linear w:[4,s] none x:[2,s]))", "not known")];
    for (text, why) in cases {
        let program = parse(text, Weights::Frozen).unwrap();
        let optimized = optimize(&program, &Options::default()).unwrap();
        let error = lower(&optimized, 1, &Wish::on(CPU)).unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
        assert!(
            error.starts_with("no native plan: "),
            "nothing is wrong with it: {error}"
        );
    }
}

/// What is returned where results are to lie so in eager.
fn returned(text: &str, outputs: Vec<Wanted>) -> Result<Lowered, Error> {
    let program = parse(text, Weights::Frozen).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let mut wish = Wish::on(CPU);
    wish.layouts.outputs = outputs;
    lower(&optimized, program.node(program.root).children.len(), &wish)
}

fn lying(strides: &[isize], offset: isize, memory: Owner) -> Wanted {
    Wanted {
        strides: Some(strides.to_vec()),
        offset,
        whole: false,
        memory,
    }
}

#[test]
fn a_result_is_made_in_the_shape_of_a_view() {
    let lowered = returned("(tuple (reshape (exp x:[4,6]) [24]))", vec![]).unwrap();
    assert_eq!(lowered.plan.steps.len(), 1);
    assert_eq!(lowered.plan.values[lowered.plan.outputs[0]].shape, [24]);
    assert!(lowered.results[0].whole);
}

#[test]
fn results_lie_as_in_eager() {
    let one = |text: &str, wanted: Wanted| {
        let lowered = returned(text, vec![wanted.clone()]).unwrap();
        let result = lowered.results[0].clone();
        assert_eq!(Some(&result.strides), wanted.strides.as_ref(), "{text}");
        (lowered.plan.steps.len(), result.given, result.offset)
    };
    let own = |strides: &[isize], offset| lying(strides, offset, Owner::Own(0));
    // As the step has it.
    assert_eq!(
        one("(tuple (permute (exp x:[4,6]) [1,0]))", own(&[1, 6], 0)),
        (1, false, 0)
    );
    assert_eq!(one("(tuple (select (exp x:[4,6]) -1 2))", own(&[6], 2)), (1, false, 2));
    // Not as the step has it: a copy, with gaps if there are some.
    assert_eq!(
        one("(tuple (permute (exp x:[4,6]) [1,0]))", own(&[4, 1], 0)),
        (2, false, 0)
    );
    assert_eq!(one("(tuple (exp x:[4,6]))", own(&[10, 1], 0)), (2, false, 0));
    assert_eq!(
        one("(tuple (expand (exp x:[6]) [4,6]))", own(&[0, 1], 0)),
        (1, false, 0)
    );
    // Eager has more in that memory, and nothing else.
    let whole = Wanted {
        whole: true,
        ..own(&[1], 0)
    };
    assert_eq!(one("(tuple (select (exp x:[4,6]) -2 0))", own(&[1], 0)), (1, false, 0));
    assert_eq!(one("(tuple (select (exp x:[4,6]) -2 0))", whole), (2, false, 0));
    // An input, and a copy of one.
    let input = lying(&[1, 6], 0, Owner::Input("x".into()));
    assert_eq!(one("(tuple (permute x:[4,6] [1,0]))", input), (0, true, 0));
    assert_eq!(one("(tuple (permute x:[4,6] [1,0]))", own(&[1, 6], 0)), (1, false, 0));
}

#[test]
fn an_input_that_is_turned_is_seen_as_a_view() {
    // In memory the input lies as what is returned, but a caller sees it otherwise.
    let program = parse("(tuple (permute x:[2,3,4] [0,2,1]))", Weights::Frozen).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let mut wish = Wish::on(CPU);
    let turned = vec![Some(vec![12, 1, 3])];
    wish.layouts.results.insert("x".into(), turned);
    wish.layouts.outputs = vec![lying(&[12, 3, 1], 0, Owner::Any)];
    let result = lower(&optimized, 1, &wish).unwrap().results.remove(0);
    assert!(result.given && !result.whole);
    assert_eq!((result.shape, result.strides), (vec![2, 4, 3], vec![12, 3, 1]));
}

#[test]
fn results_share_memory_as_in_eager() {
    let shared = |strides: &[isize], offset| lying(strides, offset, Owner::Own(0));
    let text = "(let y (exp x:[4,6])) (tuple (slice y -2 1 4 1) y (add 1.0 x:[4,6]))";
    let other = lying(&[6, 1], 0, Owner::Own(1));
    let lowered = returned(text, vec![shared(&[6, 1], 6), shared(&[6, 1], 0), other]).unwrap();
    let places: Vec<(usize, usize)> = lowered.results.iter().map(|r| (r.at, r.offset)).collect();
    assert_eq!(places, [(0, 6), (0, 0), (1, 0)]);
    // Whatever a part was made of, it is seen in the whole.
    let text = "(let y (exp x:[4,6])) (tuple y (add 1.0 x:[4,6]))";
    let lowered = returned(text, vec![shared(&[6, 1], 0), shared(&[6, 1], 0)]).unwrap();
    assert_eq!((lowered.results[1].at, lowered.plan.outputs.len()), (0, 1));
    let parts = vec![shared(&[6, 1], 0), shared(&[6, 1], 24)];
    let error = returned(text, parts).unwrap_err().to_string();
    assert!(error.contains("share memory"), "{error}");
    // Apart in eager, in one value here.
    let text = "(let y (exp x:[4,6])) (tuple y (reshape y [24]))";
    let lowered = returned(text, vec![]).unwrap();
    assert_eq!(lowered.plan.outputs.len(), 2);
}

#[test]
fn a_program_that_was_written_down_has_the_same_plan() {
    for (text, steps) in PLANNED.iter().chain(VIEWED) {
        let program = parse(text, Weights::Frozen).unwrap();
        let results = program.node(program.root).children.len();
        let optimized = optimize(&program, &Options::default()).unwrap();
        let kept = Kept::of(&optimized.output, &optimized.weights).unwrap();
        let read: Kept = serde_json::from_str(&serde_json::to_string(&kept).unwrap()).unwrap();
        assert_eq!(read, kept);
        let (again, weights) = read.program(&program).unwrap();
        let lowered = lower_program(&again, weights, results, &Wish::on(CPU)).unwrap();
        assert_eq!(lowered.plan.steps.len(), *steps, "{text}");
        let first = lower(&optimized, results, &Wish::on(CPU)).unwrap();
        assert_eq!(
            (lowered.inputs, lowered.constants),
            (first.inputs, first.constants),
            "{text}"
        );
    }
}
