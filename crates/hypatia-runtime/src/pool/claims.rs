//! Which thread does which part of a job.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that have parts of their own; more of them share.
const OWNERS: usize = 64;

/// Parts of a job that nobody has claimed yet, for each of its threads.
pub(super) struct Claims {
    parts: AtomicUsize,
    owners: AtomicUsize,
    next: [Line; OWNERS],
}

/// A number that threads count up without disturbing those who count others: two lines are fetched at a time.
#[repr(align(128))]
struct Line(AtomicUsize);

impl Claims {
    pub(super) fn new() -> Claims {
        Claims {
            parts: AtomicUsize::new(0),
            owners: AtomicUsize::new(1),
            next: [const { Line(AtomicUsize::new(0)) }; OWNERS],
        }
    }

    /// Hands out so many parts; whoever claims must be told after this.
    pub(super) fn set(&self, threads: usize, parts: usize) {
        let owners = threads.clamp(1, OWNERS);
        self.parts.store(parts, Ordering::Relaxed);
        self.owners.store(owners, Ordering::Relaxed);
        for owner in 0..owners {
            self.next[owner].0.store(parts * owner / owners, Ordering::Relaxed);
        }
    }

    /// Calls `f` with parts until there are none: first those of the thread of this number, then those of others.
    pub(super) fn work(&self, thread: usize, f: &(dyn Fn(usize) + Sync)) {
        let (parts, owners) = (self.parts.load(Ordering::Relaxed), self.owners.load(Ordering::Relaxed));
        for owner in (0..owners).map(|i| (thread + i) % owners) {
            let end = parts * (owner + 1) / owners;
            loop {
                let part = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                if part >= end {
                    break;
                }
                f(part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_thread_has_the_same_parts_in_every_job_and_then_those_of_others() {
        let claims = Claims::new();
        for (threads, parts) in [(1, 5), (2, 5), (3, 10), (3, 2), (200, 70)] {
            let order = |thread: usize| {
                claims.set(threads, parts);
                let taken = Mutex::new(vec![]);
                claims.work(thread, &|part| taken.lock().unwrap().push(part));
                taken.into_inner().unwrap()
            };
            for thread in 0..threads {
                let first = order(thread);
                assert_eq!(first, order(thread));
                let owners = threads.min(OWNERS);
                let own = first[0] == parts * (thread % owners) / owners;
                assert!(own || parts < owners, "{thread} of {threads} began with {}", first[0]);
                let mut sorted = first;
                sorted.sort_unstable();
                assert_eq!(sorted, Vec::from_iter(0..parts));
            }
        }
    }
}
