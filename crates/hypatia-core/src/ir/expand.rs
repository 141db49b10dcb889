//! The definition of a fused op, written into a program.

use egg::Id;

use crate::attr::Attr;
use crate::error::Result;
use crate::ir::build::Sink;
use crate::ir::define::{self, Operands, operand_index};
use crate::ir::program::Program;
use crate::ops::{OpId, Row, table};
use crate::sexp::Pos;

/// Adds what a fused op means, over operands that are already in the program; the node of its result.
pub fn expand(op: OpId, program: &mut Program, operands: Vec<Id>) -> Result<Id> {
    let row = table().row(op);
    define::expand(op, &mut Expansion { row, program, operands })
}

struct Expansion<'a> {
    row: &'static Row,
    program: &'a mut Program,
    operands: Vec<Id>,
}

impl Operands for Expansion<'_> {
    fn count(&self) -> usize {
        self.operands.len()
    }
}

impl Sink for Expansion<'_> {
    type Ref = Id;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Id> {
        operand_index(self.row, word)
            .and_then(|i| self.operands.get(i).copied())
            .ok_or_else(|| pos.error(format!("{} has no operand {word}", self.row.name)))
    }

    fn attr(&mut self, attr: Attr) -> Result<Id> {
        Ok(self.program.attr(attr))
    }

    fn op(&mut self, op: OpId, operands: Vec<Id>, _: Pos) -> Result<Id> {
        self.program.op(op, operands)
    }
}
