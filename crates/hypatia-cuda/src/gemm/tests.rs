//! What can be seen of products without a device.

use hypatia_core::ty::DType;

use super::describe::{Described, Preference};
use super::reference::{Places, Reference};
use super::*;
use crate::driver::Buffer;
use crate::loading::testing::has;

#[test]
fn every_problem_can_be_described() {
    if !has("cuBLASLt", version().err()) {
        return;
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for output in [dtype, DType::F32] {
            for epilogue in Epilogue::ALL {
                for transposed in [[false, true], [false, false], [true, false], [true, true]] {
                    let problem = Problem::new(dtype, [3, 17, 5], transposed).with_epilogue(epilogue);
                    let problem = Problem { output, ..problem };
                    let mut described = Described::new(&problem).unwrap();
                    let operands = Operands {
                        bias: 256,
                        aux: 512,
                        ..Operands::default()
                    };
                    described.point(&operands).unwrap();
                }
            }
        }
    }
    Described::new(&Problem::linear(DType::BF16, 8, 8, 8).with_batch(5).with_residual()).unwrap();
    Preference::new(&Problem::linear(DType::BF16, 8, 8, 8), 1 << 20).unwrap();
}

#[test]
fn what_the_library_does_not_do_is_refused() {
    let dense = Problem::linear(DType::F32, 4, 4, 4);
    let refused = |problem: Problem| problem.check().unwrap_err().to_string();
    let double = Problem::linear(DType::F64, 4, 4, 4);
    assert!(refused(double).contains("f32, bf16 or f16"));
    assert!(
        refused(Problem {
            output: DType::BF16,
            ..dense
        })
        .contains("neither")
    );
    assert!(refused(Problem { k: 0, ..dense }).contains("nothing"));
    assert!(refused(dense.with_batch(2).with_epilogue(Epilogue::DreluSum)).contains("single"));
    assert!(refused(Problem { alignment: 2, ..dense }).contains("alignment"));
    let narrow = Slab { ld: 3, batch: 16 };
    assert!(refused(Problem { out: narrow, ..dense }).contains("overlap"));
    assert!(dense.check().is_ok());
}

#[test]
fn keys_tell_problems_apart() {
    let dense = Problem::linear(DType::F32, 64, 256, 784);
    assert_eq!(dense.to_string(), "gemm f32>f32 1x64x256x784 nt none align 16");
    let all = [
        dense,
        Problem { tf32: true, ..dense },
        dense.with_residual(),
        dense.with_batch(2),
        dense.with_epilogue(Epilogue::ReluBias),
        Problem::new(DType::F32, [64, 256, 784], [false, false]),
        Problem { alignment: 8, ..dense },
        Problem {
            out: Slab { ld: 512, batch: 0 },
            ..dense
        },
        Problem {
            left: Factor { batch: 0, ..dense.left },
            ..dense.with_batch(2)
        },
    ];
    let mut keys: Vec<String> = all.iter().map(Problem::to_string).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all.len());
}

#[test]
fn epilogues_have_names() {
    for epilogue in Epilogue::ALL {
        assert_eq!(Epilogue::named(epilogue.name()), Some(epilogue));
    }
    assert_eq!(Epilogue::named("erf"), None);
}

#[test]
fn what_is_kept_has_a_size() {
    let layer = |epilogue| Problem::linear(DType::BF16, 10, 100, 20).with_epilogue(epilogue);
    assert_eq!(layer(Epilogue::ReluAuxBias).aux_bytes(), 10 * 128 / 8);
    assert_eq!(layer(Epilogue::DgeluSum).aux_bytes(), 10 * 104 * 2);
    assert_eq!(layer(Epilogue::ReluBias).aux_bytes(), 0);
    assert_eq!(layer(Epilogue::SumLeft).bias_len(), 10);
    assert_eq!(layer(Epilogue::SumRight).bias_len(), 100);
    assert_eq!(layer(Epilogue::Relu).bias_len(), 0);
}

#[test]
fn records_survive_being_kept() {
    let tuned = Tuned {
        algorithm: [1, 2, 3, 4, 5, 6, 7, u64::MAX],
        workspace: 1 << 20,
        microseconds: 3.5,
    };
    let text = serde_json::to_string(&tuned).unwrap();
    assert_eq!(serde_json::from_str::<Tuned>(&text).unwrap(), tuned);
}

/// The check that algorithms must pass, on a right result and on results that are a little wrong.
#[test]
fn wrong_results_are_noticed() {
    let device = Device::get(0);
    if !has("a GPU", device.as_ref().err().cloned()) {
        return;
    }
    let device = device.unwrap();
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let mut done = 0;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for epilogue in Epilogue::ALL {
            let problem = Problem::new(dtype, [70, 96, 200], [false, false]).with_epilogue(epilogue);
            let budget = Budget::default();
            let bytes = scratch_bytes(&problem, &budget);
            let memory = Buffer::new(device, bytes).unwrap();
            let address = memory.address();
            // SAFETY: fresh memory.
            let tuned = match unsafe { tune(&problem, stream, Scratch { address, bytes }, &budget) } {
                Err(e) if e.to_string().contains("has no algorithm") => continue,
                tuned => tuned.unwrap(),
            };
            done += 1;
            let gemm = Gemm::new(device, problem, &tuned.best).unwrap();
            let places = Places::from(&problem, address, budget.workspace);
            let reference = Reference::new(&problem, stream, places).unwrap();
            let at = places.operands;
            let size = dtype.size();
            let judged = |spoiled: Option<(u64, u8, usize)>| {
                // SAFETY: all of it is in that memory.
                unsafe {
                    reference.draw().unwrap();
                    reference.poison().unwrap();
                    gemm.launch(stream, &at).unwrap();
                    if let Some((address, byte, bytes)) = spoiled {
                        stream.fill(address, byte, bytes).unwrap();
                    }
                    reference.judge().unwrap()
                }
            };
            let what = format!("{problem}");
            assert!(judged(None) <= 1.0, "{what}");
            // One element of the last row that was not written, then one that is too large.
            let element = at.out + ((69 * 96 + 50) * size) as u64;
            assert!(judged(Some((element, 0xff, size))) > 1.0, "{what}");
            assert!(judged(Some((element, 0x47, size))) > 1.0, "{what}");
            if epilogue.sums().is_some() {
                let sum = at.bias + (problem.bias_len() / 2 * size) as u64;
                assert!(judged(Some((sum, 0x47, size))) > 1.0, "{what}");
            }
            if matches!(epilogue, Epilogue::ReluAuxBias | Epilogue::GeluAuxBias) {
                let kept = at.aux + (35 * problem.aux_bytes() / 70) as u64;
                assert!(judged(Some((kept, 0x47, 8))) > 1.0, "{what}");
            }
        }
    }
    assert!(done > 24, "only {done} problems have an algorithm");
}
