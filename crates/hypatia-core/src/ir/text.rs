//! Programs as text: `(relu (linear w:[512,784] b:[512] x:[64,784]))`.
//!
//! A word with a shape is an input, `x:bf16[2,3]` gives the dtype too, `x` alone is the input
//! named before. `(let y (relu x) … )` names a value: the last expression is the result.

use std::collections::BTreeMap;
use std::fmt::Write;

use egg::Id;

use super::build::{Sink, build};
use super::node::{Node, Op};
use super::program::{Input, Program};
use crate::attr::{Attr, parse_dims};
use crate::error::Result;
use crate::ops::OpId;
use crate::sexp::{Pos, Sexp, parse_all};
use crate::ty::{DType, TensorType, Ty};

/// Whether inputs named like parameters (`w…`, `b…`) count as frozen weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// They do.
    Frozen,
    /// Every input may change from call to call.
    Live,
}

/// Reads a program.
pub fn parse(text: &str, weights: Weights) -> Result<Program> {
    let items = parse_all(text)?;
    let mut reader = Reader {
        program: Program::default(),
        names: BTreeMap::new(),
        weights,
    };
    let Some((last, lets)) = items.split_last() else {
        return Err(Pos { line: 1, column: 1 }.error("the program is empty"));
    };
    for item in lets {
        match item {
            Sexp::List(parts, _) => match parts.as_slice() {
                [Sexp::Atom(head, _), Sexp::Atom(name, _), value] if head == "let" => {
                    let id = build(value, &mut reader)?;
                    reader.names.insert(name.clone(), id);
                }
                _ => return Err(item.pos().error("only '(let name value)' may stand before the result")),
            },
            Sexp::Atom(..) => return Err(item.pos().error("only '(let name value)' may stand before the result")),
        }
    }
    let root = build(last, &mut reader)?;
    reader.program.root = root;
    Ok(reader.program)
}

struct Reader {
    program: Program,
    names: BTreeMap<String, Id>,
    weights: Weights,
}

impl Sink for Reader {
    type Ref = Id;

    fn word(&mut self, word: &str, pos: Pos) -> Result<Id> {
        let Some((name, annotation)) = word.split_once(':') else {
            return self
                .names
                .get(word)
                .copied()
                .ok_or_else(|| pos.error(format!("'{word}' is not known; an input is written '{word}:[2,3]'")));
        };
        let ty = parse_type(annotation)
            .ok_or_else(|| pos.error(format!("'{annotation}' is no type; examples: [64,784], bf16[8,s0]")))?;
        if !ty.can_exist() {
            return Err(pos.error(format!("no tensor can have the type {ty}")));
        }
        if let Some(known) = self.names.get(name) {
            return match self.program.ty(*known) == &Ty::Tensor(ty) {
                true => Ok(*known),
                false => Err(pos.error(format!("'{name}' already has type {}", self.program.ty(*known)))),
            };
        }
        let weight = self.weights == Weights::Frozen && name.to_lowercase().starts_with(['w', 'b']);
        let id = self.program.input(Input {
            name: name.into(),
            ty: Ty::Tensor(ty),
            weight,
        })?;
        self.names.insert(name.into(), id);
        Ok(id)
    }

    fn attr(&mut self, attr: Attr) -> Result<Id> {
        Ok(self.program.attr(attr))
    }

    fn op(&mut self, op: OpId, operands: Vec<Id>, pos: Pos) -> Result<Id> {
        self.program.op(op, operands).map_err(|e| pos.error(e.to_string()))
    }
}

/// Reads `[64,784]` or `bf16[64,784]`.
pub fn parse_type(text: &str) -> Option<TensorType> {
    let (dtype, rest) = text.split_once('[')?;
    let dtype = if dtype.is_empty() {
        DType::F32
    } else {
        DType::parse(dtype)?
    };
    Some(TensorType::new(parse_dims(rest.strip_suffix(']')?)?, dtype))
}

/// Lists inside of each other in a line; a value that would need more has a line of its own.
const DEEPEST: usize = 200;

