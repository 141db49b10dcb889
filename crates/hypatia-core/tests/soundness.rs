//! Every rule of this build is sound, the walk that says so can be trusted, and the rules
//! together reach what they are for.

use std::sync::Arc;

use hypatia_core::egraph::{Context, EGraph};
use hypatia_core::ir::node::Node;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::rules::Numerics::{self, Approx, Exact, Reassoc, Wider};
use hypatia_core::rules::saturate::{Limits, saturate};
use hypatia_core::rules::soundness::{Finding, Kind, Report, reports, walk};
use hypatia_core::rules::{Phase, Rule, rules, try_rule};
use hypatia_core::{Options, optimize};

fn texts(found: &[Finding]) -> String {
    let lines = found.iter().map(|f| format!("{} ({:?}): {}", f.rule, f.kind, f.detail));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn every_rule_is_sound() {
    let reports = reports(rules(), 1);
    let found: Vec<Finding> = reports.iter().flat_map(|r| r.findings.clone()).collect();
    assert!(found.is_empty(), "{}", texts(&found));
    let fired: usize = reports.iter().flat_map(|r| r.fired.values()).sum();
    assert!(
        fired >= 20 * reports.len(),
        "{fired} programs for {} rules",
        reports.len()
    );
}

/// The same with other random programs: `cargo test --test soundness -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn every_rule_is_sound_under_other_seeds() {
    let reports = (2..8).flat_map(|seed| reports(rules(), seed));
    let found: Vec<Finding> = reports.flat_map(|r| r.findings).collect();
    assert!(found.is_empty(), "{}", texts(&found));
}

/// Where the sizes that a seed draws are all equal, others are tried.
#[test]
fn a_rule_of_many_inputs_meets_others_than_squares_under_any_seed() {
    let at = rules().iter().position(|r| r.name == "cat-inputs-biases").unwrap();
    let found: Vec<Finding> = [0, 1, 101, 102]
        .into_iter()
        .flat_map(|seed| reports(&rules()[at..=at], seed))
        .flat_map(|r| r.findings)
        .collect();
    assert!(found.is_empty(), "{}", texts(&found));
}

#[test]
fn rules_have_names_of_their_own() {
    let mut names: Vec<&str> = rules().iter().map(|r| r.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rules().len());
}

fn planted(numerics: Numerics, left: &'static str, right: &'static str, guards: &'static [&'static str]) -> Rule {
    try_rule("planted", Phase::Algebra, numerics, left, right, guards).unwrap()
}

fn kinds(rule: Rule) -> Vec<Kind> {
    walk(&[rule]).into_iter().map(|f| f.kind).collect()
}

#[test]
fn wrong_rules_are_caught() {
    let wrong = [
        // A scale on the wrong axis: the types agree for square weights only.
        planted(
            Reassoc,
            "(mul (linear ?w none ?x) ?v)",
            "(linear (mul ?w ?v) none ?x)",
            &["(rank ?v 1)"],
        ),
        // One GELU is not the other.
        planted(Reassoc, "(gelu ?x)", "(gelu_tanh ?x)", &[]),
        // A factor is missing.
        planted(Reassoc, "(mul (mul ?x ?a) ?b)", "(mul ?x ?a)", &["(number ?a)"]),
        // Only the same real number.
        planted(Exact, "(mul (mul ?x ?a) ?b)", "(mul ?x ($mul ?a ?b))", &[]),
        planted(Exact, "(add ?x 0.0)", "?x", &[]),
        // Every batch gets the first one's matrix.
        planted(
            Reassoc,
            "(bmm ?x ?y)",
            "(bmm ?x (expand (slice ?y -3 0 1 1) ($shape ?y)))",
            &[],
        ),
        // The wrong dimension, silent for square ones.
        planted(
            Reassoc,
            "(softmax (permute ?x [1,0]) -1)",
            "(permute (softmax ?x -1) [1,0])",
            &[],
        ),
        // Rounded to half precision on the way.
        planted(
            Wider,
            "(add ?x ?y)",
            "(cast (add (cast ?x bf16) (cast ?y bf16)) f32)",
            &[],
        ),
        // NaN is not zero, and an infinity times zero is NaN.
        planted(Reassoc, "(sub ?x ?x)", "(full ?x ($shape ?x) 0.0)", &[]),
        planted(Reassoc, "(relu ?x)", "(where (gt ?x 0.0) ?x (mul ?x 0.0))", &[]),
        // Padding is zero before the shift, not after it.
        planted(
            Reassoc,
            "(conv (batch_norm ?x none ?h ?m ?v ?e) ?w none ?s ?p ?d 1)",
            "(add (conv (batch_norm ?x none none ?m ?v ?e) ?w none ?s ?p ?d 1) (conv (reshape ?h ($along ?h ?w 1)) ?w none ?s ?p ?d 1))",
            &[],
        ),
        planted(Approx, "(sigmoid ?x)", "(tanh ?x)", &[]),
        // The least integer, and integers without sign.
        planted(Exact, "(relu (abs ?x))", "(abs ?x)", &[]),
        planted(Exact, "(abs (neg ?x))", "(abs ?x)", &[]),
        // An infinity leaves NaN in one of them.
        planted(Exact, "(getitem (var_mean ?x ?d ?c ?k) 1)", "(mean ?x ?d ?k)", &[]),
        // They overflow where the left side does not.
        planted(Wider, "(mul ?x (hardsigmoid ?x))", "(hardswish ?x)", &[]),
        planted(
            Wider,
            "(div (exp ?x) (sum (exp ?x) ?d true))",
            "(softmax ?x ($only ?d))",
            &[],
        ),
        // The number is rounded to 16 bits on one side.
        planted(Exact, "(mul ?x 0.7)", "(mul ?x (full ?x [] 0.7))", &["(dtype ?x bf16)"]),
    ];
    for rule in wrong {
        let law = rule.law.clone();
        assert_eq!(kinds(rule), [Kind::Differs], "{law}");
    }
}

