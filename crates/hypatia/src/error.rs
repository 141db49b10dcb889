//! The errors of the crate.

use thiserror::Error;

/// What can go wrong between a program coming in and an optimized one going out.
#[derive(Debug, Error)]
pub enum Error {
    /// Program text that cannot be read.
    #[error("{line}:{column}: {message}")]
    Syntax {
        /// 1-based line.
        line: usize,
        /// 1-based column.
        column: usize,
        /// What is wrong there.
        message: String,
    },
    /// An op applied to operands that it does not take.
    #[error("{op}: {message}")]
    Type {
        /// The op's name.
        op: String,
        /// Which operands, and why not.
        message: String,
    },
    /// A captured graph that does not have the agreed form.
    #[error("malformed graph: {0}")]
    Graph(String),
    /// A graph that is well formed but that no native plan computes.
    #[error("no native plan: {0}")]
    NoPlan(String),
    /// A value that the reference evaluator cannot compute.
    #[error("cannot evaluate {op}: {message}")]
    Eval {
        /// The op's name.
        op: String,
        /// Why.
        message: String,
    },
    /// Two merged classes disagree: a rule is wrong.
    #[error("unsound merge: {0}")]
    Unsound(String),
    /// An allocation failed.
    #[error("there is no memory for {0} bytes")]
    Memory(usize),
    /// No program could be chosen.
    #[error(transparent)]
    Extract(#[from] crate::extract::Error),
    /// Something failed on a GPU.
    #[error(transparent)]
    Cuda(#[from] crate::runtime::cuda::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
