//! Threads for kernels: parts of a job are claimed by the caller and by workers that spin for a
//! moment after a job and then sleep.
//!
//! Each thread has parts of its own, the same ones in every job of as many parts, so that it finds in its cache what
//! it used last time; who is done with them takes those of the others.
//!
//! Work between ops of torch runs on torch's own threads instead (`on_borrowed`): threads of two pools would
//! fight, since torch's spin for milliseconds after every op. Otherwise own threads are better: who finishes does
//! not wait for a thread that the system has not scheduled yet.
//!
//! One job runs at a time. A second caller does its own work alone instead of waiting, so that
//! concurrent callers neither queue nor oversubscribe the machine.

mod claims;

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use claims::Claims;

/// How long an idle worker spins before it sleeps. Waking one takes about as long.
const SPIN: Duration = Duration::from_micros(50);

/// Set in the gate when no worker may enter.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Elements of a part of a loop, within so many parts for each thread: a thread whose core is slow at the time leaves some
/// to the others, but claiming one is not free.
const ELEMENTS: usize = 1 << 16;
const PARTS: (usize, usize) = (4, 16);

/// How many parts to make of a loop over so many elements.
pub fn parts(threads: usize, elements: usize) -> usize {
    (elements / ELEMENTS).clamp(threads * PARTS.0, threads * PARTS.1)
}

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Moves when there is a new job; its low bits say nothing else.
    epoch: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    claims: Claims,
    /// Workers that may take part in this job.
    wanted: AtomicUsize,
    /// Workers inside the current job, or `CLOSED` and those: a worker that wakes up late is not waited for.
    gate: AtomicUsize,
    panicked: AtomicBool,
}

// SAFETY: `job` is written only by the caller that holds the lock and while the gate is closed and no
// worker is inside, and read by workers only while they are inside.
unsafe impl Sync for Shared {}

struct Worker {
    thread: Thread,
    asleep: std::sync::Arc<AtomicU32>,
}

/// A loop that calls `body(begin, end, context)` on parts of `0..count`, on threads that somebody else keeps.
pub type ParallelFor = unsafe extern "C" fn(i64, i64, i64, extern "C" fn(i64, i64, *mut c_void), *mut c_void) -> i32;

struct Borrowed {
    run: ParallelFor,
    /// After a fork the threads are gone.
    process: u32,
    claims: Mutex<Claims>,
}

static BORROWED: OnceLock<Borrowed> = OnceLock::new();

thread_local! {
    static ON_BORROWED: Cell<bool> = const { Cell::new(false) };
}

/// Jobs that this thread starts inside run on borrowed threads, if there are some.
pub fn on_borrowed<R>(f: impl FnOnce() -> R) -> R {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            ON_BORROWED.set(self.0);
        }
    }
    let _back = Back(ON_BORROWED.replace(true));
    f()
}

/// A job on borrowed threads.
struct Lent<'a> {
    claims: &'a Claims,
    f: &'a (dyn Fn(usize) + Sync),
    panicked: AtomicBool,
}

