"""Sizes that are left open: which values a captured graph holds for."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia
from hypatia.capture.size_ranges import Range, ranges_of
from hypatia.errors import VerificationWarning


class Attend(nn.Module):
    """Reads a cache of any length, and a mask that is one longer."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([cache, x], 1)
        if mask.shape[1] > whole.shape[1] or mask.shape[1] < whole.shape[1]:
            return x
        if cache.shape[1] > 20:
            return x * 2
        return torch.where(mask[..., None], whole, 0.0).sum(1)


class Positions(nn.Module):
    """Has a constant that meets an open size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1) + cache.shape[1]
        return self.layer(x) + at


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 1, 8), torch.randn(2, length, 8), torch.ones(2, length + 1, dtype=torch.bool)


def test_sizes_that_are_compared_keep_their_difference() -> None:
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Attend(), inputs(5), dynamic_shapes=(None, {1: auto}, {1: auto}))
    found = ranges_of(program, program.module(check_guards=False))
    cache, mask = found[1, 1], found[2, 1]
    assert isinstance(cache, Range)
    assert cache.greatest == 20
    assert cache.symbol == mask.symbol
    assert mask.offset - cache.offset == 1


@pytest.mark.parametrize(("make", "count"), [(Attend, 3), (Positions, 2)])
def test_lengths_settle_after_two_compilations(make: Callable[[], nn.Module], count: int) -> None:
    model = make().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for length in (5, 6, 7, 12, 20):
            x = inputs(length)[:count]
            torch.testing.assert_close(compiled(*x), model(*x))
        assert len({id(e) for e in compiled._entries.values()}) == 2
        # Outside of what it was captured for.
        for x in (inputs(30), (*inputs(9)[:2], inputs(11)[2])):
            torch.testing.assert_close(compiled(*x[:count]), model(*x[:count]))


class Turned(nn.Module):
    """Layers of one shape whose weights are turned around for packing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(6)])
        self.biases = nn.ParameterList([torch.randn(16) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w, b in zip(self.weights, self.biases, strict=True):
            x = torch.relu(torch.addmm(b, x, w))
        return x


def test_no_plan_takes_over_what_was_packed_of_another_weight() -> None:
    torch.manual_seed(0)
    model = Turned().eval()
    twin = copy.deepcopy(model)
    compiled = hypatia.compile(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", VerificationWarning)
        for rows in range(2, 24):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(compiled(x), twin(x))
