"""Whether two results of one computation agree, where roundings in another order are all that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, TypeGuard

import torch
from torch import fx

from .._torch import pytree
from ..capture.records import value_of

NEARLY = 1e-3
"""Results that are smaller than this share of the inputs are judged by the inputs' roundings as well."""

ULPS = 64.0
"""Roundings of the largest value by which results may differ."""

JUMPS = 4.0
"""How many times as far as torch's own results move, when the inputs are moved by a rounding."""

TURNS = 24
"""How many times inputs are moved to see which comparisons a rounding turns: of noise about zero, each run
turns half."""


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether results are apart by roundings alone."""
    return distance(ours, theirs) <= 1


def agree_at_new_sizes(
    results: Sequence[object],
    expected: Sequence[Any],
    args: Sequence[object],
    run: Callable[[Callable[[object], object]], object],
    roundings: Sequence[float] | None = None,
) -> bool:
    """Whether a plan's results are those of torch's ops; ``run`` runs these again, on arguments moved
    by the function that it is given. ``roundings`` are those of `roundings_of`, for each result."""
    coarse = [0.0] * len(results) if roundings is None else roundings
    tensors = [(a, b) for a, b in zip(results, expected, strict=True) if isinstance(a, torch.Tensor)]
    eps = [e for a, e in zip(results, coarse, strict=True) if isinstance(a, torch.Tensor)]

    def again(seed: int) -> list[torch.Tensor]:
        moved = pytree.tree_leaves(run(lambda value: _moved(value, seed)))
        return [m for m, r in zip(moved, results, strict=True) if isinstance(r, torch.Tensor)]

    unlike = {i: a != b for i, (a, b) in enumerate(tensors) if _are_whole(a, b) and not torch.equal(a, b)}
    if unlike and not _turn(unlike, tensors, again):
        return False
    pairs = [(*p, eps[i]) for i, p in enumerate(tensors) if i not in unlike]
    apart = max(starmap(distance, pairs), default=0.0)
    if 1 < apart < math.inf:
        # A difference of numbers that are nearly equal has the roundings of those.
        sizes = [a.detach().abs().amax().item() for a in args if _is_float(a) and a.numel()]
        least = NEARLY * max(sizes, default=0.0)
        apart = max((distance(*pair, least) for pair in pairs), default=0.0)
    if 1 < apart < math.inf:
        # Nor is it wrong where torch's own results jump when the inputs are moved by a rounding.
        moved = again(0)
        own = [distance(moved[i], b, eps[i]) for i, (_, b) in enumerate(tensors) if i not in unlike]
        return apart <= JUMPS * max(own, default=0.0)
    return apart <= 1


def _turn(
    unlike: dict[int, torch.Tensor],
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    again: Callable[[int], list[torch.Tensor]],
) -> bool:
    """Whether each whole number or flag that differs turns in torch's own results, too, when the inputs are
    moved by a rounding: noise decides about those. All others must be equal."""
    for seed in range(TURNS):
        moved = again(seed)
        unlike = {i: odd & (moved[i] == tensors[i][1]) for i, odd in unlike.items()}
        if not any(bool(odd.any()) for odd in unlike.values()):
            return True
    return False


def _are_whole(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether both are integers or flags of the same kind."""
    alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return alike and not (ours.is_floating_point() or ours.is_complex())


def roundings_of(graph: fx.Graph) -> list[float]:
    """By result, the coarsest rounding of a number that was computed for it: what is cast to float64 has no
    more digits than before. Reading an input rounds nothing."""
    found: dict[fx.Node, float] = {}
    for node in graph.nodes:
        eps = max((found[n] for n in node.all_input_nodes), default=0.0)
        if node.op not in ("placeholder", "get_attr", "output"):
            values = [v for v in pytree.tree_leaves(value_of(node)) if _is_float(v)]
            eps = max([eps, *(torch.finfo(v.dtype).eps for v in values)])
        found[node] = eps
    (output,) = graph.find_nodes(op="output")
    return [found.get(n, 0.0) for n in pytree.tree_leaves(output.args)]


def distance(ours: torch.Tensor, theirs: torch.Tensor, eps: float = 0.0, least: float = 0.0) -> float:
    """How far results are apart, in units of what roundings in another order explain: those of their dtype,
    or coarser ones of ``eps``."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj())
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    if not ours.numel() or torch.equal(ours, theirs):
        return 0.0
    a, b = ours.double(), theirs.double()
    unit = ULPS * max(eps, torch.finfo(ours.dtype).eps)
    apart, scale = (float(torch.stack(t.aminmax()).abs().amax()) for t in (a - b, b))
    if apart < math.inf and scale < math.inf:
        return apart / (max(scale, least, 1e-30) * unit)
    odd = ~torch.isfinite(b)
    if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
        return math.inf
    scale = b[~odd].abs().max().item() if (~odd).any() else 1.0
    apart = (a - b)[~odd].abs().max().item() if (~odd).any() else 0.0
    return apart / (max(scale, least, 1e-30) * unit)


def _is_float(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _moved(value: object, seed: int) -> object:
    """A tensor moved by up to a rounding, always the same way for a seed."""
    if not _is_float(value):
        return value
    dice = torch.Generator().manual_seed(seed)
    share = torch.rand(value.shape, generator=dice).mul_(2).sub_(1).to(value)
    return value * (1 + share * torch.finfo(value.dtype).eps)
