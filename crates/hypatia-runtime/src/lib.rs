//! From optimized programs to results: plans, the kernels that they name, and running them on a CPU
//! or, slowly, on the reference device.

pub mod arena;
pub mod cpu;
pub mod device;
pub mod error;
pub mod kernels;
pub mod lower;
pub mod operand;
pub mod plan;
pub mod pool;
pub mod reference;
pub mod step;
pub mod store;
pub mod torch;
pub mod tuning;

pub use error::{Error, Result};
