//! Running compiled programs without Python.

pub mod arena;
pub mod cpu;
pub mod plan;
pub mod pool;
pub mod step;
pub mod tuning;
