"""Which axes the dimensions of a tensor are made of, through views: a dimension that a view puts together has
several, and an axis that a view parts has parts. So batches of heads are known however they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from .records import value_of

aten = torch.ops.aten

Size = int | torch.SymInt


class Axis:
    """A direction in which something is counted; two with equal sizes are not the same."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._parts: tuple[Axis, ...] = ()

    def parts(self) -> list[Axis]:
        """What it has been parted into, or itself."""
        return [p for part in self._parts for p in part.parts()] if self._parts else [self]

    def parted(self, outer: Size) -> tuple[Axis, Axis]:
        """Parts it in two, of which the first has this size."""
        made = Axis(outer), Axis(self.size // outer)
        self._parts = made
        return made


Layout = list[list[Axis]]
"""The axes of each dimension; none of a dimension of size 1."""


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for certain: open ones are not asked for their values."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return not isinstance(a, int) and not isinstance(b, int) and bool(a.node.expr == b.node.expr)


def _divides(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a > 0 and b % a == 0
    return same_size(b, a) or same_size((b // a) * a, b)


def is_one(size: Size) -> bool:
    """Whether a size is 1 for certain."""
    return isinstance(size, int) and size == 1


def parts_of(axes: Iterable[Axis]) -> list[Axis]:
    """Axes as they are parted by now."""
    return [part for axis in axes for part in axis.parts()]


def fresh(shape: Sequence[Size]) -> Layout:
    """New axes for a tensor."""
    return [[] if is_one(size) else [Axis(size)] for size in shape]


def regrouped(layout: Layout, shape: Sequence[Size]) -> Layout | None:
    """The axes of the same elements in another shape."""
    rest = [axis for dim in layout for axis in parts_of(dim)]
    made: Layout = []
    for size in shape:
        dim: list[Axis] = []
        while not is_one(size):
            if not rest:
                return None
            axis = rest.pop(0)
            if same_size(axis.size, size):
                dim, size = [*dim, axis], 1
            elif _divides(axis.size, size):
                dim, size = [*dim, axis], size // axis.size
            elif _divides(size, axis.size):
                outer, inner = axis.parted(size)
                rest.insert(0, inner)
                dim, size = [*dim, outer], 1
            else:
                return None
        made.append(dim)
    return None if rest else made


_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TURNS = (aten.permute.default, aten.transpose.int, aten.t.default)
_ONES = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
VIEWS = frozenset((*_RESHAPES, *_TURNS, *_ONES, *_COPIES, aten.expand.default))
"""Ops whose results have the elements of their first operand, in another order or repeated."""


def _order(node: fx.Node) -> list[int]:
    """Which dimension of its operand each dimension of a turned tensor is."""
    rank = value_of(node).dim()
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    order = list(range(rank))
    a, b = (0, rank - 1) if node.target is aten.t.default else (d % rank for d in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def after(node: fx.Node, layout: Layout) -> Layout | None:
    """The axes of a view, by those of its operand; none if it repeats elements."""
    old, new = value_of(node.all_input_nodes[0]).shape, value_of(node).shape
    if node.target in _TURNS:
        return [layout[d] for d in _order(node)]
    if node.target in _RESHAPES or node.target in _ONES:
        return regrouped(layout, new)
    if len(old) > len(new) or not all(map(same_size, old[::-1], new[::-1])):
        return None
    ones = new[: len(new) - len(old)]
    return [*([] for _ in ones), *layout] if all(map(is_one, ones)) else None


def before(node: fx.Node, layout: Layout) -> Layout | None:
    """The axes of the operand of a view, by those of the view; where it is repeated it has none."""
    old, new = value_of(node.all_input_nodes[0]).shape, value_of(node).shape
    if node.target in _TURNS:
        made: Layout = [[] for _ in old]
        for dim, source in enumerate(_order(node)):
            made[source] = layout[dim]
        return made
    if node.target in _RESHAPES or node.target in _ONES:
        return regrouped(layout, old)
    kept = layout[len(new) - len(old) :]
    return [[] if is_one(size) else dim for size, dim in zip(old, kept, strict=True)]


def read_along(shape: Sequence[Size], layout: Layout) -> Layout | None:
    """The axes of a tensor of a shape that is broadcast beside one with these."""
    if len(shape) > len(layout):
        return None
    beside = layout[len(layout) - len(shape) :]
    return [[] if is_one(size) else dim for size, dim in zip(shape, beside, strict=True)]
