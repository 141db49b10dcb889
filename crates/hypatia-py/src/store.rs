//! The store on disk.

use std::path::PathBuf;

use hypatia_runtime::store;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::guarded;
use crate::logging::logged;

/// Kind, key, bytes, time of the last use and file of an entry.
type Entry = (String, String, u64, f64, PathBuf);

/// A folder with entries, each under a kind and a key.
#[pyclass(frozen, module = "hypatia._native")]
pub struct Store(store::Store);

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf, limit: u64) -> PyResult<Store> {
        guarded(py, || Ok(Store(store::Store::new(folder, limit))))
    }

    /// What was put under a key.
    fn get<'py>(&self, py: Python<'py>, kind: &str, key: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        check(kind)?;
        let found = logged(py, || Ok(self.0.get(kind, key)?))?;
        Ok(found.map(|data| PyBytes::new(py, &data)))
    }

    /// Keeps bytes under a key.
    fn put(&self, py: Python<'_>, kind: &str, key: &str, data: &[u8]) -> PyResult<()> {
        check(kind)?;
        logged(py, || Ok(self.0.put(kind, key, data)?))
    }

    /// Forgets what was put under a key.
    fn drop(&self, py: Python<'_>, kind: &str, key: &str) -> PyResult<()> {
        check(kind)?;
        logged(py, || {
            self.0.drop(kind, key);
            Ok(())
        })
    }

    /// All entries, least recently used first.
    fn entries(&self, py: Python<'_>) -> PyResult<Vec<Entry>> {
        let found = logged(py, || Ok(self.0.entries()))?;
        Ok(found
            .into_iter()
            .map(|e| (e.kind, e.key, e.size, e.used, e.path))
            .collect())
    }

    /// Removes everything; the number of entries.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        logged(py, || Ok(self.0.clear()))
    }

    /// The folder of measured times, made if there is none.
    fn tuning_folder(&self, py: Python<'_>) -> PyResult<PathBuf> {
        logged(py, || Ok(self.0.tuning_folder()?))
    }

    /// How many measured times are kept.
    fn measurements(&self, py: Python<'_>) -> PyResult<usize> {
        logged(py, || Ok(self.0.measurements()))
    }

    /// Raises what keeps it from writing.
    fn probe(&self, py: Python<'_>) -> PyResult<()> {
        logged(py, || Ok(self.0.probe()?))
    }
}

fn check(kind: &str) -> PyResult<()> {
    match store::is_kind(kind) {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "a kind is made of a-z, 0-9, '-' and '_', not {kind:?}"
        ))),
    }
}
