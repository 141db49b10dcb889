//! Plans for a GPU of nets with convolutions: images with channels last, windows, poolings, paddings.

use hypatia_runtime::lower::plan::{Lowered, Wanted, Wish};
use hypatia_runtime::plan::{DepthwiseStep, Pool, Task, Window, WindowOp};

use super::lowering::{CUDA, lowered, lowered_as, lowered_with, steps};

#[test]
fn a_training_step_keeps_channels_last_if_it_was_traced_so() {
    let text = "(let y (conv x:bf16[2,16,9,9] y:bf16[16,1,3,3] z:bf16[16] [1,1] [1,1] [1,1] 16))
(tuple (relu y))";
    let mut wish = Wish {
        saved: true,
        ..Wish::on(CUDA)
    };
    let kinds = |wish: &Wish| {
        let steps = lowered_as(text, wish).plan.steps;
        steps.iter().any(|s| matches!(s, Task::Depthwise(_)))
    };
    assert!(!kinds(&wish));
    wish.images = true;
    assert!(kinds(&wish));
}

#[test]
fn torch_pools_images_as_they_lie() {
    let mut wish = Wish {
        saved: true,
        ..Wish::on(CUDA)
    };
    wish.layouts.outputs = vec![Wanted::default()];
    let pool = "[3,3] [1,1] [1,1] [1,1] false";
    // With channels last, the usual way, and in a way that torch has no kernel for.
    for (order, strides, copied) in [
        ("[0,3,1,2]", [48, 1, 8, 2], false),
        ("[0,1,2,3]", [48, 8, 2, 1], false),
        ("[0,2,1,3]", [48, 12, 2, 1], true),
    ] {
        let text =
            format!("(let p (native_max_pool2d (permute (exp x:[2,6,4,2]) {order}) {pool})) (tuple (getitem p 0))");
        let lowered = lowered_as(&text, &wish);
        let Some(Task::Torch(call)) = lowered.plan.steps.iter().find(|s| matches!(s, Task::Torch(_))) else {
            panic!("{:?}", lowered.plan.steps);
        };
        assert_eq!(
            (&call.reads[0].strides[..], &lowered.results[0].strides[..]),
            (&strides[..], &strides[..]),
            "{order}"
        );
        assert_eq!(lowered.plan.steps.len(), if copied { 3 } else { 2 }, "{order}");
    }
}

/// A block of a residual net: 1×1, 3×3, 1×1, each with what batch norm left of itself, and what it adds to.
const BLOCK: &str = "(let a (relu (conv x:bf16[2,16,9,9] w1:bf16[8,16,1,1] b1:bf16[8] [1,1] [0,0] [1,1] 1)))
(let b (relu (conv a w2:bf16[8,8,3,3] b2:bf16[8] [1,1] [1,1] [1,1] 1)))
(let c (relu (add (conv b w3:bf16[16,8,1,1] b3:bf16[16] [1,1] [0,0] [1,1] 1) (relu x))))
(tuple (max_pool2d c [2,2] [2,2] [0,0] [1,1] false))";

