//! Fused ops: one node that stands for several. Type, meaning, cost and the call into torch
//! all follow from the definition.

use super::{Row, defined};

/// Calls a macro with the activations that fuse into the product before them: the op, its name in the names of rules, how
/// fusing changes the numbers, and the op and the rule of a perceptron with it.
macro_rules! activations {
    ($each:ident) => {
        $each! {
            // It commutes with rounding, so fusing it changes no bit; the others skip a rounding.
            "relu" "relu" Exact "fused-mlp" "fused-mlp";
            "gelu" "gelu" Wider "fused-mlp-gelu" "fused-mlp-gelu";
            "gelu_tanh" "gelu-tanh" Wider "fused-mlp-gelu_tanh" "fused-mlp-gelu-tanh";
            "silu" "silu" Wider "fused-mlp-silu" "fused-mlp-silu";
            "sigmoid" "sigmoid" Wider "fused-mlp-sigmoid" "fused-mlp-sigmoid";
            "tanh" "tanh" Wider "fused-mlp-tanh" "fused-mlp-tanh";
        }
    };
}
pub(crate) use activations;

macro_rules! linear_rows {
    ($($act:literal $_short:literal $_numerics:ident $_mlp:literal $_rule:literal;)*) => {
        vec![$(defined(concat!("fused_linear_", $act), LINEAR, |_| {
            concat!("(", $act, " (linear w b x))").into()
        })),*]
    };
}

macro_rules! mlp_rows {
    ($($act:literal $_short:literal $_numerics:ident $mlp:literal $_rule:literal;)*) => {
        vec![$(defined($mlp, "operands:T*", |n| mlp(n, $act))),*]
    };
}

const LINEAR: &str = "w:T b:T? x:T";

/// `linear → act → linear → act → … → linear` over operands `w1 b1 w2 b2 … x`.
fn mlp(operands: usize, act: &str) -> String {
    let mut text = format!("p{}", operands.saturating_sub(1));
    for layer in 0..operands / 2 {
        if layer > 0 {
            text = format!("({act} {text})");
        }
        text = format!("(linear p{} p{} {text})", 2 * layer, 2 * layer + 1);
    }
    text
}

pub(super) fn rows() -> Vec<Row> {
    [activations!(linear_rows), vec![sum()], activations!(mlp_rows), others()]
        .into_iter()
        .flatten()
        .collect()
}

fn sum() -> Row {
    defined("fused_linear_add", "w:T b:T? x:T r:T", |_| {
        "(add (linear w b x) r)".into()
    })
}

fn others() -> Vec<Row> {
    const GATED: &str = "wg:T bg:T? wu:T bu:T? wd:T bd:T? x:T";
    const CONV: &str = "x:T w:T b:T? stride:ints padding:ints dilation:ints groups:int";
    vec![
        defined("fused_swiglu", GATED, |_| {
            "(linear wd bd (mul (silu (linear wg bg x)) (linear wu bu x)))".into()
        }),
        defined("fused_geglu", GATED, |_| {
            "(linear wd bd (mul (gelu (linear wg bg x)) (linear wu bu x)))".into()
        }),
        defined("fused_geglu_tanh", GATED, |_| {
            "(linear wd bd (mul (gelu_tanh (linear wg bg x)) (linear wu bu x)))".into()
        }),
        defined("fused_conv_relu", CONV, |_| {
            "(relu (conv x w b stride padding dilation groups))".into()
        }),
        defined(
            "fused_conv_bn_relu",
            "x:T w:T b:T? stride:ints padding:ints dilation:ints groups:int g:T? h:T? mean:T var:T eps:float",
            |_| "(relu (batch_norm (conv x w b stride padding dilation groups) g h mean var eps))".into(),
        ),
        defined("fused_add_layer_norm", "x:T r:T shape:ints w:T? b:T? eps:float", |_| {
            "(layer_norm (add x r) shape w b eps)".into()
        }),
        defined("fused_add_rms_norm", "x:T r:T shape:ints w:T? eps:float?", |_| {
            "(rms_norm (add x r) shape w eps)".into()
        }),
    ]
}
