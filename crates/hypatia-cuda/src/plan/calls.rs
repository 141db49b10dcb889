//! Calls into torch. What an op makes stays where torch has put it: values in between until their last reader is launched,
//! outputs for the caller.

use hypatia_runtime::kernels::call::{Handed, Strided};
use hypatia_runtime::plan::{Holding, Place, TorchStep, ValueId};

use super::Bound;
use crate::driver::Stream;
use crate::{Error, Result};

/// A run of some of a plan's steps.
pub(super) struct Running<'a> {
    pub(super) stream: Stream,
    pub(super) inputs: &'a [u64],
    pub(super) outputs: &'a [u64],
    pub(super) arena: u64,
}

impl Bound {
    /// The place of a value; none if it is where torch makes it.
    fn place(&self, id: ValueId, run: &Running<'_>) -> Option<u64> {
        match self.places[id] {
            Place::Input(i) => Some(run.inputs[i]),
            Place::Output(i) if run.outputs[i] == 0 && self.made.number(id).is_some() => None,
            Place::Output(i) => Some(run.outputs[i]),
            Place::Arena(offset) => Some(run.arena + offset as u64),
            Place::Constant(i) => Some(self.constants[i]),
            Place::Nowhere => None,
        }
    }

    /// Where a value is.
    pub(super) fn address(&self, id: ValueId, run: &Running<'_>, holding: &Holding<'_>) -> Result<u64> {
        let known = self.place(id, run).or_else(|| holding.at(id).map(|at| at as u64));
        known.ok_or_else(|| Error::malformed(format!("value {id} is nowhere")))
    }

    /// Calls torch; what has no place is handed over.
    pub(super) fn torch(&self, t: &TorchStep, run: &Running<'_>, holding: &Holding<'_>) -> Result<Handed> {
        let gpu = Some(self.device.ordinal());
        let mut reads = Vec::with_capacity(t.reads.len());
        for o in &t.reads {
            let dtype = self.plan.values[o.value].dtype;
            reads.push(Strided {
                data: (self.address(o.value, run, holding)? as usize + o.offset * dtype.size()) as *mut u8,
                dtype,
                shape: &o.shape,
                strides: &o.strides,
                gpu,
            });
        }
        let forms: Vec<_> = t.writes.iter().map(|id| self.plan.form(*id)).collect();
        let mut writes = Vec::with_capacity(t.writes.len());
        for (id, (shape, strides)) in t.writes.iter().zip(&forms) {
            writes.push(Strided {
                data: self.place(*id, run).unwrap_or(0) as usize as *mut u8,
                dtype: self.plan.values[*id].dtype,
                shape,
                strides,
                gpu,
            });
        }
        let call = self.calls.get(t.call);
        let call = call.ok_or_else(|| Error::malformed(format!("there is no call {}", t.call)))?;
        // SAFETY: the addresses are those of the values, as `run` promises; only calls that make tensors have results
        // without a place.
        Ok(unsafe { call.call(&reads, &writes) }?)
    }
}
