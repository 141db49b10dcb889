"""The factors of attention as a model writes it: through copies, wider numbers, batch and heads in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .op_facts import says_types
from .records import value_of

aten = torch.ops.aten

SAME = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
"""Ops whose results have the same elements in another shape."""


def keeps_rows(node: fx.Node) -> bool:
    """Whether a node is what it reads, in other memory, another precision or with leading sizes split."""
    if node.target in (aten._to_copy.default, aten.clone.default):
        return value_of(node).dtype in (torch.float32, torch.bfloat16, torch.float16)
    if node.target not in SAME or not isinstance(node.args[0], fx.Node):
        return False
    new, old = value_of(node).shape, value_of(node.args[0]).shape
    return new[-2:] == old[-2:] and new.numel() == old.numel()


def only_user(node: fx.Node) -> fx.Node | None:
    """The one call that reads a node."""
    users = [n for n in node.users if not says_types(n.target)]
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def whole(node: object) -> fx.Node | None:
    """An operand of a product with batch and heads apart."""
    while isinstance(node, fx.Node) and value_of(node).dim() != 4:
        node = node.args[0] if node.target in SAME and keeps_rows(node) else None
    return node if isinstance(node, fx.Node) else None


def narrow(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What was copied and widened before a product, as it was."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return node
    if node.target in (aten.clone.default, aten.expand.default):
        return narrow(source, dtype) if value_of(source).shape == value_of(node).shape else node
    widens = node.target is aten._to_copy.default and value_of(source).dtype == dtype
    return narrow(source, dtype) if widens else node


def key_of(node: fx.Node, dtype: torch.dtype, *, swapped: bool) -> tuple[fx.Node, bool]:
    """The second factor of the scores, and whether it is still turned."""
    node = narrow(node, dtype)
    if not swapped:
        node, swapped = unswapped(node)
    return narrow(node, dtype), not swapped


def unswapped(node: object) -> tuple[Any, bool]:
    """What a node turns rows and columns of, and whether it does."""
    if not isinstance(node, fx.Node) or node.target is not aten.transpose.int:
        return node, False
    rank = value_of(node).dim()
    dims = {d % rank for d in node.args[1:] if isinstance(d, int)}
    return (node.args[0], True) if dims == {rank - 2, rank - 1} else (node, False)


def factor_of(node: fx.Node) -> float | None:
    """The number that a node multiplies by, if it is neither tiny nor huge."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or type(node.args[1]) not in (int, float):
        return None
    number = float(node.args[1])  # type: ignore[arg-type]
    factor = number if node.target is aten.mul.Tensor else 1.0 / (number or float("nan"))
    return factor if 1e-6 < factor < 1e6 else None


def unscaled(node: Any) -> tuple[object, float]:
    """What is multiplied by a number before a product, and the number."""
    factor = factor_of(node) if isinstance(node, fx.Node) else None
    return (node, 1.0) if factor is None else (node.args[0], factor)
