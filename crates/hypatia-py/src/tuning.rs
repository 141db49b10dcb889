//! The tuning database of this process.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hypatia_runtime::tuning::Database;
use pyo3::prelude::*;

use crate::guarded;
use crate::logging::logged;

static DATABASE: Mutex<Option<Arc<Database>>> = Mutex::new(None);

/// What was measured by this process and, if there is a folder, by those before it.
pub fn database() -> Arc<Database> {
    let mut known = DATABASE.lock().unwrap_or_else(PoisonError::into_inner);
    known.get_or_insert_with(|| Arc::new(Database::in_memory())).clone()
}

/// Keeps measurements in a folder, or in memory if there is none.
#[pyfunction]
#[pyo3(signature = (folder))]
pub fn tuning_folder(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<()> {
    logged(py, || {
        let opened = folder.map_or_else(Database::in_memory, Database::open);
        *DATABASE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(opened));
        Ok(())
    })
}

/// How many measurements there are.
#[pyfunction]
pub fn tuning_entries(py: Python<'_>) -> PyResult<usize> {
    guarded(py, || Ok(database().len()))
}
