"""Programs from the rule table: the left side of a law, with tensors that fit put in for its variables."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from .builder import Builder, is_float

Term = str | list[Any]

CALLS = {
    **{
        n: f"torch.{n}({{0}})"
        for n in ("relu", "sigmoid", "tanh", "exp", "abs", "neg", "sqrt", "rsqrt", "reciprocal")
    },
    **{
        n: f"torch.{n}({{0}})"
        for n in ("square", "erf", "log", "logical_not", "expm1", "log1p", "sign", "floor")
    },
    **{
        n: f"F.{n}({{0}})"
        for n in ("gelu", "silu", "mish", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus")
    },
    "gelu_tanh": "F.gelu({0}, approximate='tanh')",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": "{0} ** {1}",
    "maximum": "torch.maximum({0}, {1})",
    "minimum": "torch.minimum({0}, {1})",
    "detach": "{0}.detach()",
    "copy": "{0}.clone()",
    "dropout": "F.dropout({0}, 0.3, training=False)",
}
"""Ops whose operands may have any shape that broadcasts."""

TOKEN = re.compile(r"[()]|[^\s()]+")


@functools.cache
def laws() -> list[Term]:
    """The left sides of all laws that are written as terms."""
    from hypatia import _native

    found = []
    for rule in json.loads(_native.rules()):
        left = rule["law"].split(" = ")[0]
        if "…" not in left and left.startswith("("):
            found.append(_parsed(left))
    return found


def _parsed(text: str) -> Term:
    stack: list[list[Any]] = [[]]
    for token in TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    return stack[0][0]


def left_side(b: Builder) -> str | None:
    """The left side of one of the laws, on values that are there."""
    term = b.dice.choice(laws())
    for _ in range(4):
        made = _built(b, term, {}, b.floats(1))
        if made is not None:
            return made
    return None


def _number(token: str) -> float | int | None:
    try:
        return int(token)
    except ValueError:
        pass
    try:
        return float(token)
    except ValueError:
        return None


def _built(b: Builder, term: Term, bound: dict[str, str | None], base: str | None) -> str | None:
    """A value for a term; variables that were met before keep theirs."""
    if base is None:
        return None
    if isinstance(term, str):
        return _leaf(b, term, bound, base)
    op, *operands = term
    if op in CALLS:
        made: list[str] = []
        for operand in operands:
            value = _operand(b, operand, bound, base)
            if value is None:
                return None
            made.append(value)
        text, uses = CALLS[op], []
        for i, value in enumerate(made):
            if value.startswith("#"):
                text = text.replace(f"{{{i}}}", value[1:])
            else:
                text = text.replace(f"{{{i}}}", f"{{{len(uses)}}}") if len(uses) != i else text
                uses.append(value)
        return b.emit(text, *uses) if uses else None
    special = SPECIAL.get(op)
    return special(b, operands, bound, base) if special else None


def _operand(b: Builder, operand: Term, bound: dict[str, str | None], base: str) -> str | None:
    """A value, or a number after a '#'."""
    if isinstance(operand, str):
        number = _number(operand)
        if number is not None:
            return f"#({number!r})" if number < 0 else f"#{number!r}"
        if operand in bound:
            return bound[operand]
        if operand in ("?a", "?b", "?c") and b.chance(0.7):
            bound[operand] = f"#{b.one(0.5, 2.0, 1.0, 0.0, 3.0, 0.25, 1.5)!r}"
            return bound[operand]
    return _built(b, operand, bound, base)


def _leaf(b: Builder, token: str, bound: dict[str, str | None], base: str) -> str | None:
    if not token.startswith("?"):
        return None
    if token not in bound:
        bound[token] = base if b.chance(0.5) else b.like(base) or base
    return bound[token]


def _linear(b: Builder, operands: list[Term], bound: dict[str, str | None], base: str) -> str | None:
    w, bias, x = operands
    value = _built(b, x, bound, base)
    if value is None or not b.shape(value):
        return None
    k, dtype = b.shape(value)[-1], b.of(value)
    if not is_float(b.values[value]):
        return None
    key = str(w)
    if key not in bound:
        n = bound.setdefault("columns", str(b.one(k, k, b.size())))
        bound[key] = b.weight((int(n or k), k), dtype)
    weight = bound[key]
    if bias == "none" or weight is None:
        return b.emit("F.linear({0}, {1})", value, weight)
    if str(bias) not in bound:
        bound[str(bias)] = b.weight((b.shape(weight)[0],), dtype)
    return b.emit("F.linear({0}, {1}, {2})", value, weight, bound[str(bias)])


def _matmul(b: Builder, operands: list[Term], bound: dict[str, str | None], base: str) -> str | None:
    x = _built(b, operands[0], bound, base)
    if x is None or not b.shape(x) or not is_float(b.values[x]):
        return None
    if isinstance(operands[1], str) and operands[1] not in bound:
        bound[operands[1]] = b.weight((b.shape(x)[-1], b.size()), b.of(x))
    return b.emit("torch.matmul({0}, {1})", x, _built(b, operands[1], bound, base))


def _text(*choices: str) -> Any:
    """An op of one value, by one of several texts; what else the law gives it is left to chance."""

    def make(b: Builder, operands: list[Term], bound: dict[str, str | None], base: str) -> str | None:
        key = str(operands[1:])
        text = bound.setdefault(f"text {choices[0]} {key}", b.dice.choice(choices))
        return b.emit(text or choices[0], _built(b, operands[0], bound, base))

    return make


SPECIAL: dict[str, Any] = {
    "linear": _linear,
    "mm": _matmul,
    "matmul": _matmul,
    "bmm": _matmul,
    "reshape": _text(
        "{0}.reshape(-1)",
        "{0}.unsqueeze(0)",
        "{0}.reshape({0}.shape[0], -1)",
        "{0}.squeeze()",
        "{0}.unsqueeze(-1)",
    ),
    "permute": _text("{0}.mT", "{0}.transpose(0, -1)", "{0}.movedim(0, -1)"),
    "expand": _text(
        "{0}.expand(3, *{0}.shape)", "{0}.unsqueeze(0).expand(2, *{0}.shape)", "{0}.expand_as({0})"
    ),
    "slice": _text("{0}[..., ::2]", "{0}[..., 1:]", "{0}[:1]", "{0}[..., : {0}.shape[-1] // 2]", "{0}[::2]"),
    "select": _text("{0}[0]", "{0}[..., -1]"),
    "cast": _text(
        "{0}.to(torch.float32)", "{0}.to(torch.bfloat16)", "{0}.to(torch.float64)", "{0}.to(torch.int64)"
    ),
    "clamp": _text("{0}.clamp(0.0, 6.0)", "{0}.clamp(min=0.0)", "{0}.clamp(-1.0, 1.0)"),
    "softmax": _text("{0}.softmax(-1)", "{0}.softmax(0)"),
    "log_softmax": _text("{0}.log_softmax(-1)", "{0}.log_softmax(0)"),
    "sum": _text("{0}.sum(-1, keepdim=True)", "{0}.sum(-1)", "{0}.sum()", "{0}.sum(0)"),
    "mean": _text("{0}.mean(-1, keepdim=True)", "{0}.mean(-1)", "{0}.mean()", "{0}.mean(0)"),
    "var": _text("{0}.var(-1, unbiased=False, keepdim=True)", "{0}.var(-1, unbiased=False)"),
    "amax": _text("{0}.amax(-1, keepdim=True)", "{0}.amax(-1)"),
    "logsumexp": _text("{0}.logsumexp(-1)", "{0}.logsumexp(-1, keepdim=True)"),
    "layer_norm": _text("F.layer_norm({0}, {0}.shape[-1:])"),
    "rms_norm": _text("F.rms_norm({0}, {0}.shape[-1:])"),
    "full": _text("torch.zeros_like({0})", "{0}.new_full({0}.shape, 2.0)"),
}
"""Ops of one value with attributes, and products: attributes are chosen, not bound."""
