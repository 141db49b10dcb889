//! S-expressions with positions: the one syntax of programs, rules, op definitions and
//! calls into torch.

use crate::error::{Error, Result};

/// A tree of words.
#[derive(Debug, Clone, PartialEq)]
pub enum Sexp {
    /// A word.
    Atom(String, Pos),
    /// `( … )`.
    List(Vec<Sexp>, Pos),
}

/// 1-based line and column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pos {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl Pos {
    /// A syntax error at this place.
    pub fn error(self, message: impl Into<String>) -> Error {
        Error::Syntax {
            line: self.line,
            column: self.column,
            message: message.into(),
        }
    }
}

impl Sexp {
    /// Where it stands.
    pub fn pos(&self) -> Pos {
        match self {
            Sexp::Atom(_, p) | Sexp::List(_, p) => *p,
        }
    }
}

/// Lists inside of each other; what reads them calls itself for each.
pub const DEEPEST: usize = 1000;

/// Reads all expressions of a text; `;` starts a comment.
pub fn parse_all(text: &str) -> Result<Vec<Sexp>> {
    let mut stack: Vec<(Vec<Sexp>, Pos)> = vec![(vec![], Pos { line: 1, column: 1 })];
    let mut word: Option<(String, Pos)> = None;
    let mut brackets = 0usize;
    let mut pos = Pos { line: 1, column: 1 };
    let mut comment = false;
    for c in text.chars() {
        let delimiter = c.is_whitespace() || matches!(c, '(' | ')' | ';');
        let inside = brackets > 0 && !matches!(c, '(' | ')' | ';' | '\n');
        if comment {
            comment = c != '\n';
        } else if delimiter && !inside {
            if let Some((w, p)) = word.take() {
                if brackets > 0 {
                    return Err(p.error(format!("'[' is not closed in '{w}'")));
                }
                top(&mut stack).push(Sexp::Atom(w, p));
            }
            match c {
                '(' if stack.len() > DEEPEST => {
                    return Err(pos.error(format!(
                        "more than {DEEPEST} lists inside of each other; '(let …)' names a value"
                    )));
                }
                '(' => stack.push((vec![], pos)),
                ')' => {
                    let (items, p) = stack
                        .pop()
                        .filter(|_| !stack.is_empty())
                        .ok_or_else(|| pos.error("')' without '('"))?;
                    top(&mut stack).push(Sexp::List(items, p));
                }
                ';' => comment = true,
                _ => {}
            }
        } else if !c.is_whitespace() {
            match c {
                '[' => brackets += 1,
                ']' => brackets = brackets.checked_sub(1).ok_or_else(|| pos.error("']' without '['"))?,
                _ => {}
            }
            word.get_or_insert_with(|| (String::new(), pos)).0.push(c);
        }
        if c == '\n' {
            pos = Pos {
                line: pos.line + 1,
                column: 1,
            };
        } else {
            pos.column += 1;
        }
    }
    if let Some((w, p)) = word.take() {
        if brackets > 0 {
            return Err(p.error(format!("'[' is not closed in '{w}'")));
        }
        top(&mut stack).push(Sexp::Atom(w, p));
    }
    match stack.len() {
        1 => Ok(stack.pop().map(|(items, _)| items).unwrap_or_default()),
        _ => Err(stack[stack.len() - 1].1.error("'(' is not closed")),
    }
}

fn top(stack: &mut [(Vec<Sexp>, Pos)]) -> &mut Vec<Sexp> {
    let last = stack.len() - 1;
    &mut stack[last].0
}

/// Reads exactly one expression.
pub fn parse_one(text: &str) -> Result<Sexp> {
    let start = Pos { line: 1, column: 1 };
    let mut all = parse_all(text)?.into_iter();
    let first = all.next().ok_or_else(|| start.error("an expression is expected"))?;
    match all.next() {
        None => Ok(first),
        Some(extra) => Err(extra.pos().error("one expression is expected, here starts another")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_places() {
        for (text, place) in [
            ("(a\n (b c)", "1:1"),
            ("(a b))", "1:6"),
            ("(a [1,2 b)", "1:4"),
            ("", "1:1"),
            ("a\n b", "2:2"),
        ] {
            let message = parse_one(text).unwrap_err().to_string();
            assert!(message.starts_with(place), "{text:?}: {message}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let nested = |depth: usize| format!("{}x{}", "(a ".repeat(depth), ")".repeat(depth));
        assert!(parse_one(&nested(DEEPEST)).is_ok());
        for depth in [DEEPEST + 1, 100_000] {
            let message = parse_one(&nested(depth)).unwrap_err().to_string();
            assert!(message.starts_with(&format!("1:{}: ", 3 * DEEPEST + 1)), "{message}");
        }
    }

    #[test]
    fn brackets_may_hold_blanks() {
        let all = parse_all("(x:[1, 2] ; note\n y)").unwrap();
        let Sexp::List(items, _) = &all[0] else { panic!() };
        assert_eq!(items[0], Sexp::Atom("x:[1,2]".into(), Pos { line: 1, column: 2 }));
    }
}
