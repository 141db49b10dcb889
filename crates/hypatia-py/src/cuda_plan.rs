//! Native plans on a GPU for Python.

mod outputs;
mod rest;
mod split_weights;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use hypatia_core::ty::DType;
use hypatia_cuda::driver::Device;
use hypatia_cuda::gemm::Budget;
use hypatia_cuda::plan::{Bound as Runnable, Cuda, Setting};
use hypatia_runtime::device::Device as _;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyList, PyTuple};

use crate::logging::logged;
use crate::plan::{NativePlan, Signature, calls_and_watched, dispatched};
use crate::tensor::Exchange;
use crate::{caught, failed, guarded, tuning};
use outputs::Outputs;
pub use rest::CudaPlanRest;
use split_weights::SplitWeights;

/// Streams for which memory is kept.
const STREAMS: usize = 8;

/// A plan with its constants, on a GPU.
#[pyclass(frozen, module = "hypatia._native")]
pub struct BoundCudaPlan {
    runnable: Runnable,
    gpu: u32,
    signature: Signature,
    /// The first of the steps that a recording leaves to its calls.
    late: Option<usize>,
    /// What a call returns: outputs from zero on, inputs from -1 on downwards, or nothing; the outputs if not given.
    returns: Option<Vec<Option<isize>>>,
    /// Memory of the values in between, from torch's allocator, by stream.
    arenas: Mutex<HashMap<usize, (Py<PyAny>, u64)>>,
    split: SplitWeights,
    _kept: Py<PyList>,
}

#[pymethods]
impl BoundCudaPlan {
    /// Chooses algorithms by what was measured, now or before, and compiles kernels; see `NativePlan.bind`. `split`: fp32
    /// products may be made of products of bf16, with at most so many bytes of split weights; those of the same plan at
    /// other sizes are used again.
    #[new]
    #[pyo3(signature = (plan, constants, watched, calls, libtorch, gpu, stream, tf32, returns = None, split = true, most = None, like = None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        plan: &NativePlan,
        constants: &Bound<'_, PyList>,
        watched: &Bound<'_, PyList>,
        calls: &Bound<'_, PyList>,
        libtorch: PathBuf,
        gpu: u32,
        stream: usize,
        tf32: bool,
        returns: Option<Vec<Option<isize>>>,
        split: bool,
        most: Option<usize>,
        like: Option<&BoundCudaPlan>,
    ) -> PyResult<BoundCudaPlan> {
        caught(|| {
            let (inputs, outputs) = (plan.plan().inputs.len(), plan.plan().outputs.len());
            let known = |at: isize| {
                if at < 0 {
                    (!at as usize) < inputs
                } else {
                    (at as usize) < outputs
                }
            };
            if returns.iter().flatten().flatten().any(|at| !known(*at)) {
                return Err(PyValueError::new_err("a result that is neither an input nor an output"));
            }
            let exchange = Exchange::get(py)?;
            let memories = plan.constant_memories(constants, exchange, Some(gpu))?;
            let addresses: Vec<u64> = memories.iter().map(|m| m.0 as u64).collect();
            let (calls, watched) = calls_and_watched(calls, watched, exchange, &libtorch)?;
            let known = match like {
                Some(like) if like.signature.current(py)? => Some(&like.split),
                _ => None,
            };
            let mut split_weights = SplitWeights::like(py, known);
            let runnable = logged(py, || {
                let database = tuning::database();
                let mut scratch = vec![];
                let mut memory = |bytes: usize| {
                    let fresh = Python::attach(|_| exchange.allocate(DType::U8, &[bytes as i64], Some(gpu)));
                    let fresh = fresh.map_err(|e| hypatia_cuda::Error::Memory(e.to_string()))?;
                    let address = fresh.data() as u64;
                    scratch.push(fresh);
                    Ok(address)
                };
                let mut room = |weight: u64, bytes: usize| {
                    Python::attach(|py| split_weights.room(py, (exchange, gpu), most, weight, bytes))
                };
                let mut torch = |text: &str| {
                    dispatched(text, &libtorch).map_err(|e| hypatia_cuda::Error::Unsupported(e.to_string()))
                };
                let device = Device::get(gpu).map_err(failed)?;
                let setting = Setting {
                    stream: device.stream(stream),
                    database: &database,
                    budget: Budget::default(),
                    tf32,
                    split,
                    memory: &mut memory,
                    room: &mut room,
                    torch: &mut torch,
                };
                // SAFETY: the tensors were checked and are kept; scratch memory comes from torch and lives until the end.
                let runnable = unsafe { Cuda.bind(plan.plan().clone(), &addresses, calls, setting) }.map_err(failed)?;
                database.save();
                Ok(runnable)
            })?;
            Ok(BoundCudaPlan {
                signature: plan.signature(watched, exchange, Some(gpu)),
                late: plan.late(),
                runnable,
                gpu,
                returns,
                arenas: Mutex::new(HashMap::new()),
                split: split_weights.settled(),
                _kept: constants.clone().unbind(),
            })
        })
    }

    /// Whether the watched tensors are as they were.
    fn current(&self, py: Python<'_>) -> PyResult<bool> {
        caught(|| self.signature.current(py))
    }

    /// Runs the plan on a stream; none if an input is not what the plan was made for, or if a watched tensor changed.
    #[pyo3(signature = (stream, *inputs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        inputs: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        caught(|| self.run(py, stream, inputs))
    }

    /// Runs the first steps, for a recording, and returns what runs the others, on the same inputs; none as a call.
    #[pyo3(signature = (stream, *inputs))]
    fn begin(
        slf: PyRef<'_, Self>,
        py: Python<'_>,
        stream: usize,
        inputs: &Bound<'_, PyTuple>,
    ) -> PyResult<Option<CudaPlanRest>> {
        caught(|| {
            let Some(given) = slf.given(inputs)? else {
                return Ok(None);
            };
            CudaPlanRest::begin(py, slf.into(), stream, inputs, given).map(Some)
        })
    }

    /// Launches the steps of a call, nothing recorded, and calls a function with the number of each before; whether it
    /// ran. The results are dropped.
    #[pyo3(signature = (stream, next, *inputs))]
    fn run_told(
        &self,
        py: Python<'_>,
        stream: usize,
        next: &Bound<'_, PyAny>,
        inputs: &Bound<'_, PyTuple>,
    ) -> PyResult<bool> {
        caught(|| {
            let Some(given) = self.given(inputs)? else {
                return Ok(false);
            };
            let on = Device::get(self.gpu).map_err(failed)?.stream(stream);
            let mut outputs = Outputs::new(self, |_| true)?;
            let Ok((arena, _arena)) = self.arena(py, stream, false) else {
                return Ok(false);
            };
            let addresses = outputs.addresses();
            let (next, mut trouble) = (next.clone().unbind(), None);
            let tell = |at: usize| {
                let told = Python::attach(|py| next.call1(py, (at,)).map(drop));
                trouble = trouble.take().or(told.err());
            };
            let handed = guarded(py, || {
                // SAFETY: as of `run`.
                unsafe { self.runnable.run_told(on, &given, &addresses, arena, tell) }.map_err(failed)
            })?;
            outputs.take(self, handed);
            trouble.map_or(Ok(true), Err)
        })
    }

    /// Why a call returns none on these inputs.
    #[pyo3(signature = (*inputs))]
    fn refusal(&self, inputs: &Bound<'_, PyTuple>) -> PyResult<String> {
        caught(|| {
            if let Some(refusal) = self.signature.refusal(inputs)? {
                return Ok(refusal);
            }
            let given = self.signature.given(inputs)?;
            let odd = given.iter().flatten().position(|m| !(m.0 as usize).is_multiple_of(16));
            Ok(odd.map_or_else(
                || "there is not enough memory".into(),
                |at| format!("the address of input {at} is no multiple of 16"),
            ))
        })
    }

    /// Bytes of the values in between, and of split weights.
    fn bytes(&self) -> (usize, usize) {
        (self.runnable.arena_bytes(), self.split.bytes())
    }

    /// How each linear layer is computed, in the order of the steps.
    fn kinds(&self) -> Vec<&'static str> {
        self.runnable.kinds()
    }

    /// Whether no step calls torch.
    fn is_native(&self) -> bool {
        self.runnable.is_native()
    }
}

