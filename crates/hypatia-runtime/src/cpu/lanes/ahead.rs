//! Memory that is asked for while other work is done, so that it is there when its turn comes.

/// Bytes of a cache line.
const LINE: usize = 64;
/// Streams that are asked for side by side.
const STREAMS: usize = 4;

/// Memory that will soon be read or written, asked for line by line. A store to a line that is not there waits for it
/// as a load does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    /// Addresses that come next, and the bytes from one to the next.
    streams: [(*const u8, usize); STREAMS],
    count: usize,
}

impl Ahead {
    /// Nothing yet.
    pub(crate) fn new() -> Ahead {
        Ahead {
            streams: [(std::ptr::null(), 0); STREAMS],
            count: 0,
        }
    }

    /// Adds elements of so many bytes that are computed in so many; there is room for a few.
    pub(crate) fn push(&mut self, at: *const u8, bytes: usize, computed: usize) {
        if let Some(stream) = self.streams.get_mut(self.count) {
            *stream = (at, LINE * bytes / computed);
            self.count += 1;
        }
    }

    /// Asks for what corresponds to so many lines of the computation.
    #[inline(always)]
    pub(crate) fn fetch<const LINES: usize>(&mut self) {
        for (at, step) in &mut self.streams[..self.count] {
            for line in 0..LINES {
                prefetch(at.wrapping_add(line * *step));
            }
            *at = at.wrapping_add(LINES * *step);
        }
    }
}

/// Asks for the cache line at an address, which need not be valid. Does nothing where Rust has no such instruction.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint to the cache; no address makes it fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
