//! Running a region: tiles in order, ranges of tiles on threads.

use std::cell::Cell;

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use super::access::{Access, Layout, accesses};
use super::loops::Tile;
use super::program::{Place, Program, Step, TILE};
use super::view::{check_bounds, distinct_layouts, layouts};
use super::{View, ViewMut};
use crate::cpu::lanes::Ahead;
use crate::kernels::region::Region;
use crate::pool::{self, Pool};
use crate::{Error, Result};

/// Tiles are computed in multiples of the widest vector: what a last tile lacks is computed in its registers.
const LANES: usize = 16;

/// Nanoseconds of work for each thread. Two threads break even at 8 us of work in all when the other one is still
/// spinning, and at 30 to 60 us when it sleeps.
const WORTH_THREADS: f64 = 20_000.0;

/// Elements of a tile that goes from memory to memory by one loop.
const LONG_TILE: usize = 16 * TILE;

/// A cache line, so that registers are aligned.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(#[expect(dead_code, reason = "used by address")] [u8; 64]);

impl Line {
    pub(crate) const ZERO: Line = Line([0; 64]);
}

thread_local! {
    /// The registers of this thread. They are taken while a range runs, so that one inside another gets its own.
    static ARENA: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// A region and the memory of one run.
pub(crate) struct Bound<'a> {
    pub(crate) inputs: SmallVec<[Access<'a>; 4]>,
    pub(crate) outputs: SmallVec<[Access<'a>; 2]>,
    /// Whether outputs may be written before all inputs of the tile are read.
    pub(crate) apart: bool,
}

impl<'a> Bound<'a> {
    pub(crate) fn new(inputs: SmallVec<[Access<'a>; 4]>, outputs: SmallVec<[Access<'a>; 2]>) -> Bound<'a> {
        let apart = outputs.iter().all(|o| {
            let (first, last) = o.span();
            inputs.iter().all(|i| {
                let (other_first, other_last) = i.span();
                last < other_first || other_last < first
            })
        });
        Bound { inputs, outputs, apart }
    }
}

/// What a run depends on beside addresses: made once for tensors of one shape.
#[derive(Debug)]
pub struct Fit {
    program: Program,
    count: usize,
    inputs: Vec<Layout>,
    outputs: Vec<Layout>,
}

impl Region {
    /// Computes the outputs, all of this shape, on at most `threads` threads.
    pub fn run(&self, threads: usize, shape: &[usize], inputs: &[View], outputs: &mut [ViewMut]) -> Result<()> {
        for (i, v) in inputs.iter().enumerate() {
            check_bounds("input", i, shape, v.strides, v.len)?;
        }
        for (i, v) in outputs.iter().enumerate() {
            check_bounds("output", i, shape, v.strides, v.len)?;
        }
        let fit = self.fit(
            shape,
            &Vec::from_iter(inputs.iter().map(|v| (v.dtype, v.strides))),
            &Vec::from_iter(outputs.iter().map(|v| (v.dtype, v.strides))),
        )?;
        let from: SmallVec<[*mut u8; 4]> = inputs.iter().map(|v| v.data.cast_mut()).collect();
        let to: SmallVec<[*mut u8; 2]> = outputs.iter().map(|v| v.data).collect();
        // SAFETY: views vouch for their memory, and it was compared with the shape.
        unsafe { fit.run(threads, &from, &to) };
        Ok(())
    }

    /// Compiles the region and checks dtypes and strides of tensors of a shape, for any number of runs.
    pub fn fit(&self, shape: &[usize], inputs: &[(DType, &[isize])], outputs: &[(DType, &[isize])]) -> Result<Fit> {
        check_types("inputs", self.inputs(), inputs.iter().map(|v| v.0))?;
        check_types("outputs", self.outputs(), outputs.iter().map(|v| v.0))?;
        Ok(Fit {
            program: Program::new(self),
            count: shape.iter().product(),
            inputs: layouts("input", shape, inputs)?,
            outputs: distinct_layouts("output", shape, outputs)?,
        })
    }
}

impl Fit {
    /// Computes the outputs of tensors that start at these addresses.
    ///
    /// # Safety
    /// There is an address for each input and output, and the memory is as [`View::from_raw`] and
    /// [`ViewMut::from_raw`] say.
    pub unsafe fn run(&self, threads: usize, inputs: &[*mut u8], outputs: &[*mut u8]) {
        let bound = Bound::new(accesses(&self.inputs, inputs), accesses(&self.outputs, outputs));
        let count = self.count;
        let tiles = count.div_ceil(TILE);
        let worth = (count as f64 * self.program.weight / WORTH_THREADS) as usize;
        let threads = threads.min(worth.max(1)).min(tiles);
        if threads <= 1 {
            // SAFETY: by the caller.
            return unsafe { Runner::new(&self.program).run(&bound, 0, count) };
        }
        let parts = pool::parts(threads, count).min(tiles);
        Pool::global().run(threads, parts, &|part| {
            let (start, end) = (tiles * part / parts * TILE, tiles * (part + 1) / parts * TILE);
            // SAFETY: by the caller; parts write different positions.
            unsafe { Runner::new(&self.program).run(&bound, start, end.min(count)) };
        });
    }
}

/// A region with its registers, for the ranges that one thread computes.
pub(crate) struct Runner<'a> {
    program: &'a Program,
    arena: Vec<Line>,
    /// Where every value is by default, and where it is in the current tile.
    registers: SmallVec<[*mut u8; 16]>,
    slots: SmallVec<[*mut u8; 16]>,
}

