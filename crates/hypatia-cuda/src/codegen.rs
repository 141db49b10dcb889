//! CUDA C++ text of pointwise regions, row ops, column sums, norms, losses, depthwise convolutions and attention of one query.
//!
//! Regions and row ops ([`Region`](hypatia_runtime::kernels::region::Region),
//! [`Rowwise`](hypatia_runtime::kernels::rowwise::Rowwise)) mean here what they mean on a CPU. Strides, inner sizes and
//! dtypes are written into the text; the outermost size is a number that the kernel is given, so that another batch size
//! needs no other kernel. Elements are read and written 16 bytes at a time where strides and alignment allow it.

mod attention;
mod body;
mod columns;
mod depthwise;
mod loss;
mod norms;
mod pack;
mod pointwise;
mod reads;
mod rows;
mod space;
mod split;

#[cfg(test)]
mod tests;

use hypatia_core::ty::DType;
use hypatia_runtime::plan::{self, Plan, Task};

use crate::driver::Device;
use crate::kernel::Kernel;
use crate::{Error, Result};
use attention::Attention;
pub use columns::{Columns, columns};
use depthwise::Depthwise;
pub use loss::{Loss, cross_entropy};
pub use norms::{Norm, NormBackward};
pub use pointwise::{pointwise, reading};
pub use rows::rows;
pub use split::Split;

/// What all kernels start with.
const PRELUDE: &str = include_str!("codegen/prelude.cu");

/// Addresses that torch's allocator hands out are multiples of this.
pub(crate) const ALIGNMENT: usize = 16;

/// Kernels that a step is sure to launch, as text: all of a plan are compiled at once. Products choose theirs when they are
/// measured.
pub(crate) fn kernels(device: &Device, plan: &Plan, step: &Task) -> Result<Vec<Kernel>> {
    Ok(match step {
        Task::Region(r) => vec![pointwise::kernel(plan, r)?],
        Task::Rows(r) => vec![rows::kernel(plan, r)?],
        Task::Depthwise(d) => vec![Depthwise::of(plan, d)?.kernel()?],
        Task::Attention(a) => {
            vec![Attention::of(plan, a)?.kernel(device.arch(), device.multiprocessors() as usize)?]
        }
        Task::Columns(c) => Columns::of(plan, c)?.kernels(),
        Task::Norm(n) => Norm::of(plan, n)?.kernels(n.eps)?,
        Task::Linear(_) | Task::Batch(_) | Task::Torch(_) => vec![],
    })
}

/// How an operand lies in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Its elements.
    pub dtype: DType,
    /// Elements from one position to the next along each dimension of the shape; 0 repeats one.
    pub strides: Vec<isize>,
    /// Bytes that divide its address, a power of two.
    pub alignment: usize,
}

impl Operand {
    /// That of a step.
    pub(crate) fn of(plan: &Plan, o: &plan::Operand) -> Operand {
        let dtype = plan.values[o.value].dtype;
        Operand {
            dtype,
            strides: o.strides.clone(),
            alignment: alignment(o.offset * dtype.size()),
        }
    }

    /// A dense operand whose address is a multiple of 16.
    pub fn dense(dtype: DType, shape: &[usize]) -> Operand {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for (stride, size) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step *= *size as isize;
        }
        Operand {
            dtype,
            strides,
            alignment: ALIGNMENT,
        }
    }
}

/// What divides an address this far behind an aligned one.
pub(crate) fn alignment(bytes: usize) -> usize {
    match bytes {
        0 => ALIGNMENT,
        _ => (1 << bytes.trailing_zeros()).min(ALIGNMENT),
    }
}

/// Refuses operands that do not fit.
fn expect(what: &str, types: &[DType], shape: &[usize], operands: &[Operand]) -> Result<()> {
    let given: Vec<DType> = operands.iter().map(|o| o.dtype).collect();
    if given != types {
        return Err(Error::malformed(format!(
            "a kernel with {what} of {types:?}, given {given:?}"
        )));
    }
    match operands.iter().find(|o| o.strides.len() != shape.len()) {
        Some(o) => Err(Error::malformed(format!(
            "{what} with strides {:?} for shape {shape:?}",
            o.strides
        ))),
        None => Ok(()),
    }
}

/// Indents lines by so many levels.
fn indent(text: &str, levels: usize) -> String {
    let pad = "    ".repeat(levels);
    let lines = text.lines().map(|l| {
        if l.is_empty() {
            String::from("\n")
        } else {
            format!("{pad}{l}\n")
        }
    });
    lines.collect()
}

/// Parameters of a kernel: inputs to read, outputs to write, numbers.
fn parameters(inputs: &[DType], outputs: &[DType], numbers: &[&str]) -> String {
    let read = inputs
        .iter()
        .enumerate()
        .map(|(i, d)| format!("const {}* x{i}", body::stored(*d)));
    let write = outputs
        .iter()
        .enumerate()
        .map(|(i, d)| format!("{}* y{i}", body::stored(*d)));
    let numbers = numbers.iter().map(|n| format!("i64 {n}"));
    read.chain(write).chain(numbers).collect::<Vec<_>>().join(", ")
}
