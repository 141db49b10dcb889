//! The e-graph: all programs equal to the one that came in.

mod analysis;

pub use analysis::{Context, Facts};

use crate::ir::node::Node;

/// The e-graph of this compiler.
pub type EGraph = egg::EGraph<Node, Context>;
