//! Memory of a plan: values that do not live at the same time share bytes of one block.

use std::sync::Mutex;

use super::cpu::aligned::Aligned;

/// Values start at multiples of this.
pub const ALIGNMENT: usize = 64;

/// A value that needs memory from its first step to its last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Bytes.
    pub bytes: usize,
    /// The step that writes it.
    pub first: usize,
    /// The last step that reads it.
    pub last: usize,
}

impl Life {
    fn meets(&self, other: &Life) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Offsets for values, large ones first, each at the lowest place that is free while it lives; and
/// the bytes of the whole block.
pub fn place(lives: &[Life]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(lives[*i].bytes), *i));
    let mut offsets = vec![0; lives.len()];
    let mut placed: Vec<usize> = vec![];
    let mut total = 0;
    for i in order {
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|p| lives[**p].meets(&lives[i]))
            .map(|p| (offsets[*p], offsets[*p] + lives[*p].bytes.next_multiple_of(ALIGNMENT)))
            .collect();
        taken.sort_unstable();
        let mut at = 0;
        for (start, end) in taken {
            if start >= at + lives[i].bytes {
                break;
            }
            at = at.max(end);
        }
        offsets[i] = at;
        placed.push(i);
        total = total.max(at + lives[i].bytes.next_multiple_of(ALIGNMENT));
    }
    (offsets, total)
}

/// Blocks of one size, handed out to callers: each caller has its own while it runs.
pub struct Arenas {
    bytes: usize,
    free: Mutex<Vec<Aligned<u8>>>,
}

/// Blocks kept for later callers.
const KEPT: usize = 4;

impl Arenas {
    /// Blocks of so many bytes; none is made yet.
    pub fn new(bytes: usize) -> Arenas {
        Arenas {
            bytes,
            free: Mutex::new(vec![]),
        }
    }

    /// Bytes of a block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls a function with a block of its own.
    pub fn with<R>(&self, f: impl FnOnce(&mut Aligned<u8>) -> R) -> R {
        let taken = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let mut block = taken.unwrap_or_else(|| Aligned::zeroed(self.bytes));
        let result = f(&mut block);
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        if free.len() < KEPT {
            free.push(block);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn life() -> impl Strategy<Value = Life> {
        (0usize..5000, 0usize..20, 0usize..6).prop_map(|(bytes, first, length)| Life {
            bytes,
            first,
            last: first + length,
        })
    }

    proptest! {
        #[test]
        fn values_that_live_together_do_not_overlap(lives in prop::collection::vec(life(), 0..40)) {
            let (offsets, total) = place(&lives);
            for (i, a) in lives.iter().enumerate() {
                prop_assert!(offsets[i] % ALIGNMENT == 0);
                prop_assert!(offsets[i] + a.bytes <= total);
                for (j, b) in lives.iter().enumerate().skip(i + 1) {
                    let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                    prop_assert!(!a.meets(b) || apart || a.bytes == 0 || b.bytes == 0, "{i} and {j}");
                }
            }
        }
    }

    #[test]
    fn a_chain_needs_two_buffers() {
        let lives: Vec<Life> = (0..50)
            .map(|i| Life {
                bytes: 1024,
                first: i,
                last: i + 1,
            })
            .collect();
        assert_eq!(place(&lives).1, 2048);
    }
}
