//! From the chosen program to something that runs.

pub mod emit;
pub mod plan;
