//! How rows are given to threads.

use super::super::indent;

/// Threads of a warp, and of a block of several rows.
const WARP: usize = 32;
const BLOCK: usize = 256;

/// How rows are given to threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Plan {
    /// Elements of a row.
    pub(super) width: usize,
    /// Elements that a thread takes at a time.
    pub(super) pack: usize,
    /// Threads of a row.
    pub(in super::super) threads: usize,
    /// Rows of a block.
    pub(in super::super) rows: usize,
    /// Packs that a thread keeps; 0 if it reads them again for each pass.
    pub(super) kept: usize,
}

impl Plan {
    pub(in super::super) fn new(width: usize, pack: usize) -> Plan {
        let packs = width.div_ceil(pack);
        // Short rows share a warp.
        let threads = if width <= 1024 {
            packs.next_power_of_two().min(WARP)
        } else {
            packs.div_ceil(4).next_power_of_two().clamp(128, 1024)
        };
        let kept = packs.div_ceil(threads);
        // Registers of a thread: 64 at 1024 threads, twice as many at half.
        let room = if threads == 1024 { 32 } else { 64 };
        Plan {
            width,
            pack,
            threads,
            rows: if threads <= WARP { BLOCK / threads } else { 1 },
            kept: if kept * pack <= room { kept } else { 0 },
        }
    }

    pub(in super::super) fn block(&self) -> u32 {
        (self.threads * self.rows) as u32
    }

    /// A loop over the thread's packs: their first columns are `c`, and `p` counts them where they are kept.
    pub(super) fn over_packs(&self, inner: &str) -> String {
        let Plan {
            width,
            pack,
            threads,
            kept,
            ..
        } = *self;
        if kept == 0 {
            let step = threads * pack;
            let inner = indent(inner, 1);
            return format!("for (int c = lane * {pack}; c < {width}; c += {step}) {{\n{inner}}}\n");
        }
        // The last share may be smaller.
        let whole = kept * threads * pack == width;
        let guarded = format!("if (c < {width}) {{\n{}}}\n", indent(inner, 1));
        let inner = indent(if whole { inner } else { &guarded }, 1);
        let first = format!("    const int c = (p * {threads} + lane) * {pack};\n");
        format!("#pragma unroll\nfor (int p = 0; p < {kept}; p++) {{\n{first}{inner}}}\n")
    }
}
