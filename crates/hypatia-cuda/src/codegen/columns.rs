//! Kernels that reduce rows: sums, as the gradient of a bias is, means, norms, and the moments of batch norms.
//!
//! A block takes a chunk of rows of some columns; a second kernel puts the chunks together. A thread takes moments
//! about the first number that it sees, of few numbers at a time, and those of several threads are put together by
//! their means: so nothing cancels, however far the numbers are from zero.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::step::ColumnKind;

use super::body::{body, computed, describe, inputs_used, kept, kernel_name};
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
/// Threads that put the chunks of a column together, at most.
const FINISHING: usize = 32;
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
    let row_space = Space::new(&shape[..rows], &above);
    let column_space = Space::new(&shape[rows..], &along);
    let width = pack_width(Some(&row_space), &column_space, &operands);
    let (count, columns) = (row_space.len(), column_space.len());
    // Few columns leave room for more rows at a time.
    let lanes = columns.div_ceil(width).next_power_of_two().min(LANES);
    let parts = THREADS / lanes;
    let wide = columns.div_ceil(lanes * width);
    let (mut chunk, least) = (ROWS * parts, FEWEST * parts);
    while count > chunk && chunk > least && wide * count.div_ceil(chunk) < BLOCKS {
        chunk /= 2;
    }
    let chunks = count.div_ceil(chunk);
    let number = computed(sum_type);
    let made = Made { kinds, number, count };
    let slot = |i: usize| Slot {
        local: format!("x{i}_at"),
        pointer: format!("x{i}_row"),
        dtype: operands[i].dtype,
        stride: column_space.inner_stride(i),
        offset: column_space.offset(i, "c"),
    };
    let used = inputs_used(region);
    let taken: Vec<usize> = (0..inputs.len()).filter(|i| used[*i]).collect();
    let pointers: String = taken
        .iter()
        .map(|i| format!("const auto* x{i}_row = x{i} + {};\n", row_space.offset(*i, "row")))
        .collect();
    let region_body = body(region, "v", |i| slot(i).element());
    let element = format!("{}{}", region_body.statements, made.takes(&region_body.outputs));
    let slots: Vec<Slot> = taken.iter().map(|i| slot(*i)).collect();
    let row = [
        row_space.coordinates("row", taken.iter().copied()),
        pointers,
        all(&slots, |s| s.read(width)),
        each(width, &element),
    ];
    let found = |n: usize| format!("shared[{n}][0][i]");
    let written = match chunks {
        1 => made.results(out, "column", found),
        _ => (0..numbers)
            .map(|n| {
                let place = format!("({}ll + blockIdx.y) * {columns} + column", n * chunks);
                format!("y0[{place}] = {};\n", found(n))
            })
            .collect(),
    };
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
        indent(&column_space.coordinates("c", taken.iter().copied()), 1),
        indent(&row.concat(), 2),
        lanes * width,
        // Lanes side by side, so that each has a bank of its own.
        indent(&made.shares(&format!("[part][j * {lanes} + lane]")), 1),
        lanes * width,
        indent(
            &made.joins("shared", "[part][i]", |n| format!("shared[{n}][other][i]")),
            3
        ),
        lanes * width,
        lanes * width,
        indent(&written, 1),
    );
    let name = kernel_name("columns", &[Some(region)]);
    let comment: Vec<String> = describe(region, |i| format!("x{i}"))
        .iter()
        .zip(kinds)
        .map(|(expression, kind)| format!("{kind:?} of {expression} over {chunk} rows each"))
        .collect();
    let first_types = if chunks == 1 {
        out
    } else {
        std::slice::from_ref(&sum_type)
    };
    let shell = Shell {
        name: &name,
        comment: &comment,
        parameters: parameters(region.inputs(), first_types, &["rows"]),
        threads: THREADS as u32,
        body: text,
    };
    let (Ok(wide), Ok(tall)) = (u32::try_from(wide), u16::try_from(chunks)) else {
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
    let finish = (chunks > 1).then(|| made.finish(sum_type, out, [columns, chunks, chunk]));
    Ok(Columns {
        chunks: first,
        partial_bytes: if finish.is_some() {
            numbers * chunks * columns * sum_type.size()
        } else {
            0
        },
        finish: finish.transpose()?,
    })
}

/// What is made of columns of so many rows.
struct Made<'a> {
    kinds: &'a [ColumnKind],
    /// The type of sums.
    number: &'static str,
    count: usize,
}

