//! Linear algebra. What changes weights applies when they are frozen: the new weights are then
//! computed once. The input must be live, or else everything is a weight already.

use super::Rule;
use super::canon::laws;

pub(super) fn rules() -> Vec<Rule> {
    [sums(), chains(), scales(), norms(), reductions(), convolutions()]
        .into_iter()
        .flatten()
        .collect()
}

/// Sums of products.
fn sums() -> Vec<Rule> {
    laws! {
        // xA + xB = x(A + B)
        "add-weights": Algebra Reassoc, "(add (linear ?a none ?x) (linear ?b none ?x))"
            => "(linear (add ?a ?b) none ?x)" if "(weight ?a ?b)" "(live ?x)";
        "add-weights-bias": Algebra Reassoc, "(add~ (linear ?a ?p ?x) (linear ?b none ?x))"
            => "(linear (add ?a ?b) ?p ?x)" if "(weight ?a ?b)" "(live ?x)" "(tensor ?p)";
        "add-weights-biases": Algebra Reassoc, "(add (linear ?a ?p ?x) (linear ?b ?q ?x))"
            => "(linear (add ?a ?b) (add ?p ?q) ?x)" if "(weight ?a ?b ?p ?q)" "(live ?x)";
        // xA + yA = (x + y)A
        "add-inputs": Algebra Reassoc, "(add (linear ?w none ?x) (linear ?w none ?y))"
            => "(linear ?w none (add ?x ?y))";
        "add-inputs-bias": Algebra Reassoc, "(add~ (linear ?w ?b ?x) (linear ?w none ?y))"
            => "(linear ?w ?b (add ?x ?y))" if "(tensor ?b)";
        "add-inputs-biases": Algebra Reassoc, "(add (linear ?w ?b ?x) (linear ?w ?c ?y))"
            => "(linear ?w (add ?b ?c) (add ?x ?y))" if "(weight ?b ?c)";
        "sub-inputs": Algebra Reassoc, "(sub (linear ?w none ?x) (linear ?w none ?y))"
            => "(linear ?w none (sub ?x ?y))";
        // xA + yB = [x y] [A B]
        "cat-inputs": Algebra Reassoc, "(add (linear ?a none ?x) (linear ?b none ?y))"
            => "(linear (cat -1 ?a ?b) none (cat -1 ?x ?y))" if "(weight ?a ?b)" "(live ?x)" "(live ?y)";
        "cat-inputs-bias": Algebra Reassoc, "(add~ (linear ?a ?p ?x) (linear ?b none ?y))"
            => "(linear (cat -1 ?a ?b) ?p (cat -1 ?x ?y))" if "(weight ?a ?b)" "(live ?x)" "(live ?y)" "(tensor ?p)";
        "cat-inputs-biases": Algebra Reassoc, "(add (linear ?a ?p ?x) (linear ?b ?q ?y))"
            => "(linear (cat -1 ?a ?b) (add ?p ?q) (cat -1 ?x ?y))" if "(weight ?a ?b ?p ?q)" "(live ?x)" "(live ?y)";
        // A vector added to every row is a bias.
        "add-bias": Algebra Wider, "(add~ (linear ?w none ?x) ?v)" => "(linear ?w ?v ?x)";
        "add-to-bias": Algebra Reassoc, "(add~ (linear ?w ?b ?x) ?v)" => "(linear ?w (add ?b ?v) ?x)"
            if "(weight ?b ?v)" "(rank ?v 1)";
    }
}

