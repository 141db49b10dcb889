//! Memory that is asked for while other work is done, so that it is there when its turn comes.

use smallvec::SmallVec;

use crate::runtime::cpu::lanes::prefetch;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Ranges of memory that will be read soon.
#[derive(Default)]
pub(super) struct Ahead {
    /// Addresses that come next, and their ends.
    ranges: SmallVec<[(*const u8, usize); 4]>,
}

impl Ahead {
    /// Adds a range.
    pub(super) fn push(&mut self, data: *const u8, bytes: usize) {
        self.ranges.push((data, bytes));
    }

    /// Asks for about so many bytes.
    #[inline(always)]
    pub(super) fn fetch(&mut self, bytes: usize) {
        let Some((data, left)) = self.ranges.last_mut() else {
            return;
        };
        let lines = bytes.min(*left).div_ceil(LINE);
        for line in 0..lines {
            prefetch(data.wrapping_add(line * LINE));
        }
        *data = data.wrapping_add(lines * LINE);
        *left = left.saturating_sub(lines * LINE);
        if *left == 0 {
            self.ranges.pop();
        }
    }
}
