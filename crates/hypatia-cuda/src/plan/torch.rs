//! Products that torch computes, where cuBLASLt has no algorithm that is right.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::call::{Call, Strided};

use super::Setting;
use crate::Result;
use crate::driver::Device;
use crate::gemm::Operands;

/// How a factor or a result lies in memory: sizes and strides.
pub(super) type Form = (Vec<usize>, Vec<isize>);

/// A product that torch computes.
pub(super) struct TorchProduct {
    call: Box<dyn Call>,
    dtype: DType,
    gpu: u32,
    /// Both factors and the result.
    forms: [Form; 3],
}

impl TorchProduct {
    /// `op(left, right, out=y)`, by an op of the dispatcher.
    pub(super) fn new(
        device: &Device,
        op: &str,
        dtype: DType,
        forms: [Form; 3],
        setting: &mut Setting<'_>,
    ) -> Result<TorchProduct> {
        let call = format!(
            r#"{{"op": "{op}", "overload": "out", "arguments": [{{"tensor": 0}}, {{"tensor": 1}}, {{"out": 0}}], "returns": 1}}"#
        );
        Ok(TorchProduct {
            call: (setting.torch)(&call)?,
            dtype,
            gpu: device.ordinal(),
            forms,
        })
    }

    /// # Safety
    /// The operands are those of the product, and live until it is done.
    pub(super) unsafe fn launch(&self, o: &Operands) -> Result<()> {
        let tensor = |address: u64, i: usize| Strided {
            data: address as usize as *mut u8,
            dtype: self.dtype,
            shape: &self.forms[i].0,
            strides: &self.forms[i].1,
            gpu: Some(self.gpu),
        };
        let (reads, writes) = ([tensor(o.left, 0), tensor(o.right, 1)], [tensor(o.out, 2)]);
        // SAFETY: promised by the caller.
        unsafe { self.call.call(&reads, &writes)? };
        Ok(())
    }
}
