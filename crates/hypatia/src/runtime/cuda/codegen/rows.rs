//! Kernels of row ops.
//!
//! Narrow rows are worked on by a warp each, wide ones by a block. A thread keeps its share of the row in registers; only
//! where that would be too much is the row read again for every pass.

use super::body::{body, computed, describe, inputs_used, kept, kernel_name};
use super::pack::{Shell, Slot, all, each};
use super::space::{Space, blocks, index_type, pack_width, types};
use super::{Operand, expect, parameters};
use crate::runtime::cpu::region::Region;
use crate::runtime::cpu::rowwise::{RowOp, Rowwise};
use crate::runtime::cuda::kernel::Kernel;
use crate::runtime::cuda::{Error, Result};
use crate::ty::DType;

/// The kernel of a row op over tensors of a shape, whose last `reduced` dimensions are the rows. Operands are those of
/// [`Rowwise::run`], inputs first.
pub fn rows(
    rowwise: &Rowwise,
    shape: &[usize],
    reduced: usize,
    inputs: &[Operand],
    outputs: &[Operand],
) -> Result<Kernel> {
    let stages = Stages::new(rowwise, shape, reduced, inputs, outputs)?;
    let name = kernel_name(word(rowwise.op()), &[rowwise.prologue(), rowwise.epilogue()]);
    let shell = Shell {
        name: &name,
        comment: &stages.comment(),
        parameters: parameters(&types(inputs), &types(outputs), &["rows"]),
        threads: stages.plan.block(),
        body: stages.text(),
    };
    let count = if shape.contains(&0) { 0 } else { stages.row_space.len() };
    Ok(Kernel {
        source: shell.source(),
        name,
        blocks: blocks(count, stages.plan.rows)?,
        threads: stages.plan.block(),
        addresses: inputs.len() + outputs.len(),
        numbers: vec![count as u64],
    })
}

fn word(op: RowOp) -> &'static str {
    match op {
        RowOp::Softmax => "softmax",
        RowOp::LogSoftmax => "log_softmax",
        RowOp::LayerNorm { .. } => "layer_norm",
        RowOp::RmsNorm { .. } => "rms_norm",
        RowOp::Sum => "sum",
        RowOp::Mean => "mean",
        RowOp::Amax => "amax",
    }
}

/// How rows are given to threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Elements of a row.
    width: usize,
    /// Elements that a thread takes at a time.
    pack: usize,
    /// Threads of a row.
    pub(super) threads: usize,
    /// Rows of a block.
    pub(super) rows: usize,
    /// Packs that a thread keeps; 0 if it reads them again for each pass.
    kept: usize,
}

impl Plan {
    pub(super) fn new(width: usize, pack: usize) -> Plan {
        let packs = width.div_ceil(pack);
        let threads = if width <= 1024 {
            32
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
            rows: if threads == 32 { 8 } else { 1 },
            kept: if kept * pack <= room { kept } else { 0 },
        }
    }

    pub(super) fn block(&self) -> u32 {
        (self.threads * self.rows) as u32
    }

    /// A loop over the thread's packs: their first columns are `c`, and `p` counts them where they are kept.
    fn over_packs(&self, inner: &str) -> String {
        let Plan {
            width,
            pack,
            threads,
            kept,
            ..
        } = *self;
        if kept == 0 {
            let step = threads * pack;
            let inner = super::indent(inner, 1);
            return format!("for (int c = lane * {pack}; c < {width}; c += {step}) {{\n{inner}}}\n");
        }
        // The last share may be smaller.
        let whole = kept * threads * pack == width;
        let guarded = format!("if (c < {width}) {{\n{}}}\n", super::indent(inner, 1));
        let inner = super::indent(if whole { inner } else { &guarded }, 1);
        let first = format!("    const int c = (p * {threads} + lane) * {pack};\n");
        format!("#pragma unroll\nfor (int p = 0; p < {kept}; p++) {{\n{first}{inner}}}\n")
    }
}

struct Stages<'a> {
    rowwise: &'a Rowwise,
    plan: Plan,
    /// Positions of rows and of columns; operands are the inputs, then the outputs.
    row_space: Space,
    column_space: Space,
    operands: Vec<&'a Operand>,
    inputs: usize,
    /// Inputs of the prologue.
    taken: usize,
    /// Outputs of the epilogue.
    made: usize,
}

