use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use egg::Id;
use hypatia_core::eval::{Mode, Val};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::random::Random;
use hypatia_core::{Options, optimize};

use super::*;
use crate::cpu;
use crate::device::Registered;
use crate::lower::plan::{Wish, lower};
use crate::plan::{Memory, Runnable, Setting};
use crate::tuning::Database;

const CPU: &[Registered] = &[("cpu", &cpu::ABILITIES)];

/// A plan with numbers for its constants and inputs.
struct Sample {
    plan: Arc<Plan>,
    constants: Vec<Vec<f32>>,
    inputs: Vec<Vec<f32>>,
}

fn sample(text: &str) -> Sample {
    let program = parse(text, Weights::Frozen).unwrap();
    let results = program.node(program.root).children.len();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let lowered = lower(&optimized, results, &Wish::on(CPU)).unwrap();
    let mut random = Random(3);
    let given: Vec<Val> = (program.leaves.inputs.iter())
        .map(|i| random.value(&i.ty).unwrap())
        .collect();
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(given[*i as usize].clone()),
        _ => Err(hypatia_core::Error::Graph("no input".into())),
    };
    let values: BTreeMap<Id, Val> = optimized.output.eval(&leaf, Mode::Real).unwrap();
    let numbers = |ids: &[Id]| -> Vec<Vec<f32>> {
        let one = |id: &Id| match &values[id] {
            Val::Arr(a) => a.data.iter().map(|v| *v as f32).collect(),
            _ => vec![],
        };
        ids.iter().map(one).collect()
    };
    Sample {
        constants: numbers(&lowered.constants),
        inputs: numbers(&lowered.inputs),
        plan: Arc::new(lowered.plan),
    }
}

fn memory(list: &mut [Vec<f32>]) -> Vec<Memory> {
    list.iter_mut().map(|v| Memory(v.as_mut_ptr().cast())).collect()
}

impl Sample {
    fn bound(&mut self, chunks: Chunks, without: &[String]) -> Runnable {
        let setting = Setting {
            threads: 2,
            database: &Database::in_memory(),
            limit: Duration::ZERO,
            most: None,
            without,
            like: None,
        };
        // SAFETY: constants have their values' sizes and live as long as the sample.
        unsafe {
            self.plan
                .clone()
                .bind_in(chunks, &memory(&mut self.constants), vec![], setting)
        }
        .unwrap()
    }

    fn results(&mut self, chunks: Chunks, without: &[String]) -> Vec<Vec<u32>> {
        let runnable = self.bound(chunks, without);
        let size = |id: &ValueId| self.plan.values[*id].numel();
        let mut outputs: Vec<Vec<f32>> = self.plan.outputs.iter().map(|id| vec![f32::NAN; size(id)]).collect();
        // SAFETY: as above.
        unsafe {
            runnable
                .run(2, &memory(&mut self.inputs), &memory(&mut outputs))
                .unwrap()
        };
        let bits = |v: &Vec<f32>| v.iter().map(|x| x.to_bits()).collect();
        outputs.iter().map(bits).collect()
    }
}

const APART: &[(&str, usize)] = &[
    (
        "(tuple (linear w2:[10,40] b2:[10] (relu (linear w1:[40,20] b1:[40] x:[37,20]))))",
        37,
    ),
    // Results of several widths, one of them a place for values in between, and one with a broadcast.
    (
        "(let h (gelu (linear w1:[64,32] none x:[21,32])))
         (tuple (add x (linear w2:[32,64] none (layer_norm h [64] g:[64] none 1e-5))) (softmax h -1) (mul (mean h [-1] true) y:[1,3]))",
        21,
    ),
    // Rows of rows, merged and taken apart.
    (
        "(let h (linear w1:[24,16] b1:[24] x:[9,5,16]))
         (tuple (linear w2:[8,12] none (mul (slice h -1 0 12 1) (sigmoid (slice h -1 12 24 1)))))",
        9,
    ),
    ("(tuple (linear w:[4,30] none (reshape (exp x:[12,5,6]) [12,30])))", 12),
    ("(tuple (reshape (relu (linear w:[4,6] none (reshape x:[12,5,6] [60,6]))) [12,5,4]))", 60),
];

const TOGETHER: &[&str] = &[
    "(tuple (linear w:[4,6] none (permute x:[6,8] [1,0])))",
    "(tuple (mm (exp x:[40,30]) y:[30,40]))",
    "(tuple (exp (sum x:[8,6] [-2,-1] true)))",
    "(tuple (add x:[8,6] (slice y:[16,6] -2 0 8 1)))",
    "(tuple (add x:[8,6] y:[6]) (exp y))",
    "(tuple (softmax x:[8,4] -1) (softmax y:[6,4] -1))",
];

#[test]
fn rows_are_apart_where_every_step_treats_them_so() {
    for (text, rows) in APART {
        assert_eq!(
            sample(text).plan.rows_apart().map(|found| found.0),
            Some(*rows),
            "{text}"
        );
    }
    for text in TOGETHER {
        assert_eq!(sample(text).plan.rows_apart(), None, "{text}");
    }
}

#[test]
fn chunks_compute_the_same_bits() {
    let without = [vec![], vec!["f32".to_string()]];
    let tiles = crate::cpu::linear::Kind::named("bf16x6", DType::F32).is_some_and(|kind| kind.available());
    for (text, _) in APART {
        for without in &without[..1 + usize::from(tiles)] {
            let mut sample = sample(text);
            let (rows, cut) = sample.plan.rows_apart().unwrap();
            let expected = sample.results(Chunks::whole(), without);
            for count in [2, 3, 4] {
                for together in [1, 2] {
                    let chunks = Chunks::new(rows, count, &cut, together);
                    assert_eq!(sample.results(chunks, without), expected, "{text}, {count} chunks");
                }
            }
        }
    }
}

fn mlp(rows: usize, width: usize) -> Sample {
    sample(&format!(
        "(tuple (linear w3:[16,{width}] none (relu (linear w2:[{width},{width}] none (relu (linear w1:[{width},64] none x:[{rows},64]))))))"
    ))
}

#[test]
fn chunks_save_memory_where_they_have_many_rows() {
    for (rows, threads, count) in [(256, 2, 4), (300, 2, 4), (96, 2, 2), (8, 2, 1), (256, 1, 2), (96, 1, 1)] {
        let plan = mlp(rows, 128).plan;
        let chunks = plan.chunks(threads).unwrap();
        assert_eq!(chunks.starts().len(), count, "{rows} rows on {threads} threads");
        let saves = plan.needs(&chunks).unwrap() <= plan.alive_together().unwrap();
        assert_eq!(saves, rows >= 256, "{rows} rows on {threads} threads");
    }
}

#[test]
fn chunks_have_even_lengths() {
    let chunks = Chunks::new(257, 4, &[], 2);
    assert_eq!(chunks.starts(), [0, 65, 130, 195]);
    let lengths: Vec<usize> = chunks.forms().iter().map(|f| f.rows).collect();
    assert_eq!(lengths, [65, 62]);
    assert_eq!(Chunks::whole().starts(), [0]);
}
