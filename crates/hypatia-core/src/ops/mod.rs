//! The op table: everything the compiler knows of an op stands in its row.
//!
//! A row gives the op's name, its operands, the torch calls that mean it, its type rule, its
//! reference evaluation and the shape of its cost. A fused op's row gives a definition in
//! other ops instead, from which all of these follow.

mod conv;
pub(crate) mod fused;
mod gradient;
mod index;
mod linear;
mod norm;
mod pointwise;
mod reduce;
mod signature;
mod view;

use std::collections::BTreeMap;
use std::sync::OnceLock;

pub use signature::{AtenCall, AtenOperand, Kind, Param};

pub use crate::args::{Args, Vals, known_shape, promote};
pub use crate::error::Check;
use crate::eval::Val;
use crate::sexp::{Sexp, parse_one};
use crate::ty::Ty;
use crate::work::Cost;

/// Index of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(u16);

/// Computes the type of an op's result from its operands' types, or says why there is none.
pub type Infer = fn(&Args) -> Check<Ty>;
/// Computes an op's result from its operands' values, in real numbers held as f64.
pub type Eval = fn(&Vals) -> Check<Val>;

/// What an op means.
pub enum Meaning {
    /// By its own rules.
    Primitive {
        /// Type rule.
        infer: Infer,
        /// Reference evaluation.
        eval: Eval,
        /// Shape of the cost.
        cost: Cost,
    },
    /// By an expression in other ops over the row's operands; the function is given the
    /// number of operands, for ops that take any number.
    Defined(fn(usize) -> String),
}

/// A row of the table.
pub struct Row {
    /// Name in program text, patterns and graphs.
    pub name: &'static str,
    /// Operands, `name:kind` each.
    pub params: Vec<Param>,
    /// The torch calls that mean this op. The first without `=>` is the one that is emitted.
    pub aten: Vec<AtenCall>,
    /// What it computes.
    pub meaning: Meaning,
    /// The source of the torch calls, for the documentation.
    pub aten_text: &'static [&'static str],
}

impl Row {
    /// Whether torch chooses the kernel of its call by how the operands lie: rows without gaps must stay so.
    pub fn keeps_layout(&self) -> bool {
        self.name.starts_with("attention") || self.name == "native_group_norm"
    }

    /// The definition of a fused op for this many operands.
    pub fn definition(&self, operands: usize) -> Option<Sexp> {
        match &self.meaning {
            Meaning::Defined(f) => parse_one(&f(operands)).ok(),
            Meaning::Primitive { .. } => None,
        }
    }

    /// True when the last operand may stand any number of times.
    pub fn variadic(&self) -> bool {
        self.params.last().is_some_and(|p| p.kind == Kind::Tensors)
    }

    /// The kind of the operand at a position.
    pub fn kind(&self, position: usize) -> Kind {
        match self.params.get(position).or(self.params.last()) {
            Some(p) if p.kind == Kind::Tensors => Kind::Tensor,
            Some(p) => p.kind,
            None => Kind::Tensor,
        }
    }

    /// True when this many operands can be given.
    pub fn takes(&self, operands: usize) -> bool {
        if self.variadic() {
            operands + 1 >= self.params.len()
        } else {
            operands == self.params.len()
        }
    }
}

fn op(
    name: &'static str,
    params: &'static str,
    aten_text: &'static [&'static str],
    infer: Infer,
    eval: Eval,
    cost: Cost,
) -> Row {
    Row {
        name,
        params: signature::params(params),
        aten: aten_text.iter().map(|t| AtenCall::parse(t)).collect(),
        meaning: Meaning::Primitive { infer, eval, cost },
        aten_text,
    }
}

fn defined(name: &'static str, params: &'static str, definition: fn(usize) -> String) -> Row {
    Row {
        name,
        params: signature::params(params),
        aten: vec![],
        meaning: Meaning::Defined(definition),
        aten_text: &[],
    }
}

/// The table of all ops.
pub struct Table {
    rows: Vec<Row>,
    by_name: BTreeMap<&'static str, OpId>,
    by_target: BTreeMap<String, Vec<(OpId, usize)>>,
}

impl Table {
    fn build() -> Table {
        let rows: Vec<Row> = [
            view::rows(),
            pointwise::rows(),
            reduce::rows(),
            linear::rows(),
            norm::rows(),
            gradient::rows(),
            conv::rows(),
            index::rows(),
            fused::rows(),
        ]
        .into_iter()
        .flatten()
        .collect();
        let mut by_name = BTreeMap::new();
        let mut by_target: BTreeMap<String, Vec<(OpId, usize)>> = BTreeMap::new();
        for (i, row) in rows.iter().enumerate() {
            let id = OpId(i as u16);
            by_name.insert(row.name, id);
            for (k, call) in row.aten.iter().enumerate() {
                by_target.entry(call.target.clone()).or_default().push((id, k));
            }
        }
        Table {
            rows,
            by_name,
            by_target,
        }
    }

    /// The row of an op.
    pub fn row(&self, id: OpId) -> &Row {
        &self.rows[id.0 as usize]
    }

    /// All rows, in table order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Looks an op up by name.
    pub fn by_name(&self, name: &str) -> Option<OpId> {
        self.by_name.get(name).copied()
    }

    /// The ops that a torch call may mean, in table order.
    pub fn by_target(&self, target: &str) -> impl Iterator<Item = (OpId, &AtenCall)> {
        self.by_target
            .get(target)
            .into_iter()
            .flatten()
            .map(|(id, k)| (*id, &self.row(*id).aten[*k]))
    }
}

/// The op table of this build.
pub fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(Table::build)
}

/// An op that must exist: for names written in this crate.
pub fn op_id(name: &str) -> OpId {
    match table().by_name(name) {
        Some(id) => id,
        None => panic!("no op named {name} in the table"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_definitions_parse() {
        assert_eq!(table().by_name.len(), table().rows.len());
        for row in table().rows() {
            if matches!(row.meaning, Meaning::Defined(_)) {
                let n = if row.variadic() {
                    row.params.len() + 4
                } else {
                    row.params.len()
                };
                assert!(row.definition(n).is_some(), "{}", row.name);
            }
        }
    }
}
