//! Steps with all that does not change from call to call: weights, addresses, the form of tensors.

use std::sync::Arc;

use hypatia_core::ty::DType;

use super::address::{Address, Addresses};
use super::chunks::Form as Chunk;
use super::product::Product;
use super::{LinearStep, Memory, Operand, Plan, RegionStep, RowStep, Task, TorchStep, ValueId, broken};
use crate::cpu::linear::Packed;
use crate::cpu::region::Fit;
use crate::cpu::rowwise::RowFit;
use crate::error::Result;

/// Weights in the form that a step likes best.
#[derive(Clone)]
pub(super) struct Weights {
    pub(super) packed: Arc<Packed>,
    pub(super) bias: Option<Memory>,
}

/// A step's operands and results, in the order of the step.
pub(super) struct Ends {
    /// Operands first.
    pub(super) addresses: Vec<Address>,
    /// So many of them are operands.
    pub(super) inputs: usize,
}

/// What a step needs besides itself.
pub(super) enum Ready {
    Linear {
        weights: Weights,
        /// Rows.
        m: usize,
        x: Address,
        r: Option<Address>,
        y: Address,
    },
    /// A linear layer whose weight is an activation, too.
    Product(Product),
    Region(Fit, Ends),
    Rows(Box<RowFit>, Ends),
    /// With sizes and strides of the results.
    Torch(Ends, Vec<Form>),
}

/// Sizes and strides.
pub(super) type Form = (Vec<usize>, Vec<isize>);

impl Ready {
    /// A step for a chunk of rows.
    pub(super) fn new(
        plan: &Plan,
        step: &Task,
        weights: Option<Weights>,
        at: (&Addresses, Chunk<'_>),
    ) -> Result<Ready> {
        match step {
            Task::Linear(l) => match weights {
                Some(weights) => Ready::linear(weights, l, at),
                None => Ok(Ready::Product(Product::new(plan, l, at.1.part(l.m), at.0)?)),
            },
            Task::Region(r) => Ready::region(plan, r, at),
            Task::Rows(r) => Ready::rows(plan, r, at),
            Task::Torch(t) => Ready::torch(plan, t, at.0),
            _ => Err(broken("a step of a GPU")),
        }
    }

    pub(super) fn weights(&self) -> Option<&Weights> {
        match self {
            Ready::Linear { weights, .. } => Some(weights),
            _ => None,
        }
    }

    /// Bytes that only this step uses, during a call.
    pub(super) fn scratch(&self) -> usize {
        match self {
            Ready::Product(product) => product.bytes(),
            _ => 0,
        }
    }

    fn linear(weights: Weights, l: &LinearStep, (at, chunk): (&Addresses, Chunk<'_>)) -> Result<Ready> {
        let size = weights.packed.kind().dtype().size();
        Ok(Ready::Linear {
            m: chunk.part(l.m),
            x: at.operand(&l.x, size)?,
            r: (l.r.as_ref()).map(|(r, _)| at.operand(r, size)).transpose()?,
            y: at.value(l.y)?,
            weights,
        })
    }

    fn region(plan: &Plan, r: &RegionStep, (at, chunk): (&Addresses, Chunk<'_>)) -> Result<Ready> {
        let dense = |id: &ValueId| (plan.values[*id].dtype, &r.dense[..]);
        let (outputs, ends) = match &r.slices[..] {
            [] => (
                r.outputs.iter().map(dense).collect(),
                ends(plan, &r.inputs, &r.outputs, at)?,
            ),
            slices => {
                let places = operands(plan, slices, at)?;
                (tensors(plan, slices), Ends::new(operands(plan, &r.inputs, at)?, places))
            }
        };
        let fit = r
            .region
            .fit(&chunk.shape(&r.shape), &tensors(plan, &r.inputs), &outputs)?;
        Ok(Ready::Region(fit, ends))
    }

    fn rows(plan: &Plan, r: &RowStep, (at, chunk): (&Addresses, Chunk<'_>)) -> Result<Ready> {
        let output = (plan.values[r.output].dtype, &r.dense[..]);
        let fit = (r.rows).fit(&chunk.shape(&r.shape), r.reduced, &tensors(plan, &r.inputs), &[output])?;
        Ok(Ready::Rows(Box::new(fit), ends(plan, &r.inputs, &[r.output], at)?))
    }

    fn torch(plan: &Plan, t: &TorchStep, at: &Addresses) -> Result<Ready> {
        let forms = t.writes.iter().map(|id| plan.form(*id));
        Ok(Ready::Torch(ends(plan, &t.reads, &t.writes, at)?, forms.collect()))
    }
}

fn tensors<'a>(plan: &Plan, operands: &'a [Operand]) -> Vec<(DType, &'a [isize])> {
    let one = |o: &'a Operand| (plan.values[o.value].dtype, &o.strides[..]);
    operands.iter().map(one).collect()
}

fn operands(plan: &Plan, operands: &[Operand], at: &Addresses) -> Result<Vec<Address>> {
    let one = |o: &Operand| at.operand(o, plan.values[o.value].dtype.size());
    operands.iter().map(one).collect()
}

fn ends(plan: &Plan, inputs: &[Operand], outputs: &[ValueId], at: &Addresses) -> Result<Ends> {
    let outputs = outputs.iter().map(|id| at.value(*id)).collect::<Result<_>>()?;
    Ok(Ends::new(operands(plan, inputs, at)?, outputs))
}

impl Ends {
    fn new(inputs: Vec<Address>, outputs: Vec<Address>) -> Ends {
        Ends {
            inputs: inputs.len(),
            addresses: [inputs, outputs].concat(),
        }
    }
}
