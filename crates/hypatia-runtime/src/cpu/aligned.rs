//! Memory for packed weights and for scratch: aligned to cache lines, zeroed, on huge pages where it is large.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// What a cache line and the widest vector need.
const LINE: usize = 64;
const HUGE: usize = 2 << 20;
/// Scratch above this size goes back to the system after use.
pub const KEPT: usize = 16 << 20;

/// Types for which zero bytes are a value, and which need no drop.
pub trait Plain: Copy + Send + Sync + 'static + private::Sealed {}

mod private {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($t:ty),*) => { $(impl private::Sealed for $t {} impl Plain for $t {})* };
}
plain!(u8, u16, u32, f32, half::bf16);

/// A zeroed slice that starts at a cache line.
pub struct Aligned<T: Plain> {
    start: NonNull<T>,
    len: usize,
    layout: Layout,
}

// SAFETY: it owns its memory, and `T` is plain data.
unsafe impl<T: Plain> Send for Aligned<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for Aligned<T> {}

impl<T: Plain> Aligned<T> {
    /// `len` zeros, if there is memory for them.
    pub fn try_zeroed(len: usize) -> Option<Aligned<T>> {
        let layout = layout(len.checked_mul(size_of::<T>())?)?;
        // SAFETY: the layout is never empty.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        if layout.align() == HUGE {
            // Before the first write: pages are chosen when they are touched.
            advise_huge(start, layout.size());
        }
        // SAFETY: the allocation has this size, and zero bytes are values of `T`.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Some(Aligned {
            start: start.cast(),
            len,
            layout,
        })
    }

    /// As [`Aligned::try_zeroed`], inside kernels, which return nothing: without memory it panics, and whoever called
    /// the plan gets an error.
    pub fn zeroed(len: usize) -> Aligned<T> {
        match Aligned::try_zeroed(len) {
            Some(made) => made,
            None => panic!("there is no memory for {len} values of {} bytes", size_of::<T>()),
        }
    }

    /// The size in memory.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

/// Large blocks are aligned to huge pages and are whole numbers of them.
fn layout(bytes: usize) -> Option<Layout> {
    let align = if bytes >= 2 * HUGE { HUGE } else { LINE };
    Layout::from_size_align(bytes.max(1).checked_next_multiple_of(align)?, align).ok()
}

/// Asks for huge pages in a range that starts and ends at their borders, before it is first written.
#[cfg(target_os = "linux")]
pub fn advise_huge(start: NonNull<u8>, bytes: usize) {
    unsafe extern "C" {
        fn madvise(start: *mut std::ffi::c_void, bytes: usize, advice: i32) -> i32;
    }
    const MADV_HUGEPAGE: i32 = 14;
    // SAFETY: the range was just allocated. The advice changes no contents, and a refusal does no harm.
    unsafe { madvise(start.as_ptr().cast(), bytes, MADV_HUGEPAGE) };
}

/// Asks for huge pages: nothing to ask here.
#[cfg(not(target_os = "linux"))]
pub fn advise_huge(_: NonNull<u8>, _: usize) {}

impl<T: Plain> Drop for Aligned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr().cast(), self.layout) }
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` values were zeroed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Lends `len` floats of this thread's scratch, with whatever the last user left in them.
///
/// A use inside a use gets memory of its own.
pub fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: Cell<Option<Aligned<f32>>> = const { Cell::new(None) };
    }
    let mut scratch = match SCRATCH.take() {
        Some(scratch) if scratch.len() >= len => scratch,
        _ => Aligned::zeroed(len.next_multiple_of(1024)),
    };
    let result = f(&mut scratch[..len]);
    if scratch.bytes() <= KEPT {
        SCRATCH.set(Some(scratch));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_aligned_and_writable() {
        for len in [0, 1, 17, 1024, (5 << 20) / 4] {
            let mut a = Aligned::<f32>::zeroed(len);
            assert_eq!(a.len(), len);
            assert_eq!(a.as_ptr() as usize % LINE, 0);
            assert!(a.bytes() >= len * 4);
            assert!(a.iter().all(|&v| v == 0.0));
            a.fill(1.0);
            assert!(a.iter().all(|&v| v == 1.0));
        }
    }

    #[test]
    fn more_memory_than_there_is_is_no_abort() {
        for len in [usize::MAX, usize::MAX / 4, isize::MAX as usize / 4, 1 << 50] {
            assert!(Aligned::<f32>::try_zeroed(len).is_none(), "{len}");
        }
        assert!(std::panic::catch_unwind(|| Aligned::<f32>::zeroed(1 << 50)).is_err());
    }

    #[test]
    fn large_blocks_are_whole_huge_pages() {
        let a = Aligned::<u8>::zeroed(2 * HUGE + 1);
        assert_eq!((a.as_ptr() as usize % HUGE, a.bytes()), (0, 3 * HUGE));
    }

    #[test]
    fn scratch_is_reused_and_nests() {
        let first = with_scratch(100, |s| s.as_ptr() as usize);
        with_scratch(50, |outer| {
            assert_eq!(outer.as_ptr() as usize, first);
            outer.fill(1.0);
            with_scratch(50, |inner| inner.fill(2.0));
            assert!(outer.iter().all(|&v| v == 1.0));
        });
    }
}
