//! Turns an s-expression into something, op by op.

use crate::attr::Attr;
use crate::error::Result;
use crate::ops::{OpId, table};
use crate::sexp::{Pos, Sexp};

/// What is built: nodes of a program, a pattern, types, values, work.
pub trait Sink {
    /// A built part.
    type Ref: Clone;

    /// A word that is no compile-time value.
    fn word(&mut self, word: &str, pos: Pos) -> Result<Self::Ref>;
    /// A compile-time value.
    fn attr(&mut self, attr: Attr) -> Result<Self::Ref>;
    /// An op on built operands.
    fn op(&mut self, op: OpId, operands: Vec<Self::Ref>, pos: Pos) -> Result<Self::Ref>;
    /// `($name …)`: a compile-time value computed from operands.
    fn function(&mut self, name: &str, _operands: Vec<Self::Ref>, pos: Pos) -> Result<Self::Ref> {
        Err(pos.error(format!("${name}: functions cannot stand here")))
    }
    /// `*name`: several operands.
    fn list(&mut self, name: &str, pos: Pos) -> Result<Vec<Self::Ref>> {
        Err(pos.error(format!("*{name}: lists cannot stand here")))
    }
}

/// Builds an expression.
pub fn build<S: Sink>(sexp: &Sexp, sink: &mut S) -> Result<S::Ref> {
    match sexp {
        Sexp::Atom(word, pos) => match Attr::parse(word) {
            Some(attr) => sink.attr(attr),
            None => sink.word(word, *pos),
        },
        Sexp::List(items, pos) => {
            let Some((Sexp::Atom(head, head_pos), rest)) = items.split_first() else {
                return Err(pos.error("an op's name is expected after '('"));
            };
            let mut operands = Vec::with_capacity(rest.len());
            for item in rest {
                match item {
                    Sexp::Atom(w, p) if w.starts_with('*') && w.len() > 1 => operands.extend(sink.list(&w[1..], *p)?),
                    _ => operands.push(build(item, sink)?),
                }
            }
            if let Some(function) = head.strip_prefix('$') {
                return sink.function(function, operands, *head_pos);
            }
            let Some(op) = table().by_name(head) else {
                return Err(head_pos.error(format!("there is no op '{head}'{}", nearest(head))));
            };
            let row = table().row(op);
            if !row.takes(operands.len()) {
                let names: Vec<&str> = row.params.iter().map(|p| p.name.as_str()).collect();
                return Err(head_pos.error(format!(
                    "'{head}' takes {} operands ({}), not {}",
                    row.params.len(),
                    names.join(" "),
                    operands.len()
                )));
            }
            sink.op(op, operands, *head_pos)
        }
    }
}

/// A hint at an op whose name is close.
fn nearest(word: &str) -> String {
    let distance = |name: &str| {
        let (a, b): (Vec<char>, Vec<char>) = (word.chars().collect(), name.chars().collect());
        let mut row: Vec<usize> = (0..=b.len()).collect();
        for (i, ca) in a.iter().enumerate() {
            let mut left = i;
            row[0] = i + 1;
            for (j, cb) in b.iter().enumerate() {
                let cost = (left + usize::from(ca != cb)).min(row[j] + 1).min(row[j + 1] + 1);
                left = row[j + 1];
                row[j + 1] = cost;
            }
        }
        row[b.len()]
    };
    let best = table().rows().iter().map(|r| (distance(r.name), r.name)).min();
    match best {
        Some((d, name)) if d <= 2 => format!("; did you mean '{name}'?"),
        _ => String::new(),
    }
}