extern "C" fn claim_parts(thread: i64, _: i64, context: *mut c_void) {
    // SAFETY: the context is the job, which outlives the loop.
    let lent = unsafe { &*context.cast::<Lent<'_>>() };
    let thread = usize::try_from(thread).unwrap_or(0);
    if catch_unwind(AssertUnwindSafe(|| lent.claims.work(thread, lent.f))).is_err() {
        lent.panicked.store(true, Ordering::Relaxed);
    }
}

impl Borrowed {
    /// False if the threads are gone or busy.
    fn run(&self, threads: usize, parts: usize, f: &(dyn Fn(usize) + Sync)) -> bool {
        if self.process != std::process::id() {
            return false;
        }
        // Held while the loop runs: a second caller does its work alone.
        let claims = match self.claims.try_lock() {
            Ok(claims) => claims,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        claims.set(threads, parts);
        let lent = Lent {
            claims: &claims,
            f,
            panicked: AtomicBool::new(false),
        };
        // SAFETY: the loop returns after all its parts did.
        let status = unsafe { (self.run)(0, threads as i64, 1, claim_parts, (&raw const lent).cast_mut().cast()) };
        assert!(
            !lent.panicked.load(Ordering::Relaxed),
            "a kernel panicked in a worker thread"
        );
        if status != 0 {
            // What was not claimed is done here.
            claim_parts(0, 0, (&raw const lent).cast_mut().cast());
        }
        true
    }
}

/// A pool of worker threads.
pub struct Pool {
    shared: &'static Shared,
    workers: Mutex<Workers>,
}

struct Workers {
    /// The process that started them: after a fork they are gone.
    process: u32,
    list: Vec<Worker>,
}

impl Pool {
    /// The pool of this process; its threads start when they are first needed.
    pub fn global() -> &'static Pool {
        static POOL: OnceLock<Pool> = OnceLock::new();
        POOL.get_or_init(Pool::new)
    }

    /// Lends threads that somebody else keeps, for jobs inside [`on_borrowed`].
    ///
    /// # Safety
    /// The loop calls its body only while it runs, and stays callable.
    pub unsafe fn borrow_threads(run: ParallelFor) {
        let process = std::process::id();
        BORROWED.get_or_init(|| Borrowed {
            run,
            process,
            claims: Mutex::new(Claims::new()),
        });
    }

    fn new() -> Pool {
        // A pool lives as long as its process, since workers refer to it.
        let shared = Box::leak(Box::new(Shared {
            epoch: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            claims: Claims::new(),
            wanted: AtomicUsize::new(0),
            gate: AtomicUsize::new(CLOSED),
            panicked: AtomicBool::new(false),
        }));
        Pool {
            shared,
            workers: Mutex::new(Workers {
                process: std::process::id(),
                list: vec![],
            }),
        }
    }

    /// Calls `f` with every number below `parts`, on at most `threads` threads, the caller among them.
    pub fn run(&self, threads: usize, parts: usize, f: &(dyn Fn(usize) + Sync)) {
        let threads = threads.min(parts);
        if threads <= 1 {
            return (0..parts).for_each(f);
        }
        if ON_BORROWED.get()
            && let Some(borrowed) = BORROWED.get()
        {
            if !borrowed.run(threads, parts, f) {
                (0..parts).for_each(f);
            }
            return;
        }
        let mut workers = match self.workers.try_lock() {
            Ok(workers) => workers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..parts).for_each(f),
        };
        if workers.process != std::process::id() || !self.grow(&mut workers, threads - 1) {
            return (0..parts).for_each(f);
        }
        let s = self.shared;
        // SAFETY: the gate is closed and nobody is inside (waited for below), and this thread holds the
        // lock. The lifetime ends here for workers too: this function returns after they all left.
        unsafe { *s.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(f)) };
        s.claims.set(threads, parts);
        s.wanted.store(threads - 1, Ordering::Relaxed);
        s.panicked.store(false, Ordering::Relaxed);
        s.gate.store(0, Ordering::Release);
        s.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in &workers.list {
            if worker.asleep.load(Ordering::SeqCst) == 1 {
                worker.thread.unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| s.claims.work(0, f)));
        s.gate.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0u32;
        while s.gate.load(Ordering::Acquire) != CLOSED {
            spins += 1;
            if spins < 20_000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        drop(workers);
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(
            !s.panicked.load(Ordering::Relaxed),
            "a kernel panicked in a worker thread"
        );
    }

    /// Starts workers until there are enough; false if the system refuses.
    fn grow(&self, workers: &mut Workers, count: usize) -> bool {
        while workers.list.len() < count {
            let asleep = std::sync::Arc::new(AtomicU32::new(0));
            let (shared, index, flag) = (self.shared, workers.list.len(), asleep.clone());
            let seen = shared.epoch.load(Ordering::SeqCst);
            let started = std::thread::Builder::new()
                .name(format!("hypatia-{index}"))
                .spawn(move || work(shared, index, &flag, seen));
            match started {
                Ok(handle) => workers.list.push(Worker {
                    thread: handle.thread().clone(),
                    asleep,
                }),
                Err(_) => return false,
            }
        }
        true
    }
}

