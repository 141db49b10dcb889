//! Normalisation: written out in captured programs, and its affine part at home in the next linear.

use super::Rule;
use super::canon::laws;

pub(super) fn rules() -> Vec<Rule> {
    [written_out(), affine()].into_iter().flatten().collect()
}

/// torch captures `rms_norm` in its parts. They round several times, the op once. Where a model
/// rounds to half precision before it multiplies by the weight, that rounding stays. Where a
/// variance overflows, the parts of a layer norm give zeros and torch's kernel NaN.
fn written_out() -> Vec<Rule> {
    laws! {
        // Not wider: in a row with an infinity torch's kernel for a GPU makes NaN of all, the parts of that one alone.
        "rms-norm": Canon Reassoc, "(mul~ ?x (rsqrt (add (mean (mul ?x ?x) ?d true) ?e)))"
            => "(rms_norm ?x ($tail ?x ?d) none ($float ?e))";
        "rms-norm-div": Canon Reassoc, "(div ?x (sqrt (add (mean (mul ?x ?x) ?d true) ?e)))"
            => "(rms_norm ?x ($tail ?x ?d) none ($float ?e))";
        "rms-norm-weight": Canon Wider, "(mul~ (rms_norm ?x ?s none ?e) ?w)" => "(rms_norm ?x ?s ?w ?e)" if "(wide ?x)";
        "rms-norm-cast": Canon Wider, "(cast (rms_norm (cast ?x f32) ?s none ?e) ?d)" => "(rms_norm ?x ?s none ?e)"
            if "(number ?e)" "(widens ?x f32)";
        "rms-norm-cast-weight": Canon Wider, "(cast (mul~ (rms_norm (cast ?x f32) ?s none ?e) ?w) ?d)"
            => "(rms_norm ?x ?s ?w ?e)" if "(number ?e)" "(widens ?x f32)";
        "layer-norm": Canon Reassoc, "(mul~ (sub ?x (mean ?x ?d true)) (rsqrt (add (var ?x ?d 0.0 true) ?e)))"
            => "(layer_norm ?x ($tail ?x ?d) none none ($float ?e))";
        "layer-norm-div": Canon Reassoc, "(div (sub ?x (mean ?x ?d true)) (sqrt (add (var ?x ?d 0.0 true) ?e)))"
            => "(layer_norm ?x ($tail ?x ?d) none none ($float ?e))";
        // Mean and variance of one kernel; infinities make NaN of the whole row either way.
        "layer-norm-var-mean": Canon Reassoc,
            "(mul~ (sub ?x (getitem (var_mean ?x ?d 0.0 true) 1)) (rsqrt (add (getitem (var_mean ?x ?d 0.0 true) 0) ?e)))"
            => "(layer_norm ?x ($tail ?x ?d) none none ($float ?e))";
        "layer-norm-var-mean-div": Canon Reassoc,
            "(div (sub ?x (getitem (var_mean ?x ?d 0.0 true) 1)) (sqrt (add (getitem (var_mean ?x ?d 0.0 true) 0) ?e)))"
            => "(layer_norm ?x ($tail ?x ?d) none none ($float ?e))";
        "layer-norm-weight": Canon Wider, "(mul~ (layer_norm ?x ?s none none ?e) ?w)" => "(layer_norm ?x ?s ?w none ?e)"
            if "(wide ?x)";
        "layer-norm-bias": Canon Wider, "(add~ (layer_norm ?x ?s ?w none ?e) ?b)" => "(layer_norm ?x ?s ?w ?b ?e)"
            if "(wide ?x)";
    }
}

/// `W (g·n + h) + b = (W·g) n + (W h + b)` where `n` is normalised; `·` scales the columns of `W`.
/// A vector must stand on the last dimension alone: rank one.
fn affine() -> Vec<Rule> {
    laws! {
        "layer-norm-into-linear": Algebra Reassoc, "(linear ?w ?b (layer_norm ?x ?s ?g ?h ?e))"
            => "(linear (mul ?w ?g) (linear ?w ?b ?h) (layer_norm ?x ?s none none ?e))"
            if "(weight ?w ?b ?g ?h)" "(live ?x)" "(rank ?g 1)";
        "layer-norm-scale-into-linear": Algebra Reassoc, "(linear ?w ?b (layer_norm ?x ?s ?g none ?e))"
            => "(linear (mul ?w ?g) ?b (layer_norm ?x ?s none none ?e))" if "(weight ?w ?g)" "(live ?x)" "(rank ?g 1)";
        "rms-norm-into-linear": Algebra Reassoc, "(linear ?w ?b (rms_norm ?x ?s ?g ?e))"
            => "(linear (mul ?w ?g) ?b (rms_norm ?x ?s none ?e))" if "(weight ?w ?g)" "(live ?x)" "(rank ?g 1)";
        // Norms over the last dimensions do not see the leading ones.
        "layer-norm-reshape": Canon Exact, "(layer_norm (reshape ?x ?r) ?s ?w ?b ?e)"
            => "(reshape (layer_norm ?x ?s ?w ?b ?e) ?r)";
        "rms-norm-reshape": Canon Exact, "(rms_norm (reshape ?x ?r) ?s ?w ?e)" => "(reshape (rms_norm ?x ?s ?w ?e) ?r)";
    }
}
