//! Linear layers that cuBLASLt refuses as a whole: the product by itself, or by torch, and a kernel for what follows it.

use hypatia_runtime::kernels::product::Activation;
use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};
use hypatia_runtime::plan::Plan;

use super::product::problem;
use super::torch::TorchProduct;
use super::{LinearStep, Setting};
use crate::codegen::{self, Operand as Lying, alignment};
use crate::driver::{Device, Stream};
use crate::fp32;
use crate::gemm::Operands;
use crate::kernel::Loaded;
use crate::{Error, Result};

enum Factor {
    Ours(fp32::Product),
    Torch(TorchProduct),
}

/// A product and what follows it.
pub(super) struct Apart {
    product: Factor,
    after: Option<Loaded>,
    /// The kernel adds the bias.
    bias: bool,
}

impl Apart {
    /// # Safety
    /// The setting's memory is the device's.
    pub(super) unsafe fn new(
        device: &'static Device,
        plan: &Plan,
        l: &LinearStep,
        setting: &mut Setting<'_>,
    ) -> Result<Apart> {
        if l.gradient != Default::default() {
            return Err(Error::unsupported("a product of a backward pass in parts"));
        }
        let mut bare = l.clone();
        (bare.activation, bare.r, bare.multiplies) = (Activation::None, None, false);
        for bias in [l.b, None] {
            bare.b = bias;
            let product = problem(plan, &bare, setting.tf32)
                // SAFETY: promised by the caller.
                .and_then(|problem| unsafe { fp32::choose(device, problem, None, setting) });
            if let Ok(product) = product {
                return Ok(Apart {
                    product: Factor::Ours(product),
                    after: after(device, plan, l, bias.is_none())?,
                    bias: l.b.is_some() && bias.is_none(),
                });
            }
        }
        Ok(Apart {
            product: Factor::Torch(by_torch(device, plan, l, setting)?),
            after: after(device, plan, l, true)?,
            bias: l.b.is_some(),
        })
    }

    pub(super) fn kind(&self) -> &'static str {
        match &self.product {
            Factor::Ours(product) => product.kind(),
            Factor::Torch(_) => "torch",
        }
    }

    pub(super) fn calls_torch(&self) -> bool {
        matches!(self.product, Factor::Torch(_))
    }

    pub(super) fn workspace(&self) -> usize {
        match &self.product {
            Factor::Ours(product) => product.workspace(),
            Factor::Torch(_) => 0,
        }
    }

    /// # Safety
    /// The operands are those of the step, and live until it is done.
    pub(super) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let bare = Operands {
            residual: 0,
            bias: if self.bias { 0 } else { o.bias },
            ..*o
        };
        // SAFETY: promised by the caller.
        unsafe {
            match &self.product {
                Factor::Ours(product) => product.launch(stream, &bare)?,
                Factor::Torch(torch) => torch.launch(&bare)?,
            }
            let Some(after) = &self.after else {
                return Ok(());
            };
            let given = [o.bias].into_iter().filter(|_| self.bias);
            let added = [o.residual].into_iter().filter(|r| *r != 0);
            let addresses: Vec<u64> = [o.out].into_iter().chain(given).chain(added).chain([o.out]).collect();
            after.launch(stream, &addresses)
        }
    }
}

/// The kernel of what follows a product, in place: the bias, the activation, what is added or multiplied by. None if
/// there is nothing.
fn after(device: &'static Device, plan: &Plan, l: &LinearStep, adds_bias: bool) -> Result<Option<Loaded>> {
    let (n, _) = l
        .sizes(&plan.values[l.w].shape)
        .ok_or_else(|| Error::malformed("a weight that is no matrix"))?;
    let dtype = plan.values[l.y].dtype;
    let shape = [l.m, n];
    let y = Lying::dense(dtype, &shape);
    let mut inputs = vec![y.clone()];
    if adds_bias && l.b.is_some() {
        inputs.push(Lying {
            strides: vec![0, 1],
            ..y.clone()
        });
    }
    if let Some((r, stride)) = &l.r {
        inputs.push(Lying {
            strides: vec![*stride as isize, 1],
            alignment: alignment(r.offset * dtype.size()),
            ..y.clone()
        });
    }
    let (count, mut code, mut at) = (inputs.len(), vec![], 0);
    let mut push = |instruction: Instruction| {
        code.push(instruction);
        count + code.len() - 1
    };
    if adds_bias && l.b.is_some() {
        at = push(Instruction::new(Op::Add, [at, 1]));
    }
    if let Some(name) = l.activation.name() {
        let op = Op::named(name).ok_or_else(|| Error::unsupported(format!("a product with {name}")))?;
        at = push(Instruction::new(op, [at]));
    }
    if l.r.is_some() {
        let op = if l.multiplies { Op::Mul } else { Op::Add };
        at = push(Instruction::new(op, [at, count - 1]));
    }
    if code.is_empty() {
        return Ok(None);
    }
    let region = Region::new(&vec![dtype; count], code, &[at], Rounding::EveryOp)?;
    codegen::pointwise(&region, &shape, &inputs, &[y])?
        .load(device)
        .map(Some)
}

/// The product alone, by torch.
fn by_torch(device: &Device, plan: &Plan, l: &LinearStep, setting: &mut Setting<'_>) -> Result<TorchProduct> {
    let weight = &plan.values[l.w];
    let (n, k) = l
        .sizes(&weight.shape)
        .ok_or_else(|| Error::malformed("a weight that is no matrix"))?;
    let right = if l.transposed { [n as isize, 1] } else { [1, k as isize] };
    let forms = [
        (vec![l.m, k], vec![l.x_stride as isize, 1]),
        (vec![k, n], right.to_vec()),
        (vec![l.m, n], vec![n as isize, 1]),
    ];
    TorchProduct::new(device, "aten::mm", weight.dtype, forms, setting)
}
