//! Fusion: several ops become one kernel. The right side's definition is the left side.

use super::Numerics::{Exact, Wider};
use super::Phase::Fuse;
use super::{Rule, rule};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        // relu commutes with rounding, so fusing it changes no bit; the others skip a rounding.
        rule(
            "fuse-linear-relu",
            Fuse,
            Exact,
            "(relu (linear ?w ?b ?x))",
            "(fused_linear_relu ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-gelu",
            Fuse,
            Wider,
            "(gelu (linear ?w ?b ?x))",
            "(fused_linear_gelu ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-gelu-tanh",
            Fuse,
            Wider,
            "(gelu_tanh (linear ?w ?b ?x))",
            "(fused_linear_gelu_tanh ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-silu",
            Fuse,
            Wider,
            "(silu (linear ?w ?b ?x))",
            "(fused_linear_silu ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-sigmoid",
            Fuse,
            Wider,
            "(sigmoid (linear ?w ?b ?x))",
            "(fused_linear_sigmoid ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-tanh",
            Fuse,
            Wider,
            "(tanh (linear ?w ?b ?x))",
            "(fused_linear_tanh ?w ?b ?x)",
            &[],
        ),
        rule(
            "fuse-linear-add",
            Fuse,
            Wider,
            "(add~ (linear ?w ?b ?x) ?r)",
            "(fused_linear_add ?w ?b ?x ?r)",
            &["(tensor ?r)", "(live ?r)"],
        ),
        rule(
            "fuse-swiglu",
            Fuse,
            Wider,
            "(linear ?wd ?bd (mul~ (silu (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))",
            "(fused_swiglu ?wg ?bg ?wu ?bu ?wd ?bd ?x)",
            &[],
        ),
        rule(
            "fuse-geglu",
            Fuse,
            Wider,
            "(linear ?wd ?bd (mul~ (gelu (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))",
            "(fused_geglu ?wg ?bg ?wu ?bu ?wd ?bd ?x)",
            &[],
        ),
        rule(
            "fuse-geglu-tanh",
            Fuse,
            Wider,
            "(linear ?wd ?bd (mul~ (gelu_tanh (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))",
            "(fused_geglu_tanh ?wg ?bg ?wu ?bu ?wd ?bd ?x)",
            &[],
        ),
        rule(
            "fuse-conv-relu",
            Fuse,
            Exact,
            "(relu (conv ?x ?w ?b ?s ?p ?d ?g))",
            "(fused_conv_relu ?x ?w ?b ?s ?p ?d ?g)",
            &[],
        ),
        rule(
            "fuse-conv-bn-relu",
            Fuse,
            Wider,
            "(relu (batch_norm (conv ?x ?w ?b ?s ?p ?d ?g) ?bw ?bb ?m ?v ?e))",
            "(fused_conv_bn_relu ?x ?w ?b ?s ?p ?d ?g ?bw ?bb ?m ?v ?e)",
            &[],
        ),
        rule(
            "fuse-add-layer-norm",
            Fuse,
            Wider,
            "(layer_norm (add ?x ?r) ?s ?w ?b ?e)",
            "(fused_add_layer_norm ?x ?r ?s ?w ?b ?e)",
            &["(same ?x ?r)"],
        ),
        rule(
            "fuse-add-rms-norm",
            Fuse,
            Wider,
            "(rms_norm (add ?x ?r) ?s ?w ?e)",
            "(fused_add_rms_norm ?x ?r ?s ?w ?e)",
            &["(same ?x ?r)"],
        ),
    ]
}
