//! From the chosen program to something that runs.

pub mod emit;
mod expand;
pub mod plan;
