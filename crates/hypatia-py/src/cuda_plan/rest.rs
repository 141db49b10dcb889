//! The last steps of a plan on a GPU, which follow a recording of the first ones.

use hypatia_cuda::driver::Device;
use hypatia_cuda::plan::{Part, is_late};
use hypatia_runtime::kernels::call::Handed;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::BoundCudaPlan;
use super::outputs::Outputs;
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
        let is_late = is_late(bound.runnable.plan(), late);
        let mut outputs = Outputs::new(bound, |at| !is_late[at])?;
        let arena = bound.new_arena(py)?;
        let first = bound.runnable.part(0..late);
        let handed = run_part(py, bound, &first, stream, (&addresses, &outputs.addresses(), arena.1))?;
        outputs.take(bound, handed);
        let mut early = vec![];
        for (output, is_late) in outputs.into_inner().into_iter().zip(is_late) {
            early.push(match output {
                None if is_late => None,
                None => return Err(failed("an output is missing")),
                Some(fresh) => {
                    let address = fresh.data() as u64;
                    Some((fresh.into_object(py)?.unbind(), address))
                }
            });
        }
        Ok(CudaPlanRest {
            part: bound.runnable.part(late..steps),
            inputs: addresses,
            early,
            arena,
            // What a plan changes is not kept; such a plan has no last steps.
            _inputs: bound.late.is_some().then(|| inputs.clone().unbind()),
            plan,
        })
    }

    fn run<'py>(&self, py: Python<'py>, stream: usize) -> PyResult<Bound<'py, PyTuple>> {
        let bound = self.plan.get();
        let mut outputs = Outputs::new(bound, |at| self.early[at].is_none())?;
        let early = self.early.iter().map(|e| e.as_ref().map(|(_, address)| *address));
        let addresses: Vec<u64> = (outputs.addresses().into_iter().zip(early))
            .map(|(late, early)| early.unwrap_or(late))
            .collect();
        let handed = run_part(py, bound, &self.part, stream, (&self.inputs, &addresses, self.arena.1))?;
        outputs.take(bound, handed);
        let fresh = outputs.into_inner().into_iter().zip(&self.early);
        let late = fresh.filter(|(_, early)| early.is_none());
        let objects = late.map(|(fresh, _)| fresh.ok_or_else(|| failed("an output is missing"))?.into_object(py));
        PyTuple::new(py, objects.collect::<PyResult<Vec<_>>>()?)
    }
}

/// Runs some steps on inputs, outputs and an arena.
fn run_part(
    py: Python<'_>,
    bound: &BoundCudaPlan,
    part: &Part,
    stream: usize,
    (inputs, outputs, arena): (&[u64], &[u64], u64),
) -> PyResult<Handed> {
    guarded(py, || {
        let on = Device::get(bound.gpu).map_err(failed)?.stream(stream);
        // SAFETY: inputs were checked and are kept, or belong to the caller of `begin`, who waits; everything else
        // comes from torch's allocator and is kept, or is new. The first steps do not use late outputs, and outputs that
        // torch made for them are kept.
        unsafe { (bound.runnable).run_part(part, on, inputs, outputs, arena) }.map_err(failed)
    })
}
