//! Whether a model is still made of the parts that it was compiled with.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::caught;

/// Entries of dictionaries, lists, and dictionaries that are empty.
#[pyclass(frozen, module = "hypatia._native")]
pub struct Watch {
    entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>,
    empty: Vec<Py<PyDict>>,
    lists: Vec<(Py<PyList>, Vec<Py<PyAny>>)>,
}

#[pymethods]
impl Watch {
    /// Watches dictionaries' entries (dictionary, key, value), that others stay empty, and what lists have.
    #[new]
    fn new(
        entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>,
        empty: Vec<Py<PyDict>>,
        lists: Vec<(Py<PyList>, Vec<Py<PyAny>>)>,
    ) -> Watch {
        Watch { entries, empty, lists }
    }

    /// Whether every entry is the object that it was, or an equal number or text, and what was empty still is.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        caught(|| Ok(self.compare(py)))
    }
}

impl Watch {
    fn compare(&self, py: Python<'_>) -> bool {
        let entry = |(dict, key, value): &(Py<PyDict>, Py<PyAny>, Py<PyAny>)| {
            // SAFETY: the objects are alive, the GIL is held, and nothing here runs Python code: keys are strings and
            // whole numbers.
            unsafe {
                is_same(
                    ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()),
                    value.as_ptr(),
                )
            }
        };
        let list = |(list, items): &(Py<PyList>, Vec<Py<PyAny>>)| {
            let list = list.bind(py);
            // SAFETY: as above; items of a list are alive as long as it is not changed.
            let same = |(i, item): (usize, &Py<PyAny>)| unsafe {
                is_same(ffi::PyList_GetItem(list.as_ptr(), i as ffi::Py_ssize_t), item.as_ptr())
            };
            list.len() == items.len() && items.iter().enumerate().all(same)
        };
        let holds = self.entries.iter().all(entry)
            && self.empty.iter().all(|d| d.bind(py).is_empty())
            && self.lists.iter().all(list);
        if !holds {
            // A lookup that failed leaves an error behind.
            drop(PyErr::take(py));
        }
        holds
    }
}

/// Whether two objects are one, or equal numbers or texts of Python's own types, whose comparison runs no other code.
///
/// # Safety
/// The second one is alive, the first one too or null, and the GIL is held.
unsafe fn is_same(now: *mut ffi::PyObject, before: *mut ffi::PyObject) -> bool {
    if now == before || now.is_null() {
        return now == before;
    }
    // SAFETY: the caller's obligation.
    unsafe {
        let kind = ffi::Py_TYPE(now);
        let plain = [
            &raw mut ffi::PyFloat_Type,
            &raw mut ffi::PyLong_Type,
            &raw mut ffi::PyUnicode_Type,
        ];
        kind == ffi::Py_TYPE(before)
            && plain.contains(&kind)
            && ffi::PyObject_RichCompareBool(now, before, ffi::Py_EQ) == 1
    }
}
