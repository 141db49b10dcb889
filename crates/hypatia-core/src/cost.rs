//! What a kernel costs on a target: a roofline of arithmetic and memory traffic plus the
//! price of a launch. Measured times can replace it, op by op.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::args::Args;
use crate::attr::Attr;
use crate::error::Result;
use crate::ir::build::Sink;
use crate::ir::define::{self, Operands, Types};
use crate::ir::node::Op;
use crate::ir::program::Program;
use crate::ops::{Meaning, OpId, table};
use crate::sexp::Pos;
use crate::ty::{DType, Ty};
pub use crate::work::{Cost, Hints, Work};

/// A machine, as the cost model sees it. Rates are per microsecond.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Name for options and reports.
    pub name: String,
    /// Vector operations per microsecond.
    pub vector: f64,
    /// Matrix operations per microsecond in fp32.
    pub matrix32: f64,
    /// Matrix operations per microsecond in fp16 and bf16.
    pub matrix16: f64,
    /// Bytes per microsecond.
    pub bandwidth: f64,
    /// Microseconds to launch a kernel.
    pub launch: f64,
    /// Microseconds to make a view.
    pub view: f64,
}

impl Target {
    /// The targets that ship with the compiler.
    pub fn all() -> [Target; 3] {
        let target = |name: &str, vector, matrix32, matrix16, bandwidth, launch, view| Target {
            name: name.into(),
            vector,
            matrix32,
            matrix16,
            bandwidth,
            launch,
            view,
        };
        [
            target("cpu", 2.0e4, 2.0e5, 6.3e5, 2.0e4, 2.0, 0.5),
            target("h200", 3.0e7, 5.0e7, 7.8e8, 4.3e6, 4.0, 1.0),
            target("gpu", 1.0e7, 2.0e7, 1.5e8, 1.0e6, 5.0, 1.0),
        ]
    }

    /// A target by name.
    pub fn named(name: &str) -> Option<Target> {
        Target::all().into_iter().find(|t| t.name == name)
    }

    /// Whether work takes a time here: rates are positive, and no number is infinite.
    pub fn is_sound(&self) -> bool {
        let rates = [self.vector, self.matrix32, self.matrix16, self.bandwidth];
        let times = [self.launch, self.view];
        rates.iter().all(|r| r.is_finite() && *r > 0.0) && times.iter().all(|t| t.is_finite() && *t >= 0.0)
    }

    /// Microseconds that some work takes here.
    pub fn time(&self, work: &Work) -> f64 {
        if work.launches == 0.0 {
            return work.views * self.view;
        }
        let matrix_rate = if work.wide { self.matrix32 } else { self.matrix16 };
        let arithmetic = work.vector / self.vector + work.matrix / matrix_rate;
        work.launches * self.launch + arithmetic.max(work.bytes / self.bandwidth)
    }
}

fn numel(ty: &Ty, hints: Hints) -> f64 {
    match ty {
        Ty::Tensor(t) => t.shape.iter().map(|d| d.value(hints).max(0) as f64).product(),
        Ty::Tuple(ts) => ts.iter().map(|t| numel(t, hints)).sum(),
        _ => 0.0,
    }
}

/// Bytes that a value occupies.
pub fn bytes(ty: &Ty, hints: Hints) -> f64 {
    match ty {
        Ty::Tensor(t) => numel(ty, hints) * t.dtype.size() as f64,
        Ty::Tuple(ts) => ts.iter().map(|t| bytes(t, hints)).sum(),
        _ => 0.0,
    }
}

/// So many times the arithmetic an op takes that returns what it has found on the way, such as the statistics of a norm.
const KEPT: f64 = 1.05;

fn traffic(operands: &[Ty], out: &Ty, hints: Hints) -> f64 {
    // An operand read twice by one kernel comes from cache the second time.
    let mut read = 0.0;
    for ty in operands {
        read += bytes(ty, hints);
    }
    read + bytes(out, hints)
}

