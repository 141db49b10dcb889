//! What can go wrong on a GPU.

use thiserror::Error;

/// Why something could not be done on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A library, or a function of one, is not there.
    #[error("{library} cannot be used: {reason}")]
    Missing {
        /// What is missing.
        library: &'static str,
        /// Where it was looked for, and what the loader said.
        reason: String,
    },
    /// A call of a library failed.
    #[error("{call} failed: {name}")]
    Call {
        /// The function.
        call: &'static str,
        /// The library's name of the failure.
        name: String,
        /// The library's number of the failure.
        code: u32,
    },
    /// A kernel that NVRTC refused.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// The kernel's name.
        kernel: String,
        /// What the compiler said.
        log: String,
    },
    /// Something that is possible in principle and not served here.
    #[error("{0}")]
    Unsupported(String),
}

impl Error {
    pub(crate) fn unsupported(message: impl Into<String>) -> Error {
        Error::Unsupported(message.into())
    }

    /// True if the device had too little memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::Call { code: 2, .. })
    }
}

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
