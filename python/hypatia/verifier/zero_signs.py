"""Which elements of results depend on the sign of a zero that a sum or product returned.

Whether such a zero has a sign depends on where a kernel begins to add, in eager, too. ``atan2``, divisions
and a few other ops make different numbers of ``0`` and ``-0``: these are not judged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ..execute.changes import RandomState
from .judge import equal
from .reference import Script, Stream

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch has few kernels for the former."""

_RUNS = 4
"""All negative, all positive, and twice by lot."""


def depend_on_signs(
    gm: fx.GraphModule,
    inputs: dict[fx.Node, object],
    random: RandomState,
    exact: Mapping[fx.Node, object],
) -> dict[fx.Node, torch.Tensor]:
    """For each result in float64 that other signs change: flags of the elements that they do."""
    found: dict[fx.Node, torch.Tensor] = {}
    script = Script(gm, set(exact))
    for signs in range(_RUNS):
        for node, other in Stream(script, inputs, random, wide=True, signs=signs, seed=signs):
            plain = exact[node]
            if not isinstance(plain, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            differ = ~equal(other, plain)
            if differ.any():
                found[node] = found.get(node, differ) | differ
    return found


def without(value: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """The value with zeros where it is not judged; whole numbers without a sign by their bits."""
    signed = _SIGNED.get(value.dtype)
    return (value if signed is None else value.view(signed)).masked_fill(free, 0)