fn work(shared: &'static Shared, index: usize, asleep: &AtomicU32, mut seen: u64) {
    loop {
        let start = Instant::now();
        let mut turns = 0u32;
        loop {
            let epoch = shared.epoch.load(Ordering::Acquire);
            if epoch != seen {
                seen = epoch;
                break;
            }
            std::hint::spin_loop();
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(64) && start.elapsed() > SPIN {
                asleep.store(1, Ordering::SeqCst);
                while shared.epoch.load(Ordering::SeqCst) == seen {
                    std::thread::park();
                }
                asleep.store(0, Ordering::SeqCst);
            }
        }
        if !enter(shared) {
            continue;
        }
        if index < shared.wanted.load(Ordering::Relaxed) {
            // SAFETY: the job was published before the gate was opened, and stays until this worker left.
            let job = unsafe { (*shared.job.get()).map(|f| &*f) };
            if let Some(f) = job
                && catch_unwind(AssertUnwindSafe(|| shared.claims.work(index + 1, f))).is_err()
            {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.gate.fetch_sub(1, Ordering::Release);
    }
}

/// Goes through the gate, if it is open.
fn enter(shared: &Shared) -> bool {
    let through = |gate: usize| (gate & CLOSED == 0).then_some(gate + 1);
    shared
        .gate
        .fetch_update(Ordering::Acquire, Ordering::Relaxed, through)
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once() {
        let pool = Pool::new();
        for parts in [0, 1, 2, 3, 17, 1000] {
            for threads in [1, 2, 3, 8] {
                let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(threads, parts, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{parts} on {threads}"
                );
            }
        }
    }

    #[test]
    fn callers_at_once_do_not_wait_for_each_other() {
        let pool = Pool::new();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(2, 10, &|i| {
                            total.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 45);
    }

    #[test]
    fn a_job_inside_a_job_runs_alone() {
        let pool = Pool::new();
        let total = AtomicUsize::new(0);
        pool.run(2, 4, &|_| {
            pool.run(2, 4, &|i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 6);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new();
        for _ in 0..20 {
            let failed = catch_unwind(AssertUnwindSafe(|| {
                pool.run(2, 8, &|i| assert!(i != 5, "planted"));
            }));
            assert!(failed.is_err());
        }
        let total = AtomicUsize::new(0);
        pool.run(2, 8, &|i| {
            total.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 28);
    }

    unsafe extern "C" fn two_threads(
        begin: i64,
        end: i64,
        _: i64,
        body: extern "C" fn(i64, i64, *mut c_void),
        context: *mut c_void,
    ) -> i32 {
        let context = context as usize;
        std::thread::scope(|scope| {
            for i in begin..end {
                scope.spawn(move || body(i, i + 1, context as *mut c_void));
            }
        });
        0
    }

    #[test]
    fn borrowed_threads_run_every_part_once_and_pass_panics_on() {
        // SAFETY: the loop joins its threads.
        unsafe { Pool::borrow_threads(two_threads) };
        let pool = Pool::new();
        let total = AtomicUsize::new(0);
        let add = |i| {
            total.fetch_add(i, Ordering::Relaxed);
        };
        on_borrowed(|| pool.run(2, 100, &add));
        assert_eq!(total.load(Ordering::Relaxed), 4950);
        assert!(!ON_BORROWED.get());
        let fail = || on_borrowed(|| pool.run(2, 8, &|i| assert!(i != 5, "planted")));
        let failed = catch_unwind(AssertUnwindSafe(fail));
        assert!(failed.is_err());
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = Pool::new();
        for _ in 0..5 {
            let total = AtomicUsize::new(0);
            pool.run(3, 64, &|i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(total.load(Ordering::Relaxed), 64 * 63 / 2);
            std::thread::sleep(4 * SPIN);
        }
    }
}
