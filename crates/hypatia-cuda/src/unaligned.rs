//! The same products as those of [interleaved rows](crate::interleaved), as one launch of a kernel of ours, on GPUs of the
//! architecture 9.0: warp groups multiply, and whatever is copied is copied by the engine for tensors.

use std::ffi::c_void;

use hypatia_core::ty::DType;
use hypatia_runtime::tuning::Entry;

use crate::driver::{Device, Function, Map, Matrix, Stream};
use crate::gemm::{Epilogue, Launch, Operands, Problem};
use crate::interleaved::{Interleaved, UNIT};
use crate::nvrtc::Arch;
use crate::setting::{Setting, key_of, times};
use crate::{Error, Result, kernel};

const SOURCE: &str = include_str!("unaligned.cu");

/// The kernel, and what it is called in the tuning database.
pub(crate) const NAME: &str = "unaligned";

/// Of the kernel; measurements of others do not count.
const VERSION: u32 = 3;

/// The only architecture that has these instructions.
const ARCH: Arch = Arch::new(9, 0);

/// Rows of a warp group, and numbers that are summed up at a time. These and the next are the kernel's.
const ROWS: usize = 64;
const DEPTH: usize = 64;
const STAGES: usize = 4;
const GROUPS: usize = 2;
const SIDE: usize = 64;
const SIDES: usize = 4;

/// Rows of the weight that the first block of a cluster fetches.
const FIRST: usize = 128;

/// Columns of a tile, one of these.
const WIDTHS: [usize; 8] = [256, 240, 232, 224, 216, 208, 200, 192];

/// What a tile costs beside its columns, in columns: measured on an H200.
const TILE: usize = 50;

const THREADS: u32 = 384;

/// With fewer rows most of what a warp group computes is for nothing.
const LEAST: usize = 128;

/// As in the kernel: rows of the left factor and of the result that start alike, and the weight by what each block of a
/// cluster fetches.
#[repr(C)]
#[derive(Default)]
struct Maps([Map; 2 * UNIT + 2]);

/// A product by the kernel.
#[derive(Debug)]
pub(crate) struct Unaligned {
    problem: Problem,
    function: Function,
    width: usize,
    microseconds: f64,
}

impl Unaligned {
    /// True if it is worth trying.
    pub(crate) fn serves(device: &Device, problem: &Problem) -> bool {
        device.arch() == ARCH && fits(problem)
    }

    /// The kernel; none if it is not worth trying.
    ///
    /// # Safety
    /// The setting's memory is the device's.
    pub(crate) unsafe fn new(
        device: &'static Device,
        problem: &Problem,
        setting: &mut Setting<'_>,
    ) -> Result<Option<Unaligned>> {
        if !Unaligned::serves(device, problem) {
            return Ok(None);
        }
        let width = width(device, problem);
        let function = kernel::function(device, NAME, &text(problem.input, width))?;
        function.allow_shared(shared(width))?;
        let mut made = Unaligned {
            problem: *problem,
            function,
            width,
            microseconds: f64::INFINITY,
        };
        let key = key_of(device, problem, NAME, Some(VERSION))?;
        let known = setting.database.known_or(key, || {
            let ways: [(String, &dyn Launch); 1] = [(NAME.to_string(), &made)];
            // SAFETY: promised by the caller.
            let times = unsafe { times(problem, &ways, 0, setting)? };
            let (chosen, data) = (NAME.to_string(), vec![]);
            Ok::<_, Error>(Entry { chosen, times, data })
        })?;
        let Some(microseconds) = known.times.get(NAME) else {
            return Ok(None);
        };
        made.microseconds = *microseconds;
        Ok(Some(made))
    }

    /// Whether at least three of four rows that it computes are asked for.
    pub(crate) fn fills(&self) -> bool {
        4 * self.problem.m >= 3 * self.problem.m.next_multiple_of(UNIT * ROWS)
    }

    /// What a run takes.
    pub(crate) fn microseconds(&self) -> f64 {
        self.microseconds
    }

