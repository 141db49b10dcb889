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
    /// A plan or a call that does not have the agreed form.
    #[error("{0}")]
    Malformed(String),
    /// There is no memory, or not as much as is allowed.
    #[error("{0}")]
    Memory(String),
    /// A step of a plan that failed.
    #[error("step {at} ({name}): {cause}")]
    Step {
        /// Its place among the steps.
        at: usize,
        /// What it does.
        name: String,
        /// Why it failed.
        cause: Box<Error>,
    },
}

impl Error {
    pub(crate) fn unsupported(message: impl Into<String>) -> Error {
        Error::Unsupported(message.into())
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Error {
        Error::Malformed(message.into())
    }
}

impl From<hypatia_runtime::Error> for Error {
    fn from(error: hypatia_runtime::Error) -> Error {
        use hypatia_runtime::Error as Runtime;
        let kind = match error {
            Runtime::Unsupported(_) => Error::Unsupported,
            Runtime::Memory(_) => Error::Memory,
            Runtime::Malformed(_) | Runtime::Type { .. } | Runtime::Core(_) => Error::Malformed,
        };
        kind(error.to_string())
    }
}

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
