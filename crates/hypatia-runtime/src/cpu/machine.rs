//! The processor in words.

use super::gemm_bf16::has_tiles;
use super::lanes;

/// What the times of kernels depend on: the processor's name and model, and the instructions that are used.
pub fn describe() -> String {
    let tiles = if has_tiles() { ", tiles" } else { "" };
    format!("{}, {:?}{tiles}", name(), lanes::level()).to_lowercase()
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "unsafe in older compilers")]
fn name() -> String {
    use std::arch::x86_64::__cpuid;
    // SAFETY: every x86-64 processor has the instruction.
    let leaf = |leaf: u32| unsafe { __cpuid(leaf) };
    let mut bytes = vec![];
    if leaf(0x8000_0000).eax >= 0x8000_0004 {
        for part in 0x8000_0002..=0x8000_0004 {
            let r = leaf(part);
            bytes.extend([r.eax, r.ebx, r.ecx, r.edx].into_iter().flat_map(u32::to_le_bytes));
        }
    }
    let text: String = bytes
        .into_iter()
        .take_while(|b| *b != 0)
        .map(|b| if b.is_ascii_graphic() { char::from(b) } else { ' ' })
        .collect();
    // Hypervisors hide the name, not the model.
    format!("{} model {:x}", text.trim(), leaf(1).eax)
}

#[cfg(not(target_arch = "x86_64"))]
fn name() -> String {
    std::env::consts::ARCH.into()
}