/// Products of products.
fn chains() -> Vec<Rule> {
    laws! {
        // V(Wx + p) + q = (VW)x + (Vp + q). Inner sizes must not be zero: a product over nothing
        // hides the NaNs of the other factor.
        "linear-of-linear": Algebra Reassoc, "(linear ?v ?q (linear ?w none ?x))" => "(linear (mm ?v ?w) ?q ?x)"
            if "(weight ?v ?w)" "(live ?x)" "(has_columns ?x ?v)";
        "linear-of-linear-bias": Algebra Reassoc, "(linear ?v ?q (linear ?w ?p ?x))"
            => "(linear (mm ?v ?w) (linear ?v ?q ?p) ?x)"
            if "(weight ?v ?w ?p ?q)" "(live ?x)" "(tensor ?p)" "(has_columns ?x ?v)";
        // Wx + s·V(Ux) = (W + s·VU)x
        "lora": Algebra Reassoc, "(add~ (linear ?w ?b ?x) (linear ?v none (linear ?u none ?x)))"
            => "(linear (add ?w (mm ?v ?u)) ?b ?x)" if "(weight ?w ?v ?u)" "(live ?x)" "(has_columns ?x ?v)";
        "lora-scaled": Algebra Reassoc, "(add~ (linear ?w ?b ?x) (mul (linear ?v none (linear ?u none ?x)) ?s))"
            => "(linear (add ?w (mul (mm ?v ?u) ?s)) ?b ?x)"
            if "(weight ?w ?v ?u)" "(live ?x)" "(moderate ?s)" "(has_columns ?x ?v)";
        "mm-right": Algebra Reassoc, "(mm (mm ?a ?b) ?c)" => "(mm ?a (mm ?b ?c))" if "(has_columns ?a ?b)";
        "mm-left": Algebra Reassoc, "(mm ?a (mm ?b ?c))" => "(mm (mm ?a ?b) ?c)" if "(has_columns ?a ?b)";
        "bmm-right": Algebra Reassoc, "(bmm (bmm ?a ?b) ?c)" => "(bmm ?a (bmm ?b ?c))" if "(has_columns ?a ?b)";
        "bmm-left": Algebra Reassoc, "(bmm ?a (bmm ?b ?c))" => "(bmm (bmm ?a ?b) ?c)" if "(has_columns ?a ?b)";
        "matmul-right": Algebra Reassoc, "(matmul (matmul ?a ?b) ?c)" => "(matmul ?a (matmul ?b ?c))"
            if "(has_columns ?a ?b)";
        "matmul-left": Algebra Reassoc, "(matmul ?a (matmul ?b ?c))" => "(matmul (matmul ?a ?b) ?c)"
            if "(has_columns ?a ?b)";
    }
}

/// Numbers and vectors that scale an operand or the result.
fn scales() -> Vec<Rule> {
    laws! {
        "scale-linear": Algebra Reassoc, "(mul (linear ?w none ?x) ?s)" => "(linear (mul ?w ?s) none ?x)"
            if "(weight ?w)" "(live ?x)" "(moderate ?s)";
        "scale-linear-bias": Algebra Reassoc, "(mul (linear ?w ?b ?x) ?s)" => "(linear (mul ?w ?s) (mul ?b ?s) ?x)"
            if "(weight ?w ?b)" "(live ?x)" "(moderate ?s)";
        "divide-linear": Algebra Reassoc, "(div (linear ?w none ?x) ?s)" => "(linear (div ?w ?s) none ?x)"
            if "(weight ?w)" "(live ?x)" "(moderate ?s)";
        "divide-linear-bias": Algebra Reassoc, "(div (linear ?w ?b ?x) ?s)" => "(linear (div ?w ?s) (div ?b ?s) ?x)"
            if "(weight ?w ?b)" "(live ?x)" "(moderate ?s)";
        "linear-of-scaled": Algebra Reassoc, "(linear ?w ?b (mul ?x ?s))" => "(linear (mul ?w ?s) ?b ?x)"
            if "(weight ?w)" "(live ?x)" "(moderate ?s)";
        "linear-of-divided": Algebra Reassoc, "(linear ?w ?b (div ?x ?s))" => "(linear (div ?w ?s) ?b ?x)"
            if "(weight ?w)" "(live ?x)" "(moderate ?s)";
        // A vector beside the result scales rows of the weight, one beside the input its columns.
        "scale-rows": Algebra Reassoc, "(mul~ (linear ?w none ?x) ?v)"
            => "(linear (mul ?w (reshape ?v ($along ?v ?w 0))) none ?x)"
            if "(weight ?w ?v)" "(live ?x)" "(has_columns ?w)";
        "scale-rows-bias": Algebra Reassoc, "(mul~ (linear ?w ?b ?x) ?v)"
            => "(linear (mul ?w (reshape ?v ($along ?v ?w 0))) (mul ?b ?v) ?x)" if "(weight ?w ?b ?v)" "(live ?x)";
        "scale-columns": Algebra Reassoc, "(linear ?w ?b (mul~ ?x ?v))" => "(linear (mul ?w ?v) ?b ?x)"
            if "(weight ?w ?v)" "(live ?x)" "(rank ?v 1)";
        "scale-bmm": Algebra Reassoc, "(mul (bmm ?x ?y) ?s)" => "(bmm (mul ?x ?s) ?y)" if "(moderate ?s)";
        "divide-bmm": Algebra Reassoc, "(div (bmm ?x ?y) ?s)" => "(bmm (div ?x ?s) ?y)" if "(moderate ?s)";
        "scale-matmul": Algebra Reassoc, "(mul (matmul ?x ?y) ?s)" => "(matmul (mul ?x ?s) ?y)" if "(moderate ?s)";
        "divide-matmul": Algebra Reassoc, "(div (matmul ?x ?y) ?s)" => "(matmul (div ?x ?s) ?y)" if "(moderate ?s)";
    }
}