#[test]
fn convolutions_have_channels_last_and_fuse_with_what_follows() {
    let lowered = lowered(BLOCK);
    let names: Vec<String> = lowered.plan.steps.iter().map(Task::name).collect();
    let count = |kind: fn(&Task) -> bool| lowered.plan.steps.iter().filter(|s| kind(s)).count();
    // Both windows of one are products with bias; the last one takes the sum over.
    assert_eq!(count(|s| matches!(s, Task::Linear(l) if l.b.is_some())), 2, "{names:?}");
    assert_eq!(count(|s| matches!(s, Task::Linear(l) if l.r.is_some())), 1, "{names:?}");
    let targets: Vec<&str> = lowered.calls.iter().map(|c| c.target.as_str()).collect();
    assert_eq!(targets, ["aten.cudnn_convolution.default"], "{names:?}");
    assert!(
        names.contains(&"max_pool 2x2 over [2, 4, 4, 16]".to_owned()),
        "{names:?}"
    );
    // The weight of the convolution is bound with its channels last, and nothing else is copied but the input.
    assert_eq!(lowered.orders.iter().flatten().collect::<Vec<_>>(), [&[0, 2, 3, 1]]);
    let calls: Vec<_> = lowered
        .plan
        .steps
        .iter()
        .filter_map(|s| match s {
            Task::Torch(t) => Some(t.reads[0].strides.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(calls, [[648, 1, 72, 8]]);
}

#[test]
fn convolutions_of_one_channel_or_place_are_not_told_where_to_write() {
    // Of such operands cuDNN cannot see which layout they have, or is wrong for windows of one with padding.
    for (x, w, padding) in [
        ("[3,1,5,7]", "[12,1,3,3]", "[1,1]"),
        ("[3,8,5,7]", "[1,8,3,3]", "[1,1]"),
        ("[1,4,8,6]", "[2,4,1,1]", "[1,0]"),
        ("[2,12,1,1]", "[12,12,3,3]", "[2,2]"),
    ] {
        let text = format!("(tuple (relu (conv x:{x} w:{w} none [1,1] {padding} [1,1] 1)))");
        let targets: Vec<String> = lowered(&text).calls.into_iter().map(|c| c.target).collect();
        assert_eq!(targets.len(), 1, "{text}");
        assert!(!targets[0].contains("cudnn"), "{text}: {targets:?}");
    }
}

#[test]
fn convolutions_of_fp32_have_channels_last_and_stay_convolutions() {
    // torch allows TF32 in convolutions, not in products.
    let text = BLOCK.replace("bf16", "f32");
    let lowered = lowered(&text);
    let targets: Vec<&str> = lowered.calls.iter().map(|c| c.target.as_str()).collect();
    assert_eq!(targets, ["aten.cudnn_convolution.default"; 3]);
    assert_eq!(lowered.orders.iter().flatten().count(), 3);
    let found = steps(&text);
    let count = |name: &str| found.iter().filter(|s| *s == name).count();
    // A region after each and that of the input, the pool; the result is laid as torch has it.
    assert_eq!((count("pointwise"), count("copy")), (4, 1), "{found:?}");
    assert_eq!(found.len(), targets.len() + 6, "{found:?}");
}

#[test]
fn batch_norms_that_stay_are_pointwise() {
    for (dtype, statistics) in [("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32")] {
        for (norm, items) in [("batch_norm", ""), ("native_batch_norm", "0.1")] {
            let vector = |name: &str| format!("{name}:{statistics}[16]");
            let parameters = ["g", "h", "m", "v"].map(vector).join(" ");
            let normed = format!("({norm} c {parameters} 1e-5 {items})");
            let normed = if items.is_empty() {
                normed
            } else {
                format!("(getitem {normed} 0)")
            };
            let found = steps(&format!(
                "(let a (conv x:{dtype}[2,8,9,9] w1:{dtype}[8,8,3,3] none [1,1] [1,1] [1,1] 1))
(let c (cat -3 a (relu a)))
(tuple (conv (relu {normed}) w2:{dtype}[8,16,3,3] none [1,1] [1,1] [1,1] 1) c)"
            ));
            let convolution = "aten.convolution.default";
            let want = [convolution, "pointwise", "pointwise", convolution, "copy"];
            assert_eq!(found, want, "{norm} of {dtype} by {statistics}");
        }
    }
}

#[test]
fn images_stay_as_they_lie() {
    let image = "(let a (conv x:bf16[2,8,9,9] w:bf16[8,8,3,3] none [1,1] [1,1] [1,1] 1))";
    let convolution = "aten.convolution.default";
    let means = "column means of [9, 9, 2, 8]";
    // Squeeze and excite: the mean over the places, a product over channels, and a factor for each channel.
    let squeezed = format!(
        "{image}
(let m (conv (mean a [-2,-1] true) v:bf16[8,8,1,1] c:bf16[8] [1,1] [0,0] [1,1] 1))
(tuple (reshape (permute (mul a (sigmoid m)) [0,2,3,1]) [162,8]))"
    );
    assert_eq!(steps(&squeezed), [convolution, means, "linear", "pointwise"]);
    // The last pooling and the classifier, in both ways to write them.
    for pooled in [
        "(mean a [-2,-1] false)",
        "(reshape (adaptive_avg_pool2d a [1,1]) [2,8])",
    ] {
        let classified = format!("{image}\n(tuple (linear v:bf16[4,8] none {pooled}))");
        assert_eq!(steps(&classified), [convolution, means, "linear"], "{pooled}");
    }
    // Parts of the channels.
    let parts = format!(
        "{image}
(let l (split a [4,4] -3))
(tuple (reshape (permute (cat -3 (getitem l 0) (neg (getitem l 1))) [0,2,3,1]) [162,8]))"
    );
    assert_eq!(steps(&parts), [convolution, "pointwise"]);
    // The model has them last itself for a while: the bias is added where the norm reads, and the residual where it lies.
    let last = format!(
        "{image}
(let d (conv a w2:bf16[8,1,3,3] b:bf16[8] [1,1] [1,1] [1,1] 8))
(let n (layer_norm (permute d [0,2,3,1]) [8] g:bf16[8] h:bf16[8] 1e-6))
(let r (add a (permute (mul (gelu (linear v:bf16[8,8] none n)) s:bf16[8]) [0,3,1,2])))
(tuple (reshape (permute r [0,2,3,1]) [162,8]))"
    );
    let want = [
        convolution,
        "depthwise 3x3 over [2, 9, 9, 8]",
        "layernorm { eps: 1e-6 }",
        "linear",
        "pointwise",
    ];
    assert_eq!(steps(&last), want);
}

/// A convolution of each channel by itself between two windows of one, as in most mobile nets.
fn separable(dtype: &str, weight: &str, groups: usize) -> String {
    format!(
        "(let a (relu (conv x:{dtype}[2,16,9,9] w1:{dtype}[24,16,1,1] b1:{dtype}[24] [1,1] [0,0] [1,1] 1)))
(let b (silu (conv a w2:{dtype}{weight} b2:{dtype}[24] [2,2] [1,2] [1,1] {groups})))
(tuple (conv b w3:{dtype}[16,24,1,1] b3:{dtype}[16] [1,1] [0,0] [1,1] 1))"
    )
}

#[test]
fn channels_by_themselves_are_a_kernel_with_what_follows() {
    for dtype in ["bf16", "f16", "f32"] {
        let lowered = lowered(&separable(dtype, "[24,1,3,5]", 24));
        let names: Vec<String> = lowered.plan.steps.iter().map(Task::name).collect();
        // Windows of one are calls in fp32.
        let calls = if dtype == "f32" { 2 } else { 0 };
        assert_eq!(lowered.calls.len(), calls, "{names:?}");
        let steps = &lowered.plan.steps;
        let found = steps.iter().find_map(|s| match s {
            Task::Depthwise(d) => Some(d),
            _ => None,
        });
        let step = found.unwrap_or_else(|| panic!("{names:?}"));
        assert_eq!((step.window.size, step.window.stride), ([3, 5], [2, 2]));
        assert_eq!((step.window.padding, step.window.dilation), ([1, 2], [1, 1]));
        assert_eq!(
            (&step.x.shape[..], &step.shape[..]),
            (&[2, 9, 9, 24][..], &[2, 5, 5, 24][..])
        );
        // Bias and activation are a part of it, and the weight is bound as the kernel reads it.
        assert_eq!(
            step.inputs.iter().map(Option::is_none).collect::<Vec<_>>(),
            [true, false]
        );
        let WindowOp::Conv(w) = step.op else {
            panic!("{names:?}");
        };
        assert_eq!(lowered.plan.values[w].shape, [3, 5, 24, 1]);
        assert!(lowered.orders.contains(&Some(vec![2, 3, 0, 1])), "{:?}", lowered.orders);
    }
}

#[test]
fn groups_of_several_channels_are_left_to_torch() {
    for (weight, groups) in [("[24,2,3,3]", 12), ("[24,24,3,3]", 1), ("[24,1,3,33]", 24)] {
        let lowered = lowered(&separable("bf16", weight, groups).replace("[1,2] [1,1]", "[1,16] [1,1]"));
        assert_eq!(lowered.calls.len(), 1, "{weight}");
    }
}

/// A pooling of what a convolution made, and what follows it.
fn pooled(dtype: &str, pool: &str, result: &str) -> Lowered {
    let conv = format!("(conv x:{dtype}[2,8,9,8] w:{dtype}[24,8,3,3] none [1,1] [1,1] [1,1] 1)");
    lowered(&format!("(let a (relu {conv}))\n(let p {pool})\n(tuple {result})"))
}

fn windows(lowered: &Lowered) -> Vec<&DepthwiseStep> {
    let steps = lowered.plan.steps.iter();
    let found = steps.filter_map(|s| match s {
        Task::Depthwise(d) => Some(&**d),
        _ => None,
    });
    found.collect()
}

#[test]
fn poolings_with_channels_last_are_a_kernel_with_what_follows() {
    let mean = |counts_padding| Pool::Mean { counts_padding };
    let window = |size, stride, padding, dilation| Window {
        size,
        stride,
        padding,
        dilation,
    };
    let three = window([3, 3], [1, 1], [1, 1], [1, 1]);
    let table = [
        (
            "(avg_pool2d a [3,3] [1,1] [1,1] false false)",
            mean(false),
            three,
            [9, 8],
        ),
        ("(avg_pool2d a [3,3] [1,1] [1,1] false true)", mean(true), three, [9, 8]),
        ("(max_pool2d a [3,3] [1,1] [1,1] [1,1] false)", Pool::Max, three, [9, 8]),
        // One that names no stride, and one that hangs over the end.
        (
            "(avg_pool2d a [2,3] [] [0,1] true true)",
            mean(true),
            window([2, 3], [2, 3], [0, 1], [1, 1]),
            [5, 3],
        ),
        (
            "(getitem (native_max_pool2d a [3,2] [2,1] [1,0] [2,3] true) 0)",
            Pool::Max,
            window([3, 2], [2, 1], [1, 0], [2, 3]),
            [4, 5],
        ),
    ];
    for (dtype, (pool, takes, window, [height, width])) in
        ["bf16", "f16", "f32"].iter().flat_map(|d| table.map(|row| (d, row)))
    {
        let rows = 2 * height * width;
        let lowered = pooled(
            dtype,
            pool,
            &format!("(reshape (permute (relu p) [0,2,3,1]) [{rows},24])"),
        );
        let [step] = windows(&lowered)[..] else {
            panic!("{pool}: {:?}", lowered.plan.steps);
        };
        assert_eq!((step.op, step.window), (WindowOp::Pool(takes), window), "{pool}");
        assert_eq!(step.shape, [2, height, width, 24], "{pool}");
        assert!(!step.after.is_input() && lowered.calls.len() == 1, "{pool}: {step:?}");
    }
}

#[test]
fn a_pooling_reads_its_images_again_for_what_follows() {
    let lowered = pooled(
        "bf16",
        "(avg_pool2d a [3,3] [1,1] [1,1] false false)",
        "(reshape (permute (sub p a) [0,2,3,1]) [144,24])",
    );
    let [step] = windows(&lowered)[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    let images = &step.x;
    assert!(matches!(&step.inputs[..], [None, Some(o)] if o == images), "{step:?}");
    assert_eq!(step.output, lowered.plan.outputs[0]);
    // The whole mixer of a PoolFormer.
    let lowered = pooled(
        "f32",
        "(avg_pool2d a [3,3] [1,1] [1,1] false false)",
        "(conv (gelu (add a (mul s:f32[24,1,1] (sub p a)))) v:f32[24,24,1,1] none [1,1] [0,0] [1,1] 1)",
    );
    let [step] = windows(&lowered)[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert!(step.inputs.len() >= 3 && lowered.calls.len() == 2, "{step:?}");
}

#[test]
fn other_poolings_are_left_to_torch() {
    // Whose images lie with channels first, which want places, and whose window is too large.
    for (pool, result) in [
        ("(max_pool2d y:bf16[2,24,9,8] [3,3] [1,1] [1,1] [1,1] false)", "p"),
        (
            "(native_max_pool2d a [3,3] [1,1] [1,1] [1,1] false)",
            "(add (getitem p 0) (cast (getitem p 1) bf16))",
        ),
        ("(avg_pool2d a [1,33] [1,1] [0,16] false true)", "p"),
        ("(adaptive_avg_pool2d a [3,3])", "p"),
    ] {
        let lowered = pooled("bf16", pool, &format!("(mul {result} (mean a [-2,-1] true))"));
        assert!(windows(&lowered).is_empty(), "{pool}: {:?}", lowered.plan.steps);
    }
    let alone = lowered("(tuple (max_pool2d x:bf16[2,24,9,8] [3,3] [1,1] [1,1] [1,1] false))");
    assert_eq!((windows(&alone).len(), alone.calls.len()), (0, 1));
}

#[test]
fn torchs_pooling_of_large_windows_reads_an_image_with_channels_first() {
    for (size, strides) in [
        ("[3,3]", [24 * 64 * 64, 64 * 64, 64, 1]),
        ("[16,16]", [24 * 64 * 64, 1, 64 * 24, 24]),
    ] {
        let text = format!(
            "(let a (relu (conv x:f32[1,8,66,66] w:f32[24,8,3,3] none [1,1] [0,0] [1,1] 1)))
(tuple (adaptive_avg_pool2d a {size}))"
        );
        let lowered = lowered(&text);
        let pool = |s: &Task| match s {
            Task::Torch(t) if t.name.contains("adaptive") => Some(t.reads[0].strides.clone()),
            _ => None,
        };
        let read = lowered.plan.steps.iter().find_map(pool);
        assert_eq!(read, Some(strides.to_vec()), "{size}");
    }
}

#[test]
fn a_convolution_that_others_read_too_does_not_take_what_follows() {
    let text = "(let a (conv x:bf16[2,24,9,9] w:bf16[24,1,3,3] none [1,1] [1,1] [1,1] 24))
(tuple (add (relu a) (mean a [-2,-1] true)))";
    let lowered = lowered(text);
    let alone = |s: &Task| matches!(s, Task::Depthwise(d) if d.after.is_input());
    assert!(lowered.plan.steps.iter().any(alone), "{:?}", lowered.plan.steps);
}

#[test]
fn what_is_padded_lies_as_before() {
    let text = "(let a (conv x:bf16[2,8,9,9] w:bf16[16,8,3,3] none [1,1] [1,1] [1,1] 1))
(tuple (conv (pad (relu a) [0,1,0,1] 0.0) v:bf16[16,16,3,3] none [2,2] [0,0] [1,1] 1))";
    let lowered = lowered(text);
    let padded = lowered.plan.steps.iter().find_map(|step| match step {
        Task::Region(r) if !r.reads.is_empty() => Some(r),
        _ => None,
    });
    let padded = padded.unwrap();
    assert_eq!(padded.shape, [2, 10, 10, 16]);
    assert_eq!(padded.inputs[0].strides, [9 * 9 * 16, 9 * 16, 16, 1]);
    assert_eq!(
        lowered.plan.form(padded.outputs[0]),
        (vec![2, 10, 10, 16], vec![1600, 160, 16, 1])
    );
    let names = steps(text);
    assert_eq!(names.iter().filter(|n| *n == "pointwise").count(), 1, "{names:?}");
}

#[test]
fn images_are_padded_with_channels_last() {
    // The first convolution of a net whose padding is not the same on both sides.
    let lowered =
        lowered("(tuple (conv (pad x:bf16[2,3,9,9] [0,1,0,1] 0.0) v:bf16[16,3,3,3] none [2,2] [0,0] [1,1] 1))");
    let Task::Region(padded) = &lowered.plan.steps[0] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(padded.shape, [2, 10, 10, 3]);
    assert_eq!(padded.inputs[0].strides, [243, 9, 1, 81]);
    assert!(matches!(&lowered.plan.steps[1], Task::Torch(t) if t.reads[0].strides == [300, 1, 30, 3]));
}

#[test]
fn other_paddings_are_no_part_of_convolutions() {
    // Channels, another number, what others read, too.
    for (text, returned) in [
        ("(pad x:bf16[2,6,9,8] [0,0,0,0,1,1] 0.0)", ""),
        ("(pad x:bf16[2,8,9,8] [1,1] 1.0)", ""),
        ("(pad x:bf16[2,8,9,8] [1,1] 0.0)", "(exp p)"),
    ] {
        let text = format!("(let p {text}) (tuple (conv p v:bf16[8,1,3,3] none [1,1] [0,0] [1,1] 8) {returned})");
        let lowered = lowered_with(&text, 1 + usize::from(!returned.is_empty()), &Wish::on(CUDA));
        let convolution = lowered.plan.steps.iter().find_map(|step| match step {
            Task::Depthwise(d) => Some(d.window.padding),
            _ => None,
        });
        assert_eq!(convolution, Some([0, 0]), "{text}");
    }
}