impl<'a> Stages<'a> {
    fn new(
        rowwise: &'a Rowwise,
        shape: &[usize],
        reduced: usize,
        inputs: &'a [Operand],
        outputs: &'a [Operand],
    ) -> Result<Stages<'a>> {
        let refuse = |message: String| {
            Err(Error::unsupported(format!(
                "{:?} of shape {shape:?} {message}",
                rowwise.op()
            )))
        };
        if reduced > shape.len() {
            return refuse(format!("over {reduced} dimensions"));
        }
        let split = shape.len() - reduced;
        let (row_shape, columns) = shape.split_at(split);
        let width: usize = columns.iter().product();
        if width == 0 || width > i32::MAX as usize / 2 {
            return refuse("has rows of a size that is not served".into());
        }
        let single = [rowwise.dtype()];
        let compute = [compute(rowwise)];
        let (prologue, epilogue) = (rowwise.prologue(), rowwise.epilogue());
        let take = prologue.map_or(&single[..], Region::inputs);
        let keep = &prologue.map_or(&compute[..], Region::outputs)[1..];
        let join = &epilogue.map_or(&compute[..], Region::inputs)[1..];
        let make = epilogue.map_or(&single[..], Region::outputs);
        if inputs.len() < take.len() || outputs.len() < make.len() {
            return refuse(format!("takes {} inputs and {} outputs", take.len(), make.len()));
        }
        let after = if rowwise.op().reduces() { row_shape } else { shape };
        expect("inputs", take, shape, &inputs[..take.len()])?;
        expect("inputs", join, after, &inputs[take.len()..])?;
        expect("outputs", make, after, &outputs[..make.len()])?;
        expect("outputs", keep, shape, &outputs[make.len()..])?;
        let operands: Vec<&Operand> = inputs.iter().chain(outputs).collect();
        let rows: Vec<_> = operands.iter().map(|o| o.strides[..split].to_vec()).collect();
        // What has one number for a row lies along it with stride 0.
        let along = |o: &&Operand| {
            if o.strides.len() > split {
                o.strides[split..].to_vec()
            } else {
                vec![0; reduced]
            }
        };
        let along: Vec<_> = operands.iter().map(along).collect();
        let row_sizes: Vec<usize> = row_shape.iter().map(|n| (*n).max(1)).collect();
        let row_space = Space::new(&row_sizes, &rows);
        let column_space = Space::new(columns, &along);
        let pack = pack_width(Some(&row_space), &column_space, &operands);
        Ok(Stages {
            rowwise,
            plan: Plan::new(width, pack),
            row_space,
            column_space,
            operands,
            inputs: inputs.len(),
            taken: take.len(),
            made: make.len(),
        })
    }

    fn slot(&self, operand: usize) -> Slot {
        let name = self.pointer(operand);
        Slot {
            local: format!("{name}_at"),
            pointer: format!("{name}_row"),
            dtype: self.operands[operand].dtype,
            stride: self.column_space.inner_stride(operand),
            offset: self.column_space.offset(operand, "c"),
        }
    }

    fn pointer(&self, operand: usize) -> String {
        match operand.checked_sub(self.inputs) {
            None => format!("x{operand}"),
            Some(output) => format!("y{output}"),
        }
    }

    /// Operands of the prologue that are read, and those that it writes.
    fn before(&self) -> (Vec<usize>, Vec<usize>) {
        let used = self.rowwise.prologue().map_or(vec![true], inputs_used);
        let read = (0..self.taken).filter(|i| used[*i]).collect();
        (read, (self.inputs + self.made..self.operands.len()).collect())
    }

    /// The same of the epilogue.
    fn after(&self) -> (Vec<usize>, Vec<usize>) {
        let used = self.rowwise.epilogue().map_or(vec![true], inputs_used);
        let read = (self.taken..self.inputs).filter(|i| used[i + 1 - self.taken]).collect();
        (read, (self.inputs..self.inputs + self.made).collect())
    }

    fn text(&self) -> String {
        let Plan {
            threads,
            rows,
            pack,
            kept,
            ..
        } = self.plan;
        let number = computed(compute(self.rowwise));
        let index = index_type(self.row_space.len());
        let mut text = if rows == 1 {
            format!("const int lane = threadIdx.x;\nconst {index} row = blockIdx.x;\n")
        } else {
            let row = format!("const {index} row = blockIdx.x * ({index}){rows} + threadIdx.x / {threads};\n");
            format!("const int lane = threadIdx.x % {threads};\n{row}if (row >= rows) return;\n")
        };
        text += &self.row_space.coordinates("row", 0..self.operands.len());
        for operand in 0..self.operands.len() {
            let (name, offset) = (self.pointer(operand), self.row_space.offset(operand, "row"));
            // The product with a stride may need more bits than the number of a row.
            text += &format!("auto* {name}_row = {name} + {};\n", offset.replace(" * ", " * (i64)"));
        }
        if kept > 0 {
            text += &format!("{number} kept[{kept}][{pack}];\n");
            text += &self.visit(true, "kept[p][j] = x;\n");
        }
        text + &self.passes(number)
    }

    /// A loop over the thread's elements as they come from the prologue; `inner` uses them as `x`.
    fn visit(&self, first: bool, inner: &str) -> String {
        let (read, write) = self.before();
        let slots = |which: &[usize]| which.iter().map(|i| self.slot(*i)).collect::<Vec<_>>();
        let (read, write) = (slots(&read), if first { slots(&write) } else { vec![] });
        let pack = self.plan.pack;
        let mut element = match self.rowwise.prologue() {
            None => format!("const auto x = {};\n", self.slot(0).element()),
            Some(region) => {
                let body = body(region, "v", |i| self.slot(i).element());
                let assign: String = write.iter().zip(&body.outputs[1..]).map(|(s, v)| s.assign(v)).collect();
                format!("{}{assign}const auto x = {};\n", body.statements, body.outputs[0])
            }
        };
        element += inner;
        let coordinates = self
            .column_space
            .coordinates("c", self.before().0.into_iter().chain(self.before().1));
        let statements = [
            coordinates,
            all(&read, |s| s.read(pack)),
            all(&write, |s| s.declare(pack)),
            each(pack, &element),
            all(&write, Slot::write),
        ];
        self.plan.over_packs(&statements.concat())
    }

    /// A pass over the elements, from registers where they are kept.
    fn pass(&self, first: bool, inner: &str) -> String {
        if self.plan.kept == 0 {
            return self.visit(first, inner);
        }
        let element = format!("const auto x = kept[p][j];\n{inner}");
        self.plan.over_packs(&each(self.plan.pack, &element))
    }

    /// All passes: what is needed of the row, then what becomes of it.
    fn passes(&self, number: &str) -> String {
        let Plan { threads, width, .. } = self.plan;
        let fold = |first: bool, name: &str, start: &str, step: &str, join: &str| {
            let part = self.pass(first, &format!("{name}_part = {step};\n"));
            format!("{number} {name}_part = {start};\n{part}const {number} {name} = {join}<{threads}>({name}_part);\n")
        };
        let exponentials = |first| {
            fold(first, "most", "-INFINITE", "x > most_part ? x : most_part", "greatest")
                + &fold(false, "sum", "0", "sum_part + exp(x - most)", "total")
        };
        match self.rowwise.op() {
            RowOp::Sum => fold(true, "sum", "0", "sum_part + x", "total") + &self.one("sum"),
            RowOp::Mean => fold(true, "sum", "0", "sum_part + x", "total") + &self.one(&format!("sum / {width}")),
            RowOp::Amax => {
                fold(true, "most", "-INFINITE", "maximum(most_part, x)", "greatest_or_nan") + &self.one("most")
            }
            RowOp::Softmax => exponentials(true) + &self.each("exp(x - most) / sum"),
            RowOp::LogSoftmax => {
                exponentials(true)
                    + &format!("const {number} log_sum = log(sum);\n")
                    + &self.each("(x - most) - log_sum")
            }
            RowOp::RmsNorm { eps } => {
                fold(true, "squares", "0", "squares_part + x * x", "total")
                    + &format!("const {number} scale = rsqrt(squares / {width} + ({number}){eps:?});\n")
                    + &self.each("x * scale")
            }
            RowOp::LayerNorm { eps } => {
                // The mean is taken twice: what the first leaves matters where it is far from zero.
                fold(true, "sum", "0", "sum_part + x", "total")
                    + &format!("const {number} rough = sum / {width};\n")
                    + &fold(false, "rest", "0", "rest_part + (x - rough)", "total")
                    + &format!("const {number} low = rest / {width};\n")
                    + &fold(
                        false,
                        "squares",
                        "0",
                        "squares_part + ((x - rough) - low) * ((x - rough) - low)",
                        "total",
                    )
                    + &format!("const {number} scale = rsqrt(squares / {width} + ({number}){eps:?});\n")
                    + &self.each("((x - rough) - low) * scale")
            }
        }
    }

    /// What becomes of a row that is one number.
    fn one(&self, result: &str) -> String {
        let number = computed(compute(self.rowwise));
        let slot = |i: usize| Slot {
            offset: "0".into(),
            stride: 0,
            ..self.slot(i)
        };
        let (_, write) = self.after();
        let values = match self.rowwise.epilogue() {
            None => (String::new(), vec!["result".to_owned()]),
            Some(region) => {
                let input = |i: usize| match i {
                    0 => "result".into(),
                    _ => format!("value({}[0])", slot(self.taken + i - 1).pointer),
                };
                let body = body(region, "w", input);
                (body.statements, body.outputs)
            }
        };
        let store = write.iter().zip(&values.1).map(|(i, v)| {
            let slot = slot(*i);
            format!("{}[0] = {};\n", slot.pointer, kept(slot.dtype, v))
        });
        let store: String = store.collect();
        let inner = format!("const {number} result = {result};\n{}{store}", values.0);
        format!("if (lane == 0) {{\n{}}}\n", super::indent(&inner, 1))
    }

    /// What becomes of every element of a row.
    fn each(&self, result: &str) -> String {
        let number = computed(compute(self.rowwise));
        let (read, write) = self.after();
        let slots = |which: &[usize]| which.iter().map(|i| self.slot(*i)).collect::<Vec<_>>();
        let (read, write) = (slots(&read), slots(&write));
        let (statements, values) = match self.rowwise.epilogue() {
            None => (String::new(), vec!["result".to_owned()]),
            Some(region) => {
                let input = |i: usize| match i {
                    0 => "result".into(),
                    _ => self.slot(self.taken + i - 1).element(),
                };
                let body = body(region, "w", input);
                (body.statements, body.outputs)
            }
        };
        let assign: String = write.iter().zip(&values).map(|(s, v)| s.assign(v)).collect();
        let inner = format!("const {number} result = {result};\n{statements}{assign}");
        let pack = self.plan.pack;
        let mut needed: Vec<usize> = self.after().0.into_iter().chain(self.after().1).collect();
        let (mut before, mut source) = (String::new(), "const auto x = kept[p][j];\n".to_owned());
        if self.plan.kept == 0 {
            let taken = self.before().0;
            before = all(&slots(&taken), |s| s.read(pack));
            needed.extend(taken);
            source = match self.rowwise.prologue() {
                None => format!("const auto x = {};\n", self.slot(0).element()),
                Some(region) => {
                    let body = body(region, "v", |i| self.slot(i).element());
                    format!("{}const auto x = {};\n", body.statements, body.outputs[0])
                }
            };
        }
        let parts = [
            self.column_space.coordinates("c", needed.into_iter()),
            before,
            all(&read, |s| s.read(pack)),
            all(&write, |s| s.declare(pack)),
            each(pack, &(source + &inner)),
            all(&write, Slot::write),
        ];
        self.plan.over_packs(&parts.concat())
    }

    fn comment(&self) -> Vec<String> {
        let rowwise = self.rowwise;
        let row = rowwise
            .prologue()
            .map_or(vec!["x0".into()], |p| describe(p, |i| format!("x{i}")));
        let result = format!("{}({})", word(rowwise.op()), row[0]);
        let name = |i: usize| {
            if i == 0 {
                result.clone()
            } else {
                format!("x{}", self.taken + i - 1)
            }
        };
        let made = rowwise.epilogue().map_or(vec![result.clone()], |e| describe(e, name));
        let all = made.iter().chain(&row[1..]).enumerate();
        all.map(|(i, text)| format!("y{i} = {text}, rows of {}", self.plan.width))
            .collect()
    }
}

/// What a row op computes in.
fn compute(rowwise: &Rowwise) -> DType {
    if rowwise.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}
