//! Kernels of row ops.
//!
//! Narrow rows are worked on by a warp each or by a part of one, wide ones by a block. A thread keeps its share of the row in registers; only
//! where that would be too much is the row read again for every pass.

mod passes;
mod plan;

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::kernels::rowwise::{RowOp, Rowwise};
use hypatia_runtime::plan::{Plan as Steps, RowStep};
pub(super) use plan::Plan;

use super::body::{computed, describe, inputs_used, kernel_name};
use super::pack::{Shell, Slot};
use super::space::{Space, blocks, index_type, pack_width, types};
use super::{Operand, expect, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// The kernel of a step.
pub(super) fn kernel(plan: &Steps, r: &RowStep) -> Result<Kernel> {
    let inputs: Vec<Operand> = r.inputs.iter().map(|o| Operand::of(plan, o)).collect();
    let output = Operand {
        strides: r.dense.clone(),
        ..Operand::dense(plan.values[r.output].dtype, &[])
    };
    rows(&r.rows, &r.shape, r.reduced, &inputs, &[output])
}

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
        body: stages.head(0..stages.operands.len()) + &stages.passes(),
    };
    let count = if shape.contains(&0) { 0 } else { stages.row_space.len() };
    Ok(Kernel {
        source: shell.source(),
        name,
        blocks: blocks(count, stages.plan.rows)?,
        threads: stages.plan.block(),
        alignments: stages.operands.iter().map(|o| o.alignment).collect(),
        numbers: vec![count as u64],
    })
}

/// The start of a kernel over rows of logits `x0`, up to their greatest element `most` and the `sum` of the exponentials
/// of how far they are below it.
pub(super) fn exponentials(logits: &Operand, shape: [usize; 2]) -> Result<(Plan, String)> {
    let rowwise = Rowwise::new(RowOp::LogSoftmax, logits.dtype)?;
    let operand = std::slice::from_ref(logits);
    let stages = Stages::new(&rowwise, &shape, 1, operand, operand)?;
    Ok((stages.plan, stages.head(0..1) + &stages.exponentials()))
}

fn word(op: RowOp) -> &'static str {
    match op {
        RowOp::Softmax { .. } => "softmax",
        RowOp::LogSoftmax => "log_softmax",
        RowOp::LayerNorm { .. } => "layer_norm",
        RowOp::RmsNorm { .. } => "rms_norm",
        RowOp::Sum => "sum",
        RowOp::Mean => "mean",
        RowOp::Amax => "amax",
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

    /// What comes before the passes: which row it is, where the operands have it, and its elements.
    fn head(&self, operands: std::ops::Range<usize>) -> String {
        let Plan {
            threads,
            rows,
            pack,
            kept,
            ..
        } = self.plan;
        let index = index_type(self.row_space.len());
        let mut text = if rows == 1 {
            format!("const int lane = threadIdx.x;\nconst {index} row = blockIdx.x;\n")
        } else {
            let row = format!("const {index} row = blockIdx.x * ({index}){rows} + threadIdx.x / {threads};\n");
            format!("const int lane = threadIdx.x % {threads};\n{row}if (row >= rows) return;\n")
        };
        text += &self.row_space.coordinates("row", operands.clone());
        for operand in operands {
            let (name, offset) = (self.pointer(operand), self.row_space.offset(operand, "row"));
            // The product with a stride may need more bits than the number of a row.
            text += &format!("auto* {name}_row = {name} + {};\n", offset.replace(" * ", " * (i64)"));
        }
        if kept > 0 {
            text += &format!("{} kept[{kept}][{pack}];\n", self.number());
            text += &self.visit(true, "kept[p][j] = x;\n");
        }
        text
    }

    /// What the op is computed in.
    fn number(&self) -> &'static str {
        computed(compute(self.rowwise))
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
