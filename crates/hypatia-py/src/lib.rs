//! Python binding: converts, calls, maps errors. Graphs, options and reports cross as JSON.

mod call;
mod cuda;
mod cuda_plan;
mod devices;
mod logging;
mod plan;
mod results;
mod store;
mod tensor;
mod tuning;
mod watch;
mod weights;

use std::panic::{AssertUnwindSafe, catch_unwind};

use hypatia_core::cost::Target;
use hypatia_core::emit;
use hypatia_core::ir::captured::Captured;
use hypatia_core::ir::kept::Kept;
use hypatia_core::ir::program::Program;
use hypatia_core::ir::{import, text};
use hypatia_core::rules::{Numerics, soundness};
use hypatia_core::{Optimized, Options, report};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};

use crate::logging::logged;

create_exception!(
    _native,
    HypatiaError,
    PyRuntimeError,
    "The compiler could not do what was asked."
);

fn failed(e: impl std::fmt::Display) -> PyErr {
    HypatiaError::new_err(e.to_string())
}

fn json(value: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(failed)
}

/// Runs Rust code without the GIL; a panic becomes an exception.
fn guarded<T: Send>(py: Python<'_>, f: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    py.detach(|| caught(f))
}

/// Runs Rust code; a panic becomes an exception.
fn caught<T>(f: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let said = (panic.downcast_ref::<String>().map(String::as_str)).or_else(|| panic.downcast_ref().copied());
        let said = said.unwrap_or("no reason given");
        Err(failed(format!("internal error: the compiler panicked: {said}")))
    })
}

/// A target that ships with the compiler, by its name, or the numbers of one that was measured.
#[derive(Deserialize)]
#[serde(untagged)]
enum PyTarget {
    Named(String),
    Measured(Target),
}

impl PyTarget {
    fn target(&self) -> PyResult<Target> {
        match self {
            PyTarget::Named(name) => {
                Target::named(name).ok_or_else(|| PyValueError::new_err(format!("unknown target '{name}'")))
            }
            PyTarget::Measured(target) if target.is_sound() => Ok(target.clone()),
            PyTarget::Measured(target) => Err(PyValueError::new_err(format!(
                "the rates of target '{}' must be positive numbers",
                target.name
            ))),
        }
    }
}

/// Options as they come from Python.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PyOptions {
    target: PyTarget,
    node_limit: usize,
    numerics: String,
    disabled_rules: Vec<String>,
    ilp_deadline_ms: u64,
    proof: bool,
    #[serde(default)]
    planted: Vec<String>,
    #[serde(default)]
    random_costs: Option<u64>,
}

impl PyOptions {
    fn options(&self) -> PyResult<Options> {
        let mut options = Options {
            target: self.target.target()?,
            proof: self.proof,
            planted: self.planted.clone(),
            random_costs: self.random_costs,
            ..Options::default()
        };
        options.limits.nodes = self.node_limit;
        options.limits.without.clone_from(&self.disabled_rules);
        options.limits.numerics = match self.numerics.as_str() {
            "exact" => Numerics::Exact,
            "wider" => Numerics::Wider,
            "reassoc" => Numerics::Reassoc,
            "approx" => Numerics::Approx,
            other => return Err(PyValueError::new_err(format!("unknown numerics class '{other}'"))),
        };
        options.extract.use_ilp = self.ilp_deadline_ms > 0;
        options.extract.ilp_deadline = std::time::Duration::from_millis(self.ilp_deadline_ms);
        Ok(options)
    }
}

/// An optimized program.
#[pyclass(frozen, module = "hypatia._native")]
struct Optimization {
    optimized: Optimized,
    results: usize,
}

#[pymethods]
impl Optimization {
    /// The program as calls into torch, as JSON.
    fn emission(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || {
            let o = &self.optimized;
            let e = emit::emit(&o.output, self.results, &|id| o.weights[usize::from(id)]).map_err(failed)?;
            json(&e)
        })
    }

    /// What was done, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || json(&self.optimized.report()))
    }

    /// The program as a native plan; an error says why there is none. What it is for is JSON: values of symbols (`sizes`);
    /// for a training step that results may be inputs and views (`saved`), how tensors lie (`layouts`), and which masks are
    /// kept beside outputs (`keep`) or taken beside inputs (`masked`).
    fn plan(&self, py: Python<'_>, wish: &str) -> PyResult<plan::NativePlan> {
        logged(py, || {
            let wish = devices::wish(wish)?;
            let lowered = hypatia_runtime::lower::plan::lower(&self.optimized, self.results, &wish).map_err(failed)?;
            Ok(plan::NativePlan::new(lowered))
        })
    }

    /// The program in a form from which `kept_plan` makes plans, as JSON; none if it has no such form.
    fn kept(&self, py: Python<'_>) -> PyResult<Option<String>> {
        guarded(py, || {
            let kept = Kept::of(&self.optimized.output, &self.optimized.weights);
            kept.as_ref().map(json).transpose()
        })
    }

    /// The programs in and out as lists of nodes, as JSON.
    fn graphs(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || json(&self.optimized.graphs()))
    }

    /// The proof step by step, as JSON.
    fn steps(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || json(&self.optimized.steps().map_err(failed)?))
    }

    /// Both sides of the steps of the proof as calls into torch, and which steps these are, as JSON.
    fn step_emission(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || json(&self.optimized.emit_steps()))
    }

    /// The programs in and out as text.
    fn texts(&self, py: Python<'_>) -> PyResult<(String, String)> {
        guarded(py, || Ok(self.optimized.texts()))
    }

    /// Checks the proof again in float64 on random inputs; the result as JSON.
    fn replay(&self, py: Python<'_>, seed: u64, budget: f64) -> PyResult<String> {
        guarded(py, || match &self.optimized.proof {
            Some(proof) => json(&proof.replay(seed, budget).map_err(failed)?),
            None => Err(PyValueError::new_err(
                "no proof was kept: compile with options={'proof': True}",
            )),
        })
    }
}

