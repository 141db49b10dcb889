//! The CUDA runtime's lower layers for Python: what was found, a compiler, and single products on torch's memory.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hypatia_core::ty::DType;
use hypatia_cuda::driver::{self, Device, Executable, Graph};
use hypatia_cuda::gemm::{self, Budget, Epilogue, Operands, Problem, Scratch, Tuned};
use hypatia_cuda::loading;
use hypatia_cuda::nvrtc::{self, Arch, KernelCache};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Serialize;

use crate::logging::logged;
use crate::{caught, failed, guarded, json};

/// Looks for libraries in these folders from now on.
#[pyfunction]
fn search_in(py: Python<'_>, folders: Vec<PathBuf>) -> PyResult<()> {
    guarded(py, || {
        loading::search_in(folders);
        Ok(())
    })
}

/// What the store on disk has for a key, by two functions of Python.
struct Store {
    get: Py<PyAny>,
    put: Py<PyAny>,
}

impl KernelCache for Store {
    fn get(&self, key: &str) -> Option<Vec<u8>> {
        Python::attach(|py| self.get.call1(py, (key,)).ok()?.extract(py).ok()?)
    }

    fn put(&self, key: &str, code: &[u8]) {
        Python::attach(|py| {
            // The store reports trouble by itself.
            let _ = self.put.call1(py, (key, PyBytes::new(py, code)));
        });
    }
}

/// Keeps compiled kernels by these functions: `get(key)` returns bytes or None, `put(key, code)` keeps some.
#[pyfunction]
fn keep_in(get: Py<PyAny>, put: Py<PyAny>) -> PyResult<()> {
    caught(|| {
        nvrtc::keep_in(Arc::new(Store { get, put }));
        Ok(())
    })
}

/// A library, or why it cannot be used.
#[derive(Serialize)]
struct Found {
    name: &'static str,
    version: Option<String>,
    origin: Option<String>,
    error: Option<String>,
}

/// The three libraries, as JSON.
#[pyfunction]
fn libraries(py: Python<'_>) -> PyResult<String> {
    type Answer = hypatia_cuda::Result<(String, &'static str)>;
    let found = |name: &'static str, answer: Answer| match answer {
        Ok((version, origin)) => Found {
            name,
            version: Some(version),
            origin: Some(origin.to_owned()),
            error: None,
        },
        Err(e) => Found {
            name,
            version: None,
            origin: None,
            error: Some(e.to_string()),
        },
    };
    let pair = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    guarded(py, || {
        json(&[
            found(
                "libcuda",
                driver::version().and_then(|v| Ok((pair(v), driver::origin()?))),
            ),
            found(
                "cuBLASLt",
                gemm::version().and_then(|v| {
                    let version = format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100);
                    Ok((version, gemm::origin()?))
                }),
            ),
            found("NVRTC", nvrtc::version().and_then(|v| Ok((pair(v), nvrtc::origin()?)))),
        ])
    })
}

/// Machine code of CUDA C++ text for a compute capability.
#[pyfunction]
fn compile<'py>(py: Python<'py>, name: &str, source: &str, arch: (u32, u32)) -> PyResult<Bound<'py, PyBytes>> {
    let arch = Arch::new(arch.0, arch.1);
    let code = logged(py, || nvrtc::machine_code(name, source, arch).map_err(failed))?;
    Ok(PyBytes::new(py, &code))
}

/// Plants a fault into the text of kernels that are loaded from now on; none takes it out.
#[pyfunction]
#[pyo3(signature = (texts))]
fn plant(py: Python<'_>, texts: Option<(String, String)>) -> PyResult<()> {
    guarded(py, || {
        hypatia_cuda::kernel::plant(texts);
        Ok(())
    })
}

/// A matrix product; `tune` or `use` comes before `run`.
#[pyclass(frozen, module = "hypatia._native.cuda")]
struct Gemm {
    device: u32,
    problem: Problem,
    budget: Budget,
    ready: Mutex<Option<Arc<gemm::Gemm>>>,
}

