//! Plans that treat rows apart may run in chunks of rows.
//!
//! Side by side, a thread takes a chunk from the first step to the last: nobody waits between steps, and values in between
//! stay in the caches of a core. One after the other, values in between need memory for a chunk only. Strides do not
//! depend on the first size, so a step is bound for a chunk like for the whole, and where inputs and results start
//! moves from chunk to chunk.

#[cfg(test)]
mod tests;

use hypatia_core::ty::DType;

use super::{LinearStep, Operand, Plan, RegionStep, RowStep, Task, ValueId};
use crate::arena::ALIGNMENT;
use crate::error::{Error, Result};

/// Multiplications that are worth a chunk for each thread.
const WORK: usize = 2 << 20;
/// Rows of a chunk, at least. Each thread reads all weights for its chunk: with so many rows for each so many bytes,
/// that takes no longer than the products do. Weights beyond the last number come from memory, where threads share.
const LEAST: usize = 16;
const STREAMED: usize = 128 << 10;
const CACHED: usize = 24 << 20;
/// Rows of a chunk, at least, where chunks are to save memory: side by side, and one after the other.
const SAVING: (usize, usize) = (64, 256);
/// Chunks one after the other, at most: weights are read once for each.
const MOST: usize = 4;

/// How the rows of a plan are cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunks {
    /// Rows of the whole.
    rows: usize,
    /// Rows of a chunk; the last one may have fewer.
    each: usize,
    /// Values that have a part for each row.
    cut: Vec<bool>,
    /// Chunks that are run at the same time.
    pub(super) together: usize,
}

impl Chunks {
    /// Everything at once.
    pub(super) fn whole() -> Chunks {
        Chunks {
            rows: 1,
            each: 1,
            cut: vec![],
            together: 1,
        }
    }

    fn new(rows: usize, count: usize, cut: &[bool], together: usize) -> Chunks {
        Chunks {
            rows,
            each: rows.div_ceil(count),
            cut: cut.to_vec(),
            together,
        }
    }

    /// The first rows of the chunks.
    pub(super) fn starts(&self) -> Vec<usize> {
        (0..self.rows).step_by(self.each).collect()
    }

    /// Chunks of different lengths: most of them, and the last one.
    pub(super) fn forms(&self) -> Vec<Form<'_>> {
        let last = self.rows - (self.rows - 1) / self.each * self.each;
        let mut lengths = vec![self.each, last];
        lengths.dedup();
        lengths.into_iter().map(|rows| Form { chunks: self, rows }).collect()
    }

    fn is_cut(&self, id: ValueId) -> bool {
        self.cut.get(id).copied().unwrap_or(false)
    }

    /// Bytes of a value that a chunk uses.
    pub(super) fn bytes(&self, plan: &Plan, id: ValueId) -> usize {
        let whole = plan.values[id].bytes();
        match self.is_cut(id) {
            true => whole / self.rows * self.each,
            false => whole,
        }
    }

    /// Bytes from one row of a value to the next; none for what all rows share.
    pub(super) fn row(&self, plan: &Plan, id: ValueId) -> usize {
        match self.is_cut(id) {
            true => plan.values[id].bytes() / self.rows,
            false => 0,
        }
    }

    /// Bytes of a result that every chunk may use for something else before it writes them.
    pub(super) fn spare(&self, plan: &Plan, id: ValueId) -> usize {
        let row = self.row(plan, id);
        let fewest = self.forms().iter().map(|form| form.rows).min().unwrap_or(0);
        match (self.each == self.rows, row.is_multiple_of(ALIGNMENT)) {
            (true, _) => plan.values[id].bytes(),
            (false, true) => row * fewest,
            // Its parts do not start where values may.
            (false, false) => 0,
        }
    }
}

/// A chunk of so many rows.
#[derive(Clone, Copy)]
pub(super) struct Form<'a> {
    chunks: &'a Chunks,
    rows: usize,
}

