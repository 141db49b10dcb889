//! One spelling for each meaning: the forms in which torch captures a program become those that
//! the other rules know.

use super::Rule;

/// A table of rules: name, phase and numerics class, law, guards. `of_values` stands behind the class of a rule that does
/// not keep the gradient.
macro_rules! laws {
    ($($name:literal: $phase:ident $numerics:ident $($of_values:ident)?,
        $left:literal => $right:literal $(if $($guard:literal)+)?;)*) => {
        vec![$($crate::rules::rule(
            $name,
            $crate::rules::Phase::$phase,
            $crate::rules::Numerics::$numerics,
            $left,
            $right,
            &[$($($guard),+)?],
        )$(.$of_values())?),*]
    };
}
pub(super) use laws;

/// Ops on each element alone change places with a view: `(op (view x)) = (view (op x))`. Those whose kernel in torch
/// depends on how its operand lies are not exact.
macro_rules! elementwise_through {
    ($view:literal, $operand:literal, $numerics:ident: $($op:literal)*) => {
        vec![$($crate::rules::rule(
            concat!($op, "-through-", $view),
            $crate::rules::Phase::Canon,
            $crate::rules::Numerics::$numerics,
            concat!("(", $op, " (", $view, " ?x ", $operand, "))"),
            concat!("(", $view, " (", $op, " ?x) ", $operand, ")"),
            &[],
        )),*]
    };
}
pub(super) use elementwise_through;

pub(super) fn rules() -> Vec<Rule> {
    [products(), views(), results(), numbers(), activations()]
        .into_iter()
        .flatten()
        .collect()
}

/// Every product with a matrix is a `linear`. A rule that makes torch run another kernel than
/// before is `Reassoc`, even where the reference evaluation adds in the same order.
fn products() -> Vec<Rule> {
    laws! {
        "addmm-is-linear": Canon Exact, "(addmm ?b ?x ?m)" => "(linear (permute ?m [1,0]) ?b ?x)";
        // The sign of a zero may differ.
        "mm-is-linear": Canon Exact, "(mm ?x ?m)" => "(linear (permute ?m [1,0]) none ?x)";
        "matmul-is-linear": Canon Exact, "(matmul ?x ?m)" => "(linear (permute ?m [1,0]) none ?x)";
        // A linear works on rows, and rows are the same under any leading sizes.
        "linear-between-reshapes": Canon Exact, "(reshape (linear ?w ?b (reshape ?x ?s)) ?t)" => "(linear ?w ?b ?x)";
        "bmm-of-one": Canon Reassoc, "(bmm ?x ?y)"
            => "(linear (permute (reshape ?y ($drop_first ($shape ?y))) [1,0]) none ?x)";
        // Every batch has the same matrix.
        "bmm-expanded": Canon Reassoc, "(bmm ?x (expand ?w ?s))"
            => "(linear (permute (reshape ?w ($last_two ?w)) [1,0]) none ?x)" if "(ends_with ?s ($last_two ?w))";
        "bmm-expanded-reshaped": Canon Reassoc, "(bmm ?x (reshape (expand ?w ?s) ?t))"
            => "(linear (permute (reshape ?w ($last_two ?w)) [1,0]) none ?x)" if "(ends_with ?s ($last_two ?w))";
        "matmul-expanded": Canon Reassoc, "(matmul ?x (expand ?w ?s))"
            => "(linear (permute (reshape ?w ($last_two ?w)) [1,0]) none ?x)" if "(ends_with ?s ($last_two ?w))";
    }
}

