//! Native plans for Python: bound once to their constants, then one call runs a whole graph.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hypatia_core::ty::DType;
use hypatia_cuda::plan::late;
use hypatia_runtime::device::Device;
use hypatia_runtime::kernels::call::Call;
use hypatia_runtime::lower::plan::{Lowered, Returned, TorchCall};
use hypatia_runtime::plan::{Cpu, Memory, Plan, Runnable, Setting, Value};
use hypatia_runtime::torch::{Argument, DispatcherCall, Shim};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use serde::{Deserialize, Serialize};

use crate::call::PythonCall;
use crate::logging::logged;
use crate::results::Spares;
use crate::tensor::{Exchange, Fresh, is_lazy};
use crate::weights::{Watched, all_hold};
use crate::{caught, failed, guarded, json};

/// Time for measuring the kernels of one plan.
const TUNING: Duration = Duration::from_millis(500);

/// A plan that waits for its constants.
#[pyclass(frozen, module = "hypatia._native")]
pub struct NativePlan {
    plan: Arc<Plan>,
    inputs: Vec<usize>,
    constants: Vec<usize>,
    orders: Vec<Option<Vec<usize>>>,
    calls: Vec<TorchCall>,
    results: Vec<Returned>,
    keeps: Vec<usize>,
    masks: Vec<usize>,
    changes: Vec<usize>,
}

impl NativePlan {
    pub fn new(lowered: Lowered) -> NativePlan {
        NativePlan {
            plan: Arc::new(lowered.plan),
            inputs: lowered.inputs.into_iter().map(usize::from).collect(),
            constants: lowered.constants.into_iter().map(usize::from).collect(),
            orders: lowered.orders,
            calls: lowered.calls,
            results: lowered.results,
            keeps: lowered.keeps,
            masks: lowered.masks,
            changes: lowered.changes,
        }
    }

    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The first of the steps that a recording leaves to its calls, if it leaves some. Nothing is changed before a call
    /// can fail for want of memory.
    pub fn late(&self) -> Option<usize> {
        self.changes.is_empty().then(|| late(&self.plan)).flatten()
    }

    /// What it takes, as a caller sees it, what it makes, and what it stands on.
    pub fn signature(&self, watched: Vec<Watched>, exchange: Exchange, gpu: Option<u32>) -> Signature {
        let inputs = self.plan.inputs.iter().map(|id| Expected::seen(&self.plan, *id));
        let outputs = self.plan.outputs.iter().map(|id| Expected::of(&self.plan.values[*id]));
        Signature {
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            watched,
            exchange,
            gpu,
        }
    }

    /// Where constants are, if they are what the plan was made for.
    pub fn constant_memories(
        &self,
        constants: &Bound<'_, PyList>,
        exchange: Exchange,
        gpu: Option<u32>,
    ) -> PyResult<Vec<Memory>> {
        if constants.len() != self.plan.constants.len() {
            return Err(PyValueError::new_err("another number of constants"));
        }
        let mut memories = vec![];
        for (object, id) in constants.iter().zip(&self.plan.constants) {
            let expected = Expected::of(&self.plan.values[*id]);
            let tensor = exchange.borrow(&object)?;
            if !tensor.is(expected.dtype, &expected.shape, gpu) {
                return Err(PyValueError::new_err(format!(
                    "a constant is no dense {} on the plan's device",
                    expected.text()
                )));
            }
            memories.push(Memory(tensor.data()));
        }
        Ok(memories)
    }
}

#[derive(Serialize)]
struct Description<'a> {
    inputs: &'a [usize],
    constants: &'a [usize],
    orders: &'a [Option<Vec<usize>>],
    steps: Vec<String>,
    /// Bytes that each step reads and writes.
    moved: Vec<usize>,
    /// Multiplications with additions of each.
    multiplications: Vec<f64>,
    /// The kind of each: linear, region and so on.
    kinds: Vec<&'static str>,
    /// Of each: operations on vector units, elements written, rows and runs, elements reached one by one,
    /// bytes of constants.
    demands: Vec<[f64; 5]>,
    /// What each reads and writes, in words.
    sizes: Vec<String>,
    calls: &'a [TorchCall],
    results: &'a [Returned],
    keeps: &'a [usize],
    masks: &'a [usize],
    changes: &'a [usize],
    late: Option<usize>,
}

