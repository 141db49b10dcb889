//! Kernels that reduce rows: sums, as the gradient of a bias is, means, norms, and the moments of batch norms.
//!
//! A block takes a chunk of rows of some columns; a second kernel puts the chunks together. What lies side by side is
//! read by threads side by side, whether that are columns or the elements of one. A thread takes moments
//! about the first number that it sees, of few numbers at a time, and those of several threads are put together by
//! their means: so nothing cancels, however far the numbers are from zero.

mod made;

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::plan::{ColumnKind, ColumnStep, Plan};

use made::Made;

use super::body::{body, computed, describe, inputs_used, kernel_name};
use super::pack::{Shell, Slot, all, each};
use super::space::{Space, pack_width};
use super::{Operand, expect, indent, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// Threads of a block; at most so many are side by side.
const THREADS: usize = 256;
const LANES: usize = 32;
/// Rows that a thread reduces at most before the result is written; sums of so many f32 stay exact enough.
const ROWS: usize = 64;
/// Fewer rows are not shared out among blocks, and so many blocks keep a GPU busy.
const FEWEST: usize = 8;
const BLOCKS: usize = 264;
/// Numbers that are kept for a column, at most: shared memory has to hold them for all threads.
const NUMBERS: usize = 4;

/// A reduction in one kernel, or in two, run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Reduces chunks of rows. Operands: the region's inputs, what is known of the chunks. With one chunk the results
    /// are in its place.
    pub chunks: Kernel,
    /// Puts the chunks together, if there are several. Operands: what is known of them, the results.
    pub finish: Option<Kernel>,
    /// Bytes of what is known of the chunks.
    pub partial_bytes: usize,
}

impl Columns {
    /// Those of a step.
    pub(crate) fn of(plan: &Plan, step: &ColumnStep) -> Result<Columns> {
        let inputs: Vec<Operand> = step.inputs.iter().map(|o| Operand::of(plan, o)).collect();
        let out: Vec<DType> = step.outputs.iter().map(|v| plan.values[*v].dtype).collect();
        columns(&step.kinds, &step.region, &step.shape, step.rows, &inputs, &out)
    }

    /// All of them.
    pub(super) fn kernels(self) -> Vec<Kernel> {
        [self.chunks].into_iter().chain(self.finish).collect()
    }
}

/// Reduces the outputs of a region over the first `rows` dimensions of a shape, each to what its kind says. They must
/// all be f32, or f64; the dense results are of types `out`. For norms the region squares.
pub fn columns(
    kinds: &[ColumnKind],
    region: &Region,
    shape: &[usize],
    rows: usize,
    inputs: &[Operand],
    out: &[DType],
) -> Result<Columns> {
    let refuse = |message: &str| Err(Error::unsupported(format!("column sums of shape {shape:?}: {message}")));
    let sum_type = region.outputs().first().copied();
    let alike = |d: &DType| matches!(d, DType::F32 | DType::F64) && region.outputs().iter().all(|o| o == d);
    let Some(sum_type) = sum_type.filter(alike).filter(|_| kinds.len() == region.outputs().len()) else {
        return refuse("what is summed is neither f32 nor f64");
    };
    let numbers: usize = kinds.iter().map(|k| k.results()).sum();
    if numbers > NUMBERS {
        return refuse("there are too many sums at a time");
    }
    if rows > shape.len() || shape.contains(&0) || !out.iter().all(|d| d.is_float()) || out.len() != numbers {
        return refuse("there is nothing to sum, or it is no float");
    }
    expect("inputs", region.inputs(), shape, inputs)?;
    let operands: Vec<&Operand> = inputs.iter().collect();
    let part = |range: std::ops::Range<usize>| operands.iter().map(|o| o.strides[range.clone()].to_vec()).collect();
    let (above, along): (Vec<_>, Vec<_>) = (part(0..rows), part(rows..shape.len()));
    let along_rows = lies_along(shape, rows, inputs);
    let sums = Sums {
        made: Made {
            kinds,
            number: computed(sum_type),
            count: shape[..rows].iter().product(),
        },
        region,
        // Rows may be taken in any order.
        rows: match along_rows {
            Some(most) => Space::ordered_by(&shape[..rows], &above, most),
            None => Space::new(&shape[..rows], &above),
        },
        columns: Space::new(&shape[rows..], &along),
        operands,
        out,
        numbers,
    };
    let chunks = match along_rows {
        Some(_) => sums.across(),
        None => sums.down(),
    };
    let (count, columns) = (sums.rows.len(), sums.columns.len());
    let name = kernel_name("columns", &[Some(region)]);
    let comment: Vec<String> = describe(region, |i| format!("x{i}"))
        .iter()
        .zip(kinds)
        .map(|(expression, kind)| format!("{kind:?} of {expression} over {} rows each", chunks.rows))
        .collect();
    let first_types = if chunks.count == 1 {
        out
    } else {
        std::slice::from_ref(&sum_type)
    };
    let shell = Shell {
        name: &name,
        comment: &comment,
        parameters: parameters(region.inputs(), first_types, &["rows"]),
        threads: THREADS as u32,
        body: chunks.text,
    };
    let (Ok(wide), Ok(tall)) = (u32::try_from(chunks.blocks), u16::try_from(chunks.count)) else {
        return refuse("there are too many rows or columns");
    };
    let first = Kernel {
        source: shell.source(),
        name,
        blocks: [wide, u32::from(tall), 1],
        threads: THREADS as u32,
        alignments: (inputs.iter().map(|o| o.alignment))
            .chain(first_types.iter().map(|d| d.size()))
            .collect(),
        numbers: vec![count as u64],
    };
    let several = chunks.count > 1;
    let finish = several.then(|| sums.made.finish(sum_type, out, [columns, chunks.count, chunks.rows]));
    Ok(Columns {
        chunks: first,
        partial_bytes: if several {
            numbers * chunks.count * columns * sum_type.size()
        } else {
            0
        },
        finish: finish.transpose()?,
    })
}

