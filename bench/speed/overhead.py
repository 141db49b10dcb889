"""What a call costs above its work.

A model is called with one row and with ``MANY``. The work of a row is the slope between both, everything else
is overhead: the Python wrapper, the checks of inputs and weights, the results' tensors, the start of each
step. So ``overhead = t(1) - (t(MANY) - t(1)) / (MANY - 1)``. It is too high rather than too low: where a
kernel computes several rows at once, the slope is less than a row's work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute.native import NativeGraph
from hypatia.frontend.direct import CompiledModel
from hypatia.tools.measure import Block, block

from .run import OURS, Run

MANY = 5
WIDTH = 16


class Steps(nn.Module):
    """Steps that no fusion joins, without weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Softmax and layer norm in turn."""
        for _ in range(self.count // 2):
            x = F.layer_norm(F.softmax(x, -1), x.shape[-1:])
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one 8x8 linear layer": (lambda: nn.Linear(8, 8), 8),
    "fifty steps": (lambda: Steps(50), WIDTH),
    "a hundred steps": (lambda: Steps(100), WIDTH),
}
"""Models, and the width of their inputs."""


def overhead(run: Run) -> None:
    """Microseconds of a call and above the work, with eager beside."""
    rows: list[dict[str, Any]] = []
    run.open("overhead")["rows"] = rows
    for name in run.each(list(MODELS)):
        run.say(name)
        make, width = MODELS[name]
        rows.append({"case": name, **_measured(make().eval(), width, 3 * run.repeats)})


def _measured(model: nn.Module, width: int, rounds: int) -> dict[str, Any]:
    one, many = torch.randn(1, width), torch.randn(MANY, width)
    with torch.no_grad():
        few, more = hypatia.compile(model, one), hypatia.compile(model, many)
        calls: dict[str, Callable[[], Any]] = {
            "eager": functools.partial(model, one),
            OURS: functools.partial(few, one),
            "many rows": functools.partial(more, many),
        }
        plan = plan_of(few)
        if plan is not None:
            ((bound, _),) = plan.binding.bound.values()
            calls["plan"] = functools.partial(bound, torch.get_num_threads(), one)
        blocks: dict[str, list[Block]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                blocks[name].append(block(call))
    # The least of the medians: other work on the machine only adds.
    best = {name: 1e6 * min(b.median for b in found) for name, found in blocks.items()}
    slope = max(0.0, (best["many rows"] - best[OURS]) / (MANY - 1))
    return {
        "eager_us": best["eager"],
        "call_us": best[OURS],
        "plan_us": best.get("plan"),
        "work_us": slope,
        "overhead_us": best[OURS] - slope,
        "steps": len(plan.binding.steps) if plan is not None else None,
    }


def plan_of(compiled: CompiledModel) -> NativeGraph | None:
    """What runs the inputs seen last natively; none if torch does."""
    entry = compiled._last
    return entry.native.__self__ if entry is not None and entry.native is not None else None
