//! Kernels of pointwise regions.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::{Read, Region};
use hypatia_runtime::plan::{Placed, Plan, RegionStep, ValueId};

use super::body::{body, describe, inputs_used, kernel_name};
use super::pack::{Shell, Slot, all, each};
use super::reads::Bounds;
use super::space::{Space, blocks, index_type};
use super::{Operand, alignment, expect, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

const THREADS: u32 = 256;

/// The kernel of a step.
pub(super) fn kernel(plan: &Plan, r: &RegionStep) -> Result<Kernel> {
    let inputs: Vec<Operand> = r.inputs.iter().map(|o| Operand::of(plan, o)).collect();
    let outputs: Vec<Operand> = if r.slices.is_empty() {
        let dense = |id: &ValueId| Operand::dense(plan.values[*id].dtype, &r.shape);
        r.outputs.iter().map(dense).collect()
    } else {
        r.slices.iter().map(|o| Operand::of(plan, o)).collect()
    };
    made(&r.region, &r.shape, &inputs, &r.reads, &outputs, &r.placed)
}

/// Outputs with the alignment that they have behind their places.
fn behind(inputs: &[Operand], outputs: &[Operand], placed: &[Placed]) -> Result<Vec<Operand>> {
    let one = |p: &Placed| {
        inputs
            .get(p.by)
            .is_some_and(|o| o.dtype == DType::I64 && o.strides.iter().all(|s| *s == 0))
    };
    if !placed.is_empty() && (placed.len() != outputs.len() || !placed.iter().all(one)) {
        return Err(Error::malformed(format!("a kernel whose results are {placed:?}")));
    }
    let mut found = outputs.to_vec();
    for (output, place) in found.iter_mut().zip(placed) {
        let step = alignment(place.stride.unsigned_abs() * output.dtype.size());
        output.alignment = output.alignment.min(step);
    }
    Ok(found)
}

/// Statements that read how far behind their places results lie.
fn places(placed: &[Placed]) -> String {
    let place = |(n, p): (usize, &Placed)| {
        let Placed { by, size, .. } = p;
        format!("const i64 y{n}_to = x{by}[0];\nif ((u64)y{n}_to >= {size}) __trap();\n")
    };
    placed.iter().enumerate().map(place).collect()
}

/// The kernel of a region over tensors of a shape. Its operands are the inputs, then the outputs. An output may be the
/// memory of an input if its strides and element size are the same.
pub fn pointwise(region: &Region, shape: &[usize], inputs: &[Operand], outputs: &[Operand]) -> Result<Kernel> {
    reading(region, shape, inputs, &[], outputs)
}

/// The same of a region that reads its inputs in these ways; without any, all as their strides say.
pub fn reading(
    region: &Region,
    shape: &[usize],
    inputs: &[Operand],
    reads: &[Read],
    outputs: &[Operand],
) -> Result<Kernel> {
    made(region, shape, inputs, reads, outputs, &[])
}

/// The same whose results lie behind their places, as far as inputs of one element say, if there are such.
pub(super) fn made(
    region: &Region,
    shape: &[usize],
    inputs: &[Operand],
    reads: &[Read],
    outputs: &[Operand],
    placed: &[Placed],
) -> Result<Kernel> {
    expect("inputs", region.inputs(), shape, inputs)?;
    expect("outputs", region.outputs(), shape, outputs)?;
    let outputs = &behind(inputs, outputs, placed)?[..];
    if outputs.is_empty() {
        return Err(Error::malformed("a pointwise kernel without results"));
    }
    let operands: Vec<&Operand> = inputs.iter().chain(outputs).collect();
    let mut bounds = Bounds::new(shape, inputs, reads)?;
    let lying = operands.iter().map(|o| o.strides.clone());
    let strides: Vec<_> = lying.chain(bounds.counters()).collect();
    // Without elements nothing is launched, but the text must still be right.
    let empty = shape.contains(&0);
    let sizes: Vec<usize> = shape.iter().map(|n| (*n).max(1)).collect();
    let space = Space::ordered_by(&sizes, &strides, inputs.len());
    let width = bounds.width(&space, operands.len(), &operands);
    let slot = |i: usize| {
        let (letter, n) = if i < inputs.len() {
            ('x', i)
        } else {
            ('y', i - inputs.len())
        };
        Slot {
            pointer: format!("{letter}{n}"),
            local: format!("{letter}{n}_at"),
            dtype: operands[i].dtype,
            stride: space.inner_stride(i),
            offset: match placed.get(i.wrapping_sub(inputs.len())) {
                Some(place) => format!("{} + y{n}_to * {}", space.offset(i, "e"), place.stride),
                None => space.offset(i, "e"),
            },
        }
    };
    let mut used = inputs_used(region);
    bounds.marks_others(&mut used);
    let source = |i: usize| bounds.source(i, inputs, &slot, &space, operands.len());
    let taken: String = (0..inputs.len())
        .filter(|i| used[*i])
        .map(|i| source(i).read(width))
        .collect();
    let made: Vec<Slot> = (inputs.len()..operands.len()).map(slot).collect();
    let body = body(region, "v", |i| source(i).element());
    let assign: String = made.iter().zip(&body.outputs).map(|(s, v)| s.assign(v)).collect();
    let index = index_type(space.reach());
    let seen = (0..strides.len()).filter(|i| *i >= inputs.len() || used[*i]);
    let inner = [
        format!("const {index} e = ({index})pack * {width};\n"),
        space.coordinates("e", seen),
        taken,
        all(&made, |s| s.declare(width)),
        each(width, &(body.statements + &assign)),
        all(&made, Slot::write),
    ];
    let text = format!(
        "const i64 pack = blockIdx.x * (i64){THREADS} + threadIdx.x;\nif (pack >= packs) return;\n{}{}",
        places(placed),
        inner.concat()
    );
    let expressions = describe(region, |i| bounds.describe(i));
    let comment: Vec<String> = expressions
        .iter()
        .enumerate()
        .map(|(i, e)| format!("y{i} = {e}"))
        .collect();
    let name = kernel_name("pointwise", &[Some(region)]);
    let packs = if empty { 0 } else { space.len() / width };
    let shell = Shell {
        name: &name,
        comment: &comment,
        parameters: parameters(region.inputs(), region.outputs(), &["packs"]),
        threads: THREADS,
        body: text,
    };
    Ok(Kernel {
        source: shell.source(),
        name,
        blocks: blocks(packs, THREADS as usize)?,
        threads: THREADS,
        alignments: operands.iter().map(|o| o.alignment).collect(),
        numbers: vec![packs as u64],
    })
}
