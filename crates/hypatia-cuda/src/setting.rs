//! What choosing kernels depends on, and products by the algorithm that was chosen.

use std::collections::BTreeMap;

use hypatia_runtime::kernels::call::Call;
use hypatia_runtime::tuning::{Database, Entry, Key};

use crate::Result;
use crate::driver::{Device, Stream};
use crate::gemm::{Budget, Gemm, Launch, Problem, Scratch, Tuned, Verdict, compare, record_key, scratch_bytes, tune};

/// Gives memory that lives as long as the plan for the pieces of a weight, by the weight's address and in bytes; and
/// whether they are there already.
pub type Room<'a> = dyn FnMut(u64, usize) -> Result<(u64, bool)> + 'a;

/// What binding a plan depends on beside its constants.
pub struct Setting<'a> {
    /// The stream on which candidates are measured.
    pub stream: Stream,
    /// What was measured before.
    pub database: &'a Database,
    /// What measuring one product may cost.
    pub budget: Budget,
    /// fp32 products may be rounded to 10 bits, as torch does where it is told to.
    pub tf32: bool,
    /// fp32 products may be made of products of bf16, where these are as exact.
    pub split: bool,
    /// Gives device memory for measuring, which stays until the plan is bound.
    pub memory: &'a mut dyn FnMut(usize) -> Result<u64>,
    /// Gives device memory for other forms of weights.
    pub room: &'a mut Room<'a>,
    /// Makes calls into torch, of what they are as text.
    pub torch: &'a mut dyn FnMut(&str) -> Result<Box<dyn Call>>,
}

/// What measurements of a product are kept under. Kernels of ours have a version: those of others do not count.
pub(crate) fn key_of(device: &Device, problem: &Problem, op: &str, version: Option<u32>) -> Result<Key> {
    let version = version.map_or_else(String::new, |v| format!(" {v}"));
    Ok(Key {
        device: device.name().into(),
        libraries: record_key(device, problem)? + &version,
        op: op.into(),
        shape: vec![problem.batch, problem.m, problem.n, problem.k],
        dtype: problem.input.name().into(),
        layout: String::new(),
        threads: 0,
    })
}

/// A product by the algorithm that the database knows, or that is found now.
///
/// # Safety
/// `memory` gives memory of the device.
pub(crate) unsafe fn tuned(
    device: &'static Device,
    problem: Problem,
    setting: &mut Setting<'_>,
) -> Result<(Gemm, f64)> {
    let key = key_of(device, &problem, "gemm", None)?;
    let known = setting.database.get(&key);
    let known = known.and_then(|e| serde_json::from_slice::<Tuned>(&e.data).ok());
    if let Some(tuned) = known
        && let Ok(gemm) = Gemm::new(device, problem, &tuned)
    {
        return Ok((gemm, tuned.microseconds));
    }
    let bytes = scratch_bytes(&problem, &setting.budget);
    let scratch = Scratch {
        address: (setting.memory)(bytes)?,
        bytes,
    };
    // SAFETY: promised by the caller.
    let found = unsafe { tune(&problem, setting.stream, scratch, &setting.budget)? };
    let times = [("best".to_string(), found.best.microseconds)].into();
    let data = serde_json::to_vec(&found.best).unwrap_or_default();
    let chosen = format!("{:x?}", found.best.algorithm);
    setting.database.put(key, Entry { chosen, times, data });
    Ok((Gemm::new(device, problem, &found.best)?, found.best.microseconds))
}

/// Microseconds of ways of ours whose results are right, by name. They may work with so many bytes.
///
/// # Safety
/// The setting's memory is the device's.
pub(crate) unsafe fn times(
    problem: &Problem,
    ways: &[(String, &dyn Launch)],
    workspace: usize,
    setting: &mut Setting<'_>,
) -> Result<BTreeMap<String, f64>> {
    let budget = Budget {
        workspace: workspace.max(setting.budget.workspace),
        ..setting.budget
    };
    let bytes = scratch_bytes(problem, &budget);
    let scratch = Scratch {
        address: (setting.memory)(bytes)?,
        bytes,
    };
    let all: Vec<&dyn Launch> = ways.iter().map(|(_, way)| *way).collect();
    // SAFETY: promised by the caller.
    let verdicts = unsafe { compare(problem, setting.stream, scratch, &budget, &all)? };
    let mut times = BTreeMap::new();
    for ((name, _), verdict) in ways.iter().zip(verdicts) {
        match verdict {
            Verdict::Right(took) => {
                times.insert(name.clone(), took);
            }
            other => tracing::info!("{problem}: a kernel of ours, {name}: {other:?}; it is not used"),
        }
    }
    Ok(times)
}
