//! Whether a model is still made of the parts that it was compiled with.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Entries of dictionaries, and dictionaries that are empty.
#[pyclass(frozen, module = "hypatia._native")]
pub struct Watch {
    entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>,
    empty: Vec<Py<PyDict>>,
}

#[pymethods]
impl Watch {
    /// Watches dictionaries' entries (dictionary, key, value) and that others stay empty.
    #[new]
    fn new(entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>, empty: Vec<Py<PyDict>>) -> Watch {
        Watch { entries, empty }
    }

    /// Whether every entry is the object that it was, and what was empty still is.
    fn holds(&self, py: Python<'_>) -> bool {
        // SAFETY: the objects are alive, the GIL is held, and nothing here runs Python code: keys are strings.
        let same = |(dict, key, value): &(Py<PyDict>, Py<PyAny>, Py<PyAny>)| unsafe {
            ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) == value.as_ptr()
        };
        let holds = self.entries.iter().all(same) && self.empty.iter().all(|d| d.bind(py).is_empty());
        if !holds {
            // A lookup that failed leaves an error behind.
            drop(PyErr::take(py));
        }
        holds
    }
}
