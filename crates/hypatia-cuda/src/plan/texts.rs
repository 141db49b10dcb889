//! The kernels of a plan's steps as text, so that all of them are compiled at once.

use hypatia_core::ty::DType;
use hypatia_runtime::plan::{
    AttentionStep, ColumnStep, DepthwiseStep, NormStep, Plan, RegionStep, RowStep, Task, ValueId, WindowOp,
};

use super::lying;
use crate::codegen::{self, Columns, Operand as Lying};
use crate::driver::Device;
use crate::kernel::Kernel;
use crate::{Error, Result};

/// Kernels that a step is sure to launch. Products choose theirs when they are measured.
pub(super) fn of(device: &Device, plan: &Plan, step: &Task) -> Result<Vec<Kernel>> {
    Ok(match step {
        Task::Region(r) => vec![region(plan, r)?],
        Task::Rows(r) => vec![rows(plan, r)?],
        Task::Depthwise(d) => vec![depthwise(plan, d)?],
        Task::Attention(a) => vec![attention(device, plan, a)?],
        Task::Columns(c) => {
            let out: Vec<DType> = c.outputs.iter().map(|v| plan.values[*v].dtype).collect();
            let kernels = columns(plan, c, &out)?;
            [kernels.chunks].into_iter().chain(kernels.finish).collect()
        }
        Task::Norm(n) => match n.eps {
            Some(eps) => vec![norm(plan, n)?.forward(eps)?],
            None => {
                let kernels = norm(plan, n)?.backward()?;
                vec![kernels.rows, kernels.finish]
            }
        },
        Task::Linear(_) | Task::Batch(_) | Task::Torch(_) => vec![],
    })
}

fn region(plan: &Plan, r: &RegionStep) -> Result<Kernel> {
    let inputs: Vec<Lying> = r.inputs.iter().map(|o| lying(plan, o)).collect();
    let outputs: Vec<Lying> = if r.slices.is_empty() {
        let dense = |id: &ValueId| Lying::dense(plan.values[*id].dtype, &r.shape);
        r.outputs.iter().map(dense).collect()
    } else {
        r.slices.iter().map(|o| lying(plan, o)).collect()
    };
    codegen::reading(&r.region, &r.shape, &inputs, &r.reads, &outputs)
}

fn rows(plan: &Plan, r: &RowStep) -> Result<Kernel> {
    let inputs: Vec<Lying> = r.inputs.iter().map(|o| lying(plan, o)).collect();
    let output = Lying {
        strides: r.dense.clone(),
        ..Lying::dense(plan.values[r.output].dtype, &[])
    };
    codegen::rows(&r.rows, &r.shape, r.reduced, &inputs, &[output])
}

/// The kernels of a step whose results are of these types.
pub(super) fn columns(plan: &Plan, step: &ColumnStep, out: &[DType]) -> Result<Columns> {
    let inputs: Vec<_> = step.inputs.iter().map(|o| lying(plan, o)).collect();
    codegen::columns(&step.kinds, &step.region, &step.shape, step.rows, &inputs, out)
}

/// What a norm is over.
pub(super) fn norm(plan: &Plan, n: &NormStep) -> Result<codegen::Norm> {
    let (statistics, read) = (if n.centered { 2 } else { 1 }, n.reads.len());
    let wanted = match n.eps {
        Some(_) => (1 + statistics, 1 + statistics),
        None => (3 + statistics, 1 + statistics),
    };
    if (read, n.writes.len()) != wanted {
        return Err(Error::unsupported("a norm of other operands"));
    }
    Ok(codegen::Norm {
        dtype: plan.values[n.writes[0]].dtype,
        rows: n.rows,
        width: n.width,
        centered: n.centered,
    })
}

/// The kernel of a convolution or a pooling of each channel by itself.
fn depthwise(plan: &Plan, d: &DepthwiseStep) -> Result<Kernel> {
    let (&[_, height, width, _], &[n, oh, ow, channels]) = (&d.x.shape[..], &d.shape[..]) else {
        return Err(Error::unsupported("a window over what are no images"));
    };
    let depthwise = codegen::Depthwise {
        pool: match d.op {
            WindowOp::Conv(_) => None,
            WindowOp::Pool(pool) => Some(pool),
        },
        window: d.window,
        image: [height, width],
        shape: [n, oh, ow, channels],
        x: lying(plan, &d.x),
        after: &d.after,
        inputs: d.inputs.iter().map(|o| o.as_ref().map(|o| lying(plan, o))).collect(),
    };
    depthwise.kernel()
}

/// The kernel of attention with one query for each head.
fn attention(device: &Device, plan: &Plan, a: &AttentionStep) -> Result<Kernel> {
    let (&[batch, groups, heads, width], &[_, _, keys, _]) = (&a.q.shape[..], &a.k.shape[..]) else {
        return Err(Error::unsupported("attention of other dimensions"));
    };
    let attention = codegen::Attention {
        sizes: [batch, groups, heads, keys, width],
        q: lying(plan, &a.q),
        k: lying(plan, &a.k),
        v: lying(plan, &a.v),
        mask: a.mask.as_ref().map(|m| lying(plan, m)),
        scale: a.scale,
    };
    attention.kernel(device.arch(), device.multiprocessors() as usize)
}
