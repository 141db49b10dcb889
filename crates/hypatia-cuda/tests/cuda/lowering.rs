//! What plans for a GPU have that others do not have; no GPU is needed to see it.

use hypatia_core::ir::program::Program;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::ty::Ty;
use hypatia_core::{Options, optimize};
use hypatia_cuda::plan::{is_late, late};
use hypatia_runtime::device::Registered;
use hypatia_runtime::kernels::region::{Read, Scalar};
use hypatia_runtime::lower::plan::{Lowered, Wanted, Wish, lower};
use hypatia_runtime::plan::{LinearStep, Task};

pub const CUDA: &[Registered] = &[("cuda", &hypatia_cuda::ABILITIES)];

/// The plan of a program whose tensors are all on a GPU.
pub fn lowered(text: &str) -> Lowered {
    lowered_as(text, &Wish::on(CUDA))
}

pub fn lowered_as(text: &str, wish: &Wish) -> Lowered {
    lowered_with(text, 1, wish)
}

/// The plan of a program with so many results.
pub fn lowered_with(text: &str, results: usize, wish: &Wish) -> Lowered {
    let mut program = parse(text, Weights::Frozen).unwrap();
    let gpu = program.leaves.devices.index("cuda:0").unwrap();
    for input in &mut program.leaves.inputs {
        if let Ty::Tensor(t) = &mut input.ty {
            t.device = gpu;
        }
    }
    let program = Program::from_expr(&program.leaves, &program.expr().0).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    lower(&optimized, results, wish).unwrap()
}

const ROTATED: &str = "(let q (permute (reshape x:bf16[2,5,32] [2,5,4,8]) [0,2,1,3]))
(let r (add (mul q c:bf16[5,8]) (mul (cat -1 (neg (slice q -1 4 8 1)) (slice q -1 0 4 1)) s:bf16[5,8])))";

