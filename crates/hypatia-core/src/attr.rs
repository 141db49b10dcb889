//! Compile-time values: what an op takes besides tensors. They are leaves of the e-graph, so
//! that a pattern can bind them and a rule can compute new ones.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::dim::Dim;
use crate::dtype::DType;

/// A compile-time value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Attr {
    /// An absent optional operand.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer, possibly symbolic.
    Int(Dim),
    /// A float, by its bits: `-0.0` and `0.0` differ, a NaN equals itself.
    Float(u64),
    /// A list of integers.
    Ints(Arc<[Dim]>),
    /// An element type.
    DType(DType),
    /// A word.
    Str(Arc<str>),
}

impl Attr {
    /// A float.
    pub fn float(v: f64) -> Attr {
        Attr::Float(v.to_bits())
    }

    /// An integer.
    pub fn int(v: i64) -> Attr {
        Attr::Int(Dim::Const(v))
    }

    /// A list of known integers.
    pub fn ints(v: &[i64]) -> Attr {
        Attr::Ints(crate::dim::dims(v))
    }

    /// With sizes in the place of symbols, where they are known.
    pub fn at(&self, sizes: &BTreeMap<String, i64>) -> Attr {
        match self {
            Attr::Int(d) => Attr::Int(d.at(sizes)),
            Attr::Ints(v) => Attr::Ints(v.iter().map(|d| d.at(sizes)).collect()),
            other => other.clone(),
        }
    }

    /// The number, for a known integer, float or truth value.
    pub fn number(&self) -> Option<f64> {
        match self {
            Attr::Bool(b) => Some(f64::from(u8::from(*b))),
            Attr::Int(d) => d.known().map(|v| v as f64),
            Attr::Float(bits) => Some(f64::from_bits(*bits)),
            _ => None,
        }
    }

    /// The known integer.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Attr::Int(d) => d.known(),
            _ => None,
        }
    }

    /// The list of integers.
    pub fn as_ints(&self) -> Option<&[Dim]> {
        match self {
            Attr::Ints(v) => Some(v),
            _ => None,
        }
    }

    /// The list, when every entry is known.
    pub fn known_ints(&self) -> Option<Vec<i64>> {
        self.as_ints()?.iter().map(Dim::known).collect()
    }

    /// Reads an attribute as it stands in program text.
    pub fn parse(text: &str) -> Option<Attr> {
        match text {
            "none" => return Some(Attr::None),
            "true" => return Some(Attr::Bool(true)),
            "false" => return Some(Attr::Bool(false)),
            "inf" => return Some(Attr::float(f64::INFINITY)),
            "-inf" => return Some(Attr::float(f64::NEG_INFINITY)),
            "nan" => return Some(Attr::float(f64::NAN)),
            _ => {}
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return parse_dims(inner).map(|d| Attr::Ints(d.into()));
        }
        if let Some(word) = text.strip_prefix('\'') {
            return Some(Attr::Str(Arc::from(word)));
        }
        if let Some(d) = DType::parse(text) {
            return Some(Attr::DType(d));
        }
        if let Ok(v) = text.parse::<i64>() {
            return Some(Attr::int(v));
        }
        if text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.') {
            return text.parse::<f64>().ok().map(Attr::float);
        }
        None
    }
}

/// Reads `4,s0,3`; a word is a symbolic size.
pub fn parse_dims(inner: &str) -> Option<Vec<Dim>> {
    if inner.trim().is_empty() {
        return Some(vec![]);
    }
    inner
        .split(',')
        .map(|t| {
            let t = t.trim();
            match t.parse::<i64>() {
                Ok(v) => Some(Dim::Const(v)),
                Err(_) if t.starts_with(|c: char| c.is_ascii_alphabetic()) => Some(Dim::symbol(t)),
                Err(_) => None,
            }
        })
        .collect()
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::None => f.write_str("none"),
            Attr::Bool(b) => write!(f, "{b}"),
            Attr::Int(d) => write!(f, "{d}"),
            Attr::Float(bits) => {
                let v = f64::from_bits(*bits);
                if v.is_nan() {
                    f.write_str("nan")
                } else {
                    write!(f, "{v:?}")
                }
            }
            Attr::DType(d) => write!(f, "{d}"),
            Attr::Str(s) => write!(f, "'{s}"),
            Attr::Ints(v) => {
                f.write_str("[")?;
                for (i, d) in v.iter().enumerate() {
                    if i > 0 {
                        f.write_str(",")?;
                    }
                    write!(f, "{d}")?;
                }
                f.write_str("]")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for text in [
            "none", "true", "-3", "[1,0]", "[]", "0.5", "1e-5", "inf", "bf16", "'tanh", "[s0,4]",
        ] {
            let attr = Attr::parse(text).unwrap();
            assert_eq!(Attr::parse(&attr.to_string()), Some(attr), "{text}");
        }
        assert_eq!(Attr::parse("foo"), None);
    }
}