/// Optimizes a captured graph.
#[pyfunction]
fn optimize(py: Python<'_>, graph: &str, options: &str) -> PyResult<Optimization> {
    logged(py, || {
        let options: PyOptions = serde_json::from_str(options).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let captured: Captured = serde_json::from_str(graph).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let program = import::import(&captured).map_err(failed)?;
        let mut options = options.options()?;
        options.limits.autograd = captured.autograd;
        let optimized = hypatia_core::optimize(&program, &options).map_err(failed)?;
        Ok(Optimization {
            optimized,
            results: captured.outputs.len(),
        })
    })
}

/// A program that was kept, over the captured graph that it came from.
#[pyclass(frozen, module = "hypatia._native")]
struct KeptProgram {
    program: Program,
    weights: Vec<bool>,
    results: usize,
    report: String,
}

#[pymethods]
impl KeptProgram {
    /// Reads what `Optimization.kept` and `Optimization.report` wrote; an error if it is anything else.
    #[new]
    fn new(py: Python<'_>, graph: &str, kept: &str, report: &str) -> PyResult<KeptProgram> {
        guarded(py, || {
            let captured: Captured = serde_json::from_str(graph).map_err(failed)?;
            let kept: Kept = serde_json::from_str(kept).map_err(failed)?;
            let report: report::Report = serde_json::from_str(report).map_err(failed)?;
            let (program, weights) = kept
                .program(&import::import(&captured).map_err(failed)?)
                .map_err(failed)?;
            Ok(KeptProgram {
                program,
                weights: weights.to_vec(),
                results: captured.outputs.len(),
                report: json(&report)?,
            })
        })
    }

    /// The program as calls into torch, as JSON.
    fn emission(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || {
            let weight = |id| self.weights[usize::from(id)];
            json(&emit::emit(&self.program, self.results, &weight).map_err(failed)?)
        })
    }

    /// What was done, as JSON.
    fn report(&self) -> &str {
        &self.report
    }

    /// The program as a native plan; see `Optimization.plan`.
    fn plan(&self, py: Python<'_>, wish: &str) -> PyResult<plan::NativePlan> {
        logged(py, || {
            let wish = devices::wish(wish)?;
            let lowered =
                hypatia_runtime::lower::plan::lower_program(&self.program, &self.weights, self.results, &wish);
            Ok(plan::NativePlan::new(lowered.map_err(failed)?))
        })
    }
}

/// The captured graph as a program in text form.
#[pyfunction]
fn program_text(py: Python<'_>, graph: &str) -> PyResult<String> {
    guarded(py, || {
        let captured: Captured = serde_json::from_str(graph).map_err(|e| PyValueError::new_err(e.to_string()))?;
        Ok(text::print(&import::import(&captured).map_err(failed)?))
    })
}

/// The table of ops, as JSON.
#[pyfunction]
fn ops(py: Python<'_>) -> PyResult<String> {
    guarded(py, || json(&report::op_docs()))
}

/// The table of rules, as JSON.
#[pyfunction]
fn rules(py: Python<'_>) -> PyResult<String> {
    guarded(py, || json(&report::rule_docs()))
}

/// Tries every rule on random programs, on all cores; what was seen of each, as JSON.
#[pyfunction]
fn check_rules(py: Python<'_>, seed: u64) -> PyResult<String> {
    guarded(py, || {
        let seen = soundness::reports(hypatia_core::rules::rules(), seed);
        let checked: Vec<Checked> = seen.iter().map(Checked::of).collect();
        json(&checked)
    })
}

/// What the soundness walk saw of a rule.
#[derive(Serialize)]
struct Checked {
    rule: &'static str,
    /// Programs on which it fired and was compared.
    fired: usize,
    failure: Option<String>,
}

