//! The node of the e-graph language: an op of the table, a compile-time value, an input of
//! the program, or an opaque call into torch.

use std::fmt;

use egg::{Id, Language};
use smallvec::SmallVec;

use crate::attr::Attr;
use crate::ops::{OpId, table};

/// What a node does.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// An op of the table.
    Row(OpId),
    /// A compile-time value.
    Attr(Attr),
    /// An input of the program, by index.
    Input(u32),
    /// A call that only torch understands, by its index in the captured graph.
    Opaque(u32),
}

/// A node: an op and its operands.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// What it does.
    pub op: Op,
    /// Its operands.
    pub children: SmallVec<[Id; 4]>,
}

impl Node {
    /// A node of an op.
    pub fn new(op: OpId, children: impl IntoIterator<Item = Id>) -> Node {
        Node {
            op: Op::Row(op),
            children: children.into_iter().collect(),
        }
    }

    /// A compile-time value.
    pub fn attr(attr: Attr) -> Node {
        Node {
            op: Op::Attr(attr),
            children: SmallVec::new(),
        }
    }
}

impl Language for Node {
    type Discriminant = (Op, usize);

    fn discriminant(&self) -> Self::Discriminant {
        (self.op.clone(), self.children.len())
    }

    fn matches(&self, other: &Self) -> bool {
        self.op == other.op && self.children.len() == other.children.len()
    }

    fn children(&self) -> &[Id] {
        &self.children
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.op {
            Op::Row(id) => f.write_str(table().row(*id).name),
            Op::Attr(a) => a.fmt(f),
            Op::Input(i) => write!(f, "%{i}"),
            Op::Opaque(i) => write!(f, "torch#{i}"),
        }
    }
}
