//! Outputs of a plan on a GPU: in new memory, or where torch made them.

use hypatia_runtime::kernels::call::Handed;
use pyo3::prelude::*;

use super::BoundCudaPlan;
use crate::failed;
use crate::plan::Expected;
use crate::tensor::Fresh;

/// Some outputs of a plan during a run, by their places; torch makes those that are not there before.
pub struct Outputs(Vec<Option<Fresh>>);

impl Outputs {
    /// Memory for outputs that a run is to write, but for those that torch makes.
    pub fn new(plan: &BoundCudaPlan, writes: impl Fn(usize) -> bool) -> PyResult<Outputs> {
        let output = |(at, expected): (usize, &Expected)| {
            let given = writes(at) && !plan.runnable.makes(at);
            given
                .then(|| expected.allocate(plan.signature.exchange, Some(plan.gpu)))
                .transpose()
        };
        let all = plan.signature.outputs.iter().enumerate();
        Ok(Outputs(all.map(output).collect::<PyResult<_>>()?))
    }

    /// Where they are; zero for those that are not there.
    pub fn addresses(&self) -> Vec<u64> {
        let address = |output: &Option<Fresh>| output.as_ref().map_or(0, |f| f.data() as u64);
        self.0.iter().map(address).collect()
    }

    /// Takes what torch made in a run of the plan.
    pub fn take(&mut self, plan: &BoundCudaPlan, handed: Handed) {
        for (at, taken) in handed {
            let (expected, exchange) = (&plan.signature.outputs[at], plan.signature.exchange);
            // SAFETY: the plan made this output, densely.
            let fresh = unsafe { exchange.adopt(expected.dtype, &expected.shape, taken, Some(plan.gpu)) };
            self.0[at] = Some(fresh);
        }
    }

    /// The outputs that are there, by their places.
    pub fn into_inner(self) -> Vec<Option<Fresh>> {
        self.0
    }

    /// All outputs.
    pub fn objects(self, py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
        let object = |output: Option<Fresh>| output.ok_or_else(|| failed("an output is missing"))?.into_object(py);
        self.0.into_iter().map(object).collect()
    }
}
