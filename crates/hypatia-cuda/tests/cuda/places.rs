//! Layers over places, and pointwise ops of parts: what plans for a GPU have of them; no GPU is needed to see it.

use hypatia_runtime::lower::plan::Wish;
use hypatia_runtime::plan::Task;

use crate::lowering::{CUDA, lowered, lowered_as};

/// The names of a plan's steps, without sizes.
fn steps(text: &str) -> Vec<String> {
    let short = |step: &Task| step.name().split(" over ").next().unwrap_or_default().to_string();
    lowered(text).plan.steps.iter().map(short).collect()
}

const LAYER: &str = "(let y (linear w:bf16[5,7] b:bf16[5] (permute x:bf16[2,7,64] [0,2,1])))";

#[test]
fn a_layer_over_places_turns_nothing_around() {
    let lowered = lowered(&format!("{LAYER} (tuple (mul u:bf16[2,5,64] (permute y [0,2,1])))"));
    let [Task::Batch(product), Task::Region(rest)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(product.left.strides, [0, 7, 1]);
    assert_eq!(product.right.strides, [7 * 64, 64, 1]);
    // The bias is one number for each row.
    assert_eq!(rest.shape, [2, 5, 64]);
    assert!(rest.inputs.iter().any(|o| o.strides == [0, 1, 0]), "{:?}", rest.inputs);
}

#[test]
fn what_is_between_two_layers_lies_as_they_do() {
    let text = "(let h (gelu (linear w:bf16[9,7] b:bf16[9] (permute x:bf16[2,7,64] [0,2,1]))))
(tuple (add x (permute (linear v:bf16[7,9] c:bf16[7] h) [0,2,1])))";
    let lowered = lowered(text);
    let [
        Task::Batch(_),
        Task::Region(between),
        Task::Batch(second),
        Task::Region(_),
    ] = &lowered.plan.steps[..]
    else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(
        (&between.shape[..], &second.right.strides[..]),
        (&[2, 9, 64][..], &[9 * 64, 64, 1][..])
    );
}

#[test]
fn other_layers_are_as_they_were() {
    let is_batch = |s: &Task| matches!(s, Task::Batch(_));
    // Read without being swapped back; rows of places that are not multiples of 16 bytes, or short; f32.
    for text in ["(tuple (softmax y -1))", "(tuple (add (exp y) (mul y z:bf16[2,64,5])))"] {
        let plan = lowered(&format!("{LAYER} {text}")).plan;
        assert!(!plan.steps.iter().any(is_batch), "{text}");
    }
    for (channels, dtype) in [(65, "bf16"), (32, "bf16"), (64, "f32")] {
        let text = format!(
            "(let y (linear w:{dtype}[5,7] b:{dtype}[5] (permute x:{dtype}[2,7,{channels}] [0,2,1])))
(tuple (exp (permute y [0,2,1])))"
        );
        assert!(!lowered(&text).plan.steps.iter().any(is_batch), "{text}");
    }
    let saved = Wish {
        saved: true,
        ..Wish::on(CUDA)
    };
    let plan = lowered_as(&format!("{LAYER} (tuple (exp (permute y [0,2,1])))"), &saved).plan;
    assert!(!plan.steps.iter().any(is_batch));
}

#[test]
fn parts_of_a_pointwise_op_are_computed_where_they_are_read() {
    // The gate of a gMLP, and that of experts.
    let gated = "(let h (gelu (linear w:bf16[12,8] b:bf16[12] x:bf16[4,8])))
(tuple (mul (slice h -1 0 6 1) (layer_norm (slice h -1 6 12 1) [6] v:bf16[6] c:bf16[6] 1e-5)))";
    let names = steps(gated);
    assert_eq!(names.len(), 3, "{names:?}");
    assert!(
        names[1].starts_with("layernorm") && names[2] == "pointwise",
        "{names:?}"
    );
    let filled = "(let h (masked_fill x:bf16[4,12] m:bool[4,1] 0.0))
(tuple (mul (silu (slice h -1 0 6 1)) (slice h -1 6 12 1)))";
    assert_eq!(steps(filled), ["pointwise"]);
}

#[test]
fn a_pointwise_op_that_is_read_as_a_whole_is_computed_once() {
    let names = steps(
        "(let h (exp x:bf16[4,12]))
(tuple (mul (sum h [-1] true) (mul (silu (slice h -1 0 6 1)) (slice h -1 6 12 1))))",
    );
    assert_eq!(names.iter().filter(|n| *n == "pointwise").count(), 2, "{names:?}");
    // Each element would be computed twice.
    let twice = lowered("(let h (exp x:bf16[4,12])) (tuple (mul (slice h -1 0 8 1) (slice h -1 4 12 1)))");
    assert!(matches!(&twice.plan.steps[0], Task::Region(r) if r.shape == [4, 12]));
    // What a product applies is applied to all of its result.
    let applied = steps(
        "(let h (relu (linear w:bf16[12,8] b:bf16[12] x:bf16[4,8])))
(tuple (mul (exp (slice h -1 0 6 1)) (sub (slice h -1 6 12 1) 3.0)))",
    );
    assert!(
        applied.iter().all(|n| n.contains("relu") || n == "pointwise"),
        "{applied:?}"
    );
}
