//! Equalities between classes, for rules that patterns cannot write: any number of operands,
//! several results.

use egg::{ENodeOrVar, Id, PatternAst, Subst, Symbol, Var};

use super::pattern::type_of;
use crate::attr::Attr;
use crate::egraph::EGraph;
use crate::ir::node::{Node, Op};
use crate::ops::OpId;

/// Classes that have a node of this op with this many operands, in a fixed order.
pub(super) fn classes_of(egraph: &EGraph, op: OpId, operands: usize) -> Vec<Id> {
    let found = egraph.classes_for_op(&(Op::Row(op), operands));
    let mut classes: Vec<Id> = found
        .map(|ids| ids.map(|id| egraph.find(id)).collect())
        .unwrap_or_default();
    classes.sort_unstable();
    classes.dedup();
    classes
}

/// Operands of the nodes of a class that are this op.
pub(super) fn nodes_of(egraph: &EGraph, class: Id, op: OpId) -> Vec<Vec<Id>> {
    egraph[class]
        .nodes
        .iter()
        .filter(|n| n.op == Op::Row(op))
        .map(|n| n.children.iter().map(|c| egraph.find(*c)).collect())
        .collect()
}

/// Operands of every node of an op with this many operands, and of a node of another op that its first operand is.
pub(super) fn nested(egraph: &EGraph, outer: OpId, operands: usize, inner: OpId) -> Vec<(Vec<Id>, Vec<Id>)> {
    let mut found = vec![];
    for class in classes_of(egraph, outer, operands) {
        for whole in nodes_of(egraph, class, outer) {
            let parts = nodes_of(egraph, whole[0], inner);
            found.extend(parts.into_iter().map(|part| (whole.clone(), part)));
        }
    }
    found
}

/// Both sides of an equality over classes, each class a variable.
#[derive(Default)]
pub(super) struct Sides {
    pub(super) left: Side,
    pub(super) right: Side,
}

/// One side: a pattern over classes.
#[derive(Default)]
pub(super) struct Side {
    ast: PatternAst<Node>,
    used: Vec<Id>,
}

fn variable(class: Id) -> Var {
    Var::from_u32(u32::try_from(usize::from(class)).unwrap_or(u32::MAX))
}

impl Side {
    /// A class as an operand.
    pub(super) fn var(&mut self, class: Id) -> Id {
        self.used.push(class);
        self.ast.add(ENodeOrVar::Var(variable(class)))
    }

    /// A compile-time value.
    pub(super) fn attr(&mut self, attr: Attr) -> Id {
        self.ast.add(ENodeOrVar::ENode(Node::attr(attr)))
    }

    /// An op.
    pub(super) fn add(&mut self, op: OpId, children: &[Id]) -> Id {
        self.ast.add(ENodeOrVar::ENode(Node::new(op, children.iter().copied())))
    }
}

impl Sides {
    /// Unites both sides if they have one type, with a justification that names the rule.
    pub(super) fn unite(&self, egraph: &mut EGraph, rule: &str) -> bool {
        let mut subst = Subst::default();
        for class in self.left.used.iter().chain(&self.right.used) {
            subst.insert(variable(*class), egraph.find(*class));
        }
        let vars = |v: Var| egraph[subst[v]].data.ty.clone();
        let left = type_of(egraph, &self.left.ast, &vars);
        if left.is_none() || left != type_of(egraph, &self.right.ast, &vars) {
            return false;
        }
        egraph
            .union_instantiations(&self.left.ast, &self.right.ast, &subst, Symbol::from(rule))
            .1
    }
}
