"""A plan for every graph: assertions, constants, random ops, changes of inputs, odd results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute import plans
from hypatia.frontend.dynamo import collecting
from support import fresh_dynamo
from test_native import _fresh  # noqa: F401  (a fixture for this file too)


class Around(nn.Module):
    """Something between two linear layers."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)
        self.between = between

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.second(self.between(self.first(x).relu(), *more).relu())


def leaves(results: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def assert_same(results: Any, expected: Any) -> None:
    """Values, dtypes and strides are eager's."""
    found, wanted = leaves(results), leaves(expected)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def served(model: nn.Module, *calls: tuple[torch.Tensor, ...], direct: bool = True) -> None:
    """Both entries have a plan, which is right and runs at every call: the inputs are other values."""
    for entry in ("compile", "torch.compile") if direct else ("torch.compile",):
        fresh_dynamo()
        with torch.no_grad(), collecting() as reports:
            if entry == "compile":
                compiled = hypatia.compile(model.eval(), *[t.clone() for t in calls[0]])
                reports = compiled.reports
            else:
                compiled = torch.compile(model.eval(), backend="hypatia")
            for call in calls:
                mine, theirs = [[t.clone(memory_format=torch.preserve_format) for t in call] for _ in range(2)]
                state = torch.get_rng_state()
                results = compiled(*mine)
                after = torch.get_rng_state()
                torch.set_rng_state(state)
                assert_same(results, model(*theirs))
                assert torch.equal(after, torch.get_rng_state()), "random numbers are drawn alike"
                assert_same(mine, theirs)
        assert [plans.KERNEL in r.kernels for r in reports] == [True], (entry, [r.no_plan for r in reports])
        assert all(r.check.status == "passed" and r.kept == "plan" for r in reports)


def inputs(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(4, 16),) for _ in range(count)]


def test_assertions_of_export_are_no_effects() -> None:
    # A tensor that is made in the model leads to torch.export, which notes what `to` was given.
    served(Around(lambda x: x.to(torch.float64).cumsum(-1).to(torch.float32) + torch.tensor(0.5)), *inputs())


@pytest.mark.parametrize("freeze", [None, False])
def test_tensors_that_are_part_of_the_graph(freeze: bool | None) -> None:
    model = Around(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).repeat(8)).eval()
    options = {} if freeze is None else {"freeze": freeze}
    compiled = torch.compile(model, backend="hypatia", options=options)
    with torch.no_grad(), collecting() as reports:
        for (x,) in inputs():
            torch.testing.assert_close(compiled(x), model(x))
    assert [r.no_plan for r in reports] == [""]
