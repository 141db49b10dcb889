//! Which kind is the fastest for a layer: measured once, on scratch data of the layer's sizes.

use hypatia_core::ty::DType;

use super::{Activation, Epilogue, Kind, LinearElement, Packed, Rows, RowsMut};
use crate::cpu::machine;
use crate::tuning::{Database, Entry, Key};
use half::bf16;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Moves when kernels change so much that old measurements mean nothing.
const REVISION: u32 = 6;
/// Weights of which a measurement needs no more: they are in no cache of a core.
const WEIGHTS: usize = 4 << 20;
/// Multiplications of a measured call, about a millisecond; but columns for all threads.
const PRODUCTS: usize = 64 << 20;
const COLUMNS: usize = 256;
/// Turns after which usual calls are known well enough: all of them, or some that took long.
const TURNS: usize = 21;
const SOME: (usize, Duration) = (6, Duration::from_millis(10));

/// A linear layer whose kind is to be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Rows.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of a sum.
    pub k: usize,
    /// The type of all operands.
    pub dtype: DType,
    /// What follows the sums.
    pub activation: Activation,
    /// Something is added last.
    pub residual: bool,
    /// Threads that will be used.
    pub threads: usize,
}

impl Problem {
    fn key(&self) -> Key {
        let residual = if self.residual { "+add" } else { "" };
        Key {
            device: machine::describe(),
            libraries: format!("hypatia {} kernels {REVISION}", env!("CARGO_PKG_VERSION")),
            op: format!("linear+{:?}{residual}", self.activation).to_lowercase(),
            shape: vec![self.m, self.n, self.k],
            dtype: self.dtype.name().into(),
            layout: String::new(),
            threads: self.threads,
        }
    }

    /// The columns that are measured.
    fn columns(&self) -> usize {
        let (m, k) = (self.m.max(1), self.k.max(1));
        let most = (WEIGHTS / k).min(PRODUCTS / m.saturating_mul(k).max(1));
        self.n.min(most.max(COLUMNS * self.threads.max(1)))
    }
}

/// The candidates, fastest first, as the database says or as measured within about `limit`; in their own order if there
/// is nothing to choose, or no time. The same database gives the same answer.
pub fn rank(
    database: &Database,
    problem: &Problem,
    candidates: &[&'static Kind],
    limit: Duration,
) -> Vec<&'static Kind> {
    let usable = |kind: &&&'static Kind| kind.dtype() == problem.dtype && kind.available();
    let candidates: Vec<&'static Kind> = candidates.iter().filter(usable).copied().collect();
    if candidates.len() < 2 || problem.m == 0 || problem.n == 0 || problem.k == 0 {
        return candidates;
    }
    let key = problem.key();
    let timed = |entry: &Entry| candidates.iter().all(|kind| entry.times.contains_key(kind.name()));
    let known = database.get(&key).filter(timed);
    if let Some(entry) = known {
        return sorted(candidates, &entry.times);
    }
    let times = match problem.dtype {
        DType::F32 => measure::<f32>(problem, &candidates, limit),
        _ => measure::<bf16>(problem, &candidates, limit),
    };
    let Some(times) = times else { return candidates };
    let ranking = sorted(candidates, &times);
    database.put(
        key,
        Entry {
            chosen: ranking[0].name().into(),
            times,
            data: vec![],
        },
    );
    ranking
}

