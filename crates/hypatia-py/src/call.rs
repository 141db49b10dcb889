//! Steps that Python computes: what libtorch's C functions cannot express.

use hypatia_runtime::kernels::call::{Call, Strided};
use hypatia_runtime::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::tensor::Exchange;

/// A Python function of the tensors that a step reads and of those that it writes.
pub struct PythonCall {
    function: Py<PyAny>,
    exchange: Exchange,
}

impl PythonCall {
    pub fn new(function: Py<PyAny>, exchange: Exchange) -> PythonCall {
        PythonCall { function, exchange }
    }

    unsafe fn run(&self, py: Python<'_>, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> PyResult<()> {
        let objects = |list: &[Strided<'_>]| {
            let tensors: PyResult<Vec<_>> = list
                .iter()
                // SAFETY: the memory outlives the call, and the function keeps nothing.
                .map(|t| unsafe { self.exchange.wrap(py, t) })
                .collect();
            PyList::new(py, tensors?)
        };
        let arguments = PyTuple::new(py, [objects(reads)?, objects(writes)?])?;
        self.function.bind(py).call1(arguments).map(|_| ())
    }
}

impl Call for PythonCall {
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<()> {
        Python::attach(|py| {
            // SAFETY: by the caller.
            unsafe { self.run(py, reads, writes) }.map_err(|e| Error::Malformed(e.to_string()))
        })
    }
}
