//! Memory of results: kept when torch is done with it and used for the next call. A large block that is new costs page
//! faults, which take as long as a pass over the data, and a tensor on memory of ours takes torch half as long as one
//! that it allocates.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

const PAGE: usize = 2 << 20;

/// A block of memory.
pub struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Block {}

impl Block {
    fn new(bytes: usize) -> Option<Block> {
        let align = if bytes >= PAGE { PAGE } else { 64 };
        let size = bytes.max(1).checked_next_multiple_of(align)?;
        let layout = Layout::from_size_align(size, align).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        if align == PAGE {
            hypatia_runtime::cpu::aligned::advise_huge(start, layout.size());
        }
        Some(Block { start, layout })
    }

    /// The first byte.
    pub fn data(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Blocks that torch is done with.
pub struct Spares {
    free: Mutex<Vec<Block>>,
    most: usize,
}

impl Spares {
    /// Keeps at most so many blocks.
    pub fn new(most: usize) -> Arc<Spares> {
        Arc::new(Spares {
            free: Mutex::new(vec![]),
            most,
        })
    }

    /// A block of at least so many bytes; none if there is no memory.
    pub fn take(&self, bytes: usize) -> Option<Block> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Results of a plan differ in size; one is not to hold the memory of a much larger one.
        let room = if bytes >= PAGE { PAGE } else { bytes.max(64) };
        let fits = |b: &Block| b.layout.size() >= bytes && b.layout.size() <= bytes + room;
        match free.iter().position(fits) {
            Some(at) => Some(free.swap_remove(at)),
            None => {
                drop(free);
                Block::new(bytes)
            }
        }
    }

    /// Takes a block back.
    pub fn give(&self, block: Block) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.most {
            free.push(block);
        }
    }
}
