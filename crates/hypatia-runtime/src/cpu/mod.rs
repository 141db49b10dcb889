//! Kernels for CPUs.

mod abilities;
pub mod aligned;
pub mod gemm_bf16;
pub mod gemm_f32;
pub mod gemv;
pub mod lanes;
pub mod linear;
pub mod machine;
pub mod math;
pub mod region;
pub mod rowwise;

pub use abilities::ABILITIES;
