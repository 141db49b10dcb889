//! The little language of a row's operands and of the torch calls that mean it.
//!
//! `"add.Tensor(x, y)"` says that `aten.add.Tensor` with two arguments is this op on its
//! operands `x` and `y`; arguments not named must have their defaults. A literal must be met
//! exactly, `y#` is a number and no tensor, `_` is anything, `*xs` is a list of tensors, and `"t.default(x) => (permute x ($transposed x))"`
//! builds the op from a differently shaped call.

use crate::attr::Attr;
use crate::sexp::{Sexp, parse_one};

/// What may stand at an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A tensor.
    Tensor,
    /// A tensor or `none`.
    OptTensor,
    /// A tensor or a number.
    Scalar,
    /// Any number of tensors; last.
    Tensors,
    /// A dimension, counted from the end.
    Dim,
    /// Dimensions, counted from the end, ascending.
    Dims,
    /// A permutation, counted from the front.
    Perm,
    /// A complete shape.
    Shape,
    /// An integer.
    Int,
    /// An integer or `none`.
    OptInt,
    /// Integers.
    Ints,
    /// A float.
    Float,
    /// A float or `none`.
    OptFloat,
    /// A truth value.
    Bool,
    /// An element type.
    DType,
    /// A word.
    Str,
}

impl Kind {
    fn parse(text: &str) -> Kind {
        match text {
            "T" => Kind::Tensor,
            "T?" => Kind::OptTensor,
            "S" => Kind::Scalar,
            "T*" => Kind::Tensors,
            "dim" => Kind::Dim,
            "dims" => Kind::Dims,
            "perm" => Kind::Perm,
            "shape" => Kind::Shape,
            "int" => Kind::Int,
            "int?" => Kind::OptInt,
            "ints" => Kind::Ints,
            "float" => Kind::Float,
            "float?" => Kind::OptFloat,
            "bool" => Kind::Bool,
            "dtype" => Kind::DType,
            "str" => Kind::Str,
            _ => panic!("unknown operand kind {text}"),
        }
    }

    /// True for operands that are values at run time.
    pub fn is_tensor(self) -> bool {
        matches!(self, Kind::Tensor | Kind::OptTensor | Kind::Scalar | Kind::Tensors)
    }
}

/// A named operand.
#[derive(Debug, Clone)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// What may stand there.
    pub kind: Kind,
}

/// Reads `"x:T dim:dim"`.
pub(super) fn params(text: &str) -> Vec<Param> {
    text.split_whitespace()
        .map(|p| match p.split_once(':') {
            Some((name, kind)) => Param {
                name: name.into(),
                kind: Kind::parse(kind),
            },
            None => panic!("operand {p} has no kind"),
        })
        .collect()
}

/// One argument of a torch call.
#[derive(Debug, Clone)]
pub enum AtenOperand {
    /// Bound to the operand of this name.
    Name(String),
    /// Bound to the operand of this name, which must be a number.
    Number(String),
    /// A list of tensors bound to the variadic operand of this name.
    List(String),
    /// Must be equal to this value.
    Literal(Attr),
    /// Must be a list of these truth values.
    Flags(Vec<bool>),
    /// May be anything: layouts and devices, which the type of the result decides.
    Any,
}

/// A torch call that means an op.
#[derive(Debug, Clone)]
pub struct AtenCall {
    /// The overload, as in `aten.relu.default`.
    pub target: String,
    /// Arguments in the order of torch's schema.
    pub operands: Vec<AtenOperand>,
    /// What it means, unless it is the op on the operands of the same names.
    pub meaning: Option<Sexp>,
}

impl AtenCall {
    pub(super) fn parse(text: &str) -> AtenCall {
        let (call, meaning) = match text.split_once("=>") {
            Some((c, m)) => match parse_one(m) {
                Ok(m) => (c.trim(), Some(m)),
                Err(e) => panic!("{text}: {e}"),
            },
            None => (text, None),
        };
        let Some((target, rest)) = call.split_once('(') else {
            panic!("{text}: no '('")
        };
        let Some(inner) = rest.strip_suffix(')') else {
            panic!("{text}: no ')'")
        };
        let operands = inner
            .split(", ")
            .filter(|t| !t.is_empty())
            .map(|t| match (t.strip_prefix('*'), t.strip_suffix('#')) {
                _ if t == "_" => AtenOperand::Any,
                _ if t.starts_with("[true") => {
                    AtenOperand::Flags(t.trim_matches(['[', ']']).split(',').map(|f| f == "true").collect())
                }
                (Some(list), _) => AtenOperand::List(list.into()),
                (_, Some(number)) => AtenOperand::Number(number.into()),
                _ => match Attr::parse(t) {
                    Some(literal) => AtenOperand::Literal(literal),
                    None => AtenOperand::Name(t.into()),
                },
            })
            .collect();
        let target = match target.split_once("::") {
            Some((namespace, name)) => format!("{namespace}.{name}"),
            None => format!("aten.{target}"),
        };
        AtenCall {
            target,
            operands,
            meaning,
        }
    }
}
