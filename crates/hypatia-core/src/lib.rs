//! Hypatia's core: reads a tensor program, searches its equals in an e-graph, picks the
//! cheapest, and proves how it got there. No device, no Python and no runtime is known here.

#![forbid(unsafe_code)]

pub mod args;
pub mod attr;
pub mod cost;
pub mod dim;
pub mod dtype;
pub mod egraph;
pub mod emit;
pub mod error;
pub mod eval;
pub mod extract;
pub mod ir;
pub mod ops;
pub mod optimize;
pub mod proof;
pub mod random;
pub mod report;
pub mod rules;
pub mod sexp;
pub mod ty;
pub mod work;

pub use error::{Error, Result};
pub use optimize::{Optimized, Options, optimize};