impl Drop for Runner<'_> {
    fn drop(&mut self) {
        ARENA.set(std::mem::take(&mut self.arena));
    }
}

impl<'a> Runner<'a> {
    pub(crate) fn new(p: &'a Program) -> Runner<'a> {
        let mut arena = ARENA.take();
        if arena.len() * size_of::<Line>() < p.arena {
            arena.resize(p.arena.div_ceil(size_of::<Line>()), Line::ZERO);
        }
        let base: *mut u8 = arena.as_mut_ptr().cast();
        let place = |place: &Place| match *place {
            Place::Register(offset) => base.wrapping_add(offset),
            Place::Constant(index) => std::ptr::from_ref(&p.constants[index]).cast_mut().cast(),
            Place::None => std::ptr::null_mut(),
        };
        let registers: SmallVec<[*mut u8; 16]> = p.places.iter().map(place).collect();
        Runner {
            program: p,
            arena,
            slots: registers.clone(),
            registers,
        }
    }

    /// Computes the positions from `start` to `end`.
    ///
    /// # Safety
    /// The memory of `bound` must be that of this region's dtypes and hold these positions, and no other thread may
    /// use the outputs there.
    pub(crate) unsafe fn run(&mut self, bound: &Bound<'_>, start: usize, end: usize) {
        let p = self.program;
        let mut next = start;
        while next < end {
            let at = next;
            let exact = self.tile(bound, at, end);
            next += exact;
            let len = exact.next_multiple_of(LANES);
            self.slots.copy_from_slice(&self.registers);
            if len == exact && bound.apart {
                self.direct_outputs(bound, at, exact);
            }
            let ahead = self.ahead(bound, at, end);
            let slots = &mut self.slots;
            for (index, step) in p.steps.iter().enumerate() {
                // SAFETY: registers have room for a tile and differ from those of operands; loads and direct outputs
                // stay within the range, whose memory the caller answers for.
                unsafe {
                    match *step {
                        Step::Load { input, value } => match bound.inputs[input].direct(at, exact) {
                            Some(memory) if len == exact && (bound.apart || !p.outputs.contains(&value)) => {
                                slots[value] = memory;
                            }
                            _ => bound.inputs[input].load(at, exact, slots[value]),
                        },
                        Step::Compute { run, args, value } => run(&Tile {
                            args: args.map(|a| slots[a].cast_const()),
                            out: slots[value],
                            len,
                            ahead: if p.asks == Some(index) { ahead } else { Ahead::new() },
                        }),
                        Step::Round { run, value } => run(slots[value], len),
                    }
                }
            }
            for (access, &value) in bound.outputs.iter().zip(&p.outputs) {
                if access.direct(at, exact) != Some(self.slots[value]) {
                    // SAFETY: as above; the register holds the value of every position of the tile.
                    unsafe { access.store(at, exact, self.slots[value]) };
                }
            }
        }
    }

    /// The length of the tile at a position: longer where no registers are used.
    fn tile(&self, bound: &Bound<'_>, at: usize, end: usize) -> usize {
        let long = LONG_TILE.min(end - at) / LANES * LANES;
        let mut memory = bound.inputs.iter().chain(&bound.outputs);
        if self.program.one_loop && bound.apart && long > TILE && memory.all(|a| a.direct(at, long).is_some()) {
            return long;
        }
        TILE.min(end - at)
    }

    /// What to ask for while the tile at this position is computed: where it goes, and what the next one needs.
    fn ahead(&self, bound: &Bound<'_>, at: usize, end: usize) -> Ahead {
        let mut ahead = Ahead::new();
        if self.program.asks.is_some() {
            let (next, after) = (end.min(at + TILE), end.min(at + 2 * TILE));
            // A loop that writes the result itself is to find its lines there.
            let lead = if self.program.one_loop { TILE / 2 } else { 0 };
            bound
                .outputs
                .iter()
                .for_each(|o| o.ask(end.min(at + lead)..next, 4, &mut ahead));
            bound.inputs.iter().for_each(|i| i.ask(next..after, 4, &mut ahead));
        }
        ahead
    }

    /// Lets computed values be written where they belong instead of into registers.
    fn direct_outputs(&mut self, bound: &Bound<'_>, at: usize, len: usize) {
        let outputs = &self.program.outputs;
        for (i, (access, &value)) in bound.outputs.iter().zip(outputs).enumerate() {
            // The first values are the inputs, which are not computed.
            let loaded = value < bound.inputs.len();
            let before = outputs[..i].contains(&value);
            if !loaded
                && !before
                && let Some(memory) = access.direct(at, len)
            {
                self.slots[value] = memory;
            }
        }
    }
}

fn check_types(what: &str, wanted: &[DType], given: impl ExactSizeIterator<Item = DType>) -> Result<()> {
    let given: SmallVec<[DType; 8]> = given.collect();
    if given[..] == *wanted {
        return Ok(());
    }
    Err(Error::Type {
        op: "region".into(),
        message: format!("{what} are {given:?} instead of {wanted:?}"),
    })
}
