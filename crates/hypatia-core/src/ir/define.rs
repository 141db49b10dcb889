//! What follows from a row: types and values of ops, through the definition of fused ones.

use super::build::{Sink, build};
use crate::attr::Attr;
use crate::error::{Error, Result};
use crate::eval::{Mode, Val};
use crate::ops::{Args, Meaning, OpId, Row, Vals, table};
use crate::sexp::Pos;
use crate::ty::Ty;

fn type_error(row: &Row, message: String) -> Error {
    Error::Type {
        op: row.name.into(),
        message,
    }
}

/// Type of an op's result.
pub fn infer(op: OpId, operands: &[Ty]) -> Result<Ty> {
    let row = table().row(op);
    match &row.meaning {
        Meaning::Primitive { infer, .. } => infer(&Args(operands)).map_err(|m| type_error(row, m)),
        Meaning::Defined(_) => expand(op, &mut Types { row, operands }),
    }
}

/// Value of an op's result.
pub fn eval(op: OpId, vals: &[Val], types: &[Ty], mode: Mode) -> Result<Val> {
    let row = table().row(op);
    match &row.meaning {
        Meaning::Primitive { eval, .. } => {
            let out = infer(op, types)?;
            let vals = Vals {
                vals,
                types,
                out: &out,
                mode,
            };
            let value = eval(&vals).map_err(|message| Error::Eval {
                op: row.name.into(),
                message,
            })?;
            Ok(value.stored(&out, mode))
        }
        Meaning::Defined(_) => expand(op, &mut Values { row, vals, types, mode }).map(|(v, _)| v),
    }
}

/// Builds the definition of a fused op with a sink that knows its operands.
pub fn expand<S: Sink + Operands>(op: OpId, sink: &mut S) -> Result<S::Ref> {
    let row = table().row(op);
    match row.definition(sink.count()) {
        Some(definition) => build(&definition, sink),
        None => Err(type_error(row, "has no definition for these operands".into())),
    }
}

/// A sink over the operands of a row.
pub trait Operands {
    /// How many there are.
    fn count(&self) -> usize;
}

/// Position of a definition's word among the operands: by name, or `p3` in rows that take any number.
pub fn operand_index(row: &Row, word: &str) -> Option<usize> {
    if row.variadic() {
        return word.strip_prefix('p')?.parse().ok();
    }
    row.params.iter().position(|p| p.name == word)
}

/// The operands of a row by their types.
pub struct Types<'a> {
    /// The row.
    pub row: &'a Row,
    /// Its operands.
    pub operands: &'a [Ty],
}

impl Types<'_> {
    /// The type of an operand, by its word in the definition.
    pub fn get(&self, word: &str, pos: Pos) -> Result<Ty> {
        operand_index(self.row, word)
            .and_then(|i| self.operands.get(i))
            .cloned()
            .ok_or_else(|| pos.error(format!("{} has no operand {word}", self.row.name)))
    }
}

impl Operands for Types<'_> {
    fn count(&self) -> usize {
        self.operands.len()
    }
}

impl Sink for Types<'_> {
    type Ref = Ty;
    fn word(&mut self, word: &str, pos: Pos) -> Result<Ty> {
        self.get(word, pos)
    }
    fn attr(&mut self, attr: Attr) -> Result<Ty> {
        Ok(Ty::Attr(attr))
    }
    fn op(&mut self, op: OpId, operands: Vec<Ty>, _: Pos) -> Result<Ty> {
        infer(op, &operands)
    }
}

struct Values<'a> {
    row: &'a Row,
    vals: &'a [Val],
    types: &'a [Ty],
    mode: Mode,
}

impl Operands for Values<'_> {
    fn count(&self) -> usize {
        self.vals.len()
    }
}

impl Sink for Values<'_> {
    type Ref = (Val, Ty);
    fn word(&mut self, word: &str, pos: Pos) -> Result<(Val, Ty)> {
        operand_index(self.row, word)
            .and_then(|i| Some((self.vals.get(i)?.clone(), self.types.get(i)?.clone())))
            .ok_or_else(|| pos.error(format!("{} has no operand {word}", self.row.name)))
    }
    fn attr(&mut self, attr: Attr) -> Result<(Val, Ty)> {
        Ok((Val::Attr(attr.clone()), Ty::Attr(attr)))
    }
    fn op(&mut self, op: OpId, operands: Vec<(Val, Ty)>, _: Pos) -> Result<(Val, Ty)> {
        let (vals, types): (Vec<Val>, Vec<Ty>) = operands.into_iter().unzip();
        Ok((eval(op, &vals, &types, self.mode)?, infer(op, &types)?))
    }
}
