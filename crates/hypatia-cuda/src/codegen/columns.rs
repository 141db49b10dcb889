//! Kernels that sum over rows, as the gradient of a bias does, or take means or norms of columns.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::step::ColumnKind;

use super::body::{body, computed, describe, inputs_used, kept, kernel_name};
use super::pack::{Shell, Slot, all, each};
use super::space::{Space, pack_width, types};
use super::{Operand, expect, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// Lanes side by side, and rows at a time, of a block.
const LANES: usize = 32;
const ROWS: usize = 8;
/// Rows that a block sums at most before its sum is written; sums of so many f32 stay exact enough.
const CHUNK: usize = 512;
/// Fewer rows are not shared out among blocks, and so many blocks keep a GPU busy.
const FEWEST: usize = 64;
const BLOCKS: usize = 264;

/// Column sums in one kernel, or in two, run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Sums over chunks of rows. Operands: the region's inputs, the partial sums, the region's other outputs. Without
    /// partial sums the result is in their place.
    pub chunks: Kernel,
    /// Sums over the chunks, if there are several. Operands: the partial sums, the result.
    pub finish: Option<Kernel>,
    /// Bytes of the partial sums.
    pub partial_bytes: usize,
}

/// Sums the first output of a region over the first `rows` dimensions of a shape; its other outputs are written, too.
/// The first output must be f32, or f64, and the dense result, made of the sums, is of type `out`. For norms the region squares.
pub fn columns(
    kind: ColumnKind,
    region: &Region,
    shape: &[usize],
    rows: usize,
    inputs: &[Operand],
    outputs: &[Operand],
    out: DType,
) -> Result<Columns> {
    let refuse = |message: &str| Err(Error::unsupported(format!("column sums of shape {shape:?}: {message}")));
    let sum_type = region.outputs().first().copied();
    let Some(sum_type) = sum_type.filter(|d| matches!(d, DType::F32 | DType::F64)) else {
        return refuse("the first output is neither f32 nor f64");
    };
    if rows > shape.len() || shape.contains(&0) || !out.is_float() {
        return refuse("there is nothing to sum, or it is no float");
    }
    expect("inputs", region.inputs(), shape, inputs)?;
    expect("outputs", &region.outputs()[1..], shape, outputs)?;
    let operands: Vec<&Operand> = inputs.iter().chain(outputs).collect();
    let part = |range: std::ops::Range<usize>| operands.iter().map(|o| o.strides[range.clone()].to_vec()).collect();
    let (above, along): (Vec<_>, Vec<_>) = (part(0..rows), part(rows..shape.len()));
    let row_space = Space::new(&shape[..rows], &above);
    let column_space = Space::new(&shape[rows..], &along);
    let width = pack_width(Some(&row_space), &column_space, &operands);
    let (count, columns) = (row_space.len(), column_space.len());
    let wide = columns.div_ceil(LANES * width);
    let mut chunk = CHUNK;
    while count > CHUNK && chunk > FEWEST && wide * count.div_ceil(chunk) < BLOCKS {
        chunk /= 2;
    }
    let chunks = count.div_ceil(chunk);
    let number = computed(sum_type);
    let last = |sum: &str| kept(out, &made_of(kind, number, sum, count));
    let slot = |i: usize| {
        let name = if i < inputs.len() {
            format!("x{i}")
        } else {
            format!("y{}", i - inputs.len() + 1)
        };
        Slot {
            local: format!("{name}_at"),
            pointer: format!("{name}_row"),
            dtype: operands[i].dtype,
            stride: column_space.inner_stride(i),
            offset: column_space.offset(i, "c"),
        }
    };
    let used = inputs_used(region);
    let taken: Vec<usize> = (0..inputs.len()).filter(|i| used[*i]).collect();
    let made: Vec<Slot> = (inputs.len()..operands.len()).map(slot).collect();
    let seen: Vec<usize> = taken.iter().copied().chain(inputs.len()..operands.len()).collect();
    let pointers: String = seen
        .iter()
        .map(|i| {
            let name = slot(*i).pointer;
            let base = name.trim_end_matches("_row");
            format!("auto* {name} = {base} + {};\n", row_space.offset(*i, "row"))
        })
        .collect();
    let region_body = body(region, "v", |i| slot(i).element());
    let assign: String = made
        .iter()
        .zip(&region_body.outputs[1..])
        .map(|(s, v)| s.assign(v))
        .collect();
    let element = format!(
        "{}{assign}sum[j] += {};\n",
        region_body.statements, region_body.outputs[0]
    );
    let taken: Vec<Slot> = taken.into_iter().map(slot).collect();
    let row = [
        row_space.coordinates("row", seen.iter().copied()),
        pointers,
        all(&taken, |s| s.read(width)),
        all(&made, |s| s.declare(width)),
        each(width, &element),
        all(&made, Slot::write),
    ];
    let whole = if chunks == 1 { last("whole") } else { "whole".to_owned() };
    let text = format!(
        "const int lane = threadIdx.x % {LANES}, part = threadIdx.x / {LANES};
const i64 c = (blockIdx.x * (i64){LANES} + lane) * {width};
{number} sum[{width}] = {{}};
if (c < {columns}) {{
{}    const i64 first = blockIdx.y * (i64){chunk}, end = first + {chunk} < rows ? first + {chunk} : rows;
    for (i64 row = first + part; row < end; row += {ROWS}) {{
{}    }}
}}
__shared__ {number} parts[{ROWS}][{LANES} * {width} + 1];
for (int j = 0; j < {width}; j++) parts[part][lane * {width} + j] = sum[j];
__syncthreads();
for (int i = threadIdx.x; i < {LANES} * {width}; i += {}) {{
    const i64 column = blockIdx.x * (i64){} + i;
    {number} whole = 0;
    for (int r = 0; r < {ROWS}; r++) whole += parts[r][i];
    if (column < {columns}) y0[blockIdx.y * (i64){columns} + column] = {whole};
}}
",
        super::indent(&column_space.coordinates("c", seen.iter().copied()), 1),
        super::indent(&row.concat(), 2),
        LANES * ROWS,
        LANES * width,
    );
    let name = kernel_name("columns", &[Some(region)]);
    let expressions = describe(region, |i| format!("x{i}"));
    let first_type = if chunks == 1 { out } else { sum_type };
    let mut written = vec![first_type];
    written.extend(types(outputs));
    let threads = (LANES * ROWS) as u32;
    let shell = Shell {
        name: &name,
        comment: &[format!("y0 = sums of {} over {chunk} rows each", expressions[0])],
        parameters: parameters(region.inputs(), &written, &["rows"]),
        threads,
        body: text,
    };
    let (Ok(wide), Ok(tall)) = (u32::try_from(wide), u16::try_from(chunks)) else {
        return refuse("there are too many rows or columns");
    };
    let first = Kernel {
        source: shell.source(),
        name,
        blocks: [wide, u32::from(tall), 1],
        threads,
        alignments: (inputs.iter().map(|o| o.alignment))
            .chain([first_type.size()])
            .chain(outputs.iter().map(|o| o.alignment))
            .collect(),
        numbers: vec![count as u64],
    };
    let finish = (chunks > 1).then(|| finish(sum_type, out, [columns, chunks], &last("sum")));
    Ok(Columns {
        chunks: first,
        partial_bytes: if finish.is_some() {
            chunks * columns * sum_type.size()
        } else {
            0
        },
        finish: finish.transpose()?,
    })
}