#[pymethods]
impl Gemm {
    /// `out[m,n] = epilogue(left · right + residual)` of dense matrices; `transposed` says of each factor whether its
    /// transpose lies in memory.
    #[new]
    #[pyo3(signature = (device, dtype, sizes, *, transposed=(false, true), output=None, batch=1, tf32=false,
        epilogue="none", residual=false, rows=None, alignment=16, candidates=8, deadline_ms=300, workspace=32 << 20))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        device: u32,
        dtype: &str,
        sizes: [usize; 3],
        transposed: (bool, bool),
        output: Option<&str>,
        batch: usize,
        tf32: bool,
        epilogue: &str,
        residual: bool,
        rows: Option<[usize; 3]>,
        alignment: u32,
        candidates: usize,
        deadline_ms: u64,
        workspace: usize,
    ) -> PyResult<Gemm> {
        caught(|| {
            let named = |name: &str| {
                DType::parse(name).ok_or_else(|| PyValueError::new_err(format!("no dtype is called '{name}'")))
            };
            let dtype = named(dtype)?;
            let epilogue = Epilogue::named(epilogue)
                .ok_or_else(|| PyValueError::new_err(format!("no epilogue is called '{epilogue}'")))?;
            let mut problem = Problem::new(dtype, sizes, transposed.into())
                .with_epilogue(epilogue)
                .with_batch(batch);
            if let Some([left, right, out]) = rows {
                (problem.left.ld, problem.right.ld, problem.out.ld) = (left, right, out);
            }
            if residual {
                problem = problem.with_residual();
            }
            (problem.tf32, problem.alignment) = (tf32, alignment);
            problem.output = output.map_or(Ok(dtype), named)?;
            Ok(Gemm {
                device,
                problem,
                budget: Budget {
                    candidates,
                    deadline: Duration::from_millis(deadline_ms),
                    workspace,
                },
                ready: Mutex::new(None),
            })
        })
    }

    /// What a record of it is kept under.
    #[getter]
    fn key(&self) -> String {
        self.problem.to_string()
    }

    /// Bytes of memory that `tune` needs.
    #[getter]
    fn scratch_bytes(&self) -> usize {
        gemm::scratch_bytes(&self.problem, &self.budget)
    }

    /// Bytes and elements of a row of what the epilogue keeps.
    #[getter]
    fn aux(&self) -> (usize, usize) {
        (self.problem.aux_bytes(), self.problem.aux_ld())
    }

    /// Looks for the best algorithm in the given memory; the trials and the best one as JSON.
    fn tune(&self, py: Python<'_>, stream: usize, address: u64, bytes: usize) -> PyResult<String> {
        logged(py, || {
            let device = Device::get(self.device).map_err(failed)?;
            let scratch = Scratch { address, bytes };
            // SAFETY: the caller has allocated it on this device and keeps it until this returns.
            let tuning = unsafe { gemm::tune(&self.problem, device.stream(stream), scratch, &self.budget) };
            let tuning = tuning.map_err(failed)?;
            self.ready(device, &tuning.best)?;
            json(&tuning)
        })
    }

    /// Takes an algorithm that was found before, as JSON.
    #[pyo3(name = "use")]
    fn use_(&self, py: Python<'_>, tuned: &str) -> PyResult<()> {
        guarded(py, || {
            let tuned: Tuned = serde_json::from_str(tuned).map_err(|e| PyValueError::new_err(e.to_string()))?;
            self.ready(Device::get(self.device).map_err(failed)?, &tuned)
        })
    }

    /// Bytes that `run` works with.
    #[getter]
    fn workspace(&self) -> PyResult<usize> {
        caught(|| Ok(self.prepared()?.workspace()))
    }

    /// Launches it on a stream, over addresses of contiguous memory of the right sizes and types.
    #[pyo3(signature = (stream, left, right, out, *, residual=0, bias=0, aux=0, workspace=0))]
    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        py: Python<'_>,
        stream: usize,
        left: u64,
        right: u64,
        out: u64,
        residual: u64,
        bias: u64,
        aux: u64,
        workspace: u64,
    ) -> PyResult<()> {
        let prepared = self.prepared()?;
        let operands = Operands {
            left,
            right,
            residual,
            bias,
            aux,
            out,
            workspace,
        };
        guarded(py, || {
            let device = Device::get(self.device).map_err(failed)?;
            let _current = device.enter().map_err(failed)?;
            // SAFETY: the caller's addresses are those of the problem's operands.
            unsafe { prepared.launch(device.stream(stream), &operands) }.map_err(failed)
        })
    }
}

impl Gemm {
    fn ready(&self, device: &'static Device, tuned: &Tuned) -> PyResult<()> {
        let made = gemm::Gemm::new(device, self.problem, tuned).map_err(failed)?;
        *self.ready.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(made));
        Ok(())
    }

    fn prepared(&self) -> PyResult<Arc<gemm::Gemm>> {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ready.ok_or_else(|| PyValueError::new_err(format!("{}: it was not tuned", self.problem)))
    }
}

/// What was launched on a stream, to be run again by one call.
#[pyclass(frozen, module = "hypatia._native.cuda")]
struct Recording {
    device: &'static Device,
    executable: Mutex<Executable>,
}

#[pymethods]
impl Recording {
    /// Runs it on a stream. The memory that was recorded must live until it is done.
    fn launch(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        guarded(py, || {
            let _current = self.device.enter().map_err(failed)?;
            let mut executable = self.executable.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: promised by the caller.
            unsafe { executable.launch(self.device.stream(stream)) }.map_err(failed)
        })
    }
}

/// Calls a function that launches kernels on a stream of its own, and records them instead; what it returns.
#[pyfunction]
fn record(gpu: u32, stream: usize, run: &Bound<'_, PyAny>) -> PyResult<(Recording, Py<PyAny>)> {
    caught(|| {
        let device = Device::get(gpu).map_err(failed)?;
        let (graph, done) = Graph::record_on(device.stream(stream), |_| run.call0()).map_err(failed)?;
        let returned = done?.unbind();
        let executable = Mutex::new(graph.instantiate().map_err(failed)?);
        Ok((Recording { device, executable }, returned))
    })
}

/// The module `hypatia._native.cuda`.
pub(crate) fn module(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "cuda")?;
    module.add_class::<Gemm>()?;
    module.add_class::<Recording>()?;
    module.add_function(wrap_pyfunction!(record, &module)?)?;
    module.add_function(wrap_pyfunction!(search_in, &module)?)?;
    module.add_function(wrap_pyfunction!(keep_in, &module)?)?;
    module.add_function(wrap_pyfunction!(libraries, &module)?)?;
    module.add_function(wrap_pyfunction!(compile, &module)?)?;
    module.add_function(wrap_pyfunction!(plant, &module)?)?;
    module.add("epilogues", Epilogue::ALL.map(Epilogue::name).to_vec())?;
    parent.add_submodule(&module)
}
