//! Norms of training steps.

use hypatia_runtime::plan::{NormStep, Plan};

use crate::Result;
use crate::codegen;
use crate::driver::{Device, Stream};
use crate::kernel::Loaded;

/// A norm with its statistics, or its gradients.
pub(super) enum Norm {
    Forward(Loaded),
    Backward {
        rows: Loaded,
        finish: Loaded,
        partial_bytes: usize,
    },
}

impl Norm {
    pub(super) fn new(device: &'static Device, plan: &Plan, n: &NormStep) -> Result<Norm> {
        let norm = codegen::Norm::of(plan, n)?;
        Ok(match n.eps {
            Some(eps) => Norm::Forward(norm.forward(eps)?.load(device)?),
            None => {
                let kernels = norm.backward()?;
                Norm::Backward {
                    rows: kernels.rows.load(device)?,
                    finish: kernels.finish.load(device)?,
                    partial_bytes: kernels.partial_bytes,
                }
            }
        })
    }

    pub(super) fn workspace(&self) -> usize {
        match self {
            Norm::Forward(_) => 0,
            Norm::Backward { partial_bytes, .. } => *partial_bytes,
        }
    }

    /// # Safety
    /// The operands of the step are at these addresses, and there is room for [`Norm::workspace`].
    pub(super) unsafe fn launch(&self, stream: Stream, reads: &[u64], writes: &[u64], workspace: u64) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Norm::Forward(kernel) => kernel.launch(stream, &[reads, writes].concat()),
                Norm::Backward { rows, finish, .. } => {
                    rows.launch(stream, &[reads, &[writes[0], workspace]].concat())?;
                    finish.launch(stream, &[&[workspace], &writes[1..]].concat())
                }
            }
        }
    }
}
