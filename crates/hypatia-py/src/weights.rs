//! What tells whether a weight is what it was when something was made of it.
//!
//! The version counter tells of changes in place, the address of memory that was replaced. Neither tells of memory
//! that was freed and filled again under a version counter that somebody keeps, as sharded models do: it may lie where
//! it lay before. In the CPU's memory some elements are looked at for that.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::caught;
use crate::tensor::Exchange;

/// Version counter, address, and a sum over some elements.
type State = (i64, usize, u64);

/// A tensor whose state is remembered. It is not kept alive.
pub struct Watched {
    tensor: Py<PyWeakrefReference>,
    state: State,
}

impl Watched {
    pub fn new(tensor: &Bound<'_, PyAny>) -> PyResult<Watched> {
        Ok(Watched {
            state: state(tensor)?,
            tensor: PyWeakrefReference::new(tensor)?.unbind(),
        })
    }

    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        match self.tensor.bind(py).upgrade() {
            Some(tensor) => Ok(state(&tensor)? == self.state),
            None => Ok(false),
        }
    }
}

/// Whether all of them are as they were.
pub fn all_hold(watched: &[Watched], py: Python<'_>) -> PyResult<bool> {
    for one in watched {
        if !one.holds(py)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The state of a weight: its version counter, where it lies, and a sum over some of its elements.
#[pyfunction]
pub fn weight_state(tensor: &Bound<'_, PyAny>) -> PyResult<State> {
    caught(|| state(tensor))
}

fn state(tensor: &Bound<'_, PyAny>) -> PyResult<State> {
    let py = tensor.py();
    let version = tensor.getattr(intern!(py, "_version"))?.extract()?;
    let borrowed = Exchange::get(py)?.borrow(tensor)?;
    Ok((version, borrowed.data() as usize, borrowed.sample()))
}
