"""The scores of attention as models write them: a product, scaled, with something added and entries hidden.

What is done to a product is done to zeros instead, and added. Numbers far below every score stay so, one
below the other, so that rows which are hidden as a whole have the shares that they have in the model. Torch's
attention returns zeros for rows of minus infinity, where a softmax has NaN: in the mask such rows are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from .._torch import disable_current_modes
from .attention_factors import Numbers, Product, Value, Write, grouped, is_cast, only_user, product_of
from .axes import VIEWS, Axis, Layout, after, read_along, same_size
from .records import value_of

aten = torch.ops.aten

HIDDEN = -1e30
"""A number below every score: beside one that is not as low, such a score has no share, whatever it was."""


class Change(NamedTuple):
    """Something that is done to scores."""

    node: fx.Node
    number: float
    """What they are multiplied by or filled with, or what is added is multiplied by."""
    tensor: fx.Node | None = None
    """What is added, or says where they are filled."""
    layout: Sequence[list[Axis]] = ()
    fills: bool = False
    where: bool = True
    """The value of a condition that says that an entry is filled."""


class Scores(NamedTuple):
    """What a softmax is of."""

    product: Product
    layout: Layout
    changes: list[Change]

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.product.alpha * math.prod(c.number for c in self.changes if c.tensor is None)

    @property
    def limits(self) -> list[Change]:
        """Where something is added or hidden."""
        return [c for c in self.changes if c.tensor is not None]


def scores_of(node: object, numbers: Numbers) -> Scores | None:
    """The scores that a node is, if it is a product with changes that are known."""
    chain: list[tuple[fx.Node, Change | None]] = []
    product = _start(node, numbers, chain)
    if product is None:
        return None
    layout: Layout | None = product.layout
    changes: list[Change] = []
    if product.added is not None:
        chain.append((product.node, Change(product.node, product.beta, product.added)))
    for each, change in reversed(chain):
        if change is None and each.target in VIEWS and layout is not None:
            layout = after(each, layout)
        if layout is None:
            return None
        if change is not None and change.tensor is not None:
            beside = read_along(value_of(change.tensor).shape, layout)
            if beside is None:
                return None
            change = change._replace(layout=beside)
        changes += [change] if change is not None else []
    assert layout is not None
    return Scores(product, layout, changes) if _hides(changes) else None


def _start(node: object, numbers: Numbers, chain: list[tuple[fx.Node, Change | None]]) -> Product | None:
    """The product that scores start with; ``chain`` gets what follows it, the last first."""
    if not isinstance(node, fx.Node):
        return None
    if (product := product_of(node)) is not None:
        return product
    for source, change in _ways(node, numbers):
        if not isinstance(source, fx.Node) or only_user(source) is None:
            continue
        length = len(chain)
        chain.append((node, change))
        if (product := _start(source, numbers, chain)) is not None:
            return product
        del chain[length:]
    return None


def _ways(node: fx.Node, numbers: Numbers) -> list[tuple[object, Change | None]]:
    """What a node may change, and how."""
    args = node.args
    if node.target in VIEWS or is_cast(node):
        return [(args[0], None)]
    if (scaled := numbers.factor(node)) is not None:
        return [(scaled[0], Change(node, scaled[1]))]
    found: list[tuple[object, Change]] = []
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        sign = 1.0 if node.target is aten.add.Tensor else -1.0
        found = [(args[0], Change(node, sign, args[1]))]  # type: ignore[arg-type]
        found += [(args[1], Change(node, 1.0, args[0]))] if sign == 1.0 else []  # type: ignore[arg-type]
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        found = _filled(node, numbers, [(args[0], args[2], True)], args[1])
    elif node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        ways = [(args[1], args[2], False), (args[2], args[1], True)]
        found = _filled(node, numbers, ways, args[0])
    shape = value_of(node).shape
    return [
        (source, change)
        for source, change in found
        if isinstance(source, fx.Node)
        and isinstance(change.tensor, fx.Node)
        and len(value_of(source).shape) == len(shape)
        and all(map(same_size, value_of(source).shape, shape))
    ]


def _filled(
    node: fx.Node, numbers: Numbers, ways: Sequence[tuple[object, object, bool]], condition: object
) -> list[tuple[object, Change]]:
    """Fillings of scores with numbers that are known."""
    found: list[tuple[object, Change]] = []
    for source, filling, where in ways:
        number = numbers.of(filling)
        is_bool = isinstance(condition, fx.Node) and value_of(condition).dtype == torch.bool
        if number is None or not is_bool:
            continue
        with disable_current_modes():
            rounded = float(torch.tensor(number, dtype=value_of(node).dtype))
        found.append((source, Change(node, rounded, condition, fills=True, where=where)))  # type: ignore[arg-type]
    return found


def _hides(changes: list[Change]) -> bool:
    """Whether what fills scores is below all of them, after all that is done to it."""
    scale = 1.0
    for change in reversed(changes):
        if change.tensor is None:
            scale *= change.number
        elif change.fills and not change.number * min(scale, 1.0) <= HIDDEN:
            return False
    return True


def added_to(
    write: Write[Value],
    given: Callable[[fx.Node], Value],
    scores: Scores,
    groups: Sequence[Sequence[Axis]],
) -> Value | None:
    """What is added to scores, with a dimension for each group of axes, in the precision of the scores."""
    total: Value | None = None
    for change in scores.changes:
        value = value_of(change.node)

        def number(n: float, value: torch.Tensor = value) -> Value:
            return write(aten.scalar_tensor.default, n, dtype=value.dtype, device=value.device)

        if change.tensor is None:
            total = None if total is None else write(aten.mul.Tensor, total, change.number)
            continue
        read = value_of(change.tensor)
        part = grouped(write, given(change.tensor), read.shape, change.layout, groups, [3])
        if change.fills:
            rest = number(0.0) if total is None else total
            sides = [number(change.number), rest] if change.where else [rest, number(change.number)]
            total = write(aten.where.self, part, *sides)
            continue
        if read.dtype != value.dtype:
            part = write(aten._to_copy.default, part, dtype=value.dtype)
        part = part if change.number == 1.0 else write(aten.mul.Tensor, part, change.number)
        total = part if total is None else write(aten.add.Tensor, total, part)
    return total


def bounded(write: Write[Value], total: Value, scores: Scores, dtype: torch.dtype) -> Value:
    """The same as torch's attention may add it."""
    limits = scores.limits
    known = [c.number for c in limits if c.fills]
    adds = len(known) < len(limits)
    value = value_of(limits[-1].node)

    def number(n: float) -> Value:
        return write(aten.scalar_tensor.default, n, dtype=value.dtype, device=value.device)

    if dtype != torch.float16 and (adds or any(n > -math.inf for n in known)):
        # Kernels multiply by the logarithm of two: the least number would be out of range.
        seen = write(aten.gt.Scalar, total, HIDDEN)
        less = write(aten.add.Tensor, write(aten.mul.Tensor, total, 1 / 16), HIDDEN * 15 / 16)
        total = write(aten.where.self, seen, total, less)
    if adds or -math.inf in known:
        most = write(aten.amax.default, total, [-1], True)
        total = write(aten.where.self, write(aten.eq.Scalar, most, -math.inf), number(math.nan), total)
    return write(aten._to_copy.default, total, dtype=dtype) if dtype != value.dtype else total
