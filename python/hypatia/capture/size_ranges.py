"""Sizes and numbers that a captured graph leaves open, and which values it holds for."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from .._torch import FakeTensorMode, detect_fake_mode
from ..errors import UnsupportedError
from .records import value_of

_MOST = 2**62
"""A size without a bound."""


class Range(NamedTuple):
    """What an open size can be."""

    least: int
    greatest: int
    symbol: str
    """Sizes of one symbol differ by their offsets."""
    offset: int = 0
    """How much more than the symbol the size is."""


Ranges = dict[tuple[int, int | None], Range]
"""Sizes that are left open, by input and dimension; an integer has none."""


def ranges_of(program: torch.export.ExportedProgram, gm: fx.GraphModule) -> Ranges:
    """The least and greatest value of symbolic sizes, by input and dimension; none if they depend on more."""
    bounds: dict[str, tuple[int, int]] = {}
    hints: dict[str, int] = {}
    places: dict[tuple[int, int | None], tuple[str, int]] = {}
    nodes = gm.graph.find_nodes(op="placeholder")
    for i, node in enumerate(nodes):
        value = node.meta.get("val")
        sizes: list[tuple[int | None, object]] = [(None, value)]
        if isinstance(value, torch.Tensor):
            sizes = list(enumerate(value.shape))
        for d, size in sizes:
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                symbol = next(iter(expression.free_symbols), None)
                offset = expression if symbol is None else expression - symbol
                known, hint = program.range_constraints.get(symbol), size.node.hint
                if known is None or not isinstance(hint, int) or not offset.is_Integer:
                    return {}
                places[i, d] = str(symbol), int(offset)
                hints[str(symbol)] = hint - int(offset)
                # Sizes of 0 and 1 are cases of their own.
                least = max(2 - min(int(offset), 0), int(known.lower))
                greatest = int(known.upper) if known.upper < _MOST else _MOST
                old = bounds.get(str(symbol), (least, greatest))
                bounds[str(symbol)] = max(old[0], least), min(old[1], greatest)
    for guard in getattr(program, "_guards_code", None) or ():
        named = {(nodes[i].name, d): at for (i, d), at in places.items()}
        if (pair := _pair(guard, named)) is not None:
            # It holds where they are as far apart as they are here.
            _tie(*pair, hints, places, bounds)
            named = {(nodes[i].name, d): at for (i, d), at in places.items()}
        if not _narrowed(guard, named, bounds):
            return {}
    found: Ranges = {}
    for place, (symbol, offset) in places.items():
        least, greatest = bounds[symbol]
        found[place] = Range(least + offset, min(greatest + offset, _MOST), symbol, offset)
    return found


class _UnknownError(Exception):
    """A condition is no comparison of sums."""


_Sum = dict[str, int]
"""How many times each symbol is added, and the number beside them under an empty name."""


_Named = Mapping[tuple[str, int | None], tuple[str, int]]
"""By name and dimension, the symbol of a size and how much more it is."""


def _tie(
    symbol: str,
    other: str,
    hints: Mapping[str, int],
    places: dict[tuple[int, int | None], tuple[str, int]],
    bounds: dict[str, tuple[int, int]],
) -> None:
    """Makes one symbol of two: the other is as much more as it is now."""
    more = hints[other] - hints[symbol]
    for place, (name, offset) in places.items():
        if name == other:
            places[place] = symbol, offset + more
    (least, greatest), (low, high) = bounds[symbol], bounds.pop(other)
    bounds[symbol] = max(least, low - more), min(greatest, high - more)


def _pair(guard: str, named: _Named) -> tuple[str, str] | None:
    """The symbols of a condition that says something of the difference of two."""
    compared = _compared(guard, named)
    if compared is None or sorted(n for s, n in compared[1].items() if s) != [-1, 1]:
        return None
    first, second = sorted(s for s in compared[1] if s)
    return first, second


def _compared(guard: str, named: _Named) -> tuple[ast.cmpop, _Sum] | None:
    """A condition as a sum that is compared with 0."""
    try:
        tree = ast.parse(guard, mode="eval").body
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
            return None
        left, right = _sum(tree.left, named), _sum(tree.comparators[0], named)
    except (_UnknownError, SyntaxError):
        return None
    difference = {s: left.get(s, 0) - right.get(s, 0) for s in {*left, *right}}
    return tree.ops[0], {s: n for s, n in difference.items() if n or not s}


def _narrowed(guard: str, named: _Named, bounds: dict[str, tuple[int, int]]) -> bool:
    """Whether the bounds say what a graph was captured under; they are made narrower where that is enough."""
    compared = _compared(guard, named)
    if compared is None:
        return False
    op, difference = compared
    number = difference.pop("", 0)
    if not difference:
        return bool(_COMPARED[type(op)](number, 0))
    if len(difference) > 1:
        return False
    ((symbol, times),) = difference.items()
    if times < 0:
        op, times, number = _TURNED[type(op)](), -times, -number
    # It says: times * symbol + number, compared with 0.
    least, greatest = bounds[symbol]
    if isinstance(op, ast.LtE | ast.Lt):
        greatest = min(greatest, (-number - isinstance(op, ast.Lt)) // times)
    elif isinstance(op, ast.GtE | ast.Gt):
        least = max(least, -((number - isinstance(op, ast.Gt)) // times))
    elif isinstance(op, ast.NotEq):
        return times * greatest + number < 0 or times * least + number > 0
    else:
        return False
    bounds[symbol] = least, greatest
    return least <= greatest


_COMPARED = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TURNED = {
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def _sum(tree: ast.expr, named: _Named) -> _Sum:
    """A sum of sizes, numbers and multiples of them, as torch.export writes it."""
    match tree:
        case ast.Constant(value=int(number)):
            return {"": number}
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _times(_sum(inner, named), -1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            first = _sum(left, named)
            second = _times(_sum(right, named), 1 if isinstance(tree.op, ast.Add) else -1)
            return {s: first.get(s, 0) + second.get(s, 0) for s in {*first, *second}}
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _sum(left, named), _sum(right, named)
            if first.keys() == {""}:
                return _times(second, first[""])
            if second.keys() == {""}:
                return _times(first, second[""])
    return _size(tree, named)


def _times(terms: _Sum, number: int) -> _Sum:
    return {s: n * number for s, n in terms.items()}


def _size(tree: ast.expr, named: _Named) -> _Sum:
    """``L['x'].size()[0]``, or ``L['x']`` if that is a number."""
    dim: int | None = None
    match tree:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=inner, attr="size")), slice=ast.Constant(value=int(dim))
        ):
            tree = inner
    match tree:
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
            if (name, dim) in named:
                symbol, offset = named[name, dim]
                return {symbol: 1, "": offset}
    raise _UnknownError


def open_examples(gm: fx.GraphModule, ranges: Ranges) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """The inputs that a graph with open sizes was exported with, and their mode."""
    examples = [value_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(examples)
    if not ranges or mode is None or mode.shape_env is None:
        raise UnsupportedError("sizes cannot be left open")
    return mode, examples
