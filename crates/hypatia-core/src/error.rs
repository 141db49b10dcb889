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
    /// No program could be chosen.
    #[error(transparent)]
    Extract(#[from] crate::extract::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