impl Form<'_> {
    /// So many of the whole's, for a chunk.
    pub(super) fn part(self, whole: usize) -> usize {
        whole / self.chunks.rows * self.rows
    }

    /// The shape of what a step computes, for a chunk.
    pub(super) fn shape(self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Some(first) = shape.first_mut().filter(|_| self.rows < self.chunks.rows) {
            *first = self.part(*first);
        }
        shape
    }
}

impl Plan {
    /// The chunks that the plan is to be run in on so many threads.
    pub(super) fn chunks(&self, threads: usize) -> Result<Chunks> {
        let whole = Chunks::whole();
        let (work, weights, single) = self.products();
        if work == 0 {
            return Ok(whole);
        }
        let Some((rows, cut)) = self.rows_apart() else {
            return Ok(whole);
        };
        // Torch's products in 16 bits need memory for themselves; those in fp32 do not.
        let enough = if single { self.alive_together()? } else { usize::MAX };
        let saves = |chunks: &Chunks| Ok::<bool, Error>(self.needs(chunks)? <= enough);
        let streams = |chunks: &Chunks| chunks.each >= LEAST && chunks.each * STREAMED >= weights && weights <= CACHED;
        let at_once = Chunks::new(rows, threads, &cut, threads);
        if threads > 1 && work >= WORK && streams(&at_once) {
            let twice = Chunks::new(rows, 2 * threads, &cut, threads);
            let better = twice.each >= SAVING.0 && streams(&twice) && !saves(&at_once)? && saves(&twice)?;
            return Ok(if better { twice } else { at_once });
        }
        if saves(&whole)? {
            return Ok(whole);
        }
        let least = if threads > 1 { SAVING.1 } else { SAVING.0 };
        for count in 2..=MOST {
            let chunks = Chunks::new(rows, count, &cut, 1);
            if chunks.each >= least && saves(&chunks)? {
                return Ok(chunks);
            }
        }
        Ok(whole)
    }

    /// Multiplications of all linear layers, if there are several, bytes of their weights, and whether all are in fp32.
    fn products(&self) -> (usize, usize, bool) {
        let (mut work, mut weights, mut single, mut count) = (0, 0, true, 0);
        for step in &self.steps {
            if let Task::Linear(l) = step {
                let w = &self.values[l.w];
                work += l.m * w.numel();
                weights += w.bytes();
                single &= w.dtype == DType::F32;
                count += 1;
            }
        }
        (if count > 1 { work } else { 0 }, weights, single)
    }

    /// Bytes of results and of the block of values in between.
    fn needs(&self, chunks: &Chunks) -> Result<usize> {
        let results: usize = self.outputs.iter().map(|id| self.values[*id].bytes()).sum();
        Ok(self.layout(chunks, None)?.bytes * chunks.together + results)
    }

    /// The most bytes that values and results have at the same time: what eager needs at least.
    fn alive_together(&self) -> Result<usize> {
        let (_, _, lives) = self.lives(&Chunks::whole(), None)?;
        let written = |id: &ValueId| self.steps.iter().position(|s| s.writes().contains(id)).unwrap_or(0);
        let results: Vec<(usize, usize)> = (self.outputs.iter())
            .map(|id| (written(id), self.values[*id].bytes()))
            .collect();
        let at = |step: usize| {
            let between = lives
                .iter()
                .filter(|l| l.first <= step && step <= l.last)
                .map(|l| l.bytes);
            let done = results
                .iter()
                .filter(|(first, _)| *first <= step)
                .map(|(_, bytes)| bytes);
            between.sum::<usize>() + done.sum::<usize>()
        };
        Ok((0..self.steps.len()).map(at).max().unwrap_or(0))
    }

    /// The number of rows in which a step writes a value, whatever shape it is returned in.
    fn rows_of(&self, id: ValueId) -> Option<usize> {
        let step = self.steps.iter().find(|s| s.writes().contains(&id))?;
        match step {
            Task::Linear(l) => Some(l.m),
            Task::Region(r) => r.shape.first().copied(),
            Task::Rows(r) => r.shape.first().copied(),
            _ => None,
        }
    }

