//! The last steps of a plan on a GPU, which follow a recording of the first ones.

use hypatia_cuda::driver::Device;
use hypatia_cuda::plan::{Part, is_late};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::cuda_plan::BoundCudaPlan;
use crate::plan::objects;
use crate::{caught, failed, guarded};

/// What is left to do once the first steps of a plan have run: the last ones write large results, into new memory at
/// every call. The first ones may run again and again, on the same memory, as a recording does.
#[pyclass(frozen, module = "hypatia._native")]
pub struct CudaPlanRest {
    plan: Py<BoundCudaPlan>,
    part: Part,
    inputs: Vec<u64>,
    /// Outputs that the first steps write or read; the others are of the last ones alone.
    early: Vec<Option<(Py<PyAny>, u64)>>,
    arena: (Py<PyAny>, u64),
    /// Keeps the inputs that the last steps may read.
    _inputs: Option<Py<PyTuple>>,
}

#[pymethods]
impl CudaPlanRest {
    /// Outputs of the plan that the first steps have to do with, in memory that is always the same; none for others.
    #[getter]
    fn early(&self, py: Python<'_>) -> Vec<Option<Py<PyAny>>> {
        let object = |e: &Option<(Py<PyAny>, u64)>| e.as_ref().map(|(object, _)| object.clone_ref(py));
        self.early.iter().map(object).collect()
    }

    /// Runs the last steps on a stream on which the first ones ran; the other outputs, in new memory. Early outputs are
    /// complete then, too.
    fn __call__<'py>(&self, py: Python<'py>, stream: usize) -> PyResult<Bound<'py, PyTuple>> {
        caught(|| self.run(py, stream))
    }
}

impl CudaPlanRest {
    /// Runs the first steps; the addresses are those of the inputs.
    pub fn begin(
        py: Python<'_>,
        plan: Py<BoundCudaPlan>,
        stream: usize,
        inputs: &Bound<'_, PyTuple>,
        addresses: Vec<u64>,
    ) -> PyResult<CudaPlanRest> {
        let bound = plan.get();
        let steps = bound.runnable.plan().steps.len();
        let late = bound.late.unwrap_or(steps);
        let mut early = vec![];
        for (expected, is_late) in bound.outputs.iter().zip(is_late(bound.runnable.plan(), late)) {
            early.push(if is_late {
                None
            } else {
                let fresh = expected.allocate(bound.exchange, Some(bound.gpu))?;
                let address = fresh.data() as u64;
                Some((fresh.into_object(py)?.unbind(), address))
            });
        }
        let rest = CudaPlanRest {
            part: bound.runnable.part(late..steps),
            inputs: addresses,
            early,
            arena: bound.new_arena(py)?,
            // What a plan changes is not kept; such a plan has no last steps.
            _inputs: bound.late.is_some().then(|| inputs.clone().unbind()),
            plan,
        };
        rest.run_part(py, &rest.plan.get().runnable.part(0..late), stream, &[])?;
        Ok(rest)
    }

    fn run<'py>(&self, py: Python<'py>, stream: usize) -> PyResult<Bound<'py, PyTuple>> {
        let bound = self.plan.get();
        let mut fresh = vec![];
        for (expected, early) in bound.outputs.iter().zip(&self.early) {
            if early.is_none() {
                fresh.push(expected.allocate(bound.exchange, Some(bound.gpu))?);
            }
        }
        let addresses: Vec<u64> = fresh.iter().map(|f| f.data() as u64).collect();
        self.run_part(py, &self.part, stream, &addresses)?;
        PyTuple::new(py, objects(py, fresh)?)
    }

    /// Runs some steps, with the addresses of late outputs if they use those.
    fn run_part(&self, py: Python<'_>, part: &Part, stream: usize, late: &[u64]) -> PyResult<()> {
        let bound = self.plan.get();
        let mut late = late.iter().copied();
        let outputs: Vec<u64> = (self.early.iter())
            .map(|early| early.as_ref().map_or_else(|| late.next().unwrap_or(0), |(_, at)| *at))
            .collect();
        guarded(py, || {
            let on = Device::get(bound.gpu).map_err(failed)?.stream(stream);
            // SAFETY: inputs were checked and are kept, or belong to the caller of `begin`, who waits; everything else
            // comes from torch's allocator and is kept, or is new. The first steps do not use late outputs.
            unsafe { (bound.runnable).run_part(part, on, &self.inputs, &outputs, self.arena.1) }.map_err(failed)
        })
    }
}
