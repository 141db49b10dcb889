//! Fused ops: one node that stands for several. Type, meaning, cost and the call into torch
//! all follow from the definition.

use super::{Row, defined};

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
    const LINEAR: &str = "w:T b:T? x:T";
    const MLP: &str = "operands:T*";
    const GATED: &str = "wg:T bg:T? wu:T bu:T? wd:T bd:T? x:T";
    const CONV: &str = "x:T w:T b:T? stride:ints padding:ints dilation:ints groups:int";
    vec![
        defined("fused_linear_relu", LINEAR, |_| "(relu (linear w b x))".into()),
        defined("fused_linear_gelu", LINEAR, |_| "(gelu (linear w b x))".into()),
        defined("fused_linear_gelu_tanh", LINEAR, |_| {
            "(gelu_tanh (linear w b x))".into()
        }),
        defined("fused_linear_silu", LINEAR, |_| "(silu (linear w b x))".into()),
        defined("fused_linear_sigmoid", LINEAR, |_| "(sigmoid (linear w b x))".into()),
        defined("fused_linear_tanh", LINEAR, |_| "(tanh (linear w b x))".into()),
        defined("fused_linear_add", "w:T b:T? x:T r:T", |_| {
            "(add (linear w b x) r)".into()
        }),
        defined("fused-mlp", MLP, |n| mlp(n, "relu")),
        defined("fused-mlp-gelu", MLP, |n| mlp(n, "gelu")),
        defined("fused-mlp-gelu_tanh", MLP, |n| mlp(n, "gelu_tanh")),
        defined("fused-mlp-silu", MLP, |n| mlp(n, "silu")),
        defined("fused-mlp-sigmoid", MLP, |n| mlp(n, "sigmoid")),
        defined("fused-mlp-tanh", MLP, |n| mlp(n, "tanh")),
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
