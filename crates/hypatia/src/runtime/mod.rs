//! Running compiled programs without Python.

pub mod arena;
pub mod cpu;
pub mod cuda;
pub mod operand;
pub mod plan;
pub mod pool;
pub mod step;
pub mod torch;
pub mod tuning;