impl Checked {
    fn of(report: &soundness::Report) -> Checked {
        Checked {
            rule: report.rule,
            fired: report.fired.values().sum(),
            failure: report.findings.first().map(|f| format!("{:?}: {}", f.kind, f.detail)),
        }
    }
}

/// Both sides of rules on random programs, at most `count` for each form: as calls into torch, as JSON.
#[pyfunction]
fn rule_pairs(py: Python<'_>, seed: u64, count: usize) -> PyResult<String> {
    guarded(py, || {
        let of = |rule| soundness::pairs(rule, count, seed).into_iter().map(move |p| (rule, p));
        let pairs = hypatia_core::rules::rules().iter().flat_map(of);
        json(
            &pairs
                .filter_map(|(rule, pair)| Sides::of(rule, pair))
                .collect::<Vec<_>>(),
        )
    })
}

/// Two expressions that a rule says are equal.
#[derive(Serialize)]
struct Sides {
    rule: &'static str,
    numerics: Numerics,
    gradient: bool,
    guards: &'static [&'static str],
    /// Dtype, shape, and whether the input is to be above zero.
    inputs: Vec<(&'static str, Vec<i64>, bool)>,
    /// Its results are the two sides.
    emission: emit::Emission,
    text: [String; 2],
}

impl Sides {
    fn of(rule: &hypatia_core::rules::Rule, mut pair: soundness::Pair) -> Option<Sides> {
        let terms = &mut pair.terms;
        let mut inputs = vec![];
        for (input, positive) in terms.leaves.inputs.iter().zip(&pair.positive) {
            let t = input.ty.tensor()?;
            let shape = t.shape.iter().map(|d| d.known()).collect::<Option<_>>()?;
            inputs.push((t.dtype.torch_name(), shape, *positive));
        }
        for i in 0..terms.nodes().len() {
            if let hypatia_core::ir::node::Op::Input(k) = terms.node(i.into()).op {
                terms.origin.insert(i.into(), k);
            }
        }
        let side = |root| {
            let mut side = terms.clone();
            side.root = root;
            text::print(&side).replace('\n', " ")
        };
        let (emission, emitted) = emit::emit_pairs(terms, &[(pair.before, pair.after)]);
        (emitted.len() == 1).then(|| Sides {
            rule: rule.name,
            numerics: rule.numerics,
            gradient: rule.gradient,
            guards: rule.guards,
            inputs,
            emission,
            text: [side(pair.before), side(pair.after)],
        })
    }
}

/// Runs kernels on torch's own threads, if this libtorch lends them; whether it does.
#[pyfunction]
fn borrow_threads(py: Python<'_>, libtorch: std::path::PathBuf) -> PyResult<bool> {
    guarded(py, || {
        let found = hypatia_runtime::torch::parallel_for(&libtorch);
        if let Some(run) = found {
            // SAFETY: torch is never unloaded, and its loop returns after all its parts did.
            unsafe { hypatia_runtime::pool::Pool::borrow_threads(run) };
        }
        Ok(found.is_some())
    })
}

/// Names of the targets that the cost model knows.
#[pyfunction]
fn targets() -> Vec<String> {
    Target::all().map(|t| t.name).into()
}

/// The numbers of a target, as JSON: what `optimize` takes in place of its name.
#[pyfunction]
fn target_numbers(name: &str) -> PyResult<String> {
    caught(|| json(&PyTarget::Named(name.into()).target()?))
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::start();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("HypatiaError", m.py().get_type::<HypatiaError>())?;
    m.add_class::<Optimization>()?;
    m.add_class::<KeptProgram>()?;
    m.add_class::<plan::NativePlan>()?;
    m.add_class::<plan::BoundPlan>()?;
    m.add_class::<cuda_plan::BoundCudaPlan>()?;
    m.add_class::<cuda_plan::CudaPlanRest>()?;
    m.add_class::<watch::Watch>()?;
    m.add_class::<store::Store>()?;
    m.add_function(wrap_pyfunction!(optimize, m)?)?;
    m.add_function(wrap_pyfunction!(program_text, m)?)?;
    m.add_function(wrap_pyfunction!(ops, m)?)?;
    m.add_function(wrap_pyfunction!(rules, m)?)?;
    m.add_function(wrap_pyfunction!(check_rules, m)?)?;
    m.add_function(wrap_pyfunction!(rule_pairs, m)?)?;
    m.add_function(wrap_pyfunction!(targets, m)?)?;
    m.add_function(wrap_pyfunction!(target_numbers, m)?)?;
    m.add_function(wrap_pyfunction!(weights::weight_state, m)?)?;
    m.add_function(wrap_pyfunction!(borrow_threads, m)?)?;
    m.add_function(wrap_pyfunction!(tuning::tuning_folder, m)?)?;
    m.add_function(wrap_pyfunction!(tuning::tuning_entries, m)?)?;
    cuda::module(m)?;
    Ok(())
}
