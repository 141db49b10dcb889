//! Which kernels a plan needs before its first product is measured: all are compiled at once.

use std::collections::BTreeSet;

use hypatia_runtime::plan::{Plan, Task};

use super::product::Product;
use crate::driver::Device;
use crate::gemm::CHECK;
use crate::kernel::{self, Kernel};
use crate::setting::Setting;
use crate::{Result, nvrtc};

/// Compiles the kernels of the steps, and those that compute or judge products.
pub(super) fn compile(
    device: &'static Device,
    plan: &Plan,
    texts: &[Vec<Kernel>],
    setting: &Setting<'_>,
) -> Result<()> {
    let mut sources = BTreeSet::new();
    for step in &plan.steps {
        match step {
            Task::Linear(l) => {
                sources.insert((CHECK.0, CHECK.1.to_owned()));
                sources.extend(Product::sources(device, plan, l, setting));
            }
            Task::Batch(_) => _ = sources.insert((CHECK.0, CHECK.1.to_owned())),
            _ => {}
        }
    }
    let others = sources.iter().map(|(name, source)| (*name, source.as_str()));
    let steps = texts.iter().flatten().map(|k| (k.name.as_str(), k.source.as_str()));
    let missing = others
        .chain(steps)
        .filter(|(_, source)| !kernel::is_loaded(device, source));
    nvrtc::compile_ahead(missing, device.arch())
}
