//! Sizes: integers, or polynomials over symbolic sizes in a normal form, so that two sizes
//! are equal exactly when their normal forms are.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A product of symbols, sorted.
type Monomial = Arc<[Arc<str>]>;

/// A size or an integer computed from sizes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    /// A known integer.
    Const(i64),
    /// Monomials (sorted symbols, coefficient), sorted, none zero, at least one with a symbol.
    Poly(Arc<[(Monomial, i64)]>),
}

type Terms = BTreeMap<Monomial, i64>;

impl Dim {
    /// A symbolic size.
    pub fn symbol(name: &str) -> Dim {
        let monomial: Monomial = Arc::from(vec![Arc::<str>::from(name)]);
        Dim::Poly(Arc::from(vec![(monomial, 1)]))
    }

    /// A sum of `coefficient × product of symbols`.
    pub fn from_terms(terms: impl IntoIterator<Item = (Vec<String>, i64)>) -> Dim {
        let mut map = Terms::new();
        for (mut symbols, c) in terms {
            symbols.sort();
            let key: Monomial = symbols.iter().map(|s| Arc::from(s.as_str())).collect();
            let sum = map.entry(key).or_default();
            *sum = sum.wrapping_add(c);
        }
        Dim::normal(map)
    }

    fn normal(mut map: Terms) -> Dim {
        map.retain(|_, c| *c != 0);
        if map.keys().all(|k| k.is_empty()) {
            return Dim::Const(map.values().fold(0, |sum, c| sum.wrapping_add(*c)));
        }
        Dim::Poly(map.into_iter().collect::<Vec<_>>().into())
    }

    /// The monomials: symbols and coefficient.
    pub fn terms(&self) -> Vec<(Vec<&str>, i64)> {
        match self {
            Dim::Const(c) => vec![(vec![], *c)],
            Dim::Poly(p) => p.iter().map(|(s, c)| (s.iter().map(|x| &**x).collect(), *c)).collect(),
        }
    }

    fn map(&self) -> Terms {
        match self {
            Dim::Const(c) => Terms::from([(Arc::from(vec![]), *c)]),
            Dim::Poly(p) => p.iter().cloned().collect(),
        }
    }

    /// The integer, when it is known.
    pub fn known(&self) -> Option<i64> {
        match self {
            Dim::Const(c) => Some(*c),
            Dim::Poly(_) => None,
        }
    }

    /// With sizes in the place of symbols, where they are known.
    pub fn at(&self, sizes: &BTreeMap<String, i64>) -> Dim {
        let Dim::Poly(terms) = self else {
            return self.clone();
        };
        let mut map = Terms::new();
        for (symbols, c) in terms.iter() {
            let known = symbols.iter().filter_map(|s| sizes.get(&**s));
            let value = known.fold(*c, |product, size| product.wrapping_mul(*size));
            let left: Monomial = symbols.iter().filter(|s| !sizes.contains_key(&***s)).cloned().collect();
            let sum = map.entry(left).or_default();
            *sum = sum.wrapping_add(value);
        }
        Dim::normal(map)
    }

    /// True when this is provably the integer `v`.
    pub fn is(&self, v: i64) -> bool {
        self.known() == Some(v)
    }

    /// Sum.
    pub fn add(&self, other: &Dim) -> Dim {
        if let (Dim::Const(a), Dim::Const(b)) = (self, other) {
            return Dim::Const(a.wrapping_add(*b));
        }
        let mut map = self.map();
        for (k, c) in other.map() {
            let e = map.entry(k).or_default();
            *e = e.wrapping_add(c);
        }
        Dim::normal(map)
    }

    /// Product with an integer.
    pub fn scale(&self, by: i64) -> Dim {
        match self {
            Dim::Const(a) => Dim::Const(a.wrapping_mul(by)),
            Dim::Poly(_) => Dim::normal(self.map().into_iter().map(|(k, c)| (k, c.wrapping_mul(by))).collect()),
        }
    }

    /// Difference.
    pub fn sub(&self, other: &Dim) -> Dim {
        self.add(&other.scale(-1))
    }

    /// Product.
    pub fn mul(&self, other: &Dim) -> Dim {
        match (self, other) {
            (Dim::Const(c), d) | (d, Dim::Const(c)) => d.scale(*c),
            _ => {
                let mut map = Terms::new();
                for (ka, ca) in self.map() {
                    for (kb, cb) in other.map() {
                        let mut k: Vec<Arc<str>> = ka.iter().chain(kb.iter()).cloned().collect();
                        k.sort();
                        let e = map.entry(k.into()).or_default();
                        *e = e.wrapping_add(ca.wrapping_mul(cb));
                    }
                }
                Dim::normal(map)
            }
        }
    }

    /// Exact quotient, when it is provably one.
    pub fn div(&self, by: &Dim) -> Option<Dim> {
        if self == by && !by.is(0) {
            // A symbolic size divided by itself is one unless it is zero: not provable.
            return self.known().map(|_| Dim::Const(1));
        }
        let by = by.known().filter(|b| *b != 0)?;
        let mut map = self.map();
        for c in map.values_mut() {
            if c.checked_rem(by)? != 0 {
                return None;
            }
            *c /= by;
        }
        Some(Dim::normal(map))
    }

    /// Value with symbols looked up; unknown symbols count as `default`.
    pub fn value(&self, hint: &dyn Fn(&str) -> i64) -> i64 {
        match self {
            Dim::Const(c) => *c,
            Dim::Poly(p) => p
                .iter()
                .map(|(s, c)| s.iter().fold(*c, |acc, x| acc.saturating_mul(hint(x))))
                .fold(0i64, i64::saturating_add),
        }
    }
}

impl From<i64> for Dim {
    fn from(v: i64) -> Dim {
        Dim::Const(v)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (symbols, c)) in self.terms().iter().enumerate() {
            let (sign, c) = if *c < 0 {
                ("-", c.unsigned_abs())
            } else {
                ("+", c.unsigned_abs())
            };
            if i > 0 || sign == "-" {
                f.write_str(sign)?;
            }
            match (symbols.is_empty(), c) {
                (true, c) => write!(f, "{c}")?,
                (false, 1) => f.write_str(&symbols.join("*"))?,
                (false, c) => write!(f, "{c}*{}", symbols.join("*"))?,
            }
        }
        Ok(())
    }
}

/// Product of sizes; one for none.
pub fn product(dims: &[Dim]) -> Dim {
    dims.iter().fold(Dim::Const(1), |a, d| a.mul(d))
}

/// Known integers as sizes.
pub fn dims(values: &[i64]) -> Arc<[Dim]> {
    values.iter().map(|v| Dim::Const(*v)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_exactly_when_normal_forms_are() {
        let (s, t) = (Dim::symbol("s0"), Dim::symbol("s1"));
        assert_eq!(s.add(&t).mul(&s), s.mul(&s).add(&t.mul(&s)));
        assert_ne!(s, t);
        assert_eq!(s.sub(&s), Dim::Const(0));
        assert_eq!(s.scale(6).div(&Dim::Const(3)), Some(s.scale(2)));
        assert_eq!(s.scale(6).div(&Dim::Const(4)), None);
        assert_eq!(s.div(&s), None);
        assert_eq!(Dim::Const(i64::MIN).div(&Dim::Const(-1)), None);
        assert_eq!(s.scale(-2).add(&Dim::Const(1)).to_string(), "1-2*s0");
    }
}
