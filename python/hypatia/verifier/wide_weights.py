"""Calls in float64 on weights that stay in their own precision: a block of them is widened at a time.

Where a batch is small, copies of all weights in float64 would take longer than the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten

WEIGHT_PLACES: dict[object, int] = {
    _aten.linear.default: 1,
    _aten.addmm.default: 2,
    _aten.mm.default: 1,
    _aten.embedding.default: 0,
}
"""Which argument of an op is a weight that can be widened block by block."""

LARGE = 1 << 18
"""Elements from which on that is done."""

BLOCK = 1 << 17
"""Elements that are widened at a time: in float64 they stay in a cache."""

ROWS = 256
"""Rows of the other operand up to which that is done: with more, products take most of the time."""


def can_stay(target: object, weight: object, args: tuple[Any, ...]) -> bool:
    """Whether a call can be computed without a copy of its weight in float64."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_cpu:
        return False
    if weight.numel() < LARGE or not weight.is_floating_point() or weight.layout is not torch.strided:
        return False
    if target is _aten.embedding.default:
        return True
    rows = args[1] if target is _aten.addmm.default else args[0]
    plain = len(args) == (2 if target is _aten.mm.default else 3) or target is _aten.linear.default
    return plain and rows.dim() >= 1 and rows.numel() <= ROWS * rows.shape[-1]


def widened_call(target: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """What the call returns in float64. All other arguments are in float64."""
    if target is _aten.embedding.default:
        return target(*args).double()
    if target is _aten.linear.default:
        return _product(args[0], args[1].t(), args[2] if len(args) > 2 else None)
    if target is _aten.addmm.default:
        return _product(args[1], args[2], args[0])
    return _product(args[0], args[1], None)


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Rows times weight, whose columns are widened some at a time."""
    columns = max(1, BLOCK // max(1, weight.shape[0]))
    parts = [torch.matmul(rows, part.double()) for part in weight.split(columns, dim=1)]
    whole = torch.cat(parts, dim=-1)
    return whole if bias is None else whole.add_(bias)
