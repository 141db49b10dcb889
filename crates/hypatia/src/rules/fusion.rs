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
    ]
}
