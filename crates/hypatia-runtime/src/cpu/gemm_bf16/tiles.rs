//! AMX: permission, configuration, and the kernel over tiles.
//!
//! The compiler never uses tile registers, so what one assembly block leaves in them the next one finds.

use super::format::{Format, TILE};
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::OnceLock;

/// True if the processor has bf16 tiles and the system lets this process use them.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| present() && permitted())
}

#[allow(unused_unsafe, reason = "unsafe in older compilers")]
fn present() -> bool {
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    // SAFETY: every x86-64 processor has the instruction.
    let (most, features) = unsafe {
        (
            std::arch::x86_64::__cpuid(0).eax,
            std::arch::x86_64::__cpuid_count(7, 0).edx,
        )
    };
    most >= 7 && features & BF16_AND_TILES == BF16_AND_TILES
}

/// Asks for the tile registers, which a process has to before its first use of them.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    unsafe extern "C" {
        fn syscall(number: std::ffi::c_long, ...) -> std::ffi::c_long;
    }
    const ARCH_PRCTL: std::ffi::c_long = 158;
    const ARCH_REQ_XCOMP_PERM: std::ffi::c_long = 0x1023;
    const TILE_DATA: std::ffi::c_long = 18;
    // SAFETY: the call reads and writes no memory of ours; a system that does not know it refuses.
    unsafe { syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Asks for the cache lines of some elements.
#[inline(always)]
pub fn fetch<T>(from: *const T, len: usize) {
    for line in (0..len * size_of::<T>()).step_by(ROW) {
        // SAFETY: a prefetch faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(line)) };
    }
}

/// All eight tiles: 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Shapes([u8; 64]);

static SHAPES: Shapes = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Shapes(bytes)
};

/// Calls `f` with the tiles configured, and leaves them released: a thread in use of tiles is slow to switch.
///
/// # Safety
/// Tiles are available.
pub unsafe fn configured<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: the shapes are valid, and the caller knows that the instruction is there.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly, preserves_flags)) };
    let result = f();
    // SAFETY: as above.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    result
}

/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn zero<const T: u8>() {
    // SAFETY: the caller's obligation.
    unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) }
}

/// # Safety
/// Tiles are configured, and 16 rows of 64 bytes can be read, `stride` bytes apart.
#[inline(always)]
unsafe fn load<const T: u8>(from: *const u16, stride: usize) {
    // SAFETY: the caller's obligation.
    unsafe {
        asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) from, s = in(reg) stride,
            options(nostack, readonly, preserves_flags))
    }
}

/// Loads the tile of activations. Those that stream by do not push weights out of the first-level cache.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn load_x<const STREAM: bool>(from: *const u16) {
    // SAFETY: the caller's obligation.
    unsafe {
        if !STREAM {
            return load::<X>(from, ROW);
        }
        asm!("tileloaddt1 tmm{t}, [{p} + {s}*1]", t = const X, p = in(reg) from, s = in(reg) ROW,
            options(nostack, readonly, preserves_flags))
    }
}

/// # Safety
/// Tiles are configured, and 16 rows of 64 bytes can be written, `stride` bytes apart.
#[inline(always)]
unsafe fn store<const T: u8>(to: *mut f32, stride: usize) {
    // SAFETY: the caller's obligation.
    unsafe {
        asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) to, s = in(reg) stride,
            options(nostack, preserves_flags))
    }
}

/// `tile S += tile X · tile W`.
///
/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn add_product<const S: u8>() {
    // SAFETY: the caller's obligation.
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{x}, tmm{w}", s = const S, x = const X, w = const W,
            options(nostack, nomem, preserves_flags))
    }
}

/// Operands of the kernel. Tiles of a row block stand in pairs, its upper and lower 16 rows.
pub struct Product {
    /// The row block from the first step on.
    pub x: *const u16,
    /// The panel from the first step on.
    pub w: *const u16,
    /// From panel to panel, in elements.
    pub panel: usize,
    pub steps: usize,
    pub sums: *mut f32,
    /// From row to row of the sums, in elements.
    pub stride: usize,
    /// Adds to the sums that are there.
    pub adds: bool,
    /// Weights that are needed soon, and how many cache lines of them to fetch in each step.
    pub soon: *const u16,
    pub lines: usize,
}

const ROW: usize = 64;
/// How far ahead weights are fetched, in steps.
const AHEAD: usize = 4;
/// The tiles of operands; those before them are sums: upper left, upper right, lower left, lower right.
const X: u8 = 4;
const W: u8 = 5;

