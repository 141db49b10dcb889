//! Memory of a plan: values that do not live at the same time share bytes of one block.

use std::sync::Mutex;

use crate::cpu::aligned::Aligned;

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

/// Memory that may be used until a step, which needs it for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Bytes.
    pub bytes: usize,
    /// The step.
    pub until: usize,
}

/// Offsets for values, large ones first, each at the lowest place that is free while it lives; and
/// the bytes of the whole block.
pub fn place(lives: &[Life]) -> (Vec<usize>, usize) {
    let (places, total) = place_in(&[], lives);
    (places.into_iter().map(|p| p.1).collect(), total)
}

/// As [`place`], in blocks that are there anyway where values fit and else in one more: the number of such a block, if
/// it is one, and the offset.
pub fn place_in(blocks: &[Block], lives: &[Life]) -> (Vec<(Option<usize>, usize)>, usize) {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(lives[*i].bytes), *i));
    let mut places = vec![(None, 0); lives.len()];
    let mut placed: Vec<usize> = vec![];
    let mut total = 0;
    for i in order {
        let lowest = |block: Option<usize>| {
            let mut taken: Vec<(usize, usize)> = (placed.iter())
                .filter(|p| places[**p].0 == block && lives[**p].meets(&lives[i]))
                .map(|p| (places[*p].1, places[*p].1 + lives[*p].bytes.next_multiple_of(ALIGNMENT)))
                .collect();
            taken.sort_unstable();
            let mut at = 0;
            for (start, end) in taken {
                if start >= at + lives[i].bytes {
                    break;
                }
                at = at.max(end);
            }
            at
        };
        let given = (blocks.iter().enumerate()).find_map(|(b, block)| {
            let at = lowest(Some(b));
            (lives[i].last < block.until && at + lives[i].bytes <= block.bytes).then_some((Some(b), at))
        });
        places[i] = given.unwrap_or_else(|| (None, lowest(None)));
        if places[i].0.is_none() {
            total = total.max(places[i].1 + lives[i].bytes.next_multiple_of(ALIGNMENT));
        }
        placed.push(i);
    }
    (places, total)
}

/// Blocks of one size, handed out to callers: each caller has its own while it runs.
pub struct Arenas {
    bytes: usize,
    kept: usize,
    free: Mutex<Vec<Aligned<u8>>>,
}

/// Blocks kept for later callers, at least.
const KEPT: usize = 4;

impl Arenas {
    /// Blocks of so many bytes, of which a caller uses so many; none is made yet.
    pub fn new(bytes: usize, each: usize) -> Arenas {
        Arenas {
            bytes,
            kept: KEPT.max(each),
            free: Mutex::new(vec![]),
        }
    }

    /// Bytes of a block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls a function with a block of its own; none if there is no memory for it.
    pub fn with<R>(&self, f: impl FnOnce(&mut Aligned<u8>) -> R) -> Option<R> {
        let taken = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let mut block = match taken {
            Some(block) => block,
            None => Aligned::try_zeroed(self.bytes)?,
        };
        let result = f(&mut block);
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        if free.len() < self.kept {
            free.push(block);
        }
        Some(result)
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

    proptest! {
        #[test]
        fn blocks_are_left_in_time(
            lives in prop::collection::vec(life(), 0..30),
            blocks in prop::collection::vec((0usize..9000, 0usize..20), 0..4),
        ) {
            let blocks: Vec<Block> = blocks.into_iter().map(|(bytes, until)| Block { bytes, until }).collect();
            let (places, total) = place_in(&blocks, &lives);
            for (i, a) in lives.iter().enumerate() {
                let (block, at) = places[i];
                match block {
                    Some(b) => prop_assert!(a.last < blocks[b].until && at + a.bytes <= blocks[b].bytes),
                    None => prop_assert!(at + a.bytes <= total),
                }
                for (j, b) in lives.iter().enumerate().skip(i + 1) {
                    let apart = block != places[j].0 || at + a.bytes <= places[j].1 || places[j].1 + b.bytes <= at;
                    prop_assert!(!a.meets(b) || apart || a.bytes == 0 || b.bytes == 0, "{i} and {j}");
                }
            }
        }
    }

    #[test]
    fn values_lie_in_results_that_are_not_written_yet() {
        let lives: Vec<Life> = (0..4)
            .map(|i| Life {
                bytes: 1024,
                first: i,
                last: i + 1,
            })
            .collect();
        // Steps 0 to 3 make values, step 4 the result: the value it reads cannot be there.
        let result = Block { bytes: 1024, until: 4 };
        let (places, total) = place_in(&[result], &lives);
        assert_eq!(total, 1024);
        assert_eq!(places[3].0, None);
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