#[test]
fn rules_that_cannot_fire_are_reported() {
    let never = planted(Exact, "(relu (relu ?x))", "(relu ?x)", &["(rank ?x 1)", "(rank ?x 2)"]);
    assert_eq!(kinds(never), [Kind::NeverFired]);
    // The right side never has the type of the left.
    let untyped = planted(Exact, "(mm ?x ?y)", "(permute (mm ?x ?y) [0,2,1])", &[]);
    assert_eq!(kinds(untyped), [Kind::NeverFired]);
    // It says nothing.
    let empty = planted(Exact, "(permute ?x ?p)", "(permute ?x ?p)", &[]);
    assert_eq!(kinds(empty), [Kind::NeverFired]);
}

#[test]
fn rules_tried_on_square_matrices_only_are_reported() {
    // Right, but the guards leave nothing on which a wrong axis would show.
    let square = planted(
        Exact,
        "(copy ?x)",
        "?x",
        &["(rank ?x 2)", "(eq ($size ?x -1) ($size ?x -2))"],
    );
    assert_eq!(kinds(square), [Kind::OnlySquare]);
}

#[test]
fn facts_that_disagree_are_reported() {
    let conflict = planted(Exact, "(full ?x ?s 1.0)", "(full ?x ?s 2.0)", &[]);
    assert_eq!(kinds(conflict), [Kind::Conflict]);
}

#[test]
fn the_walk_is_deterministic() {
    let some = || &rules()[..20];
    let counts = |r: Vec<Report>| r.into_iter().map(|r| (r.fired, r.skewed)).collect::<Vec<_>>();
    assert_eq!(counts(reports(some(), 3)), counts(reports(some(), 3)));
}

#[test]
fn a_tampered_proof_does_not_hold() {
    let program = parse("(relu (linear w:[4,3] b:[4] (relu x:[2,3])))", Weights::Frozen).unwrap();
    let proof = optimize(&program, &Options::default()).unwrap().proof.unwrap();
    assert!(proof.replay(7, 1e9).unwrap().holds());
    assert!(!proof.steps.is_empty());
    for i in 0..proof.steps.len() {
        // The step now ends in its own operand, or is left out.
        let mut tampered = proof.clone();
        let node: &Node = tampered.terms.node(tampered.steps[i].before);
        tampered.steps[i].after = node.children[0];
        assert!(!tampered.replay(7, 1e9).is_ok_and(|r| r.holds()), "step {i}");
        let mut shorter = proof.clone();
        shorter.steps.remove(i);
        assert!(!shorter.replay(7, 1e9).unwrap().connected, "step {i}");
    }
}