    /// The number of rows that all steps treat apart, and which values have a part for each; none if there is no such
    /// number.
    fn rows_apart(&self) -> Option<(usize, Vec<bool>)> {
        let first = |id: &ValueId| self.values[*id].shape.first().copied();
        let written = self.outputs.iter().map(|id| self.rows_of(*id)).min().flatten();
        let returned = self.outputs.iter().map(first).min().flatten();
        [written, returned]
            .into_iter()
            .flatten()
            .find_map(|rows| self.apart(rows))
    }

    fn apart(&self, rows: usize) -> Option<(usize, Vec<bool>)> {
        if rows < 2 || !self.seen.is_empty() {
            return None;
        }
        let mut apart = Apart {
            plan: self,
            rows,
            cut: vec![None; self.values.len()],
        };
        self.constants.iter().for_each(|id| apart.cut[*id] = Some(false));
        let all = (self.steps.iter()).all(|step| match step {
            Task::Linear(l) => apart.linear(l),
            Task::Region(r) => apart.region(r),
            Task::Rows(r) => apart.row_step(r),
            _ => false,
        });
        let results = self.outputs.iter().all(|id| apart.cut[*id] == Some(true));
        (all && results).then(|| (rows, apart.cut.iter().map(|c| *c == Some(true)).collect()))
    }
}

/// Which values have a part for each row, as far as that is known.
struct Apart<'a> {
    plan: &'a Plan,
    rows: usize,
    cut: Vec<Option<bool>>,
}

impl Apart<'_> {
    fn linear(&mut self, l: &LinearStep) -> bool {
        let Some((_, k)) = l.sizes(&self.plan.values[l.w].shape) else {
            return false;
        };
        let value = &self.plan.values[l.y];
        let n = value.numel() / l.m.max(1);
        let mut read = |o: &Operand, stride: usize, columns: usize| {
            self.aligned(o.value, o.offset, (l.m, stride as isize), columns.saturating_sub(1))
        };
        let read = read(&l.x, l.x_stride, k) && l.r.as_ref().is_none_or(|(r, stride)| read(r, *stride, n));
        read && self.plan.constants.contains(&l.w) && self.writes(l.y, &[l.m])
    }

    fn region(&mut self, r: &RegionStep) -> bool {
        r.inputs.iter().all(|o| self.operand(o))
            && r.slices.is_empty()
            && r.outputs.iter().all(|id| self.writes(*id, &r.shape))
    }

    fn row_step(&mut self, r: &RowStep) -> bool {
        r.shape.len() > r.reduced && r.inputs.iter().all(|o| self.operand(o)) && self.writes(r.output, &r.shape)
    }

    fn operand(&mut self, o: &Operand) -> bool {
        let (Some((first, sizes)), Some((stride, strides))) = (o.shape.split_first(), o.strides.split_first()) else {
            return false;
        };
        if strides.iter().any(|s| *s < 0) || o.shape.contains(&0) {
            return false;
        }
        let last = sizes.iter().zip(strides).map(|(n, s)| (n - 1) * *s as usize).sum();
        self.aligned(o.value, o.offset, (*first, *stride), last)
    }

    /// Whether what is read for a row lies in that row's part of a value, or is the same for all rows: first elements
    /// at one distance, and how far the last one is from them.
    fn aligned(&mut self, id: ValueId, offset: usize, (count, stride): (usize, isize), last: usize) -> bool {
        if !count.is_multiple_of(self.rows) {
            return false;
        }
        if stride == 0 {
            return self.is(id, false);
        }
        let (each, part) = (count / self.rows, self.plan.values[id].numel() / self.rows);
        let (Ok(stride), true) = (
            usize::try_from(stride),
            self.plan.values[id].numel() == part * self.rows,
        ) else {
            return false;
        };
        each * stride == part && offset + (each - 1) * stride + last < part && self.is(id, true)
    }

    fn writes(&mut self, id: ValueId, shape: &[usize]) -> bool {
        shape.first().is_some_and(|n| n.is_multiple_of(self.rows)) && self.is(id, true)
    }

    fn is(&mut self, id: ValueId, cut: bool) -> bool {
        *self.cut[id].get_or_insert(cut) == cut
    }
}