/// What becomes of the sum of a column of so many elements.
fn made_of(kind: ColumnKind, number: &str, sum: &str, count: usize) -> String {
    match kind {
        ColumnKind::Sum => sum.to_owned(),
        ColumnKind::Mean => format!("({number})({sum} * ({number})(1.0 / {count}.0))"),
        ColumnKind::Norm => format!("({number})sqrt({sum})"),
    }
}

/// Sums over the chunks, a thread for each column; the result is this of a sum.
fn finish(sum_type: DType, out: DType, [columns, chunks]: [usize; 2], last: &str) -> Result<Kernel> {
    let name = "columns_finish".to_owned();
    let number = computed(sum_type);
    let text = format!(
        "const i64 c = blockIdx.x * 256ll + threadIdx.x;
if (c >= columns) return;
{number} sum = 0;
for (i64 chunk = 0; chunk < chunks; chunk++) sum += x0[chunk * columns + c];
y0[c] = {last};
"
    );
    let shell = Shell {
        name: &name,
        comment: &["y0 = sums of the chunks of columns".into()],
        parameters: parameters(&[sum_type], &[out], &["columns", "chunks"]),
        threads: 256,
        body: text,
    };
    Ok(Kernel {
        source: shell.source(),
        name,
        blocks: super::space::blocks(columns, 256)?,
        threads: 256,
        alignments: vec![sum_type.size(), out.size()],
        numbers: vec![columns as u64, chunks as u64],
    })
}