#[test]
fn proofs_hold_where_the_sides_share_terms_of_the_rule() {
    for (text, rule) in [
        ("(relu (relu x:[4]))", "relu-relu"),
        ("(abs (abs x:[4]))", "abs-abs"),
        ("(abs (relu x:[4]))", "abs-relu"),
        ("(relu (abs x:[4]))", "relu-abs"),
        ("(sub (neg y:[4]) (neg y))", "sub-neg"),
        ("(sub (sub x:[4] (neg y:[4])) (neg (sub x (neg y))))", "sub-neg"),
        ("(relu (relu (relu (relu x:[4]))))", "relu-relu"),
        ("(matmul (matmul y:[64,4] x:[4,64]) y)", "matmul-right"),
        ("(mul (neg x:[4]) (neg (neg x)))", "neg-neg"),
    ] {
        let program = parse(text, Weights::Frozen).unwrap();
        let proof = optimize(&program, &Options::default()).unwrap().proof.unwrap();
        assert!(
            proof.rules().iter().any(|(name, _)| name == rule),
            "{text}: {:?}",
            proof.rules()
        );
        let replay = proof.replay(7, 1e9).unwrap();
        assert!(replay.holds() && replay.evaluated > 0, "{text}: {replay:?}");
    }
}

#[test]
fn rules_that_lose_the_gradient_stay_out_of_what_autograd_differentiates() {
    let fired = |text: &str, autograd: bool| {
        let mut options = Options::default();
        options.limits.autograd = autograd;
        let program = parse(text, Weights::Live).unwrap();
        optimize(&program, &options).unwrap().stats.fired
    };
    for (text, rule) in [
        ("(getitem (max_dim x:[4,3] -1 false) 0)", "max-item"),
        ("(getitem (min_dim x:[4,3] -1 false) 0)", "min-item"),
        ("(clamp x:[4] 0.0 none)", "relu-of-clamp"),
        ("(div (clamp (add x:[4] 3.0) 0.0 6.0) 6.0)", "hardsigmoid-of-clamp"),
        ("(abs (relu x:[4]))", "abs-relu"),
    ] {
        assert!(fired(text, false).contains_key(rule), "{rule}");
        assert!(!fired(text, true).contains_key(rule), "{rule}");
    }
}

/// torch's kernel of hardsigmoid for a GPU has a sixth in fp32, whatever the dtype.
#[test]
fn hardsigmoid_is_not_used_for_float64() {
    let fires = |dtype: &str| {
        let program = parse(
            &format!("(div (clamp (add x:{dtype}[4] 3.0) 0.0 6.0) 6.0)"),
            Weights::Live,
        );
        let found = optimize(&program.unwrap(), &Options::default()).unwrap();
        found.stats.fired.contains_key("hardsigmoid-of-clamp")
    };
    assert!(fires("f32") && fires("bf16"));
    assert!(!fires("f64"));
}

/// A value is made of itself where numbers cancel, or where one swallows another: what comes of that differs by
/// roundings, without end.
#[test]
fn chains_of_numbers_that_cancel_come_to_an_end() {
    for (program, most) in [
        ("(div (mul x:[4] 1e-5) 1e-5)", 50),
        ("(mul (div x:[4] 1e-5) 1e-5)", 50),
        ("(div (mul (mul x:[4] 3.0) 1e-5) 1e-5)", 100),
        ("(div (mul (mul x:[4] 0.0) 1e-5) 1e-5)", 100),
        ("(add (add x:[4] 1e25) 1.0)", 50),
        ("(sub (add (add x:[4] 1e-9) 0.1) 0.1)", 100),
        ("(mul (mul (mul (mul x:[4] 1e-5) 7.0) 0.3) 47619.04761904762)", 8_000),
    ] {
        let program = parse(program, Weights::Live).unwrap();
        let found = optimize(&program, &Options::default()).unwrap();
        assert!(found.size.0 < most, "{:?}", found.size);
    }
}

/// Whether saturation finds that the two items of a tuple are equal.
fn equal(tuple: &str) -> bool {
    let program = parse(tuple, Weights::Frozen).unwrap_or_else(|e| panic!("{tuple}: {e}"));
    let leaves = Arc::new(program.leaves.clone());
    let mut egraph = EGraph::new(Context {
        leaves,
        conflicts: vec![],
    });
    let root = egraph.add_expr(&program.expr().0);
    saturate(&mut egraph, &Limits::default());
    assert!(egraph.analysis.conflicts.is_empty());
    let nodes = &egraph[root].nodes;
    nodes
        .iter()
        .any(|n| n.children.len() == 2 && egraph.find(n.children[0]) == egraph.find(n.children[1]))
}

