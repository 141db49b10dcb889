//! Running on NVIDIA GPUs: the driver, cuBLASLt and NVRTC, all loaded at run time.
//!
//! Nothing of CUDA is needed to build this, and every absence is an [`Error`] with a sentence that says what is
//! missing.
//!
//! | module | what it is for |
//! |---|---|
//! | [`loading`] | which copies of the libraries are used |
//! | [`driver`] | devices, streams, events, modules, graphs |
//! | [`nvrtc`] | CUDA C++ text becomes machine code, kept by a [`KernelCache`](nvrtc::KernelCache) |
//! | [`kernel`] | a generated kernel on a device, ready to launch |
//! | [`codegen`] | pointwise regions and row ops as CUDA C++ |
//! | [`gemm`] | matrix products with epilogues; algorithms are checked before they are timed |
//! | [`fp32`] | fp32 products by tensor cores, as exact as without them |
//! | `few` | 16-bit products of few rows, at the speed of memory |
//! | `interleaved` | 16-bit products whose rows are no multiple of 16 bytes |
//! | [`setting`] | what choosing kernels depends on |
//! | [`plan`] | plans: steps over device memory |
//! | [`replay`] | launches recorded once for each set of addresses |

mod abilities;
pub mod codegen;
pub mod driver;
mod error;
mod few;
pub mod fp32;
pub mod gemm;
mod interleaved;
pub mod kernel;
pub mod loading;
pub mod nvrtc;
mod padded;
pub mod plan;
pub mod replay;
pub mod setting;
mod sys;
mod unaligned;

pub use abilities::ABILITIES;
pub use error::{Error, Result};