/// A batch norm is `S·y + (h - S·m)` with `S = g / √(v + e)` for each channel; the channels of a
/// matrix are its columns. With `e` above zero `S` is finite. What becomes a weight of 16 bits is
/// computed in fp32 and rounded once.
fn norms() -> Vec<Rule> {
    laws! {
        "batch-norm-of-rows": Algebra Exact, "(batch_norm (reshape (linear ?w ?b ?x) ?s) ?g ?h ?m ?v ?e)"
            => "(batch_norm (linear ?w ?b (reshape ?x ($rows ?s ?w ?x))) ?g ?h ?m ?v ?e)";
        "linear-batch-norm": Algebra Reassoc, "(batch_norm (linear ?w none ?x) ?g ?h ?m ?v ?e)"
            => "(linear (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 0))) ($dtype ?w)) \
                        (cast (sub (cast ?h ($wide ?w)) (mul (cast ?m ($wide ?w)) (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e))))) ($dtype ?w)) ?x)"
            if "(weight ?w ?g ?h ?m ?v)" "(live ?x)" "(rank ?x 2)" "(positive ?e)";
        "linear-bias-batch-norm": Algebra Reassoc, "(batch_norm (linear ?w ?b ?x) ?g ?h ?m ?v ?e)"
            => "(linear (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 0))) ($dtype ?w)) \
                        (cast (add (mul (sub (cast ?b ($wide ?w)) (cast ?m ($wide ?w))) (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e)))) (cast ?h ($wide ?w))) ($dtype ?w)) ?x)"
            if "(weight ?w ?b ?g ?h ?m ?v)" "(live ?x)" "(rank ?x 2)" "(positive ?e)";
        "batch-norm-linear": Algebra Reassoc, "(linear ?w ?b (batch_norm ?x ?g ?h ?m ?v ?e))"
            => "(linear (cast (mul (cast ?w ($wide ?w)) (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e)))) ($dtype ?w)) \
                        (cast (linear (cast ?w ($wide ?w)) (cast ?b ($wide ?w)) \
                              (sub (cast ?h ($wide ?w)) (mul (cast ?m ($wide ?w)) (mul (cast ?g ($wide ?w)) \
                              (rsqrt (add (cast ?v ($wide ?w)) ?e)))))) ($dtype ?w)) ?x)"
            if "(weight ?w ?b ?g ?h ?m ?v)" "(live ?x)" "(rank ?x 2)" "(positive ?e)";
        "conv-batch-norm": Algebra Reassoc, "(batch_norm (conv ?x ?w none ?s ?p ?d ?n) ?g ?h ?m ?v ?e)"
            => "(conv ?x (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                               (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 0))) ($dtype ?w)) \
                      (cast (sub (cast ?h ($wide ?w)) (mul (cast ?m ($wide ?w)) (mul (cast ?g ($wide ?w)) \
                            (rsqrt (add (cast ?v ($wide ?w)) ?e))))) ($dtype ?w)) ?s ?p ?d ?n)"
            if "(weight ?w ?g ?h ?m ?v)" "(live ?x)" "(positive ?e)";
        "conv-bias-batch-norm": Algebra Reassoc, "(batch_norm (conv ?x ?w ?b ?s ?p ?d ?n) ?g ?h ?m ?v ?e)"
            => "(conv ?x (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                               (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 0))) ($dtype ?w)) \
                      (cast (add (mul (sub (cast ?b ($wide ?w)) (cast ?m ($wide ?w))) (mul (cast ?g ($wide ?w)) \
                            (rsqrt (add (cast ?v ($wide ?w)) ?e)))) (cast ?h ($wide ?w))) ($dtype ?w)) ?s ?p ?d ?n)"
            if "(weight ?w ?b ?g ?h ?m ?v)" "(live ?x)" "(positive ?e)";
        // Padding is zero after the norm, so it must be absent.
        "batch-norm-conv": Algebra Reassoc, "(conv (batch_norm ?x ?g ?h ?m ?v ?e) ?w none ?s ?p ?d 1)"
            => "(conv ?x (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                               (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 1))) ($dtype ?w)) \
                      (cast (sum (mul (cast ?w ($wide ?w)) (reshape (sub (cast ?h ($wide ?w)) \
                            (mul (cast ?m ($wide ?w)) (mul (cast ?g ($wide ?w)) (rsqrt (add (cast ?v ($wide ?w)) ?e))))) \
                            ($along ?g ?w 1))) ($inner_dims ?w) false) ($dtype ?w)) \
                      ?s ?p ?d 1)" if "(weight ?w ?g ?h ?m ?v)" "(live ?x)" "(zeros ?p)" "(positive ?e)";
        "batch-norm-conv-bias": Algebra Reassoc, "(conv (batch_norm ?x ?g ?h ?m ?v ?e) ?w ?b ?s ?p ?d 1)"
            => "(conv ?x (cast (mul (cast ?w ($wide ?w)) (reshape (mul (cast ?g ($wide ?w)) \
                               (rsqrt (add (cast ?v ($wide ?w)) ?e))) ($along ?g ?w 1))) ($dtype ?w)) \
                      (cast (add (cast ?b ($wide ?w)) (sum (mul (cast ?w ($wide ?w)) (reshape (sub (cast ?h ($wide ?w)) \
                            (mul (cast ?m ($wide ?w)) (mul (cast ?g ($wide ?w)) (rsqrt (add (cast ?v ($wide ?w)) ?e))))) \
                            ($along ?g ?w 1))) ($inner_dims ?w) false)) ($dtype ?w)) \
                      ?s ?p ?d 1)" if "(weight ?w ?b ?g ?h ?m ?v)" "(live ?x)" "(zeros ?p)" "(positive ?e)";
    }
}