#[test]
fn captured_forms_meet_their_ops() {
    for tuple in [
        // A linear on three dimensions, as AOTAutograd writes it.
        "(tuple (reshape (addmm b:[5] (reshape x:[2,3,8] [6,8]) (permute w:[5,8] [1,0])) [2,3,5]) (linear w b x))",
        "(tuple (relu (reshape (mm (reshape x:[6,3,8] [18,8]) (permute w:[5,8] [1,0])) [6,3,5])) (relu (linear w none x)))",
        // einsum('bij,jk->bik') by way of bmm.
        "(tuple (reshape (permute (reshape (bmm (reshape (permute (permute (reshape x:[2,3,8] [2,3,8,1]) [0,1,3,2]) [0,1,3,2]) [1,6,8])
           (reshape (permute (permute (reshape w:[8,5] [8,5,1,1]) [2,3,1,0]) [3,2,0,1]) [1,8,5])) [2,3,1,5]) [0,1,3,2]) [2,3,5])
           (linear (permute w [1,0]) none x))",
        // One matrix for all batches.
        "(tuple (reshape (bmm (reshape (expand x:[2,4,3,8] [2,4,3,8]) [8,3,8]) (reshape (expand w:[8,5] [2,4,8,5]) [8,8,5])) [2,4,3,5])
           (linear (permute w [1,0]) none x))",
        "(tuple (getitem (split (linear w:[12,8] b:[12] x:[2,8]) [4,4,4] -1) 1) (linear (slice w -2 4 8 1) (slice b -1 4 8 1) x))",
        "(tuple (cat -1 (getitem (split x:[2,6] [2,4] -1) 0) (getitem (split x [2,4] -1) 1)) x)",
        "(tuple (getitem (split (cat -1 x:[2,3] y:[2,4]) [3,4] -1) 1) y)",
        // F.rms_norm, and Llama's in fp32.
        "(tuple (mul (mul x:[2,3,8] (rsqrt (add (mean (pow x 2.0) [-1] true) 1e-6))) w:[8]) (rms_norm x [8] w 1e-6))",
        "(tuple (mul w:[8] (mul x:[2,3,8] (rsqrt (add (mean (pow x 2.0) [-1] true) 1e-6)))) (rms_norm x [8] w 1e-6))",
        "(tuple (cast (mul (mul (cast x:bf16[2,8] f32) (rsqrt (add (mean (pow (cast x f32) 2.0) [-1] true) 1e-6))) w:bf16[8]) bf16)
           (rms_norm x [8] w 1e-6))",
        // GPT-2's gelu.
        "(tuple (mul (mul x:[8] 0.5) (add (tanh (mul (add x (mul (pow x 3.0) 0.044715)) 0.7978845608028654)) 1.0)) (gelu_tanh x))",
        "(tuple (div (exp (sub x:[4,8] (amax x [-1] true))) (sum (exp (sub x (amax x [-1] true))) [-1] true)) (softmax x -1))",
    ] {
        assert!(equal(tuple), "{tuple}");
    }
    // Llama's norm in bf16 rounds before it multiplies by the weight.
    assert!(!equal(
        "(tuple (mul w:bf16[8] (cast (mul (cast x:bf16[2,8] f32) (rsqrt (add (mean (pow (cast x f32) 2.0) [-1] true) 1e-6))) bf16))
           (rms_norm x [8] w 1e-6))"
    ));
}

#[test]
fn algebra_reaches_one_product() {
    for tuple in [
        // LoRA, with its scale anywhere.
        "(tuple (add (linear w:[5,8] b:[5] x:[3,8]) (mul (linear wb:[5,2] none (linear wa:[2,8] none x)) 2.0))
           (linear (add w (mul (mm wb wa) 2.0)) b x))",
        "(tuple (add (linear wb:[5,2] none (linear wa:[2,8] none x:[3,8])) (linear w:[5,8] b:[5] x)) (linear (add w (mm wb wa)) b x))",
        "(tuple (add (linear w:[5,8] b:[5] x:[3,8]) (linear wb:[5,2] none (mul (linear wa:[2,8] none x) 2.0)))
           (linear (add w (mm wb (mul wa 2.0))) b x))",
        // The scale of an attention goes into the weight of its queries.
        "(tuple (div (bmm (linear w:[4,8] b:[4] x:[2,3,8]) y:[2,4,5]) 2.5) (bmm (linear (div w 2.5) (div b 2.5) x) y))",
        "(tuple (mul (bmm (permute (linear w:[3,8] none x:[2,4,8]) [0,2,1]) y:[2,4,5]) 0.5)
           (bmm (permute (linear (mul w 0.5) none x) [0,2,1]) y))",
        "(tuple (add (linear w:[5,8] none x:[3,8]) b:[5]) (linear w b x))",
        "(tuple (slice (linear w:[5,8] b:[5] x:[2,3,8]) -2 0 1 1) (linear w b (slice x -2 0 1 1)))",
    ] {
        assert!(equal(tuple), "{tuple}");
    }
}