/// One or two row tiles (`TALL`) by one or two panels (`WIDE`); activations may `STREAM` by.
///
/// Six tiles are in use, four of them sums: where a second hardware thread shares the tile unit, eight take up to twice
/// as long, and with fewer sums a tile is loaded for too few products.
///
/// # Safety
/// Tiles are configured, and the pointers reach what the product names.
#[inline(always)]
pub unsafe fn multiply<F: Format, const TALL: bool, const WIDE: bool, const STREAM: bool>(p: &Product) {
    let (mut x, mut w, mut soon) = (p.x, p.w, p.soon);
    // SAFETY: the caller's obligation; a prefetch faults nowhere.
    unsafe {
        let outside = p.adds && F::PIECES > 1;
        begin::<TALL, WIDE>(p, p.adds && !outside);
        for _ in 0..p.steps {
            if !TALL {
                // Weights go by once, and come from memory.
                for line in 0..F::PIECES * TILE * 2 / ROW {
                    let ahead = AHEAD * F::PIECES * TILE + line * ROW / 2;
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead).cast());
                    if WIDE {
                        _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(p.panel + ahead).cast());
                    }
                }
            }
            for line in 0..p.lines {
                _mm_prefetch::<_MM_HINT_T1>(soon.wrapping_add(line * ROW / 2).cast());
            }
            soon = soon.wrapping_add(p.lines * ROW / 2);
            for (i, &(a, b)) in F::PAIRS.iter().enumerate() {
                let new = (i == 0 || F::PAIRS[i - 1].0 != a, i == 0 || F::PAIRS[i - 1].1 != b);
                let (x, left) = (x.add(a * 2 * TILE), w.add(b * TILE));
                let right = left.wrapping_add(p.panel);
                match (TALL, WIDE) {
                    // To and fro, so that the next pair begins with the tiles that this one ends with.
                    (true, true) if i % 2 == 0 => square::<STREAM, 0, 2, 3, 1>(x, left, right, new),
                    (true, true) => square::<STREAM, 1, 3, 2, 0>(x, right, left, new),
                    (true, false) => {
                        load::<W>(left, ROW);
                        load_x::<STREAM>(x);
                        add_product::<0>();
                        load_x::<STREAM>(x.add(TILE));
                        add_product::<2>();
                    }
                    (false, _) => {
                        load_x::<STREAM>(x);
                        load::<W>(left, ROW);
                        add_product::<0>();
                        if WIDE {
                            load::<W>(right, ROW);
                            add_product::<1>();
                        }
                    }
                }
            }
            x = x.add(F::PIECES * 2 * TILE);
            w = w.add(F::PIECES * TILE);
        }
        if outside {
            let mut sums = Square([0.0; 4 * 16 * 16]);
            end::<TALL, WIDE>(sums.0.as_mut_ptr(), 32);
            add_square::<TALL, WIDE>(&sums, p);
        } else {
            end::<TALL, WIDE>(p.sums, p.stride);
        }
    }
}

/// Two row tiles by two panels. `new` says whether the first tiles of either have to be loaded.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn square<const STREAM: bool, const A: u8, const B: u8, const C: u8, const D: u8>(
    x: *const u16,
    first: *const u16,
    second: *const u16,
    new: (bool, bool),
) {
    // SAFETY: the caller's obligation.
    unsafe {
        if new.1 {
            load::<W>(first, ROW);
        }
        if new.0 {
            load_x::<STREAM>(x);
        }
        add_product::<A>();
        load_x::<STREAM>(x.add(TILE));
        add_product::<B>();
        load::<W>(second, ROW);
        add_product::<C>();
        load_x::<STREAM>(x);
        add_product::<D>();
    }
}

/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn begin<const TALL: bool, const WIDE: bool>(p: &Product, adds: bool) {
    let (sums, lower, bytes) = (p.sums, p.sums.wrapping_add(16 * p.stride), p.stride * size_of::<f32>());
    // SAFETY: the caller's obligation.
    unsafe {
        if !adds {
            zero::<0>();
            zero::<1>();
            zero::<2>();
            return zero::<3>();
        }
        load::<0>(sums.cast(), bytes);
        if WIDE {
            load::<1>(sums.add(16).cast(), bytes);
        }
        if TALL {
            load::<2>(lower.cast(), bytes);
        }
        if TALL && WIDE {
            load::<3>(lower.add(16).cast(), bytes);
        }
    }
}

/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn end<const TALL: bool, const WIDE: bool>(sums: *mut f32, stride: usize) {
    let (lower, bytes) = (sums.wrapping_add(16 * stride), stride * size_of::<f32>());
    // SAFETY: the caller's obligation.
    unsafe {
        store::<0>(sums, bytes);
        if WIDE {
            store::<1>(sums.add(16), bytes);
        }
        if TALL {
            store::<2>(lower, bytes);
        }
        if TALL && WIDE {
            store::<3>(lower.add(16), bytes);
        }
    }
}

/// The sums of a kernel, in rows of 32.
#[repr(align(64))]
struct Square([f32; 4 * 16 * 16]);

/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn add_square<const TALL: bool, const WIDE: bool>(square: &Square, p: &Product) {
    let columns = if WIDE { 32 } else { 16 };
    for (row, more) in square.0.chunks(32).enumerate().take(if TALL { 32 } else { 16 }) {
        // SAFETY: the product's sums have these rows.
        let sums = unsafe { std::slice::from_raw_parts_mut(p.sums.add(row * p.stride), columns) };
        sums.iter_mut().zip(more).for_each(|(s, m)| *s += m);
    }
}
