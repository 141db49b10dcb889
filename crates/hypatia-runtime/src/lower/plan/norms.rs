//! Norms of training steps, on devices where one kernel gives a norm with its statistics, or its gradients.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ty::{DType, Ty};

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::step::{NormStep, Operand, Task, Value};

/// A norm that a kernel serves.
pub(super) struct Norm {
    rows: usize,
    width: usize,
    centered: bool,
    eps: Option<f64>,
    reads: Vec<Id>,
}

impl Lowering<'_> {
    /// What a node is, if it is such a norm with all of its parameters.
    pub(super) fn norm(&self, id: Id) -> Option<Norm> {
        let children = &self.program.node(id).children;
        // Where the last dimensions and what is read stand among the operands.
        let (centered, last, reads) = match self.name(id) {
            "native_layer_norm" => (true, 1, vec![0, 2, 3]),
            "native_rms_norm" => (false, 1, vec![0, 2]),
            "layer_norm_backward" => (true, 2, vec![0, 1, 3, 4, 5]),
            "rms_norm_backward" => (false, 2, vec![0, 1, 3, 4]),
            _ => return None,
        };
        let reads: Vec<Id> = reads.into_iter().map(|i| children[i]).collect();
        let widest = self.can.norm_statistics?;
        if reads.iter().any(|r| self.is_attr(*r)) {
            return None;
        }
        let (shape, dtype) = self.shape(reads[0]).ok()?;
        let width: usize = self.attr(children[last])?.known_ints()?.iter().product::<i64>() as usize;
        let served = matches!(dtype, DType::F32 | DType::BF16 | DType::F16) && (1..=widest).contains(&width);
        let eps = match self.name(id) {
            "native_layer_norm" => Some(self.attr(children[4])?.number()?),
            "native_rms_norm" => Some(match self.attr(children[3])? {
                Attr::None => f64::from(f32::EPSILON),
                given => given.number()?,
            }),
            _ => None,
        };
        (served && !shape.contains(&0)).then(|| Norm {
            rows: shape.iter().product::<usize>() / width,
            width,
            centered,
            eps,
            reads,
        })
    }

    pub(super) fn norm_step(&mut self, id: Id) -> Result<()> {
        let norm = self.norm(id).ok_or_else(|| no_plan("a norm of another kind"))?;
        let Ty::Tuple(types) = self.program.ty(id).clone() else {
            return Err(no_plan("a norm with one result"));
        };
        let reads = norm.reads.iter().map(|r| self.whole(*r)).collect::<Result<_>>()?;
        let (mut items, mut writes) = (vec![], vec![]);
        for ty in types.iter() {
            let Ty::Tensor(t) = ty else {
                return Err(no_plan(format!("a norm that returns {ty}")));
            };
            let shape: Option<Vec<usize>> = t.shape.iter().map(|d| d.known().map(|v| v as usize)).collect();
            let shape = shape.ok_or_else(|| no_plan("sizes that are not known"))?;
            self.plan.values.push(Value {
                shape: shape.clone(),
                dtype: t.dtype,
            });
            let value = self.plan.values.len() - 1;
            writes.push(value);
            items.push(Some(Operand::dense(value, &shape)));
        }
        self.items.insert(id, items);
        self.plan.steps.push(Task::Norm(Box::new(NormStep {
            rows: norm.rows,
            width: norm.width,
            centered: norm.centered,
            eps: norm.eps,
            reads,
            writes,
        })));
        Ok(())
    }
}
