"""Small models for tests of plans, and whether their results are right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


class Layers(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(19, 37, bias), nn.Linear(37, 5, bias)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Mixed(nn.Module):
    """Ops that have a kernel between ops that only torch has."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x).relu()))


def assert_right(result: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> None:
    """As close to float64 as eager is: at most twice its error, plus a few roundings."""
    with torch.no_grad():
        eager = model(*inputs)
        wide = copy.deepcopy(model).double()(*[x.double() if x.is_floating_point() else x for x in inputs])
    assert result.shape == eager.shape
    assert result.dtype == eager.dtype
    if eager.numel():
        scale, eps = wide.abs().max().item(), torch.finfo(eager.dtype).eps
        allowed = 2 * (eager.double() - wide).abs().max().item() + 4 * eps * scale
        assert (result.double() - wide).abs().max().item() <= allowed
