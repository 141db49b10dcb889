"""Changes in place of tensors that expand() repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia


class All(nn.Module):
    """Sets all repetitions, of one number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x * 0.5
        once = half.unsqueeze(0).expand(2, *half.shape)
        once.expand(3, *once.shape).zero_()
        return once.abs() + 0.5


class One(nn.Module):
    """Sets one of the repetitions, which is all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x * 1e30
        large.expand(3, *large.shape)[1].fill_(1.0)
        return large + 0


class Assigned(nn.Module):
    """The same by an assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x * 1e30
        large.expand(3, *large.shape)[1, ...] = 2.0
        return large + 0


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "torch": lambda model, x: torch.compile(model, backend="hypatia")(x),
    "direct": lambda model, x: hypatia.compile(model)(x),
    "optimize": lambda model, x: hypatia.optimize(model, x)(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [All, One, Assigned])
def test_changes_of_repeated_tensors(kind: type[nn.Module], grad: bool, way: str) -> None:
    x = torch.tensor(3.0)
    model = kind()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(WAYS[way](model, x), model(x), rtol=0, atol=0)


def test_changes_of_repeated_tensors_have_gradients() -> None:
    for way in WAYS.values():
        x = torch.tensor(3.0, requires_grad=True)
        result = way(One(), x)
        assert isinstance(result, torch.Tensor)
        result.backward()
        assert x.grad is not None
        assert x.grad.item() == 0.0