    fn blocks(&self) -> u32 {
        2 * tiles(&self.problem, self.width).min(clusters(self.function.device())) as u32
    }

    fn maps(&self, o: &Operands) -> Result<Maps> {
        let Problem {
            m,
            n,
            k,
            input,
            left,
            right,
            ..
        } = self.problem;
        let make = |elements: usize, address: u64, [rows, columns, row]: [usize; 3], part: usize| {
            let address = address + 2 * elements as u64;
            let matrix = Matrix {
                address,
                rows,
                columns,
                row,
            };
            Map::new(input == DType::F16, matrix, part)
        };
        let mut maps = Maps::default();
        for kind in 0..UNIT {
            let (rows, first) = ((m - kind).div_ceil(UNIT), UNIT - kind * n % UNIT);
            maps.0[kind] = make(kind * left.ld, o.left, [rows, k, UNIT * left.ld], ROWS)?;
            let columns = (n - first) / UNIT * UNIT;
            maps.0[UNIT + kind] = make(kind * n + first, o.out, [rows, columns, UNIT * n], ROWS)?;
        }
        for (at, part) in [(2 * UNIT, FIRST), (2 * UNIT + 1, self.width + UNIT - FIRST)] {
            maps.0[at] = make(0, o.right, [n, k, right.ld], part)?;
        }
        Ok(maps)
    }

    /// # Safety
    /// As of [`Gemm::launch`](crate::gemm::Gemm::launch).
    pub(crate) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let p = &self.problem;
        let biased = p.epilogue == Epilogue::Bias;
        let lacks = [o.left, o.right, o.out].contains(&0) || biased && o.bias == 0;
        if lacks || ![o.left, o.right, o.out].iter().all(|a| a.is_multiple_of(16)) {
            return Err(Error::malformed(format!(
                "{p}: {o:x?} lacks something or is not aligned"
            )));
        }
        let mut maps = self.maps(o)?;
        let sizes = [p.m, p.n, p.k].map(|n| n as u64);
        let [m, n, k] = sizes;
        let mut numbers = [if biased { o.bias } else { 0 }, o.out, m, n, k];
        let mut arguments: smallvec::SmallVec<[*mut c_void; 8]> = smallvec::smallvec![(&raw mut maps).cast()];
        arguments.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast()));
        // SAFETY: promised by the caller; maps and sizes are those of the operands, and the driver copies them.
        unsafe {
            self.function.launch_given(
                stream,
                [self.blocks(), 1, 1],
                THREADS,
                shared(self.width),
                &mut arguments,
            )
        }
    }
}

impl Launch for Unaligned {
    unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { Unaligned::launch(self, stream, operands) }
    }
}

/// Whether the kernel computes it, and the library is slow.
fn fits(problem: &Problem) -> bool {
    Interleaved::serves(problem)
        && !problem.n.is_multiple_of(UNIT)
        && problem.m >= LEAST
        && problem.n >= WIDTHS[0]
        && problem.m.max(problem.n).max(problem.k) < 1 << 30
        && tiles(problem, WIDTHS[WIDTHS.len() - 1]) < 1 << 30
}

/// Tiles of a cluster. Rows that are eight apart start alike.
fn tiles(problem: &Problem, width: usize) -> usize {
    2 * problem.m.div_ceil(UNIT * ROWS) * (problem.n + UNIT - 1).div_ceil(width)
}

/// Clusters of two blocks that run at a time.
fn clusters(device: &Device) -> usize {
    (device.multiprocessors() as usize / 2).max(1)
}

/// The columns of a tile with which the last turn of all clusters does least for nothing.
fn best_width(problem: &Problem, clusters: usize) -> usize {
    let cost = |width: &usize| tiles(problem, *width).div_ceil(clusters) * (width + TILE);
    WIDTHS.into_iter().min_by_key(cost).unwrap_or(WIDTHS[0])
}

fn width(device: &Device, problem: &Problem) -> usize {
    best_width(problem, clusters(device))
}

