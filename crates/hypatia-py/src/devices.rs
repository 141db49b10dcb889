//! The devices that plans are made for, by the type of torch's devices that each stands for.

use hypatia_runtime::cpu;
use hypatia_runtime::device::Registered;
use hypatia_runtime::lower::plan::Wish;
use pyo3::PyResult;

use crate::failed;

/// All devices. Whatever is not listed here has no native plan.
const DEVICES: &[Registered] = &[("cpu", &cpu::ABILITIES), ("cuda", &hypatia_cuda::ABILITIES)];

/// What Python wishes for, on any of the devices.
pub fn wish(json: &str) -> PyResult<Wish> {
    let wish: Wish = serde_json::from_str(json).map_err(failed)?;
    Ok(Wish {
        devices: DEVICES,
        ..wish
    })
}