impl BoundCudaPlan {
    /// Where inputs are, if they are what the plan was made for and no watched tensor changed.
    fn given(&self, inputs: &Bound<'_, PyTuple>) -> PyResult<Option<Vec<u64>>> {
        let Some(given) = self.signature.given(inputs)? else {
            return Ok(None);
        };
        let given: Vec<u64> = given.iter().map(|m| m.0 as u64).collect();
        Ok(given.iter().all(|a| a % 16 == 0).then_some(given))
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        inputs: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(given) = self.given(inputs)? else {
            return Ok(None);
        };
        let device = Device::get(self.gpu).map_err(failed)?;
        let on = device.stream(stream);
        let mut outputs = Outputs::new(self, |_| true)?;
        // The arena stays alive in `_arena`, or with the plan.
        let Ok((arena, _arena)) = self.arena(py, stream, on.is_capturing().map_err(failed)?) else {
            return Ok(None);
        };
        let addresses = outputs.addresses();
        let handed = guarded(py, || {
            // SAFETY: inputs were checked and belong to the caller; everything else comes from torch's allocator, which
            // knows on which stream it is used: torch's current one, as callers say.
            unsafe { self.runnable.run(on, &given, &addresses, arena) }.map_err(failed)
        })?;
        outputs.take(self, handed);
        let objects = outputs.objects(py)?;
        let Some(returns) = &self.returns else {
            return PyTuple::new(py, objects).map(Some);
        };
        let mut returned = Vec::with_capacity(returns.len());
        for at in returns {
            returned.push(match at {
                None => py.None().into_bound(py),
                Some(at) if *at < 0 => inputs.get_item(!at as usize)?,
                Some(at) => objects[*at as usize].clone(),
            });
        }
        PyTuple::new(py, returned).map(Some)
    }

    /// Memory of the values in between for a stream. Recordings of the user's get memory of their own, which torch keeps
    /// for their replays.
    fn arena(&self, py: Python<'_>, stream: usize, capturing: bool) -> PyResult<(u64, Option<Py<PyAny>>)> {
        if self.runnable.arena_bytes() == 0 {
            return Ok((0, None));
        }
        if capturing {
            let (object, address) = self.new_arena(py)?;
            return Ok((address, Some(object)));
        }
        // Torch may let go of the GIL while it frees or allocates; whoever takes it then must not wait for this with it.
        let mut arenas = (self.arenas.lock_py_attached(py)).unwrap_or_else(PoisonError::into_inner);
        if let Some((_, address)) = arenas.get(&stream) {
            return Ok((*address, None));
        }
        if arenas.len() >= STREAMS {
            arenas.clear();
        }
        let (object, address) = self.new_arena(py)?;
        arenas.insert(stream, (object, address));
        Ok((address, None))
    }

    /// Memory of the values in between, and where it is.
    fn new_arena(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, u64)> {
        let bytes = self.runnable.arena_bytes() as i64;
        let fresh = self.signature.exchange.allocate(DType::U8, &[bytes], Some(self.gpu))?;
        let address = fresh.data() as u64;
        Ok((fresh.into_object(py)?.unbind(), address))
    }
}