/// Bytes of shared memory: both factors of each stage, what is written, biases, and barriers.
fn shared(width: usize) -> u32 {
    let stages = STAGES * 2 * DEPTH * (GROUPS * ROWS + width + UNIT);
    let barriers = 2 * STAGES + GROUPS * SIDES + GROUPS;
    (stages + GROUPS * (2 * ROWS * SIDE + 4 * width) + 8 * barriers) as u32
}

/// The kernel for a product.
pub(crate) fn source(device: &Device, problem: &Problem) -> String {
    text(problem.input, width(device, problem))
}

fn text(dtype: DType, width: usize) -> String {
    let count = ROWS * width / 128;
    let listed = |name: fn(usize) -> String| (0..count).map(name).collect::<Vec<_>>().join(", ");
    SOURCE
        .replace("REGISTERS", &listed(|i| format!("%{i}")))
        .replace("SUMS", &listed(|i| format!("\"+f\"(sums[{i}])")))
        .replace("LEFT", &format!("%{count}"))
        .replace("RIGHT", &format!("%{}", count + 1))
        .replace("ADD", &format!("%{}", count + 2))
        .replace("WIDTH", &width.to_string())
        .replace("TYPE", if dtype == DType::F16 { "f16" } else { "bf16" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc;

    #[test]
    fn it_is_for_large_products_into_rows_that_begin_anywhere() {
        let large = Problem::linear(DType::BF16, 4096, 50257, 768);
        assert!(fits(&large));
        assert!(fits(&large.with_epilogue(Epilogue::Bias)));
        assert!(fits(&Problem::linear(DType::F16, 512, 30522, 768)));
        assert!(!fits(&large.with_epilogue(Epilogue::ReluBias)));
        assert!(!fits(&Problem::linear(DType::BF16, 4096, 50264, 768)));
        assert!(!fits(&Problem::linear(DType::BF16, 64, 50257, 768)));
        assert!(!fits(&Problem::linear(DType::F32, 4096, 50257, 768)));
    }

    #[test]
    fn tiles_are_as_wide_as_fills_the_last_turn() {
        let width = |m, n| best_width(&Problem::linear(DType::BF16, m, n, 768), 66);
        assert_eq!([width(512, 30522), width(4096, 30522)], [232, 232]);
        assert_eq!([width(512, 50257), width(4096, 50257)], [256, 256]);
    }

    #[test]
    fn every_element_is_written() {
        for (n, width) in [257, 258, 260, 300, 511, 513, 1001]
            .into_iter()
            .zip(WIDTHS.into_iter().cycle())
        {
            for kind in 0..UNIT {
                // As the kernel and its maps have it.
                let first = (UNIT - kind * n % UNIT) as isize;
                let engine = (n as isize - first) / UNIT as isize * UNIT as isize;
                let mut done = vec![false; n];
                for tile in 0..(n + UNIT - 1).div_ceil(width) {
                    for start in [0, SIDE, 2 * SIDE, width - SIDE] {
                        let unit = UNIT as isize;
                        let at = (tile * width + start) as isize - unit;
                        let ends = if at < 0 { 0 } else { engine - at };
                        for c in 0..SIDE as isize {
                            let column = at + first + c;
                            let whole = at + c < engine && (at >= 0 || c >= unit);
                            let by_hand = (0..SIDE as isize).contains(&ends) && (ends..ends + unit).contains(&c);
                            if whole || by_hand && (0..n as isize).contains(&column) {
                                done[column as usize] = true;
                            }
                        }
                    }
                }
                assert!(done.iter().all(|d| *d), "{n} {kind} {width}");
            }
        }
    }

    #[test]
    fn it_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for (dtype, width) in [(DType::BF16, 256), (DType::F16, 232), (DType::BF16, 192)] {
            assert!(shared(width) <= 227 << 10);
            nvrtc::compile(NAME, &text(dtype, width), ARCH).unwrap();
        }
    }
}