/// Views compose, and those that change nothing vanish. Equal types prove that nothing changed
/// but for permutations.
fn views() -> Vec<Rule> {
    laws! {
        "reshape-reshape": Canon Exact, "(reshape (reshape ?x ?s) ?t)" => "(reshape ?x ?t)";
        "reshape-none": Canon Exact, "(reshape ?x ?s)" => "?x";
        "permute-permute": Canon Exact, "(permute (permute ?x ?p) ?q)" => "(permute ?x ($compose ?p ?q))";
        "permute-none": Canon Exact, "(permute ?x ?p)" => "?x" if "(identity ?p)";
        "permute-units": Canon Exact, "(permute ?x ?p)" => "(reshape ?x ($permuted ?x ?p))" if "(moves_units ?x ?p)";
        "expand-expand": Canon Exact, "(expand (expand ?x ?s) ?t)" => "(expand ?x ?t)";
        "expand-none": Canon Exact, "(expand ?x ?s)" => "?x";
        "slice-bounds": Canon Exact, "(slice ?x ?d ?a ?b ?s)"
            => "(slice ?x ?d ($place ?x ?d ?a 0) ($place ?x ?d ?b ($size ?x ?d)) ?s)";
        "slice-slice": Canon Exact, "(slice (slice ?x ?d ?a ?b ?s) ?d ?e ?f ?t)"
            => "(slice ?x ?d ($sub_place ?a ?s ?e) ($sub_place ?a ?s ?f) ($imul ?s ?t))"
            if "(cuts_twice ?x ?d ?a ?b ?s ?e ?f ?t)";
        "slice-none": Canon Exact, "(slice ?x ?d ?a ?b ?s)" => "?x";
        "cat-of-one": Canon Exact, "(cat ?d ?x)" => "?x";
        "cast-none": Canon Exact, "(cast ?x ?d)" => "?x";
        "cast-cast": Canon Exact, "(cast (cast ?x ?d) ?e)" => "(cast ?x ?e)" if "(widens ?x ?d)";
        "detach-none": Canon Exact of_values, "(detach ?x)" => "?x";
        // The same numbers; whoever needs other memory or strides makes them from the result.
        "copy-none": Canon Exact, "(copy ?x)" => "?x";
        "pad-none": Canon Exact, "(pad ?x ?p ?v)" => "?x" if "(zeros ?p)";
        "dropout-none": Canon Exact, "(dropout ?x ?p)" => "?x";
    }
}

/// One result of an op with several is an op of its own.
fn results() -> Vec<Rule> {
    laws! {
        "split-item": Canon Exact, "(getitem (split ?x ?sizes ?d) ?i)"
            => "(slice ?x ?d ($part_start ?sizes ?i) ($part_end ?sizes ?i) 1)";
        "unbind-item": Canon Exact, "(getitem (unbind ?x ?d) ?i)" => "(select ?x ?d ?i)";
        "layer-norm-item": Canon Exact, "(getitem (native_layer_norm ?x ?s ?w ?b ?e) 0)"
            => "(layer_norm ?x ?s ?w ?b ?e)";
        "rms-norm-item": Canon Exact, "(getitem (native_rms_norm ?x ?s ?w ?e) 0)" => "(rms_norm ?x ?s ?w ?e)";
        "group-norm-item": Canon Exact, "(getitem (native_group_norm ?x ?g ?w ?b ?e ?n ?c ?p) 0)"
            => "(group_norm ?x ?g ?w ?b ?e)";
        "batch-norm-item": Canon Exact, "(getitem (native_batch_norm ?x ?w ?b ?m ?v ?e ?t) 0)"
            => "(batch_norm ?x ?w ?b ?m ?v ?e)";
        "cudnn-batch-norm-item": Canon Exact, "(getitem (cudnn_batch_norm ?x ?w ?b ?m ?v ?e ?t) 0)"
            => "(batch_norm ?x ?w ?b ?m ?v ?e)";
        "max-pool-item": Canon Exact, "(getitem (native_max_pool2d ?x ?k ?s ?p ?d ?c) 0)"
            => "(max_pool2d ?x ?k ?s ?p ?d ?c)";
        // A gradient of amax goes to all that are greatest, one of max to the first.
        "max-item": Canon Exact of_values, "(getitem (max_dim ?x ?d ?k) 0)" => "(amax ?x ($dims ?x ?d) ?k)";
        "min-item": Canon Exact of_values, "(getitem (min_dim ?x ?d ?k) 0)" => "(amin ?x ($dims ?x ?d) ?k)";
        // Nor does one of amax go anywhere but to NaN where there is a NaN, as one of max does.
        "max-all": Canon Exact of_values, "(max_all ?x)" => "(amax ?x ($dims ?x none) false)";
        "min-all": Canon Exact of_values, "(min_all ?x)" => "(amin ?x ($dims ?x none) false)";
        // Not so the mean: the kernel moves it from element to element, which makes NaN of an infinity.
        "var-item": Canon Exact, "(getitem (var_mean ?x ?d ?c ?k) 0)" => "(var ?x ?d ?c ?k)";
        // torch chooses the kernel again.
        "attention-cpu-item": Canon Reassoc, "(getitem (attention_cpu ?q ?k ?v ?m ?c ?s) 0)"
            => "(attention ?q ?k ?v ?m ?c ?s)";
        "attention-efficient-item": Canon Reassoc, "(getitem (attention_efficient ?q ?k ?v ?m ?c ?s ?l) 0)"
            => "(attention ?q ?k ?v ?m ?c ?s)";
        "attention-flash-item": Canon Reassoc, "(getitem (attention_flash ?q ?k ?v ?c ?s) 0)"
            => "(attention ?q ?k ?v none ?c ?s)";
        "attention-cudnn-item": Canon Reassoc, "(getitem (attention_cudnn ?q ?k ?v ?m ?c ?s ?l) 0)"
            => "(attention ?q ?k ?v ?m ?c ?s)";
    }
}

