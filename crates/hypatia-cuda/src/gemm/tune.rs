//! Which algorithm is the fastest among those that are right.
//!
//! The library's heuristic proposes. Each proposal computes the product of random operands, and only if that is right
//! does its time count: some algorithms of the library are wrong for some problems.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::describe::{Described, Preference};
use super::reference::{Places, Reference};
use super::{Problem, Run, handle};
use crate::driver::{Event, Graph, Stream};
use crate::sys::{self, Blas, Candidate};
use crate::{Error, Result};

/// What tuning may cost.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Proposals to ask for.
    pub candidates: usize,
    /// After this, the best one so far is taken, as soon as there is one.
    pub deadline: Duration,
    /// Bytes that an algorithm may work with.
    pub workspace: usize,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            candidates: 8,
            deadline: Duration::from_millis(300),
            workspace: 32 << 20,
        }
    }
}

/// Device memory that nobody else uses while tuning.
#[derive(Debug, Clone, Copy)]
pub struct Scratch {
    /// Where it starts.
    pub address: u64,
    /// How long it is.
    pub bytes: usize,
}

/// An algorithm to be kept: the same library on the same kind of device can use it again for the same problem.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// The library's own description.
    pub algorithm: [u64; 8],
    /// Bytes that it works with.
    pub workspace: usize,
    /// What a run took.
    pub microseconds: f64,
}

/// What became of a proposal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Verdict {
    /// It is right, and takes this many microseconds.
    Right(f64),
    /// It is wrong by this multiple of what is allowed.
    Wrong(f32),
    /// It could not be run.
    Failed(String),
}

/// A proposal and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trial {
    /// The library's own description.
    pub algorithm: [u64; 8],
    /// Bytes that it works with.
    pub workspace: usize,
    /// What became of it.
    pub verdict: Verdict,
}

/// The outcome of tuning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tuning {
    /// The fastest that is right.
    pub best: Tuned,
    /// All that were tried, in the library's order.
    pub trials: Vec<Trial>,
}

/// Bytes of memory that tuning a problem needs.
pub fn scratch_bytes(problem: &Problem, budget: &Budget) -> usize {
    // The start may be anywhere.
    Places::from(problem, 0, budget.workspace).end as usize + 256
}

/// Launches that one measurement holds, recorded as a graph, so that the host does not slow them down.
const REPEATS: usize = 16;
/// Products that take longer than this, in microseconds, are launched one by one.
const LONG: f64 = 100.0;

/// Looks for the best algorithm.
///
/// # Safety
/// The scratch memory must be the device's, and nobody else may use it until this returns.
pub unsafe fn tune(problem: &Problem, stream: Stream, scratch: Scratch, budget: &Budget) -> Result<Tuning> {
    let began = Instant::now();
    if scratch.bytes < scratch_bytes(problem, budget) {
        return Err(Error::unsupported(format!(
            "{problem}: tuning needs {} bytes and was given {}",
            scratch_bytes(problem, budget),
            scratch.bytes
        )));
    }
    let _current = stream.device().enter()?;
    if stream.is_capturing()? {
        return Err(Error::unsupported(format!(
            "{problem}: cannot be tuned while a graph is captured"
        )));
    }
    let mut described = Described::new(problem)?;
    let places = Places::from(problem, scratch.address, budget.workspace);
    described.point(&places.operands)?;
    let proposals = propose(problem, &described, stream, budget)?;
    let reference = Reference::new(problem, stream, places)?;
    let run = Run {
        handle: handle(stream.device())?,
        described: &described,
        residual: problem.residual.is_some(),
    };
    // SAFETY: the scratch memory is ours and long enough.
    unsafe { reference.draw()? };
    let mut trials: Vec<Trial> = vec![];
    let mut best: Option<Tuned> = None;
    for candidate in &proposals {
        if best.is_some() && began.elapsed() > budget.deadline {
            break;
        }
        let limit = best.map_or(f64::INFINITY, |b| b.microseconds);
        // SAFETY: as above.
        let verdict = unsafe { attempt(&run, &reference, candidate, stream, &places, limit) }
            .unwrap_or_else(|e| Verdict::Failed(e.to_string()));
        if let Verdict::Right(microseconds) = verdict
            && microseconds < limit
        {
            best = Some(Tuned {
                algorithm: candidate.algorithm.data,
                workspace: candidate.workspace,
                microseconds,
            });
        }
        if let Verdict::Wrong(by) = verdict {
            tracing::info!(
                "{problem}: an algorithm of cuBLASLt is wrong by {by} times what is allowed; it is not used"
            );
        }
        trials.push(Trial {
            algorithm: candidate.algorithm.data,
            workspace: candidate.workspace,
            verdict,
        });
    }
    match best {
        Some(best) => Ok(Tuning { best, trials }),
        None => Err(Error::unsupported(format!(
            "{problem}: none of {} algorithms is right: {:?}",
            trials.len(),
            trials.iter().map(|t| &t.verdict).collect::<Vec<_>>()
        ))),
    }
}