/// The work of an op on operands of these types.
pub fn work(op: OpId, operands: &[Ty], out: &Ty, hints: Hints) -> Work {
    let row = table().row(op);
    let wide = operands
        .iter()
        .chain([out])
        .filter_map(Ty::tensor)
        .any(|t| matches!(t.dtype, DType::F32 | DType::F64));
    match &row.meaning {
        Meaning::Primitive { cost, .. } => {
            let mut work = Work {
                wide,
                launches: 1.0,
                bytes: traffic(operands, out, hints),
                ..Work::default()
            };
            match cost {
                Cost::Free => return Work::default(),
                Cost::View => {
                    return Work {
                        views: 1.0,
                        ..Work::default()
                    };
                }
                Cost::Map(k) => work.vector = k * numel(out, hints),
                Cost::Reduce(k) => {
                    let read = operands.iter().map(|t| numel(t, hints)).fold(0.0, f64::max);
                    // What is kept beside the first result takes time even where memory does not count.
                    let kept = if matches!(out, Ty::Tuple(_)) { KEPT } else { 1.0 };
                    work.vector = kept * k * read;
                }
                Cost::Matrix(f) => {
                    work.matrix = 2.0 * f(&Args(operands), out).map_or(0.0, |d| d.value(hints) as f64);
                }
                Cost::Gather => work.bytes = 2.0 * bytes(out, hints),
            }
            work
        }
        Meaning::Defined(_) => match inner_work(op, operands, hints) {
            Ok(inner) => Work {
                bytes: traffic(operands, out, hints),
                // Kernels of one op follow each other without a return to the caller.
                launches: 1.0 + 0.9 * (inner.launches - 1.0).max(0.0),
                wide,
                ..inner
            },
            // A definition that has no type here is never chosen.
            Err(_) => Work {
                bytes: f64::MAX,
                launches: 1.0,
                ..Work::default()
            },
        },
    }
}

/// Work of the ops inside a fused op; launches count its matrix products.
fn inner_work(op: OpId, operands: &[Ty], hints: Hints) -> Result<Work> {
    let mut sink = Works {
        types: Types {
            row: table().row(op),
            operands,
        },
        hints,
        total: Work::default(),
    };
    define::expand(op, &mut sink)?;
    Ok(sink.total)
}

struct Works<'a> {
    types: Types<'a>,
    hints: Hints<'a>,
    total: Work,
}

impl Operands for Works<'_> {
    fn count(&self) -> usize {
        self.types.count()
    }
}

impl Sink for Works<'_> {
    type Ref = Ty;
    fn word(&mut self, word: &str, pos: Pos) -> Result<Ty> {
        self.types.get(word, pos)
    }
    fn attr(&mut self, attr: Attr) -> Result<Ty> {
        Ok(Ty::Attr(attr))
    }
    fn op(&mut self, op: OpId, operands: Vec<Ty>, _: Pos) -> Result<Ty> {
        let out = define::infer(op, &operands)?;
        let work = work(op, &operands, &out, self.hints);
        self.total.vector += work.vector;
        self.total.matrix += work.matrix;
        self.total.launches += f64::from(u8::from(work.matrix > 0.0));
        Ok(out)
    }
}

impl Program {
    /// Arithmetic of everything that the root needs.
    pub fn work(&self, hints: Hints) -> f64 {
        self.reachable()
            .into_iter()
            .map(|id| match &self.node(id).op {
                Op::Row(op) => {
                    let types: Vec<Ty> = self.node(id).children.iter().map(|c| self.ty(*c).clone()).collect();
                    let w = work(*op, &types, self.ty(id), hints);
                    w.vector + w.matrix + w.bytes
                }
                _ => 0.0,
            })
            .sum()
    }
}

/// Times that were measured on the target, in microseconds; they outrank the roofline.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured(BTreeMap<String, f64>);

impl Measured {
    /// Notes the time of an op on operands of these types.
    pub fn insert(&mut self, op: OpId, operands: &[Ty], time: f64) {
        self.0.insert(Measured::key(op, operands), time);
    }

    /// The time of an op on operands of these types, if it was measured.
    pub fn time(&self, op: OpId, operands: &[Ty]) -> Option<f64> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&Measured::key(op, operands)).copied()
    }

    fn key(op: OpId, operands: &[Ty]) -> String {
        let mut key = table().row(op).name.to_string();
        for ty in operands {
            key.push(' ');
            key.push_str(&ty.to_string());
        }
        key
    }
}

/// The work of an opaque call: one pass over its operands, and not less than a launch.
pub fn opaque_work(operands: &[Ty], out: &Ty, hints: Hints) -> Work {
    Work {
        launches: 1.0,
        bytes: traffic(operands, out, hints),
        wide: true,
        ..Work::default()
    }
}

/// True when an op only makes a view.
pub fn is_view(op: OpId) -> bool {
    matches!(
        table().row(op).meaning,
        Meaning::Primitive {
            cost: Cost::View | Cost::Free,
            ..
        }
    )
}