/// Arithmetic with numbers: one op, the number last.
fn numbers() -> Vec<Rule> {
    laws! {
        "number-last-add": Canon Exact, "(add ?c ?x)" => "(add ?x ?c)" if "(number ?c)";
        "number-last-mul": Canon Exact, "(mul ?c ?x)" => "(mul ?x ?c)" if "(number ?c)";
        "sub-number": Canon Exact, "(sub ?x ?c)" => "(add ?x ($neg ?c))";
        // Dividing by a power of two is exact; other reciprocals are rounded.
        "div-power-of-two": Canon Exact, "(div ?x ?c)" => "(mul ?x ($recip ?c))" if "(power_of_two ?c)";
        "one-over": Canon Exact, "(div 1.0 ?x)" => "(reciprocal ?x)";
        "square-is-mul": Canon Exact, "(square ?x)" => "(mul ?x ?x)";
        // The last bit may differ in fp64.
        "pow-two-is-mul": Canon Exact, "(pow ?x 2.0)" => "(mul ?x ?x)";
        "pow-one": Canon Exact, "(pow ?x 1.0)" => "?x";
        "twice": Canon Exact, "(add ?x ?x)" => "(mul ?x 2.0)";
    }
}

/// Activations written out. The op rounds once where its parts round several times.
fn activations() -> Vec<Rule> {
    laws! {
        "silu-of-sigmoid": Canon Wider, "(mul~ ?x (sigmoid ?x))" => "(silu ?x)";
        // Above its threshold softplus is x, where tanh is one already. torch's gradient of mish divides by an exponential,
        // which is infinite below -88.7: there it has the other sign and a hundredth of the size.
        "mish-of-softplus": Canon Wider of_values, "(mul~ ?x (tanh (softplus ?x 1.0 20.0)))" => "(mish ?x)";
        // Not so `x · hardsigmoid x`: the kernel of hardswish divides last, and overflows before.
        // torch's kernel for a GPU multiplies by a sixth in fp32.
        "hardsigmoid-of-clamp": Canon Wider of_values, "(div (clamp (add ?x 3.0) 0.0 6.0) 6.0)" => "(hardsigmoid ?x)"
            if "(narrow ?x)";
        // torch's kernel of gelu doubles before it halves, and overflows above half of the greatest number.
        "gelu-of-erf": Canon Reassoc, "(mul~ (mul ?x 0.5) (add (erf (div ?x 1.4142135623730951)) 1.0))" => "(gelu ?x)";
        "gelu-of-erf-scaled": Canon Reassoc, "(mul~ (mul ?x 0.5) (add (erf (mul ?x 0.7071067811865476)) 1.0))"
            => "(gelu ?x)";
        "gelu-of-tanh": Canon Wider,
            "(mul~ (mul ?x 0.5) (add (tanh (mul (add ?x (mul (pow ?x 3.0) 0.044715)) 0.7978845608028654)) 1.0))"
            => "(gelu_tanh ?x)";
        // At zero the gradient of one is one, of the other zero.
        "relu-of-clamp": Canon Exact of_values, "(clamp ?x 0.0 none)" => "(relu ?x)";
        "rsqrt-of-sqrt": Canon Wider, "(reciprocal (sqrt ?x))" => "(rsqrt ?x)";
        // Without the greatest element taken off, exponentials overflow where a softmax does not, and the other way round.
        "softmax-of-exp": Canon Wider,
            "(div (exp (sub ?x (amax ?x ?d true))) (sum (exp (sub ?x (amax ?x ?d true))) ?d true))"
            => "(softmax ?x ($only ?d))";
        // Kernels of half precision compute in fp32 and round once.
        "softmax-f32": Canon Exact, "(softmax_f32 ?x ?d)" => "(softmax (cast ?x f32) ?d)";
        "log-softmax-f32": Canon Exact, "(log_softmax_f32 ?x ?d)" => "(log_softmax (cast ?x f32) ?d)";
        "softmax-cast": Canon Wider, "(cast (softmax (cast ?x f32) ?d) ?e)" => "(softmax ?x ?d)" if "(widens ?x f32)";
        "log-softmax-cast": Canon Wider, "(cast (log_softmax (cast ?x f32) ?d) ?e)" => "(log_softmax ?x ?d)"
            if "(widens ?x f32)";
        "log-of-softmax": Canon Wider, "(log (softmax ?x ?d))" => "(log_softmax ?x ?d)";
        "exp-of-log-softmax": Canon Wider, "(exp (log_softmax ?x ?d))" => "(softmax ?x ?d)";
    }
}