fn propose(problem: &Problem, described: &Described, stream: Stream, budget: &Budget) -> Result<Vec<Candidate>> {
    let preference = Preference::new(problem, budget.workspace)?;
    let mut found = vec![Candidate::default(); budget.candidates.max(1)];
    let mut count = 0;
    let [a, b, c, d] = described.layouts();
    // SAFETY: descriptors that live, and room for as many as are asked for.
    let asked = unsafe {
        Blas::get()?.cublasLtMatmulAlgoGetHeuristic(
            handle(stream.device())?,
            described.desc(),
            a,
            b,
            c,
            d,
            preference.0,
            found.len() as i32,
            found.as_mut_ptr(),
            &mut count,
        )
    };
    match asked {
        Err(Error::Call {
            code: sys::BLAS_NOT_SUPPORTED,
            ..
        }) => count = 0,
        other => other?,
    }
    found.truncate(count.unsigned_abs() as usize);
    found.retain(|f| f.state == 0 && f.workspace <= budget.workspace);
    if found.is_empty() {
        return Err(Error::unsupported(format!(
            "{problem}: cuBLASLt has no algorithm for it"
        )));
    }
    Ok(found)
}

/// Runs a proposal, compares and times it.
///
/// # Safety
/// The places must be the caller's alone.
unsafe fn attempt(
    run: &Run,
    reference: &Reference,
    candidate: &Candidate,
    stream: Stream,
    places: &Places,
    limit: f64,
) -> Result<Verdict> {
    let workspace = candidate.workspace;
    let device = stream.device();
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    // SAFETY: promised by the caller.
    let once = |stream| unsafe { run.launch(&candidate.algorithm, workspace, stream, &places.operands) };
    // SAFETY: as above.
    unsafe {
        reference.poison()?;
        once(stream)?;
        let worst = reference.judge()?;
        if worst > 1.0 {
            return Ok(Verdict::Wrong(worst));
        }
    }
    start.record(stream)?;
    once(stream)?;
    end.record(stream)?;
    let rough = end.since(&start)?;
    if rough > LONG {
        if rough > 2.0 * limit {
            return Ok(Verdict::Right(rough));
        }
        let mut least = rough;
        for _ in 0..3 {
            start.record(stream)?;
            once(stream)?;
            end.record(stream)?;
            least = least.min(end.since(&start)?);
        }
        return Ok(Verdict::Right(least));
    }
    let graph = Graph::record(device, |stream| (0..REPEATS).try_for_each(|_| once(stream)))?;
    let mut graph = graph.instantiate()?;
    graph.upload(stream)?;
    let mut least = f64::INFINITY;
    for _ in 0..4 {
        start.record(stream)?;
        // SAFETY: what was recorded uses the places alone.
        unsafe { graph.launch(stream)? };
        end.record(stream)?;
        least = least.min(end.since(&start)? / REPEATS as f64);
    }
    Ok(Verdict::Right(least))
}