impl Made<'_> {
    /// A statement for each kind, which is told its place and that of its first number.
    fn each(&self, statement: impl Fn(usize, usize, ColumnKind) -> String) -> String {
        let mut at = 0;
        let mut found = String::new();
        for (k, kind) in self.kinds.iter().enumerate() {
            found += &statement(k, at, *kind);
            at += kind.results();
        }
        found
    }

    /// What a thread starts with.
    fn starts(&self, width: usize) -> String {
        let number = self.number;
        self.each(|k, _, kind| match kind {
            ColumnKind::Moments { .. } => {
                format!("{number} from{k}[{width}] = {{}}, sum{k}[{width}] = {{}}, square{k}[{width}] = {{}};\n")
            }
            _ => format!("{number} sum{k}[{width}] = {{}};\n"),
        })
    }

    /// Takes values of column `j`.
    fn takes(&self, values: &[String]) -> String {
        let number = self.number;
        self.each(|k, _, kind| {
            let value = &values[k];
            match kind {
                ColumnKind::Moments { .. } => format!(
                    "if (row == first + part) from{k}[j] = {value};
const {number} far{k} = {value} - from{k}[j];
sum{k}[j] += far{k};
square{k}[j] += far{k} * far{k};
"
                ),
                _ => format!("sum{k}[j] += {value};\n"),
            }
        })
    }

    /// Puts what a thread found of column `j`, of `mine` rows, into shared memory.
    fn shares(&self, place: &str) -> String {
        let number = self.number;
        self.each(|k, at, kind| match kind {
            ColumnKind::Moments { .. } => format!(
                "{{
    const {number} mean = mine > 0 ? sum{k}[j] / ({number})mine : 0, spread = square{k}[j] - sum{k}[j] * mean;
    shared[{at}]{place} = from{k}[j] + mean;
    shared[{}]{place} = spread < 0 ? ({number})0 : spread;
}}
",
                at + 1
            ),
            _ => format!("shared[{at}]{place} = sum{k}[j];\n"),
        })
    }

    /// Puts what is known of `more` rows, which are this `share` then, to what is known of `mine`.
    fn joins(&self, name: &str, place: &str, more: impl Fn(usize) -> String) -> String {
        let number = self.number;
        self.each(|_, at, kind| match kind {
            ColumnKind::Moments { .. } => format!(
                "merge({name}[{at}]{place}, {name}[{}]{place}, {}, {}, share, ({number})mine);\n",
                at + 1,
                more(at),
                more(at + 1)
            ),
            _ => format!("{name}[{at}]{place} += {};\n", more(at)),
        })
    }

    /// Writes the results, of these numbers.
    fn results(&self, out: &[DType], place: &str, found: impl Fn(usize) -> String) -> String {
        let (number, count) = (self.number, self.count);
        self.each(|_, at, kind| {
            let write = |n: usize, value: String| format!("y{n}[{place}] = {};\n", kept(out[n], &value));
            match kind {
                ColumnKind::Sum => write(at, found(at)),
                ColumnKind::Mean => write(at, format!("({number})({} * ({number})(1.0 / {count}.0))", found(at))),
                ColumnKind::Norm => write(at, format!("({number})sqrt({})", found(at))),
                ColumnKind::Moments { correction } => {
                    let rest = count.saturating_sub(correction as usize);
                    write(at, found(at)) + &write(at + 1, format!("{} / ({number}){rest}.0", found(at + 1)))
                }
            }
        })
    }

    /// Puts the chunks together, some threads for each column.
    fn finish(&self, sum_type: DType, out: &[DType], [columns, chunks, chunk]: [usize; 3]) -> Result<Kernel> {
        let name = "columns_finish".to_owned();
        let number = self.number;
        let numbers = out.len();
        let parts = chunks.next_power_of_two().min(FINISHING);
        let text = format!(
            "const int lane = threadIdx.x % {LANES}, part = threadIdx.x / {LANES};
const i64 own = blockIdx.x * (i64){LANES} + lane, c = own < columns ? own : columns - 1;
{number} known[{numbers}] = {{}};
i64 mine = 0;
#pragma unroll 4
for (i64 at = part; at < chunks; at += {parts}) {{
    const i64 more = (at + 1) * {chunk} < rows ? {chunk} : rows - at * {chunk};
    const {number} share = ({number})more / ({number})(mine + more);
{}    mine += more;
}}
__shared__ {number} shared[{numbers}][{parts}][{LANES}];
__shared__ i64 counts[{parts}];
counts[part] = mine;
for (int n = 0; n < {numbers}; n++) shared[n][part][lane] = known[n];
for (int half = {parts} / 2; half > 0; half /= 2) {{
    __syncthreads();
    if (part < half) {{
        const int other = part + half;
        const i64 more = counts[other];
        const {number} share = more > 0 ? ({number})more / ({number})(mine + more) : 0;
{}        counts[part] = mine += more;
    }}
}}
if (part > 0 || own >= columns) return;
{}",
            indent(
                &self.joins("known", "", |n| format!("x0[({n} * chunks + at) * columns + c]")),
                1
            ),
            indent(
                &self.joins("shared", "[part][lane]", |n| format!("shared[{n}][other][lane]")),
                2
            ),
            self.results(out, "c", |n| format!("shared[{n}][0][lane]")),
        );
        let threads = (LANES * parts) as u32;
        let shell = Shell {
            name: &name,
            comment: &["what is known of the chunks of columns, put together".into()],
            parameters: parameters(&[sum_type], out, &["columns", "chunks", "rows"]),
            threads,
            body: text,
        };
        Ok(Kernel {
            source: shell.source(),
            name,
            blocks: super::space::blocks(columns, LANES)?,
            threads,
            alignments: std::iter::once(sum_type)
                .chain(out.iter().copied())
                .map(DType::size)
                .collect(),
            numbers: vec![columns as u64, chunks as u64, self.count as u64],
        })
    }
}