#[test]
fn parts_are_put_together_inside_a_region() {
    let lowered = lowered(&format!("{ROTATED}\n(tuple (reshape (permute r [0,2,1,3]) [2,5,32]))"));
    let [Task::Region(step)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(step.shape, [2, 4, 5, 4]);
    // Where the query lies, and in halves of its rows.
    let places: Vec<_> = step.slices.iter().map(|o| (o.offset, &o.strides[..])).collect();
    assert_eq!(places, [(0, &[160, 8, 32, 1][..]), (4, &[160, 8, 32, 1][..])]);
    assert_eq!(step.outputs, lowered.plan.outputs);
}

#[test]
fn parts_of_one_size_are_put_together_by_a_region() {
    let lowered = lowered("(tuple (cat -1 (neg x:[3,4]) y:[3,4]))");
    let [Task::Region(step)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!((step.shape.clone(), step.slices.len()), (vec![3, 4], 2));
    assert_eq!(step.outputs, lowered.plan.outputs);
}

#[test]
fn parts_of_other_sizes_are_read_where_they_lie() {
    let few = lowered("(tuple (mul 2.0 (cat -1 (neg x:[3,4]) y:[3,5])))");
    let names: Vec<String> = few.plan.steps.iter().map(Task::name).collect();
    assert_eq!(names, ["pointwise over [3, 4]", "pointwise over [3, 9]"]);
    let many = lowered("(tuple (mul 2.0 (cat -1 x:[3,4] y:[3,5] x x x y y)))");
    let names: Vec<String> = many.plan.steps.iter().map(Task::name).collect();
    assert_eq!(many.calls.len(), 1, "{names:?}");
}

#[test]
fn layers_of_few_rows_take_a_gate_over() {
    let gated = |rows: usize, terms: usize| {
        let text = format!(
            "(let x x:bf16[{rows},{terms}])\n\
             (tuple (mul (silu (linear w:bf16[512,{terms}] none x)) (linear v:bf16[512,{terms}] none x)))"
        );
        let steps = lowered(&text).plan.steps;
        steps.iter().map(Task::name).collect::<Vec<_>>()
    };
    assert_eq!(gated(16, 256), ["linear", "linear + silu, multiplied"]);
    for (rows, terms) in [(17, 256), (16, 252), (16, 64)] {
        let names = gated(rows, terms);
        assert!(names.iter().any(|n| n.starts_with("pointwise")), "{names:?}");
    }
}

#[test]
fn attention_writes_as_its_query_lies() {
    let text = format!(
        "{ROTATED}\n(tuple (linear w:bf16[16,32] none (reshape (permute (attention r q q none false none) [0,2,1,3]) [2,5,32])))"
    );
    let lowered = lowered(&text);
    let [Task::Region(_), Task::Torch(call), Task::Linear(_)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    let seen = &lowered.plan.seen[&call.writes[0]];
    assert_eq!(*seen, (vec![2, 4, 5, 8], vec![160, 8, 32, 1]));
}

#[test]
fn a_norm_without_eps_takes_that_of_what_it_computes_in() {
    let lowered = lowered("(tuple (rms_norm x:bf16[2,6] [6] w:bf16[6] none))");
    assert!(
        matches!(&lowered.plan.steps[..], [Task::Rows(_)]),
        "{:?}",
        lowered.plan.steps
    );
}

#[test]
fn a_norm_that_is_rounded_and_then_scaled_is_one_step() {
    for (text, want) in [
        ("(tuple (mul w:bf16[6] (rms_norm x:bf16[4,6] [6] none 1e-5)))", 1),
        ("(tuple (mul (layer_norm x:f16[4,6] [6] none none 1e-5) w:f16[6]))", 1),
        // The region that reads it multiplies.
        ("(tuple (exp (mul w:bf16[6] (rms_norm x:bf16[4,6] [6] none 1e-5))))", 2),
        // Others read the norm, or what it is multiplied by changes.
        (
            "(let n (rms_norm x:bf16[4,6] [6] none 1e-5)) (tuple n (mul w:bf16[6] n))",
            2,
        ),
        ("(tuple (mul y:bf16[6] (rms_norm x:bf16[4,6] [6] none 1e-5)))", 2),
    ] {
        assert_eq!(steps(text).len(), want, "{text}: {:?}", steps(text));
    }
}

#[test]
fn casts_to_wider_numbers_are_made_where_they_are_read() {
    let statistics = "(let x (cast x:bf16[4,9] float32))
(let m (amax x [-1] true))
(let s (sum (exp (sub x m)) [-1] true))";
    let lowered = lowered_with(&format!("{statistics}\n(tuple m s)"), 2, &Wish::on(CUDA));
    let [Task::Rows(_), Task::Rows(sum)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert!(sum.inputs.iter().any(|o| o.value == lowered.plan.inputs[0]));
    // Somebody else reads it: there is one of it for all.
    let lowered = lowered_with(&format!("{statistics}\n(tuple m s x)"), 3, &Wish::on(CUDA));
    assert_eq!(lowered.plan.steps.len(), 3, "{:?}", lowered.plan.steps);
}

#[test]
fn a_matrix_may_be_kept_in_more_dimensions() {
    // The gradient of a weight, of a gradient and an input with two dimensions of rows.
    let lowered = lowered(
        "(let g (reshape g:bf16[2,8,24] [16,24]))
(tuple (mm (permute g [1,0]) (reshape x:bf16[2,8,32] [16,32])))",
    );
    let [Task::Linear(step)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    let weight = &lowered.plan.values[step.w].shape;
    assert_eq!((step.m, step.sizes(weight)), (24, Some((32, 16))), "{weight:?}");
}

#[test]
fn norms_of_training_steps_are_kernels() {
    let forward = lowered(
        "(let n (native_layer_norm x:bf16[4,32] [32] w:bf16[32] b:bf16[32] 1e-5))
(tuple (add (getitem n 0) (mul (getitem n 0) (getitem n 2))))",
    );
    assert!(matches!(&forward.plan.steps[0], Task::Norm(n) if n.eps == Some(1e-5) && n.centered));
    let backward = lowered(
        "(let d (layer_norm_backward g:bf16[4,32] x:bf16[4,32] [32] m:f32[4,1] s:f32[4,1] w:bf16[32] b:bf16[32]))
(tuple (add (getitem d 0) (getitem d 1)))",
    );
    assert!(matches!(&backward.plan.steps[0], Task::Norm(n) if n.eps.is_none() && (n.rows, n.width) == (4, 32)));
    // Too wide for the registers of a block.
    let wide = lowered(
        "(let n (native_layer_norm x:bf16[4,9000] [9000] w:bf16[9000] b:bf16[9000] 1e-5))
(tuple (add (getitem n 0) (mul (getitem n 0) (getitem n 2))))",
    );
    assert!(!wide.plan.steps.iter().any(|s| matches!(s, Task::Norm(_))));
}

#[test]
fn gradients_of_activations_are_part_of_regions() {
    for name in ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh"] {
        let lowered = lowered(&format!(
            "(tuple (mul 2.0 ({name}_backward g:bf16[4,32] (add 1.0 x:bf16[4,32]))))"
        ));
        assert!(matches!(&lowered.plan.steps[..], [Task::Region(_)]), "{name}");
    }
}

#[test]
fn what_is_kept_lies_as_the_backward_pass_expects() {
    let mut wish = Wish {
        saved: true,
        ..Wish::on(CUDA)
    };
    let text = "(tuple (exp (permute x:bf16[2,5,4,8] [0,2,1,3])))";
    let returned = |wish: &Wish| lowered_as(text, wish).results[0].strides.clone();
    assert_eq!(returned(&wish), [160, 40, 8, 1]);
    wish.layouts.outputs = vec![Wanted {
        strides: Some(vec![160, 8, 32, 1]),
        ..Wanted::default()
    }];
    assert_eq!(returned(&wish), [160, 8, 32, 1]);
}

#[test]
fn an_input_that_is_kept_lies_as_the_backward_pass_expects() {
    // A weight that was copied to have its channels last: the copy is gone, its strides are not.
    let text = "(tuple (exp x:bf16[2]) y:bf16[4,3,2,2])";
    let mut wish = Wish {
        saved: true,
        ..Wish::on(CUDA)
    };
    for (strides, given) in [(vec![12, 4, 2, 1], true), (vec![12, 1, 6, 3], false)] {
        let kept = Wanted {
            strides: Some(strides.clone()),
            ..Wanted::default()
        };
        wish.layouts.outputs = vec![Wanted::default(), kept];
        let returned = lowered_with(text, 2, &wish).results[1].clone();
        assert_eq!((returned.strides, returned.given), (strides, given));
    }
}

#[test]
fn a_factor_that_is_part_of_a_value_is_copied() {
    // Products take their sizes from the shape of the factor's value.
    let lowered = lowered("(tuple (mm x:[4,8] (slice y:[12,6] -2 0 8 1)))");
    let [Task::Region(_), Task::Linear(product)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(lowered.plan.values[product.w].shape, [8, 6]);
}

/// Attention by torch, a product with a vocabulary, and what follows.
fn language(vocabulary: usize, results: &[&str]) -> Lowered {
    let text = format!(
        "(let q (reshape x:bf16[8,4,512,64] [8,4,512,64]))
(let a (reshape (permute (attention q q q none false none) [0,2,1,3]) [8,512,256]))
(let n (rms_norm a [256] g:bf16[256] 1e-5))
(let logits (linear w:bf16[{vocabulary},256] none n))
(tuple {})",
        results.join(" ")
    );
    lowered_with(&text, results.len(), &Wish::on(CUDA))
}

fn names_of_late(lowered: &Lowered) -> Vec<String> {
    let from = late(&lowered.plan).unwrap_or(lowered.plan.steps.len());
    lowered.plan.steps[from..].iter().map(Task::name).collect()
}

#[test]
fn a_large_last_result_follows_a_recording() {
    for vocabulary in [50257, 50264] {
        let lowered = language(vocabulary, &["logits"]);
        assert_eq!(names_of_late(&lowered), ["linear"]);
        let from = lowered.plan.steps.len() - 1;
        assert_eq!(
            (late(&lowered.plan), is_late(&lowered.plan, from)),
            (Some(from), vec![true])
        );
    }
}

#[test]
fn what_is_made_of_a_large_result_follows_too() {
    let lowered = language(50257, &["logits", "(sum (exp logits) [-1] false)"]);
    let names = names_of_late(&lowered);
    assert!(names.len() > 1 && names[0] == "linear", "{names:?}");
}

#[test]
fn results_that_are_written_before_are_copied() {
    let lowered = language(50257, &["n", "logits"]);
    assert_eq!(names_of_late(&lowered), ["linear"]);
    let from = late(&lowered.plan).unwrap();
    let flags = is_late(&lowered.plan, from);
    let bytes = lowered.plan.outputs.iter().map(|id| lowered.plan.values[*id].bytes());
    let found: Vec<_> = bytes.zip(flags).collect();
    assert_eq!(found, [(8 * 512 * 256 * 2, false), (8 * 512 * 50257 * 2, true)]);
}

#[test]
fn small_results_are_copied() {
    // A copy takes less than a launch.
    let small = language(64, &["logits"]);
    assert_eq!(late(&small.plan), None);
    // Only one step, and nothing to record before it.
    let alone = lowered("(tuple (linear w:bf16[50257,256] none x:bf16[4096,256]))");
    assert_eq!((alone.plan.steps.len(), late(&alone.plan)), (1, None));
}

/// What the steps of a plan do, copies apart from other pointwise work.
pub fn steps(text: &str) -> Vec<String> {
    let name = |step: &Task| match step {
        Task::Region(r) if r.region.meaning().instructions.is_empty() => "copy".to_owned(),
        Task::Region(_) => "pointwise".to_owned(),
        Task::Rows(r) => format!("{:?}", r.rows.op()).to_lowercase(),
        other => other.name(),
    };
    lowered(text).plan.steps.iter().map(name).collect()
}

#[test]
fn activations_of_several_ops_are_part_of_regions() {
    for call in [
        "hardswish a",
        "hardsigmoid a",
        "leaky_relu a 0.1",
        "elu a 1.5",
        "softplus a 2.0 20.0",
        "mish a",
    ] {
        let found = steps(&format!(
            "(let a (conv x:bf16[2,8,9,9] w:bf16[8,8,3,3] b:bf16[8] [1,1] [1,1] [1,1] 1))
(tuple (reshape (permute ({call}) [0,2,3,1]) [162,8]))"
        ));
        assert_eq!(found, ["aten.convolution.default", "pointwise"], "{call}");
    }
}

#[test]
fn paddings_and_gathers_are_parts_of_regions() {
    for (text, want) in [
        ("(tuple (pad x:bf16[2,3,5] [1,2] 0.0))", &["copy"][..]),
        (
            "(tuple (mul (pad (exp x:bf16[2,3,5]) [1,2] 0.0) y:bf16[2,3,8]))",
            &["pointwise", "pointwise"],
        ),
        (
            "(tuple (add (gather x:bf16[2,3,5] -1 i:i64[2,3,9]) y:bf16[2,3,9]))",
            &["pointwise"],
        ),
        (
            "(tuple (add (permute (gather x:bf16[2,3,5] -1 i:i64[2,3,9]) [0,2,1]) y:bf16[2,9,3]))",
            &["pointwise"],
        ),
        // What others read, too, is computed once.
        (
            "(let p (pad x:[4] [1,1] 0.0)) (tuple (exp p) (neg p))",
            &["copy", "pointwise"],
        ),
        // Numbers that the dtype does not have, and nothing inside.
        ("(tuple (pad x:f16[4] [1,1] 1e5))", &["aten.constant_pad_nd.default"]),
        ("(tuple (pad x:i64[4] [1,1] 0.5))", &["aten.constant_pad_nd.default"]),
        ("(tuple (pad x:[0,4] [1,1,1,0] 1.0))", &["aten.constant_pad_nd.default"]),
        // Whole numbers have no NaN for what is out of range.
        ("(tuple (gather x:i64[2,5] -1 i:i64[2,9]))", &["aten.gather.default"]),
    ] {
        assert_eq!(steps(text), want, "{text}");
    }
}

#[test]
fn an_index_made_of_weights_is_bound_before_it_is_expanded() {
    let lowered = lowered(
        "(let i (expand (permute w:i64[3,4] [1,0]) [6,4,3]))
(tuple (add (gather x:[6,4,5] -1 i) (gather y:[6,4,5] -1 i)))",
    );
    assert_eq!(lowered.orders, [Some(vec![1, 2])]);
    let constant = &lowered.plan.values[lowered.plan.constants[0]];
    assert_eq!(constant.shape, [4, 3]);
    let [Task::Region(step)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    let index = step.inputs.iter().filter(|o| o.value == lowered.plan.constants[0]);
    let strides: Vec<_> = index.map(|o| &o.strides[..]).collect();
    assert_eq!(strides, [[0, 3, 1]; 2]);
}

/// The products of a plan.
fn products(lowered: &Lowered) -> Vec<&LinearStep> {
    let steps = lowered.plan.steps.iter();
    steps
        .filter_map(|step| match step {
            Task::Linear(l) => Some(l),
            _ => None,
        })
        .collect()
}

/// The plan of both products of a backward pass that read a gradient of `columns` columns.
fn backward(gradient: &str, columns: usize, more: &str) -> Lowered {
    let text = format!(
        "(let g {gradient})\n(tuple (mm g w:bf16[{columns},768]) (mm (permute g [1,0]) h:bf16[512,768]) {more})"
    );
    lowered_with(&text, if more.is_empty() { 2 } else { 3 }, &Wish::on(CUDA))
}

#[test]
fn a_region_writes_rows_that_products_read_fast() {
    for (columns, padded) in [(513, 520), (1001, 1008), (30522, 30528), (50257, 50264)] {
        let cast = format!("(reshape (cast (mul x:[2,256,{columns}] s:[256,1]) bf16) [512,{columns}])");
        let lowered = backward(&cast, columns, "");
        let Task::Region(region) = &lowered.plan.steps[0] else {
            panic!("{:?}", lowered.plan.steps);
        };
        // The dimension that is summed over, and columns that are rows of the result, are as many as before.
        let [g_w, g_h] = products(&lowered)[..] else {
            panic!("{:?}", lowered.plan.steps);
        };
        let sizes = |l: &LinearStep| (l.m, l.sizes(&lowered.plan.values[l.w].shape));
        assert_eq!((sizes(g_w), g_w.x_stride), ((512, Some((768, columns))), padded));
        assert_eq!((sizes(g_h), g_h.x_stride), ((columns, Some((768, 512))), padded));
        assert!(g_h.gradient.x_transposed);
        for l in [g_w, g_h] {
            assert_eq!(l.x.value, region.outputs[0]);
            assert_eq!(
                (&l.x.shape[..], &l.x.strides[..]),
                (&[512, columns][..], &[padded as isize, 1][..])
            );
        }
        assert_eq!(region.shape, [2, 256, padded]);
        assert_eq!(lowered.plan.values[region.outputs[0]].shape, region.shape);
        // What repeats along a row needs no bounds.
        let within = Read::Within {
            before: vec![0; 3],
            sizes: vec![2, 256, columns],
            outside: Scalar::Float(0.0),
        };
        assert_eq!(region.reads, [within, Read::Plain]);
    }
}

#[test]
fn rows_are_copied_where_others_see_them() {
    let copied = |lowered: &Lowered| {
        let product = products(lowered)[0].x.clone();
        let copies = lowered.plan.steps.iter().filter_map(|s| match s {
            Task::Region(r) if r.outputs == [product.value] => Some((r.region.is_input(), r.shape.clone())),
            _ => None,
        });
        assert!(products(lowered).iter().all(|l| l.x.value == product.value));
        copies.collect::<Vec<_>>()
    };
    // A gradient that is given, one that torch computes, one that a region reads, too.
    for gradient in [
        "g:bf16[512,1001]",
        "(cumsum x:bf16[512,1001] -1)",
        "(exp x:bf16[512,1001])",
    ] {
        let lowered = backward(gradient, 1001, "(sub g (softmax g -1))");
        assert_eq!(copied(&lowered), [(true, vec![512, 1008])], "{gradient}");
    }
    // Sums that come with no product read the copy, too.
    let lowered = backward("g:bf16[512,1001]", 1001, "(vector_norm g [-2] 2.0 false)");
    let sums = lowered.plan.steps.iter().find_map(|s| match s {
        Task::Columns(c) => Some((c.inputs[0].value, c.inputs[0].strides.clone())),
        _ => None,
    });
    assert_eq!(sums, Some((products(&lowered)[0].x.value, vec![1008, 1])));
    // A result lies as before.
    let lowered = backward("(exp x:bf16[512,1001])", 1001, "g");
    assert_eq!(copied(&lowered), [(true, vec![512, 1008])]);
    assert_eq!(lowered.plan.values[lowered.plan.outputs[2]].numel(), 512 * 1001);
}

#[test]
fn rows_of_other_products_stay_as_they_are() {
    let strides = |text: &str| {
        let lowered = lowered(text);
        products(&lowered).iter().map(|l| l.x_stride).collect::<Vec<_>>()
    };
    // Rows of the weight begin anywhere, too.
    assert_eq!(
        strides("(tuple (linear w:bf16[768,1001] none (exp x:bf16[512,1001])))"),
        [1001]
    );
    // So do those of the result.
    assert_eq!(strides("(tuple (mm (exp x:bf16[512,1001]) w:bf16[1001,769]))"), [1001]);
    // All begin at multiples of 16 bytes.
    assert_eq!(strides("(tuple (mm (exp x:bf16[512,1000]) w:bf16[1000,768]))"), [1000]);
    // Too short, too few multiplications, another element type.
    assert_eq!(strides("(tuple (mm (exp x:bf16[4096,129]) w:bf16[129,768]))"), [129]);
    assert_eq!(strides("(tuple (mm (exp x:bf16[16,1001]) w:bf16[1001,768]))"), [1001]);
    assert_eq!(strides("(tuple (mm (exp x:[512,1001]) w:[1001,768]))"), [1001]);
    // A copy would cost more than it saves.
    assert_eq!(strides("(tuple (mm x:bf16[8192,1001] w:bf16[1001,128]))"), [1001]);
    assert_eq!(strides("(tuple (mm (exp x:bf16[8192,1001]) w:bf16[1001,128]))"), [1008]);
}

#[test]
fn reductions_of_the_same_numbers_are_one_step() {
    let columns = |text: &str| {
        let steps = lowered(text).plan.steps;
        let kinds = steps.iter().filter_map(|s| match s {
            Task::Columns(c) => Some(c.kinds.len()),
            _ => None,
        });
        kinds.collect::<Vec<_>>()
    };
    let sums = "(sum (exp x) [-2] false) (sum (mul x x) [-2] false)";
    assert_eq!(columns(&format!("(tuple (sum x:[9,5] [-2] false) {sums})")), [3]);
    // Of other dimensions, of other numbers, and in another type.
    assert_eq!(
        columns("(tuple (sum x:[9,5,4] [-3] false) (mean x [-3,-2] false))"),
        [1, 1]
    );
    assert_eq!(
        columns("(tuple (sum x:[9,5] [-2] false) (mean y:[9,5] [-2] false))"),
        [1, 1]
    );
    assert_eq!(
        columns("(tuple (sum x:[9,5] [-2] false) (sum (cast x f64) [-2] false))"),
        [1, 1]
    );
}
