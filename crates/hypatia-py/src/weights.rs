//! What tells whether a weight is what it was when something was made of it.
//!
//! The version counter tells of changes in place, the address of memory that was replaced. Neither tells of memory
//! that was freed and filled again under a version counter that somebody keeps, as sharded models do: it may lie where
//! it lay before. In the CPU's memory some elements are looked at for that.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::caught;
use crate::tensor::{Exchange, Look};

/// A tensor whose state is remembered. It is not kept alive.
pub struct Watched {
    tensor: Py<PyWeakrefReference>,
    version: i64,
    look: Look,
}

impl Watched {
    pub fn new(tensor: &Bound<'_, PyAny>) -> PyResult<Watched> {
        Ok(Watched {
            version: version(tensor)?,
            look: Exchange::get(tensor.py())?.borrow(tensor)?.look(),
            tensor: PyWeakrefReference::new(tensor)?.unbind(),
        })
    }

    fn holds(&self, py: Python<'_>, exchange: Exchange) -> PyResult<bool> {
        let Some(tensor) = self.tensor.bind(py).upgrade() else {
            return Ok(false);
        };
        Ok(version(&tensor)? == self.version && exchange.borrow(&tensor)?.is_as(&self.look))
    }
}

/// Whether all of them are as they were.
pub fn all_hold(watched: &[Watched], py: Python<'_>) -> PyResult<bool> {
    let exchange = Exchange::get(py)?;
    for one in watched {
        if !one.holds(py, exchange)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The state of a weight: its version counter, where it lies, and a number of some of its elements, its sizes and strides.
#[pyfunction]
pub fn weight_state(tensor: &Bound<'_, PyAny>) -> PyResult<(i64, usize, u64)> {
    caught(|| {
        let (address, sum) = Exchange::get(tensor.py())?.borrow(tensor)?.look().numbers();
        Ok((version(tensor)?, address, sum))
    })
}

fn version(tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}
