//! Steps that Python computes: what libtorch's C functions cannot express.

use std::ops::Range;

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::call::{Call, Handed, Kept, Strided};
use hypatia_runtime::{Error, Result};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::tensor::{Exchange, is_lazy};

/// A Python function of the tensors that a step reads and of those that it writes. It returns results for which none
/// are given there, in their order.
pub struct PythonCall {
    function: Py<PyAny>,
    exchange: Exchange,
}

impl PythonCall {
    pub fn new(function: Py<PyAny>, exchange: Exchange) -> PythonCall {
        PythonCall { function, exchange }
    }

    unsafe fn run(&self, py: Python<'_>, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> PyResult<Handed> {
        let objects = |list: &[Strided<'_>]| {
            let tensors: PyResult<Vec<_>> = list
                .iter()
                .map(|t| match t.is_open() {
                    true => Ok(py.None().into_bound(py)),
                    // SAFETY: the memory outlives the call, and the function keeps nothing.
                    false => unsafe { self.exchange.wrap(py, t) },
                })
                .collect();
            PyList::new(py, tensors?)
        };
        let arguments = PyTuple::new(py, [objects(reads)?, objects(writes)?])?;
        let returned = self.function.bind(py).call1(arguments)?;
        let open: Vec<usize> = (0..writes.len()).filter(|i| writes[*i].is_open()).collect();
        if open.is_empty() {
            return Ok(vec![]);
        }
        let results: Vec<Bound<'_, PyAny>> = returned.extract()?;
        if results.len() != open.len() {
            return Err(PyRuntimeError::new_err("a call with another number of results"));
        }
        let placed = writes.iter().filter(|w| !w.is_open());
        let mut others: Vec<_> = reads.iter().chain(placed).map(Strided::extent).collect();
        let mut handed = vec![];
        for (i, result) in open.into_iter().zip(results) {
            handed.push((i, self.handed(&result, &writes[i], &mut others)?));
        }
        Ok(handed)
    }

    /// Hands a result over: the tensor itself if it can stand for the result, otherwise a copy that lies as it should.
    fn handed(
        &self,
        result: &Bound<'_, PyAny>,
        wanted: &Strided<'_>,
        others: &mut Vec<Range<usize>>,
    ) -> PyResult<Kept> {
        let exchange = self.exchange;
        let found = exchange.borrow(result)?;
        if found.gpu()?.is_some() != wanted.gpu.is_some() {
            // Fake tensors do not tell where random states lie.
            return Err(PyRuntimeError::new_err("a result is on another device"));
        }
        let taken = if found.stands_for(wanted, others) && !is_lazy(result, wanted.dtype)? {
            Kept::new(found.data(), exchange.owned(result)?)
        } else {
            let extent = wanted.extent();
            let copy = exchange.allocate(DType::U8, &[extent.len() as i64], wanted.gpu)?;
            let data = copy.data();
            // SAFETY: the memory was just made for it.
            let tensor = unsafe { exchange.wrap(result.py(), &Strided { data, ..*wanted })? };
            tensor.call_method1("copy_", (result,))?;
            Kept::new(data, copy)
        };
        let data = taken.data();
        others.push(Strided { data, ..*wanted }.extent());
        Ok(taken)
    }
}

impl Call for PythonCall {
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<Handed> {
        Python::attach(|py| {
            // SAFETY: by the caller.
            unsafe { self.run(py, reads, writes) }.map_err(|e| Error::Malformed(e.to_string()))
        })
    }

    fn makes(&self) -> bool {
        true
    }
}