/// Fastest first, by their margins, with a bonus for what comes first and for what holds no copy.
fn sorted(mut candidates: Vec<&'static Kind>, times: &BTreeMap<String, f64>) -> Vec<&'static Kind> {
    let first = candidates[0];
    let time = |kind: &Kind| {
        let time = times.get(kind.name()).copied().unwrap_or(f64::INFINITY);
        match kind.in_place() {
            true => time / kind.margin(),
            false if kind == first => time,
            false => time * kind.margin(),
        }
    };
    candidates.sort_by(|a, b| time(a).total_cmp(&time(b)));
    candidates
}

/// Microseconds of a usual call of each candidate, in turns; None if not every candidate had a call in time, or there is
/// no memory to try them.
fn measure<T: LinearElement>(
    problem: &Problem,
    candidates: &[&'static Kind],
    limit: Duration,
) -> Option<BTreeMap<String, f64>> {
    let quiet = Quiet::wait();
    let begin = Instant::now();
    let (m, n, k) = (problem.m, problem.columns(), problem.k);
    let (x, w, bias) = (numbers::<T>(m * k)?, numbers::<T>(n * k)?, numbers::<T>(n)?);
    let mut y = numbers::<T>(m * n)?;
    let residual = numbers::<T>(if problem.residual { m * n } else { 0 })?;
    let epilogue = Epilogue {
        bias: Some(&bias[..]),
        activation: problem.activation,
        residual: problem.residual.then(|| Rows::dense(&residual[..], n)),
        round_before_activation: true,
    };
    let mut layers = vec![];
    for kind in candidates {
        // SAFETY: the weights live until the end of this function, and are not written.
        layers.push(unsafe { Packed::in_place(kind, Rows::dense(&w, k), n, k) }.ok()?);
        if begin.elapsed() > limit {
            return None;
        }
    }
    let mut times = vec![vec![]; layers.len()];
    let packed = Instant::now();
    for turn in 0..TURNS {
        for (layer, taken) in layers.iter().zip(&mut times) {
            let start = Instant::now();
            let y = RowsMut::dense(&mut y[..], n);
            layer.run(problem.threads, Rows::dense(&x, k), m, y, &epilogue).ok()?;
            // The first turn warms up.
            if turn > 0 {
                taken.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        if begin.elapsed() > limit && turn == 0 {
            return None;
        }
        if turn > 0 && begin.elapsed() > limit || turn >= SOME.0 && packed.elapsed() > SOME.1 {
            break;
        }
    }
    quiet.over();
    // What a call usually takes: tiles are twice as slow while the other half of the core is busy, which the fastest
    // call does not show.
    let times = times.into_iter().map(|mut taken| {
        taken.sort_by(f64::total_cmp);
        taken[taken.len() / 2]
    });
    Some(
        candidates
            .iter()
            .map(|kind| kind.name().to_string())
            .zip(times)
            .collect(),
    )
}

/// A time in which no other threads of the process are awake.
struct Quiet;

/// When the last one ended.
static QUIET: Mutex<Option<Instant>> = Mutex::new(None);
/// Threads of torch's that wait for work spin for 6 to 11 ms.
const REST: Duration = Duration::from_millis(12);

impl Quiet {
    /// Waits for it to begin, unless the last one is just over.
    fn wait() -> Quiet {
        let last = *QUIET.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|end| end.elapsed() > REST / 12) {
            std::thread::sleep(REST);
        }
        Quiet
    }

    fn over(self) {
        *QUIET.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

/// Numbers such as networks have: of either sign, none of them zero.
fn numbers<T: LinearElement>(len: usize) -> Option<Vec<T>> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 65536.0 - 0.49999;
    let mut numbers = vec![];
    numbers.try_reserve_exact(len).ok()?;
    numbers.extend((0..len).map(|i| T::narrow(value(i))));
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::super::ErrorClass;
    use super::*;

    fn problem(m: usize, n: usize, k: usize) -> Problem {
        Problem {
            m,
            n,
            k,
            dtype: DType::F32,
            activation: Activation::Gelu,
            residual: true,
            threads: 2,
        }
    }

    fn candidates() -> Vec<&'static Kind> {
        Kind::candidates(DType::F32, 3, ErrorClass::Fp32, true)
    }

    #[test]
    fn what_was_measured_is_kept_and_decides() {
        let (database, p) = (Database::in_memory(), problem(3, 70, 40));
        assert!(candidates().len() >= 2);
        let ranking = rank(&database, &p, &candidates(), Duration::from_secs(60));
        assert_eq!(ranking.len(), candidates().len());
        let entry = database.get(&p.key()).unwrap();
        assert_eq!(entry.chosen, ranking[0].name());
        assert!(candidates().iter().all(|c| entry.times[c.name()] > 0.0));
        // The database has the last word, whatever the machine would say now.
        for winner in candidates() {
            let time = |kind: &&'static Kind| if *kind == winner { 1.0 } else { 100.0 };
            let times = candidates().iter().map(|k| (k.name().to_string(), time(k))).collect();
            database.put(p.key(), Entry { times, ..entry.clone() });
            assert_eq!(rank(&database, &p, &candidates(), Duration::ZERO)[0], winner);
        }
    }

    #[test]
    fn near_ties_go_to_the_first_or_to_what_needs_no_memory() {
        let pick = |f32: f64, six: f64, rows: f64| {
            let times = [("f32", f32), ("bf16x6", six), ("rows", rows)];
            let times = times.map(|(name, time)| (name.to_string(), time)).into();
            let kinds = ["f32", "bf16x6", "rows"].map(|name| Kind::named(name, DType::F32).unwrap());
            sorted(kinds.to_vec(), &times)[0].name()
        };
        assert_eq!(pick(1.0, 0.99, 2.0), "f32");
        assert_eq!(pick(1.0, 0.8, 2.0), "f32");
        assert_eq!(pick(1.0, 0.6, 2.0), "bf16x6");
        assert_eq!(pick(1.0, 2.0, 1.03), "rows");
        assert_eq!(pick(1.0, 2.0, 1.2), "f32");
    }

    #[test]
    fn without_time_or_choice_the_order_stays() {
        let database = Database::in_memory();
        let all = candidates();
        assert_eq!(rank(&database, &problem(8, 64, 64), &all, Duration::ZERO), all);
        assert_eq!(rank(&database, &problem(0, 64, 64), &all, Duration::from_secs(1)), all);
        assert_eq!(
            rank(&database, &problem(8, 64, 64), &all[..1], Duration::from_secs(1)),
            all[..1]
        );
        let bf16 = Problem {
            dtype: DType::BF16,
            ..problem(8, 64, 64)
        };
        assert!(rank(&database, &bf16, &all, Duration::from_secs(1)).is_empty());
        assert!(database.is_empty());
    }

    #[test]
    fn large_layers_are_measured_on_some_of_their_columns() {
        assert_eq!(problem(64, 256, 784).columns(), 256);
        assert_eq!(problem(1, 2048, 2048).columns(), 2048);
        assert_eq!(problem(512, 4096, 4096).columns(), 512);
        assert_eq!(problem(1, 50_000, 4096).columns(), 1024);
    }

    #[test]
    fn the_first_kind_that_can_stand_for_the_weights_is_packed() {
        let mut w = numbers::<f32>(64).unwrap();
        w[7] = f32::INFINITY;
        let kinds = ["bf16x6", "f32"].map(|name| Kind::named(name, DType::F32).unwrap());
        let kinds: Vec<_> = kinds.into_iter().filter(|kind| kind.available()).collect();
        // SAFETY: none of the kinds is in place.
        let packed = unsafe { Packed::first(&kinds, Rows::dense(&w, 8), 8, 8) }.unwrap();
        assert_eq!(packed.kind().name(), "f32");
        // SAFETY: as above.
        assert!(unsafe { Packed::first(&[], Rows::dense(&w, 8), 8, 8) }.is_err());
    }
}
