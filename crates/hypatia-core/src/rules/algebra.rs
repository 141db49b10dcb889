//! Elementwise algebra: identities, idempotents, chains of numbers, invariances.
//!
//! Left out because they are false somewhere: `x - x = 0` and `x · 0 = 0` (NaN, infinities),
//! `log(exp x) = x` (overflow), `exp(log x) = x` (negative numbers), `sqrt(x²) = |x|` (overflow),
//! `x^½ = sqrt x` (negative zero and infinity).

use super::Rule;
use super::canon::laws;

pub(super) fn rules() -> Vec<Rule> {
    [identities(), chains(), invariances()].into_iter().flatten().collect()
}

fn identities() -> Vec<Rule> {
    laws! {
        "mul-one": Canon Exact, "(mul~ ?x ?c)" => "?x" if "(const ?c 1.0)";
        "div-one": Canon Exact, "(div ?x ?c)" => "?x" if "(const ?c 1.0)";
        "mul-minus-one": Canon Exact, "(mul~ ?x ?c)" => "(neg ?x)" if "(const ?c -1.0)";
        // `x - 0` keeps every bit, `x + 0` makes a zero positive, and so does `0 - x`: dividing by it shows that.
        "sub-zero": Canon Exact, "(sub ?x ?c)" => "?x" if "(is ?c 0.0)";
        "add-zero": Canon Exact, "(add~ ?x ?c)" => "?x" if "(const ?c 0.0)" "(whole ?x)";
        "zero-sub": Canon Exact, "(sub ?c ?x)" => "(neg ?x)" if "(const ?c 0.0)" "(whole ?x)";
        "neg-neg": Canon Exact, "(neg (neg ?x))" => "?x";
        // A negative is taken before types are promoted: the least integer, and a zero without sign.
        "add-neg": Canon Exact, "(add~ ?x (neg ?y))" => "(sub ?x ?y)" if "(one_dtype ?x ?y)";
        "sub-neg": Canon Exact, "(sub ?x (neg ?y))" => "(add ?x ?y)" if "(one_dtype ?x ?y)";
        // The difference of equal floats is a positive zero in both orders, and its negative is not.
        "neg-sub": Canon Exact, "(neg (sub ?x ?y))" => "(sub ?y ?x)" if "(whole ?x ?y)";
        "mul-neg-neg": Canon Exact, "(mul (neg ?x) (neg ?y))" => "(mul ?x ?y)" if "(one_dtype ?x ?y)";
        // The negative of a number without sign is another one.
        "abs-neg": Canon Exact, "(abs (neg ?x))" => "(abs ?x)" if "(signed ?x)";
        "abs-abs": Canon Exact, "(abs (abs ?x))" => "(abs ?x)";
        "relu-relu": Canon Exact, "(relu (relu ?x))" => "(relu ?x)";
        // The least integer has no positive counterpart: its absolute value is itself.
        "relu-abs": Canon Exact, "(relu (abs ?x))" => "(abs ?x)" if "(float ?x)";
        // A negative zero passes through a relu; at NaN the gradient of an absolute value is zero.
        "abs-relu": Canon Reassoc of_values, "(abs (relu ?x))" => "(relu ?x)";
        "clamp-clamp": Canon Exact, "(clamp (clamp ?x ?a ?b) ?a ?b)" => "(clamp ?x ?a ?b)";
        "not-not": Canon Exact, "(logical_not (logical_not ?x))" => "?x";
        "mul-reciprocal": Canon Wider, "(mul~ ?x (reciprocal ?y))" => "(div ?x ?y)";
    }
}

/// Numbers of a chain become one, unless it leaves the range of fp32 where the chain did not. Integers wrap before a
/// float makes floats of them.
fn chains() -> Vec<Rule> {
    laws! {
        "add-add": Canon Reassoc, "(add (add ?x ?a) ?b)" => "(add ?x ($add ?a ?b))"
            if "(float ?x)" "(within ($add ?a ?b))";
        "mul-mul": Canon Reassoc, "(mul (mul ?x ?a) ?b)" => "(mul ?x ($mul ?a ?b))"
            if "(float ?x)" "(moderate ($mul ?a ?b))";
        "mul-div": Canon Reassoc, "(div (mul ?x ?a) ?b)" => "(mul ?x ($div ?a ?b))"
            if "(float ?x)" "(moderate ($div ?a ?b))";
        "div-mul": Canon Reassoc, "(mul (div ?x ?a) ?b)" => "(mul ?x ($div ?b ?a))" if "(moderate ($div ?b ?a))";
        "div-div": Canon Reassoc, "(div (div ?x ?a) ?b)" => "(div ?x ($mul ?a ?b))" if "(moderate ($mul ?a ?b))";
        "mul-neg": Canon Exact, "(mul (neg ?x) ?a)" => "(mul ?x ($neg ?a))" if "(float ?x)";
        "neg-mul": Canon Exact, "(neg (mul ?x ?a))" => "(mul ?x ($neg ?a))";
    }
}

/// A softmax does not see what is added to all of its elements. Only a small number is known to be
/// harmless: an infinite one makes every element NaN, and a large one swallows their digits.
fn invariances() -> Vec<Rule> {
    laws! {
        "softmax-shift": Canon Reassoc, "(softmax (add ?x ?c) ?d)" => "(softmax ?x ?d)" if "(small ?c)";
        "log-softmax-shift": Canon Reassoc, "(log_softmax (add ?x ?c) ?d)" => "(log_softmax ?x ?d)" if "(small ?c)";
        // An infinite largest element gives NaN either way.
        "softmax-largest": Canon Reassoc, "(softmax (sub ?x (amax ?x ?r true)) ?d)" => "(softmax ?x ?d)"
            if "(eq ?r ($dims ?x ?d))";
    }
}