/// A dense tensor that a plan takes or makes.
#[derive(Clone)]
pub struct Expected {
    pub dtype: DType,
    pub shape: Vec<i64>,
    /// Where it is not dense.
    strides: Option<Vec<i64>>,
    bytes: usize,
}

impl Expected {
    pub fn of(value: &Value) -> Expected {
        Expected {
            dtype: value.dtype,
            shape: value.shape.iter().map(|s| *s as i64).collect(),
            strides: None,
            bytes: value.bytes(),
        }
    }

    /// A value of a plan as a caller sees it.
    pub fn seen(plan: &Plan, id: usize) -> Expected {
        let mut expected = Expected::of(&plan.values[id]);
        if let Some((shape, strides)) = plan.seen.get(&id) {
            expected.shape = shape.iter().map(|s| *s as i64).collect();
            expected.strides = Some(strides.iter().map(|s| *s as i64).collect());
        }
        expected
    }

    /// A new tensor in the CPU's memory, or in that of a GPU.
    pub fn allocate(&self, exchange: Exchange, gpu: Option<u32>) -> PyResult<Fresh> {
        exchange.allocate(self.dtype, &self.shape, gpu)
    }

    fn text(&self) -> String {
        let strides = self
            .strides
            .as_ref()
            .map_or_else(String::new, |s| format!(" with strides {s:?}"));
        format!("{}{:?}{strides}", self.dtype.torch_name(), self.shape)
    }
}

#[pymethods]
impl NativePlan {
    /// Which nodes of the program are inputs and constants, and what the steps are, as JSON.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || {
            json(&Description {
                inputs: &self.inputs,
                constants: &self.constants,
                orders: &self.orders,
                steps: self.plan.steps.iter().map(|s| s.name()).collect(),
                moved: self.plan.steps.iter().map(|s| self.plan.moved(s)).collect(),
                multiplications: (self.plan.steps.iter())
                    .map(|s| s.multiplications(&self.plan.values))
                    .collect(),
                kinds: self.plan.steps.iter().map(|s| s.kind()).collect(),
                demands: (self.plan.steps.iter().map(|s| self.plan.demand(s)))
                    .map(|d| [d.vector, d.results, d.runs, d.apart, d.constants])
                    .collect(),
                sizes: self.plan.steps.iter().map(|s| self.plan.sizes(s)).collect(),
                calls: &self.calls,
                results: &self.results,
                keeps: &self.keeps,
                masks: &self.masks,
                changes: &self.changes,
                late: self.late(),
            })
        })
    }

    /// How many outputs it has.
    fn outputs(&self) -> usize {
        self.plan.outputs.len()
    }

    /// Packs the constants. Kernels are chosen by what was measured, now or before; copies of weights take at most
    /// `most` bytes, and are shared with a plan that is `like` this one; kinds in `without` are not used. The plan does not run any more once one of the watched tensors was changed or lies
    /// elsewhere. A call is text, for libtorch's dispatcher, or a Python function.
    #[pyo3(signature = (constants, watched, calls, libtorch, threads, most = None, without = vec![], like = None))]
    #[allow(clippy::too_many_arguments)]
    fn bind(
        &self,
        py: Python<'_>,
        constants: &Bound<'_, PyList>,
        watched: &Bound<'_, PyList>,
        calls: &Bound<'_, PyList>,
        libtorch: PathBuf,
        threads: usize,
        most: Option<usize>,
        without: Vec<String>,
        like: Option<PyRef<'_, BoundPlan>>,
    ) -> PyResult<BoundPlan> {
        caught(|| {
            let exchange = Exchange::get(py)?;
            let memories = self.constant_memories(constants, exchange, None)?;
            let (calls, watched) = calls_and_watched(calls, watched, exchange, &libtorch)?;
            let like = like.as_ref().map(|p| &p.runnable);
            let runnable = logged(py, || {
                let database = crate::tuning::database();
                let setting = Setting {
                    threads,
                    database: &database,
                    limit: TUNING,
                    most,
                    without: &without,
                    like,
                };
                // SAFETY: the tensors were checked; the list keeps them alive, and `kept` those that are read later.
                let runnable = unsafe { Cpu.bind(self.plan.clone(), &memories, calls, setting) }.map_err(failed)?;
                database.save();
                Ok(runnable)
            })?;
            let mut kept = vec![];
            for at in runnable.kept() {
                kept.push(constants.get_item(at)?.unbind());
            }
            Ok(BoundPlan {
                signature: self.signature(watched, exchange, None),
                runnable,
                spares: Spares::new(self.plan.outputs.len()),
                _kept: kept,
            })
        })
    }
}

