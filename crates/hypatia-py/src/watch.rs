//! Whether a model is still made of the parts that it was compiled with.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::caught;

type Object = Py<PyAny>;
type Entry = (Object, Object);

/// Entries of dictionaries, keys that they have not, whole dictionaries, and what else has items.
#[pyclass(frozen, module = "hypatia._native")]
pub struct Watch {
    entries: Vec<(Py<PyDict>, Object, Object)>,
    absent: Vec<(Py<PyDict>, Object)>,
    whole: Vec<(Py<PyDict>, Vec<Entry>)>,
    items: Vec<(Object, Vec<Object>)>,
}

#[pymethods]
impl Watch {
    /// Watches dictionaries' entries (dictionary, key, value), that others have no such keys, all entries of others in
    /// their order, and the items of lists, sets and the like. Single keys are texts.
    #[new]
    fn new(
        entries: Vec<(Py<PyDict>, Object, Object)>,
        absent: Vec<(Py<PyDict>, Object)>,
        whole: Vec<(Py<PyDict>, Vec<Entry>)>,
        items: Vec<(Object, Vec<Object>)>,
    ) -> PyResult<Watch> {
        caught(|| {
            Ok(Watch {
                entries,
                absent,
                whole,
                items,
            })
        })
    }

    /// Whether everything is the object that it was, or an equal number or text, and nothing is gone or new.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        caught(|| Ok(self.compare(py)))
    }
}

impl Watch {
    fn compare(&self, py: Python<'_>) -> bool {
        // SAFETY: the objects are alive, the GIL is held, and nothing here runs Python code: keys are texts.
        let found =
            |dict: &Py<PyDict>, key: &Object| unsafe { ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) };
        // SAFETY: the entry is alive as long as the dictionary is not changed, which takes Python code.
        let entry =
            |(dict, key, value): &(Py<PyDict>, Object, Object)| unsafe { is_same(found(dict, key), value.as_ptr()) };
        let holds = self.entries.iter().all(entry)
            && self.absent.iter().all(|(dict, key)| found(dict, key).is_null())
            && self.whole.iter().all(|(dict, known)| has_entries(dict.bind(py), known))
            && self
                .items
                .iter()
                .all(|(object, known)| has_items(object.bind(py), known));
        if !holds {
            // A lookup that failed leaves an error behind.
            drop(PyErr::take(py));
        }
        holds
    }
}

/// Whether a dictionary has these entries in this order, and no others.
fn has_entries(dict: &Bound<'_, PyDict>, known: &[Entry]) -> bool {
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the dictionary is not changed meanwhile, since no Python code runs; its keys and values are alive.
    let mut same = |(k, v): &Entry| unsafe {
        ffi::PyDict_Next(dict.as_ptr(), &raw mut at, &raw mut key, &raw mut value) != 0
            && is_same(key, k.as_ptr())
            && is_same(value, v.as_ptr())
    };
    dict.len() == known.len() && known.iter().all(&mut same)
}

/// Whether a list or anything else that can be iterated has these items. What cannot any more has not.
fn has_items(object: &Bound<'_, PyAny>, known: &[Object]) -> bool {
    let Ok(list) = object.cast::<PyList>() else {
        let Ok(items) = object.try_iter() else { return false };
        let mut known = known.iter();
        for item in items {
            let (Ok(item), Some(k)) = (item, known.next()) else {
                return false;
            };
            // SAFETY: both are alive: one is owned here, one by the caller.
            if !unsafe { is_same(item.as_ptr(), k.as_ptr()) } {
                return false;
            }
        }
        return known.next().is_none();
    };
    // SAFETY: items of a list are alive as long as it is not changed, which takes Python code.
    let same = |(i, item): (usize, &Object)| unsafe {
        is_same(ffi::PyList_GetItem(list.as_ptr(), i as ffi::Py_ssize_t), item.as_ptr())
    };
    list.len() == known.len() && known.iter().enumerate().all(same)
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