/// Sums over rows come before the product. Over no rows a sum is zero whatever NaNs the weight
/// has, and a mean is NaN, which it stays only if the product adds something.
fn reductions() -> Vec<Rule> {
    laws! {
        "sum-before-linear": Algebra Reassoc, "(sum (linear ?w none ?x) ?d ?k)" => "(linear ?w none (sum ?x ?d ?k))"
            if "(not_last ?d)" "(nonempty ?x ?d)";
        "mean-before-linear": Algebra Reassoc, "(mean (linear ?w ?b ?x) ?d ?k)" => "(linear ?w ?b (mean ?x ?d ?k))"
            if "(not_last ?d)" "(has_columns ?x)";
    }
}

fn convolutions() -> Vec<Rule> {
    laws! {
        "scale-conv": Algebra Reassoc, "(mul (conv ?x ?w none ?s ?p ?d ?n) ?c)"
            => "(conv ?x (mul ?w ?c) none ?s ?p ?d ?n)" if "(weight ?w)" "(live ?x)" "(moderate ?c)";
        "scale-conv-bias": Algebra Reassoc, "(mul (conv ?x ?w ?b ?s ?p ?d ?n) ?c)"
            => "(conv ?x (mul ?w ?c) (mul ?b ?c) ?s ?p ?d ?n)" if "(weight ?w ?b)" "(live ?x)" "(moderate ?c)";
        "conv-of-scaled": Algebra Reassoc, "(conv (mul ?x ?c) ?w ?b ?s ?p ?d ?n)"
            => "(conv ?x (mul ?w ?c) ?b ?s ?p ?d ?n)" if "(weight ?w)" "(live ?x)" "(moderate ?c)";
    }
}
