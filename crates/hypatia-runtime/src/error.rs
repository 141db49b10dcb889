//! The errors of the crate.

use thiserror::Error;

/// What can go wrong between an optimized program and its results.
#[derive(Debug, Error)]
pub enum Error {
    /// A program that is well formed but that no native plan computes.
    #[error("no native plan: {0}")]
    Unsupported(String),
    /// A plan or a call that does not have the agreed form.
    #[error("malformed graph: {0}")]
    Malformed(String),
    /// A kernel applied to operands that it does not take.
    #[error("{op}: {message}")]
    Type {
        /// The kernel's or the instruction's name.
        op: String,
        /// Which operands, and why not.
        message: String,
    },
    /// An allocation failed.
    #[error("there is no memory for {0} bytes")]
    Memory(usize),
    /// Something that the compiler refused.
    #[error(transparent)]
    Core(#[from] hypatia_core::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
