//! Fusion: several ops become one kernel. The right side's definition is the left side.

use super::Rule;
use super::canon::laws;
use crate::ops::fused::activations;

macro_rules! linear_activations {
    ($($act:literal $short:literal $numerics:ident $_mlp:literal $_rule:literal;)*) => {
        vec![$(super::rule(
            concat!("fuse-linear-", $short),
            super::Phase::Fuse,
            super::Numerics::$numerics,
            concat!("(", $act, " (linear ?w ?b ?x))"),
            concat!("(fused_linear_", $act, " ?w ?b ?x)"),
            &[],
        )),*]
    };
}

pub(super) fn rules() -> Vec<Rule> {
    [activations!(linear_activations), others()]
        .into_iter()
        .flatten()
        .collect()
}

fn others() -> Vec<Rule> {
    laws! {
        "fuse-linear-add": Fuse Wider, "(add~ (linear ?w ?b ?x) ?r)"
            => "(fused_linear_add ?w ?b ?x ?r)" if "(tensor ?r)" "(live ?r)";
        "fuse-swiglu": Fuse Wider, "(linear ?wd ?bd (mul~ (silu (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))"
            => "(fused_swiglu ?wg ?bg ?wu ?bu ?wd ?bd ?x)";
        "fuse-geglu": Fuse Wider, "(linear ?wd ?bd (mul~ (gelu (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))"
            => "(fused_geglu ?wg ?bg ?wu ?bu ?wd ?bd ?x)";
        "fuse-geglu-tanh": Fuse Wider, "(linear ?wd ?bd (mul~ (gelu_tanh (linear ?wg ?bg ?x)) (linear ?wu ?bu ?x)))"
            => "(fused_geglu_tanh ?wg ?bg ?wu ?bu ?wd ?bd ?x)";
        "fuse-conv-relu": Fuse Exact, "(relu (conv ?x ?w ?b ?s ?p ?d ?g))" => "(fused_conv_relu ?x ?w ?b ?s ?p ?d ?g)";
        "fuse-conv-bn-relu": Fuse Wider, "(relu (batch_norm (conv ?x ?w ?b ?s ?p ?d ?g) ?bw ?bb ?m ?v ?e))"
            => "(fused_conv_bn_relu ?x ?w ?b ?s ?p ?d ?g ?bw ?bb ?m ?v ?e)";
        "fuse-add-layer-norm": Fuse Wider, "(layer_norm (add ?x ?r) ?s ?w ?b ?e)"
            => "(fused_add_layer_norm ?x ?r ?s ?w ?b ?e)" if "(same ?x ?r)";
        "fuse-add-rms-norm": Fuse Wider, "(rms_norm (add ?x ?r) ?s ?w ?e)"
            => "(fused_add_rms_norm ?x ?r ?s ?w ?e)" if "(same ?x ?r)";
    }
}
