//! Calls into torch. Results that only steps of the same run read stay where torch has put them, until the last of these
//! is launched; others are copied to where they belong.

use std::collections::BTreeMap;

use hypatia_runtime::kernels::call::{Kept, Strided};
use hypatia_runtime::plan::{Place, Plan, TorchStep, ValueId};

use super::Bound;
use crate::driver::Stream;
use crate::{Error, Result};

/// A run of some of a plan's steps.
pub(super) struct Running<'a> {
    pub(super) stream: Stream,
    pub(super) inputs: &'a [u64],
    pub(super) outputs: &'a [u64],
    pub(super) arena: u64,
    /// The step behind its last.
    pub(super) end: usize,
}

/// The last step that reads each value; 0 if none does.
pub(super) fn last_reads(plan: &Plan) -> Vec<usize> {
    let mut last = vec![0; plan.values.len()];
    for (at, step) in plan.steps.iter().enumerate() {
        for id in [step.reads(), step.weights()].concat() {
            last[id] = at;
        }
    }
    last
}

impl Bound {
    /// Where a value is.
    pub(super) fn address(&self, id: ValueId, run: &Running<'_>, kept: &BTreeMap<ValueId, Kept>) -> Result<u64> {
        if let Some(kept) = kept.get(&id) {
            return Ok(kept.data as u64);
        }
        match self.places[id] {
            Place::Input(i) => Ok(run.inputs[i]),
            Place::Output(i) => Ok(run.outputs[i]),
            Place::Arena(offset) => Ok(run.arena + offset as u64),
            Place::Constant(i) => Ok(self.constants[i]),
            Place::Nowhere => Err(Error::unsupported(format!("value {id} is nowhere"))),
        }
    }

    /// Calls torch; results that stay where they are.
    pub(super) fn torch(
        &self,
        t: &TorchStep,
        run: &Running<'_>,
        kept: &BTreeMap<ValueId, Kept>,
    ) -> Result<Vec<(ValueId, Kept)>> {
        let gpu = Some(self.device.ordinal());
        let mut reads = Vec::with_capacity(t.reads.len());
        for o in &t.reads {
            let dtype = self.plan.values[o.value].dtype;
            reads.push(Strided {
                data: (self.address(o.value, run, kept)? as usize + o.offset * dtype.size()) as *mut u8,
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
                data: self.address(*id, run, kept)? as usize as *mut u8,
                dtype: self.plan.values[*id].dtype,
                shape,
                strides,
                gpu,
            });
        }
        // What a later run reads, or the caller, must be where they look for it.
        let within = |id: &ValueId| matches!(self.places[*id], Place::Arena(_)) && self.last[*id] < run.end;
        let anywhere: Vec<bool> = t.writes.iter().map(within).collect();
        let call = self.calls.get(t.call);
        let call = call.ok_or_else(|| Error::unsupported(format!("there is no call {}", t.call)))?;
        // SAFETY: the addresses are those of the values, as `run` promises.
        let found = unsafe { call.keep(&reads, &writes, &anywhere) };
        let found = found.map_err(|e| Error::unsupported(e.to_string()))?;
        let found = t.writes.iter().zip(found);
        Ok(found.filter_map(|(id, kept)| Some((*id, kept?))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hypatia_core::ty::DType;
    use hypatia_runtime::plan::{Operand, Task, Value};

    #[test]
    fn the_last_reader_of_each_value_is_known() {
        let step = |reads: &[ValueId], writes: &[ValueId]| {
            Task::Torch(TorchStep {
                name: String::new(),
                call: 0,
                reads: reads.iter().map(|id| Operand::dense(*id, &[4])).collect(),
                writes: writes.to_vec(),
            })
        };
        let value = || Value {
            shape: vec![4],
            dtype: DType::F32,
        };
        let plan = Plan {
            values: (0..4).map(|_| value()).collect(),
            steps: vec![step(&[0], &[1]), step(&[1], &[2]), step(&[1, 2], &[3])],
            ..Plan::default()
        };
        assert_eq!(last_reads(&plan), [0, 2, 2, 0]);
    }
}
