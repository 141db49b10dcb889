//! From the chosen program to something that runs.

pub mod plan;