/// A call as Python describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    op: String,
    overload: String,
    arguments: Vec<Argument>,
    returns: usize,
}

type Calls = Vec<Box<dyn Call>>;

/// The calls of a plan, and the tensors that it stands on as they are now. That is before they are read: what another
/// thread changes meanwhile is noticed by the first call.
pub fn calls_and_watched(
    calls: &Bound<'_, PyList>,
    watched: &Bound<'_, PyList>,
    exchange: Exchange,
    libtorch: &Path,
) -> PyResult<(Calls, Vec<Watched>)> {
    let calls = calls.iter().map(|c| call(&c, exchange, libtorch));
    let watched = watched.iter().map(|t| Watched::new(&t));
    Ok((calls.collect::<PyResult<_>>()?, watched.collect::<PyResult<_>>()?))
}

/// New tensors as torch's.
pub fn objects<'py>(py: Python<'py>, fresh: Vec<Fresh>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    fresh.into_iter().map(|f| f.into_object(py)).collect()
}

fn call(given: &Bound<'_, PyAny>, exchange: Exchange, libtorch: &Path) -> PyResult<Box<dyn Call>> {
    let Ok(text) = given.extract::<String>() else {
        return Ok(Box::new(PythonCall::new(given.clone().unbind(), exchange)));
    };
    dispatched(&text, libtorch)
}

/// A call through libtorch's dispatcher.
pub fn dispatched(text: &str, libtorch: &Path) -> PyResult<Box<dyn Call>> {
    let d: Described = serde_json::from_str(text).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let shim = Shim::get(libtorch).map_err(failed)?;
    let call = DispatcherCall::new(shim, &d.op, &d.overload, d.arguments, d.returns).map_err(failed)?;
    Ok(Box::new(call))
}

/// What calls of a plan are checked against.
pub struct Signature {
    inputs: Vec<Expected>,
    pub outputs: Vec<Expected>,
    /// The tensors that it stands on.
    watched: Vec<Watched>,
    pub exchange: Exchange,
    /// The GPU on which inputs are, if they are on one.
    gpu: Option<u32>,
}

impl Signature {
    /// Whether the watched tensors are as they were.
    pub fn current(&self, py: Python<'_>) -> PyResult<bool> {
        all_hold(&self.watched, py)
    }

    /// Where inputs are, if they are what the plan was made for and no watched tensor changed; what has no plain memory is
    /// no error here: torch knows what to do with it.
    pub fn given(&self, inputs: &Bound<'_, PyTuple>) -> PyResult<Option<Vec<Memory>>> {
        if inputs.len() != self.inputs.len() || !self.current(inputs.py())? {
            return Ok(None);
        }
        let mut given = Vec::with_capacity(self.inputs.len());
        for (object, expected) in inputs.iter_borrowed().zip(&self.inputs) {
            let Some(memory) = self.memory(&object, expected)? else {
                return Ok(None);
            };
            given.push(memory);
        }
        Ok(Some(given))
    }

    /// Where an input is, if it is a tensor of this dtype that lies so.
    fn memory(&self, object: &Bound<'_, PyAny>, expected: &Expected) -> PyResult<Option<Memory>> {
        let Ok(tensor) = self.exchange.borrow(object) else {
            return Ok(None);
        };
        let lies = match &expected.strides {
            None => tensor.is(expected.dtype, &expected.shape, self.gpu),
            Some(strides) => tensor.lies(expected.dtype, &expected.shape, strides, self.gpu),
        };
        Ok((lies && !is_lazy(object, expected.dtype)?).then(|| Memory(tensor.data())))
    }