/// The operand that repeats the fewest of its elements, if those of a column lie side by side in it.
fn lies_along(shape: &[usize], rows: usize, inputs: &[Operand]) -> Option<usize> {
    let read = |o: &Operand| -> usize {
        let dims = (0..shape.len()).filter(|d| o.strides[*d] != 0);
        dims.map(|d| shape[d]).product()
    };
    let most = (0..inputs.len()).rev().max_by_key(|i| read(&inputs[*i]))?;
    let strides = &inputs[most].strides;
    let innermost = (0..shape.len())
        .filter(|d| shape[*d] > 1 && strides[*d] != 0)
        .min_by_key(|d| strides[*d].unsigned_abs())?;
    (innermost < rows).then_some(most)
}

/// The body of a kernel, and how the work is shared out.
struct Chunks {
    text: String,
    /// Blocks for all columns.
    blocks: usize,
    /// Rows of a chunk, and how many chunks there are.
    rows: usize,
    count: usize,
}

/// What the kernels are made of.
struct Sums<'a> {
    made: Made<'a>,
    region: &'a Region,
    rows: Space,
    columns: Space,
    operands: Vec<&'a Operand>,
    out: &'a [DType],
    /// How many are kept for a column.
    numbers: usize,
}

impl Sums<'_> {
    /// The operands that are read.
    fn taken(&self) -> impl Iterator<Item = usize> {
        let used = inputs_used(self.region);
        (0..self.operands.len()).filter(move |i| used[*i])
    }

    /// Pointers `x0_from`, … to where operands have the first element at the position `index` of a space.
    fn pointers(&self, space: &Space, index: &str) -> String {
        let pointer = |i: usize| format!("const auto* x{i}_from = x{i} + {};\n", space.offset(i, index));
        space.coordinates(index, self.taken()) + &self.taken().map(pointer).collect::<String>()
    }

    /// Reads packs of elements at the position `index` of a space, and takes them; they begin where `begins` says.
    fn packs(&self, space: &Space, index: &str, width: usize, begins: &str) -> String {
        let slot = |i: usize| Slot {
            local: format!("x{i}_at"),
            pointer: format!("x{i}_from"),
            dtype: self.operands[i].dtype,
            stride: space.inner_stride(i),
            offset: space.offset(i, index),
        };
        let slots: Vec<Slot> = self.taken().map(slot).collect();
        let computed = body(self.region, "v", |i| slot(i).element());
        let element = format!("{}{}", computed.statements, self.made.takes(&computed.outputs, begins));
        all(&slots, |s| s.read(width)) + &each(width, &element)
    }

    /// Shares rows out: halves chunks until there are enough blocks, or few rows for each thread of a block.
    fn chunk(&self, at_once: usize, blocks: usize) -> usize {
        let count = self.rows.len();
        let mut chunk = ROWS * at_once;
        while count > chunk && chunk > FEWEST * at_once && blocks * count.div_ceil(chunk) < BLOCKS {
            chunk /= 2;
        }
        chunk
    }

    /// Writes what a block found of a column: the results, or what is known of a chunk.
    fn written(&self, chunks: usize, found: impl Fn(usize) -> String) -> String {
        if chunks == 1 {
            return self.made.results(self.out, "column", found);
        }
        let columns = self.columns.len();
        let write = |n: usize| {
            let place = format!("({}ll + blockIdx.y) * {columns} + column", n * chunks);
            format!("y0[{place}] = {};\n", found(n))
        };
        (0..self.numbers).map(write).collect()
    }

    /// Threads side by side take columns side by side.
    fn down(&self) -> Chunks {
        let Sums { made, numbers, .. } = self;
        let width = pack_width(Some(&self.rows), &self.columns, &self.operands);
        let (number, columns) = (made.number, self.columns.len());
        // Few columns leave room for more rows at a time.
        let lanes = columns.div_ceil(width).next_power_of_two().min(LANES);
        let parts = THREADS / lanes;
        let blocks = columns.div_ceil(lanes * width);
        let chunk = self.chunk(parts, blocks);
        let count = self.rows.len().div_ceil(chunk);
        let row = self.pointers(&self.rows, "row") + &self.packs(&self.columns, "c", width, "row == first + part");
        let text = format!(
            "const int lane = threadIdx.x % {lanes}, part = threadIdx.x / {lanes};
const i64 c = (blockIdx.x * (i64){lanes} + lane) * {width};
const i64 first = blockIdx.y * (i64){chunk}, end = first + {chunk} < rows ? first + {chunk} : rows;
{}if (c < {columns}) {{
{}    #pragma unroll 4
    for (i64 row = first + part; row < end; row += {parts}) {{
{}    }}
}}
__shared__ {number} shared[{numbers}][{parts}][{}];
__shared__ int counts[{parts}];
int mine = first + part < end ? (int)((end - first - part + {parts} - 1) / {parts}) : 0;
counts[part] = mine;
for (int j = 0; j < {width}; j++) {{
{}}}
for (int half = {parts} / 2; half > 0; half /= 2) {{
    __syncthreads();
    if (part < half) {{
        const int other = part + half, more = counts[other];
        const {number} share = more > 0 ? ({number})more / ({number})(mine + more) : 0;
        for (int i = lane; i < {}; i += {lanes}) {{
{}        }}
        counts[part] = mine += more;
    }}
}}
__syncthreads();
for (int i = threadIdx.x; i < {}; i += {THREADS}) {{
    const i64 column = blockIdx.x * (i64){} + i % {lanes} * {width} + i / {lanes};
    if (column >= {columns}) continue;
{}}}
",
            made.starts(width),
            indent(&self.columns.coordinates("c", self.taken()), 1),
            indent(&row, 2),
            lanes * width,
            // Lanes side by side, so that each has a bank of its own.
            indent(&made.shares(|n| format!("shared[{n}][part][j * {lanes} + lane]")), 1),
            lanes * width,
            indent(
                &made.joins(
                    |n| format!("shared[{n}][part][i]"),
                    |n| format!("shared[{n}][other][i]")
                ),
                3
            ),
            lanes * width,
            lanes * width,
            indent(&self.written(count, |n| format!("shared[{n}][0][i]")), 1),
        );
        Chunks {
            text,
            blocks,
            rows: chunk,
            count,
        }
    }

    /// Threads side by side take the elements of a column, which lie side by side.
    fn across(&self) -> Chunks {
        let Sums { made, numbers, .. } = self;
        let width = pack_width(Some(&self.columns), &self.rows, &self.operands);
        let (number, columns) = (made.number, self.columns.len());
        // Short columns leave room for more of them.
        let lanes = (self.rows.len() / width).next_power_of_two().min(THREADS);
        let parts = THREADS / lanes;
        let blocks = columns.div_ceil(parts);
        let chunk = self.chunk(lanes * width, blocks);
        let count = self.rows.len().div_ceil(chunk);
        let row = self.rows.coordinates("row", self.taken()) + &self.packs(&self.rows, "row", width, "packs == 0");
        let text = format!(
            "const int lane = threadIdx.x % {lanes}, part = threadIdx.x / {lanes};
const i64 own = blockIdx.x * (i64){parts} + part, c = own < {columns} ? own : {columns} - 1;
const i64 first = blockIdx.y * (i64){chunk}, end = first + {chunk} < rows ? first + {chunk} : rows;
int packs = 0;
{}{}#pragma unroll 4
for (i64 row = first + lane * {width}; row < end; row += {}) {{
{}    packs++;
}}
{number} apart[{numbers}][{width}];
{{
    const int mine = packs;
#pragma unroll
    for (int j = 0; j < {width}; j++) {{
{}    }}
}}
#pragma unroll
for (int j = 1; j < {width}; j++) {{
    const {number} mine = ({number})(j * packs), share = packs > 0 ? ({number})(1.0 / (j + 1)) : 0;
{}}}
__shared__ {number} shared[{numbers}][{THREADS}];
__shared__ int counts[{THREADS}];
int mine = packs * {width};
counts[threadIdx.x] = mine;
for (int n = 0; n < {numbers}; n++) shared[n][threadIdx.x] = apart[n][0];
for (int half = {lanes} / 2; half > 0; half /= 2) {{
    __syncthreads();
    if (lane < half) {{
        const int other = threadIdx.x + half, more = counts[other];
        const {number} share = more > 0 ? ({number})more / ({number})(mine + more) : 0;
{}        counts[threadIdx.x] = mine += more;
    }}
}}
if (lane > 0 || own >= {columns}) return;
const i64 column = own;
{}",
            made.starts(width),
            self.pointers(&self.columns, "c"),
            lanes * width,
            indent(&row, 1),
            indent(&made.shares(|n| format!("apart[{n}][j]")), 2),
            indent(
                &made.joins(|n| format!("apart[{n}][0]"), |n| format!("apart[{n}][j]")),
                1
            ),
            indent(
                &made.joins(
                    |n| format!("shared[{n}][threadIdx.x]"),
                    |n| format!("shared[{n}][other]")
                ),
                2
            ),
            self.written(count, |n| format!("shared[{n}][threadIdx.x]")),
        );
        Chunks {
            text,
            blocks,
            rows: chunk,
            count,
        }
    }
}
