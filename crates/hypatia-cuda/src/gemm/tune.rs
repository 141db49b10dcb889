//! Which algorithm is the fastest among those that are right.
//!
//! The library's heuristic proposes. Each proposal computes the product of random operands, and only if that is right
//! does its time count: some algorithms of the library are wrong for some problems.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::describe::{Described, Preference};
use super::reference::{Places, Reference};
use super::{Operands, Problem, Run, handle};
use crate::driver::{Entered, Event, Graph, Stream};
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
pub(super) const REPEATS: usize = 16;
/// Products that take longer than this, in microseconds, are launched one by one.
const LONG: f64 = 100.0;

/// Looks for the best algorithm.
///
/// # Safety
/// The scratch memory must be the device's, and nobody else may use it until this returns.
pub unsafe fn tune(problem: &Problem, stream: Stream, scratch: Scratch, budget: &Budget) -> Result<Tuning> {
    let began = Instant::now();
    let _current = ready(problem, stream, scratch, budget)?;
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
        let way = Proposed { run: &run, candidate };
        // SAFETY: as above.
        let verdict = unsafe { attempt(&way, &reference, stream, &places, limit) };
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

/// A way to compute a product.
pub trait Launch {
    /// Launches it, within [`Device::enter`](crate::driver::Device::enter).
    ///
    /// # Safety
    /// As of [`Gemm::launch`](super::Gemm::launch).
    unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()>;

    /// Whether it will be launched behind kernels of ours, and may begin before they are done: so it is timed.
    fn begins_early(&self) -> bool {
        false
    }
}

/// An algorithm of the library.
struct Proposed<'a> {
    run: &'a Run<'a>,
    candidate: &'a Candidate,
}

impl Launch for Proposed<'_> {
    unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        let Candidate {
            algorithm, workspace, ..
        } = self.candidate;
        // SAFETY: promised by the caller.
        unsafe { self.run.launch(algorithm, *workspace, stream, operands) }
    }
}

/// What becomes of ways that are not the library's, each judged and timed as its algorithms are.
///
/// # Safety
/// As of [`tune`]; they work with no more memory than the budget allows.
pub unsafe fn compare(
    problem: &Problem,
    stream: Stream,
    scratch: Scratch,
    budget: &Budget,
    ways: &[&dyn Launch],
) -> Result<Vec<Verdict>> {
    let _current = ready(problem, stream, scratch, budget)?;
    let places = Places::from(problem, scratch.address, budget.workspace);
    let reference = Reference::new(problem, stream, places)?;
    // SAFETY: promised by the caller; the memory is long enough.
    unsafe {
        reference.draw()?;
        let all = ways.iter();
        Ok(all
            .map(|way| attempt(*way, &reference, stream, &places, f64::INFINITY))
            .collect())
    }
}

/// Refuses what cannot be measured now; else the device is entered.
fn ready(problem: &Problem, stream: Stream, scratch: Scratch, budget: &Budget) -> Result<Entered> {
    if scratch.bytes < scratch_bytes(problem, budget) {
        return Err(Error::unsupported(format!(
            "{problem}: tuning needs {} bytes and was given {}",
            scratch_bytes(problem, budget),
            scratch.bytes
        )));
    }
    let current = stream.device().enter()?;
    if stream.is_capturing()? {
        return Err(Error::unsupported(format!(
            "{problem}: cannot be tuned while a graph is captured"
        )));
    }
    Ok(current)
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

/// Runs a way, compares and times it; why it could not be run, if so.
///
/// # Safety
/// The places must be the caller's alone.
unsafe fn attempt(way: &dyn Launch, reference: &Reference, stream: Stream, places: &Places, limit: f64) -> Verdict {
    // SAFETY: promised by the caller.
    let tried = unsafe {
        judged(way, reference, stream, places).and_then(|worst| match worst > 1.0 {
            true => Ok(Verdict::Wrong(worst)),
            false => timed(way, stream, places, limit).map(Verdict::Right),
        })
    };
    tried.unwrap_or_else(|e| Verdict::Failed(e.to_string()))
}

/// How far its result is from what it should be, as a multiple of what is allowed.
///
/// # Safety
/// As of [`attempt`].
unsafe fn judged(way: &dyn Launch, reference: &Reference, stream: Stream, places: &Places) -> Result<f32> {
    // SAFETY: promised by the caller.
    unsafe {
        reference.poison()?;
        way.launch(stream, &places.operands)?;
        reference.judge()
    }
}

/// Microseconds of a launch; only roughly, where that is far above the limit.
///
/// # Safety
/// As of [`attempt`].
unsafe fn timed(way: &dyn Launch, stream: Stream, places: &Places, limit: f64) -> Result<f64> {
    let device = stream.device();
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    // SAFETY: promised by the caller.
    let once = |stream, number| unsafe { way.launch(stream, &places.operands_of(number)) };
    start.record(stream)?;
    once(stream, 0)?;
    end.record(stream)?;
    let rough = end.since(&start)?;
    if rough > LONG {
        if rough > 2.0 * limit {
            return Ok(rough);
        }
        let mut least = rough;
        for _ in 0..3 {
            start.record(stream)?;
            once(stream, 0)?;
            end.record(stream)?;
            least = least.min(end.since(&start)?);
        }
        return Ok(least);
    }
    let graph = Graph::record(device, |stream| {
        let early = |i| stream.beginning_early(i > 0 && way.begins_early());
        (0..REPEATS).try_for_each(|i| once(early(i), i))
    })?;
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
    Ok(least)
}
