//! What is made of the numbers of a column: of those of a thread, of several threads, of chunks of rows.

use hypatia_core::ty::DType;
use hypatia_runtime::step::ColumnKind;

use super::super::body::kept;
use super::super::pack::Shell;
use super::super::{indent, parameters, space};
use super::LANES;
use crate::Result;
use crate::kernel::Kernel;

/// Threads that put the chunks of a column together, at most.
const FINISHING: usize = 32;

/// What is made of columns of so many rows.
pub(super) struct Made<'a> {
    pub kinds: &'a [ColumnKind],
    /// The type of sums.
    pub number: &'static str,
    pub count: usize,
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
    pub fn starts(&self, width: usize) -> String {
        let number = self.number;
        self.each(|k, _, kind| match kind {
            ColumnKind::Moments { .. } => {
                format!("{number} from{k}[{width}] = {{}}, sum{k}[{width}] = {{}}, square{k}[{width}] = {{}};\n")
            }
            _ => format!("{number} sum{k}[{width}] = {{}};\n"),
        })
    }

    /// Takes values of column `j`; `begins` says whether it is the first time.
    pub fn takes(&self, values: &[String], begins: &str) -> String {
        let number = self.number;
        self.each(|k, _, kind| {
            let value = &values[k];
            match kind {
                ColumnKind::Moments { .. } => format!(
                    "if ({begins}) from{k}[j] = {value};
const {number} far{k} = {value} - from{k}[j];
sum{k}[j] += far{k};
square{k}[j] += far{k} * far{k};
"
                ),
                _ => format!("sum{k}[j] += {value};\n"),
            }
        })
    }

    /// Keeps what a thread found of column `j`, of `mine` rows.
    pub fn shares(&self, place: impl Fn(usize) -> String) -> String {
        let number = self.number;
        self.each(|k, at, kind| match kind {
            ColumnKind::Moments { .. } => format!(
                "{{
    const {number} mean = mine > 0 ? sum{k}[j] / ({number})mine : 0, spread = square{k}[j] - sum{k}[j] * mean;
    {} = from{k}[j] + mean;
    {} = spread < 0 ? ({number})0 : spread;
}}
",
                place(at),
                place(at + 1)
            ),
            _ => format!("{} = sum{k}[j];\n", place(at)),
        })
    }

    /// Puts what is known of `more` rows, which are this `share` then, to what is known of `mine`.
    pub fn joins(&self, known: impl Fn(usize) -> String, more: impl Fn(usize) -> String) -> String {
        let number = self.number;
        self.each(|_, at, kind| match kind {
            ColumnKind::Moments { .. } => format!(
                "merge({}, {}, {}, {}, share, ({number})mine);\n",
                known(at),
                known(at + 1),
                more(at),
                more(at + 1)
            ),
            _ => format!("{} += {};\n", known(at), more(at)),
        })
    }

    /// Writes the results, of these numbers.
    pub fn results(&self, out: &[DType], place: &str, found: impl Fn(usize) -> String) -> String {
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
    pub fn finish(&self, sum_type: DType, out: &[DType], [columns, chunks, chunk]: [usize; 3]) -> Result<Kernel> {
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
                &self.joins(
                    |n| format!("known[{n}]"),
                    |n| format!("x0[({n} * chunks + at) * columns + c]")
                ),
                1
            ),
            indent(
                &self.joins(
                    |n| format!("shared[{n}][part][lane]"),
                    |n| format!("shared[{n}][other][lane]")
                ),
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
            blocks: space::blocks(columns, LANES)?,
            threads,
            alignments: std::iter::once(sum_type)
                .chain(out.iter().copied())
                .map(DType::size)
                .collect(),
            numbers: vec![columns as u64, chunks as u64, self.count as u64],
        })
    }
}
