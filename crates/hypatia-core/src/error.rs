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
    Extract(#[from] ExtractError),
}

/// Why extraction rejects a graph or a choice.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ExtractError {
    /// The root is not a class of the graph.
    #[error("root {root} is not among the {classes} classes")]
    Root {
        /// The root that was asked for.
        root: usize,
        /// How many classes there are.
        classes: usize,
    },
    /// A node reads a class that does not exist.
    #[error("node {node} of class {class} reads class {child}, which does not exist")]
    Child {
        /// The class of the node.
        class: usize,
        /// The node, by its index in the class.
        node: usize,
        /// The missing class.
        child: usize,
    },
    /// A cost is negative, infinite or not a number.
    #[error("node {node} of class {class} costs {cost}; a cost is finite and not negative")]
    Cost {
        /// The class of the node.
        class: usize,
        /// The node, by its index in the class.
        node: usize,
        /// The offending cost.
        cost: f64,
    },
    /// The nodes marked as original do not compute the root.
    #[error("the original nodes do not compute root {root}")]
    Original {
        /// The root that was asked for.
        root: usize,
    },
    /// A choice needs a class for which it names no existing node.
    #[error("class {class} is needed, but no node of it is chosen")]
    Incomplete {
        /// The class without a node.
        class: usize,
    },
    /// A choice makes a class depend on itself.
    #[error("class {class} depends on itself")]
    Cyclic {
        /// A class on the cycle.
        class: usize,
    },
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A result, or a sentence that says why there is none: whoever asked knows of which op it speaks.
pub type Check<T> = Result<T, String>;
