"""Comparing two callables."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import hypatia


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 7))


def test_a_compiled_model_passes() -> None:
    model, x = mlp(), torch.randn(5, 20)
    result = hypatia.verify(model, torch.compile(model, backend="hypatia"), x)
    assert result, result
    assert "passed" in str(result)
    assert result.candidate[0].cosine == pytest.approx(1)
    assert 0 < result.reference[0].ulps < 50


def test_a_wrong_model_fails_and_says_how() -> None:
    model, x = mlp(), torch.randn(5, 20)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[2].bias.add_(1e-3)
    result = hypatia.verify(model, wrong, x)
    assert not result
    assert "roundings from float64" in str(result)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (lambda x: x.relu().double(), "float64"),
        (lambda x: x.relu()[:1], r"float32\[1, 3\] on cpu instead of float32\[2, 3\]"),
        (lambda x: (x.relu(), x), "2 results instead of 1"),
        (lambda x: x.relu() * math.nan, "roundings"),
    ],
)
def test_differences_in_kind_fail(candidate: object, message: str) -> None:
    result = hypatia.verify(lambda x: x.relu(), candidate, torch.randn(2, 3))
    assert not result
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(result.reason)


def test_special_values_and_empty_results_are_equal_to_themselves() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    assert hypatia.verify(lambda x: x * 2, lambda x: x + x, x)
    assert hypatia.verify(lambda x: x * 2, lambda x: x + x, torch.randn(0, 3))


def test_nothing_is_changed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return nn.functional.dropout(self.norm(x.mul_(scale)), 0.5, training=True)

    model, x = Counting(), torch.randn(6, 4)
    before, buffers, state = x.clone(), [b.clone() for b in model.buffers()], torch.get_rng_state()
    assert hypatia.verify(model, model, x, kwargs={"scale": 2.0})
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(model.buffers(), buffers, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
