//! What plans for a GPU have that others do not have; no GPU is needed to see it.

use hypatia::ir::program::Program;
use hypatia::ir::text::{Weights, parse};
use hypatia::lower::plan::{Lowered, Wish, lower};
use hypatia::runtime::plan::Task;
use hypatia::ty::{Device, Ty};
use hypatia::{Options, optimize};

/// The plan of a program whose tensors are all on a GPU.
fn lowered(text: &str) -> Lowered {
    let mut program = parse(text, Weights::Frozen).unwrap();
    for input in &mut program.leaves.inputs {
        if let Ty::Tensor(t) = &mut input.ty {
            t.device = Device(1);
        }
    }
    let program = Program::from_expr(&program.leaves, &program.expr().0).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    lower(&optimized, 1, &Wish::default()).unwrap()
}

const ROTATED: &str = "(let q (permute (reshape x:bf16[2,5,32] [2,5,4,8]) [0,2,1,3]))
(let r (add (mul q c:bf16[5,8]) (mul (cat -1 (neg (slice q -1 4 8 1)) (slice q -1 0 4 1)) s:bf16[5,8])))";

#[test]
fn parts_are_put_together_inside_a_region() {
    let lowered = lowered(&format!("{ROTATED}\n(tuple (reshape (permute r [0,2,1,3]) [2,5,32]))"));
    let [Task::Region(step)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(step.shape, [2, 4, 5, 4]);
    // Where the query lies, and in halves of its rows.
    let places: Vec<_> = step.slices.iter().map(|o| (o.offset, &o.strides[..])).collect();
    assert_eq!(places, [(0, &[160, 8, 32, 1][..]), (4, &[160, 8, 32, 1][..])]);
    assert_eq!(step.outputs, lowered.plan.outputs);
}

#[test]
fn parts_of_other_sizes_are_left_to_torch() {
    let lowered = lowered("(tuple (mul 2.0 (cat -1 (neg x:[3,4]) y:[3,5])))");
    let names: Vec<String> = lowered.plan.steps.iter().map(Task::name).collect();
    assert_eq!(lowered.calls.len(), 1, "{names:?}");
}

#[test]
fn attention_writes_as_its_query_lies() {
    let text = format!(
        "{ROTATED}\n(tuple (linear w:bf16[16,32] none (reshape (permute (attention r q q none false none) [0,2,1,3]) [2,5,32])))"
    );
    let lowered = lowered(&text);
    let [Task::Region(_), Task::Torch(call), Task::Linear(_)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    let seen = &lowered.plan.seen[&call.writes[0]];
    assert_eq!(*seen, (vec![2, 4, 5, 8], vec![160, 8, 32, 1]));
}

#[test]
fn a_norm_without_eps_takes_that_of_what_it_computes_in() {
    let lowered = lowered("(tuple (rms_norm x:bf16[2,6] [6] w:bf16[6] none))");
    assert!(
        matches!(&lowered.plan.steps[..], [Task::Rows(_)]),
        "{:?}",
        lowered.plan.steps
    );
}

#[test]
fn a_factor_that_is_part_of_a_value_is_copied() {
    // Products take their sizes from the shape of the factor's value.
    let lowered = lowered("(tuple (mm x:[4,8] (slice y:[12,6] -2 0 8 1)))");
    let [Task::Region(_), Task::Linear(product)] = &lowered.plan.steps[..] else {
        panic!("{:?}", lowered.plan.steps);
    };
    assert_eq!(lowered.plan.values[product.w].shape, [8, 6]);
}