/// Writes a program: one line for a tree, `let` lines for values that are used twice.
pub fn print(program: &Program) -> String {
    let mut uses: BTreeMap<Id, usize> = BTreeMap::new();
    for id in program.reachable() {
        for c in &program.node(id).children {
            *uses.entry(*c).or_default() += 1;
        }
    }
    let mut names: BTreeMap<Id, String> = BTreeMap::new();
    let mut out = String::new();
    let mut lets = 0;
    let mut depths: BTreeMap<Id, usize> = BTreeMap::new();
    for id in program.reachable() {
        let node = program.node(id);
        let shared = uses.get(&id).copied().unwrap_or(0) > 1;
        let text = expression(program, node, &names);
        let depth = node
            .children
            .iter()
            .map(|c| 1 + depths.get(c).copied().unwrap_or(0))
            .max();
        let depth = depth.unwrap_or(0);
        let named = (shared || depth >= DEEPEST) && depth > 0 && id != program.root;
        depths.insert(id, if named { 0 } else { depth });
        if named {
            let name = format!("v{lets}");
            lets += 1;
            // Writing to a string cannot fail.
            let _ = writeln!(out, "(let {name} {text})");
            names.insert(id, name);
        } else {
            names.insert(id, text);
        }
        if id == program.root {
            out.push_str(&names[&id]);
        }
    }
    out
}

/// One node, with its operands as already written.
fn expression(program: &Program, node: &Node, operands: &BTreeMap<Id, String>) -> String {
    match &node.op {
        Op::Input(i) => {
            let input = &program.leaves.inputs[*i as usize];
            match &input.ty {
                Ty::Tensor(t) if t.dtype == DType::F32 => {
                    format!("{}:{}", input.name, t.to_string().trim_start_matches("f32"))
                }
                ty => format!("{}:{ty}", input.name),
            }
        }
        Op::Attr(a) => a.to_string(),
        Op::Row(_) | Op::Opaque(_) => {
            let head = match &node.op {
                Op::Opaque(i) => program
                    .leaves
                    .opaques
                    .get(i)
                    .map_or(node.to_string(), |o| format!("torch:{}", o.name)),
                _ => node.to_string(),
            };
            let mut text = format!("({head}");
            for c in &node.children {
                text.push(' ');
                text.push_str(&operands[c]);
            }
            text.push(')');
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for text in [
            "(relu (linear w:[512,784] b:[512] x:[64,784]))",
            "(let v0 (relu x:bf16[s0,4]))\n(add v0 v0)",
            "(slice x:[4,6] -1 0 3 1)",
        ] {
            let program = parse(text, Weights::Frozen).unwrap();
            assert_eq!(print(&program), text);
        }
    }

    #[test]
    fn deep_programs_are_written_in_lines() {
        let deep: String = (1..5000).map(|i| format!("(let v{i} (relu v{}))\n", i - 1)).collect();
        let program = parse(&format!("(let v0 (relu x:[2]))\n{deep}v4999"), Weights::Frozen).unwrap();
        let text = print(&program);
        assert!(text.len() < 100_000);
        assert_eq!(print(&parse(&text, Weights::Frozen).unwrap()), text);
    }

    #[test]
    fn tensors_that_cannot_exist_are_errors() {
        for text in [
            "x:[9223372036854775807]",
            "(relu x:[9223372036854775807])",
            "(relu x:[4294967296,4294967296])",
            "(relu x:[-1])",
            "(relu x:bf16[s0,9223372036854775807])",
            "(expand x:[1] [9223372036854775807])",
            "(cat -1 x:[2305843009213693951] x:[2305843009213693951])",
            "(mm x:[4611686018427387904,1] y:[1,4611686018427387904])",
        ] {
            assert!(parse(text, Weights::Frozen).is_err(), "{text}");
        }
    }

    #[test]
    fn errors_have_places() {
        for (text, expected) in [
            (
                "(relu\n  (linaer w:[5,7] none x:[6,7]))",
                "2:4: there is no op 'linaer'; did you mean 'linear'?",
            ),
            ("(relu y)", "1:7: 'y' is not known; an input is written 'y:[2,3]'"),
            ("(relu x:[2,)", "1:7: '[' is not closed in 'x:[2,'"),
            ("(mm x:[2,3] y:[4,5])", "1:2: mm: inner sizes 3 and 4 differ"),
            ("(relu x:[2] y:[2])", "1:2: 'relu' takes 1 operands (x), not 2"),
        ] {
            assert_eq!(parse(text, Weights::Frozen).unwrap_err().to_string(), expected);
        }
    }
}
