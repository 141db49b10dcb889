//! Launches recorded once for each set of addresses.
//!
//! A graph has the addresses of its operands in it, and most of its kernels are the library's, whose arguments cannot be
//! changed. Callers come back with the same addresses, though: allocators hand out the same blocks again. So every set
//! of addresses that is seen twice gets a graph of its own, a few of them are kept, and whatever is new is launched
//! kernel by kernel.

use std::sync::{Mutex, PoisonError};

use smallvec::SmallVec;

use crate::Result;
use crate::driver::{Executable, Graph, Stream};

type Addresses = SmallVec<[u64; 8]>;

/// Graphs of one list of launches.
#[derive(Debug)]
pub struct Replay {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Most recently used last.
    recorded: Vec<(Addresses, Executable)>,
    /// Sets without a graph, how often each was seen, most recent last.
    seen: Vec<(Addresses, u32)>,
    /// How often a set must be seen to get a graph; it grows when graphs are dropped to make room for others.
    patience: u32,
}

/// Sets without a graph that are remembered.
const REMEMBERED: usize = 32;
const MOST_PATIENT: u32 = 64;

impl Replay {
    /// Keeps at most so many graphs.
    pub fn new(capacity: usize) -> Replay {
        let state = State {
            patience: 2,
            ..State::default()
        };
        Replay {
            capacity: capacity.max(1),
            state: Mutex::new(state),
        }
    }

    /// Runs the launches that `launch` makes on the stream that it is given, within
    /// [`Device::enter`](crate::driver::Device::enter). They may depend on the addresses and on nothing else that
    /// changes.
    ///
    /// # Safety
    /// All memory that the launches use must live until they are done, and that which is not among the addresses as long
    /// as this.
    pub unsafe fn run(
        &self,
        stream: Stream,
        addresses: &[u64],
        mut launch: impl FnMut(Stream) -> Result<()>,
    ) -> Result<()> {
        // Somebody else's recording takes the launches themselves.
        if stream.is_capturing()? {
            return launch(stream);
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = state.recorded.iter().rposition(|(a, _)| a[..] == *addresses) {
            if at + 1 < state.recorded.len() {
                let entry = state.recorded.remove(at);
                state.recorded.push(entry);
            }
            if let Some((_, graph)) = state.recorded.last_mut() {
                // SAFETY: promised by the caller.
                return unsafe { graph.launch(stream) };
            }
        }
        if !state.is_worth_recording(addresses) {
            drop(state);
            return launch(stream);
        }
        let mut graph = Graph::record(stream.device(), launch)?.instantiate()?;
        // SAFETY: promised by the caller.
        unsafe { graph.launch(stream)? };
        state.keep(addresses.into(), graph, self.capacity);
        Ok(())
    }

    /// How many graphs there are.
    pub fn len(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).recorded.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl State {
    fn is_worth_recording(&mut self, addresses: &[u64]) -> bool {
        let at = self.seen.iter().rposition(|(a, _)| a[..] == *addresses);
        let (set, times) = at.map_or_else(|| (addresses.into(), 0), |at| self.seen.remove(at));
        if times + 1 >= self.patience {
            return true;
        }
        if self.seen.len() >= REMEMBERED {
            self.seen.remove(0);
        }
        self.seen.push((set, times + 1));
        false
    }

    fn keep(&mut self, addresses: Addresses, graph: Executable, capacity: usize) {
        if self.recorded.len() >= capacity {
            self.recorded.remove(0);
            self.patience = (self.patience * 2).min(MOST_PATIENT);
        }
        self.recorded.push((addresses, graph));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_recorded_when_it_comes_back() {
        let mut state = State {
            patience: 2,
            ..State::default()
        };
        assert!(!state.is_worth_recording(&[1, 2]));
        assert!(!state.is_worth_recording(&[1, 3]));
        assert!(state.is_worth_recording(&[1, 2]));
        // It was taken out of the list, and has to earn its place again if its graph is dropped.
        assert!(!state.is_worth_recording(&[1, 2]));
    }

    #[test]
    fn sets_that_never_come_back_are_forgotten() {
        let mut state = State {
            patience: 2,
            ..State::default()
        };
        for i in 0..1000 {
            assert!(!state.is_worth_recording(&[i]));
        }
        assert_eq!(state.seen.len(), REMEMBERED);
        assert!(!state.is_worth_recording(&[0]));
        assert!(state.is_worth_recording(&[999]));
    }
}