    /// What is wrong with inputs on which a call returns none, if it is something that is checked here.
    pub fn refusal(&self, inputs: &Bound<'_, PyTuple>) -> PyResult<Option<String>> {
        if !self.current(inputs.py())? {
            return Ok(Some("a weight changed".into()));
        }
        let expected = self.inputs.len();
        if inputs.len() != expected {
            return Ok(Some(format!("it takes {expected} inputs, not {}", inputs.len())));
        }
        for (at, (object, one)) in inputs.iter().zip(&self.inputs).enumerate() {
            if self.memory(&object, one)?.is_none() {
                let text = one.text();
                return Ok(Some(format!("input {at} is not {text} as the plan was made for")));
            }
        }
        Ok(None)
    }
}

/// A plan with its constants.
#[pyclass(frozen, module = "hypatia._native")]
pub struct BoundPlan {
    runnable: Runnable,
    signature: Signature,
    spares: Arc<Spares>,
    /// Constants that steps read where they are.
    _kept: Vec<Py<PyAny>>,
}

#[pymethods]
impl BoundPlan {
    /// Whether the watched tensors are as they were.
    fn current(&self, py: Python<'_>) -> PyResult<bool> {
        caught(|| self.signature.current(py))
    }

    /// Runs the plan on dense tensors of the shapes it was made for; none if an input is another one, or if a
    /// watched tensor changed.
    #[pyo3(signature = (threads, *inputs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        threads: usize,
        inputs: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        caught(|| self.run(py, threads, inputs))
    }

    /// Seconds of each step of a call; none as a call.
    #[pyo3(signature = (threads, *inputs))]
    fn step_times(&self, py: Python<'_>, threads: usize, inputs: &Bound<'_, PyTuple>) -> PyResult<Option<Vec<f64>>> {
        caught(|| {
            let Some(given) = self.signature.given(inputs)? else {
                return Ok(None);
            };
            let exchange = self.signature.exchange;
            let outputs = self.signature.outputs.iter();
            let fresh = outputs
                .map(|e| e.allocate(exchange, None))
                .collect::<PyResult<Vec<_>>>()?;
            let results: Vec<Memory> = fresh.iter().map(|f| Memory(f.data())).collect();
            guarded(py, || {
                // SAFETY: inputs were checked and are kept alive by the tuple; results are new.
                unsafe { self.runnable.run_timed(threads, &given, &results) }.map_err(failed)
            })
            .map(Some)
        })
    }

    /// Why a call returns none on these inputs.
    #[pyo3(signature = (*inputs))]
    fn refusal(&self, inputs: &Bound<'_, PyTuple>) -> PyResult<String> {
        let refusal = caught(|| self.signature.refusal(inputs))?;
        Ok(refusal.unwrap_or_else(|| "it is not known why".into()))
    }

    /// How each linear layer is computed, in the order of the steps.
    fn kinds(&self) -> Vec<&'static str> {
        self.runnable.kinds()
    }

    /// Bytes of the values in between, and of packed constants.
    fn bytes(&self) -> (usize, usize) {
        (self.runnable.arena_bytes(), self.runnable.packed_bytes())
    }
}

impl BoundPlan {
    fn run<'py>(
        &self,
        py: Python<'py>,
        threads: usize,
        inputs: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(given) = self.signature.given(inputs)? else {
            return Ok(None);
        };
        let (outputs, exchange) = (&self.signature.outputs, self.signature.exchange);
        let mut fresh = Vec::with_capacity(outputs.len());
        for expected in outputs {
            let bytes = expected.bytes;
            let again = exchange.reuse(expected.dtype, &expected.shape, bytes, &self.spares);
            fresh.push(match again {
                Some(tensor) => tensor,
                None => expected.allocate(exchange, None)?,
            });
        }
        let results: Vec<Memory> = fresh.iter().map(|f| Memory(f.data())).collect();
        guarded(py, || {
            // SAFETY: inputs were checked and are kept alive by the tuple; results are new.
            unsafe { Cpu.run(&self.runnable, threads, &given, &results) }.map_err(failed)
        })?;
        PyTuple::new(py, objects(py, fresh)?).map(Some)
    }
}
