"""The factors of attention as a model writes it: of any product, through views, copies and wider numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import fx

from .._torch import disable_current_modes
from .axes import VIEWS, Axis, Layout, Size, before, fresh, is_one, parts_of, same_size
from .constant_values import computed
from .op_facts import says_types
from .records import value_of

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_OVER = (aten.div.Tensor, aten.div.Scalar)
_ADDING = aten.baddbmm.default
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.mm.default)


class Factor(NamedTuple):
    """A tensor that is multiplied, and what its dimensions are."""

    node: fx.Node
    layout: Layout
    scale: float = 1.0
    """What it is multiplied by before."""

    @property
    def axes(self) -> list[Axis]:
        """All of its axes."""
        return [axis for dim in self.layout for axis in parts_of(dim)]


class Product(NamedTuple):
    """A product of matrices."""

    node: fx.Node
    factors: tuple[Factor, Factor]
    layout: Layout
    added: fx.Node | None = None
    beta: float = 1.0
    alpha: float = 1.0
    """The product times one number, with something added times another."""


def product_of(node: object) -> Product | None:
    """A product with axes of its own."""
    if not isinstance(node, fx.Node) or node.target not in (*PRODUCTS, _ADDING):
        return None
    adds = node.target is _ADDING
    first, second = node.args[adds : adds + 2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    shapes = [value_of(n).shape for n in (first, second)]
    if min(map(len, shapes)) < 2:
        return None
    out, (between,) = fresh(value_of(node).shape), fresh(shapes[0][-1:])
    batches = [
        [
            [] if is_one(size) else dim
            for size, dim in zip(shape[:-2], out[len(out) - len(shape) :], strict=False)
        ]
        for shape in shapes
    ]
    factors = (
        Factor(first, [*batches[0], out[-2], between]),
        Factor(second, [*batches[1], between, out[-1]]),
    )
    if not adds:
        return Product(node, factors, out)
    (added, beta), alpha = (node.args[0], node.kwargs.get("beta", 1.0)), node.kwargs.get("alpha", 1.0)
    if not isinstance(added, fx.Node) or not all(type(n) in (int, float) for n in (beta, alpha)):
        return None
    return Product(node, factors, out, added, float(beta), float(alpha))  # type: ignore[arg-type]


def only_user(node: fx.Node) -> fx.Node | None:
    """The one call that reads a node."""
    users = [n for n in node.users if not says_types(n.target)]
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def is_cast(node: fx.Node) -> bool:
    """Whether a node is what it reads in another precision."""
    return node.target is aten._to_copy.default and value_of(node).dtype in FLOATS


class Numbers:
    """Numbers that a graph multiplies by or fills with."""

    def __init__(self, constants: set[fx.Node]) -> None:
        self.constants = constants
        self._known = functools.cache(self._computed)

    def of(self, value: object) -> float | None:
        """A number, or a constant tensor that is one."""
        if type(value) in (int, float):
            return float(value)  # type: ignore[arg-type]
        known = value in self.constants and value_of(value).numel() == 1
        return self._known(value) if known and isinstance(value, fx.Node) else None

    def _computed(self, node: fx.Node) -> float | None:
        with disable_current_modes():
            found = computed([node]).get(node)
            return None if found is None else float(found)

    def factor(self, node: fx.Node) -> tuple[fx.Node, float] | None:
        """What a node multiplies by a number that is neither tiny nor huge, and the number."""
        if node.target not in (*_TIMES, *_OVER) or len(node.args) != 2 or node.kwargs:
            return None
        ways = [(0, 1), (1, 0)] if node.target in _TIMES else [(0, 1)]
        for at, by in ways:
            read, number = node.args[at], self.of(node.args[by])
            if isinstance(read, fx.Node) and number:
                alike = value_of(read).shape == value_of(node).shape
                number = number if node.target in _TIMES else 1.0 / number
                return (read, number) if alike and 1e-6 < number < 1e6 else None
        return None


def source_of(factor: Factor, dtype: torch.dtype, numbers: Numbers | None) -> Factor | None:
    """What a factor is made of by views, copies and wider numbers, of a precision; by scaling, too, if
    ``numbers`` are given."""
    node, layout, scale = factor
    found: Factor | None = None
    while True:
        value = value_of(node)
        if value.dtype == dtype and 0 not in value.shape:
            found = Factor(node, layout, scale)
        if numbers is not None and (scaled := numbers.factor(node)) is not None:
            node, scale = scaled[0], scale * scaled[1]
        elif is_cast(node) and value_of(node.all_input_nodes[0]).dtype == dtype:
            node = node.all_input_nodes[0]
        elif node.target in VIEWS and (older := before(node, layout)) is not None:
            node, layout = node.all_input_nodes[0], older
        else:
            return found


class UnplacedError(Exception):
    """Sizes that are open cannot be written as numbers."""


Value = TypeVar("Value")
"""A node, or a tensor."""

Write = Callable[..., Value]
"""Calls an op, or adds the call to a graph."""


def sizes(wanted: Sequence[Size]) -> list[int]:
    """Sizes as a reshape takes them.

    Raises:
        UnplacedError: more than one is open.
    """
    if sum(not isinstance(size, int) for size in wanted) > 1:
        raise UnplacedError
    return [size if isinstance(size, int) else -1 for size in wanted]


def _reshaped(write: Write[Value], value: Value, shape: Sequence[Size], wanted: Sequence[Size]) -> Value:
    if len(shape) == len(wanted) and all(map(same_size, shape, wanted)):
        return value
    return write(aten.reshape.default, value, sizes(wanted))


def _turned(write: Write[Value], value: Value, axes: list[Axis], wanted: list[Axis]) -> Value:
    return value if axes == wanted else write(aten.permute.default, value, [axes.index(a) for a in wanted])


def size_of(axes: Sequence[Axis]) -> Size:
    """How many there are of all axes together."""
    size: Size = 1
    for axis in axes:
        size = axis.size if is_one(size) else size * axis.size
    return size


def grouped(
    write: Write[Value],
    value: Value,
    shape: Sequence[Size],
    layout: Sequence[list[Axis]],
    groups: Sequence[Sequence[Axis]],
    whole: Sequence[int],
) -> Value:
    """A tensor with one dimension for each group of axes. Groups that it has no axis of have size 1, but for
    those that are to be ``whole``, in which it is repeated."""
    axes = [axis for dim in layout for axis in parts_of(dim)]
    filled = [group for i, group in enumerate(groups) if i in whole or any(a in axes for a in group)]
    wanted = [axis for group in groups for axis in group if axis in axes]
    value = _reshaped(write, value, shape, [axis.size for axis in axes]) if axes != wanted else value
    shape = [axis.size for axis in axes] if axes != wanted else shape
    if axes != wanted:
        value, shape = _turned(write, value, axes, wanted), [axis.size for axis in wanted]
    every = [axis for group in filled for axis in group]
    if every != wanted:
        value = _reshaped(write, value, shape, [a.size if a in wanted else 1 for a in every])
        if not all(isinstance(a.size, int) for a in every if a not in wanted):
            raise UnplacedError
        value = write(aten.expand.default, value, [-1 if a in wanted else a.size for a in every])
        shape = [axis.size for axis in every]
    return _reshaped(write, value, shape, [size_of(g) if g in filled else 1 for g in groups])


def regained(
    write: Write[Value], value: Value, groups: Sequence[Sequence[Axis]], layout: Layout, shape: Sequence[Size]
) -> Value:
    """A tensor of groups as another that has the same axes."""
    axes = [axis for group in groups for axis in group]
    wanted = [axis for dim in layout for axis in parts_of(dim)]
    now: Sequence[Size] = [size_of(group) for group in groups]
    if axes != wanted:
        value = _reshaped(write, value, now, [axis.size for axis in axes])
        value, now = _turned(write, value, axes, wanted), [axis.size for axis in wanted]
    return _reshaped(write, value, now, shape)
