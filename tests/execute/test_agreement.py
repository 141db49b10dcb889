"""Plans at new sizes beside torch's ops: what noise decides is not judged, everything else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import hypatia
from hypatia.execute.agreement import agree_at_new_sizes, roundings_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def compared(x: torch.Tensor) -> list[torch.Tensor]:
    """Means that are zero but for roundings, compared with zero; means that are not; and numbers."""
    normed = F.layer_norm(x, (8,))
    return [normed.mean(-1) > 0, x.mean(-1) > 0, normed]


def agrees(change: Callable[[list[torch.Tensor]], object]) -> bool:
    results = compared(X)
    change(results)

    def run(moved: Callable[[Any], Any]) -> object:
        return compared(moved(X))

    return agree_at_new_sizes(results, compared(X), [X], run)


def test_comparisons_of_noise_may_turn() -> None:
    assert agrees(lambda results: results[0].logical_not_())


@pytest.mark.parametrize(
    "change",
    [
        lambda results: results[1][3].logical_not_(),
        lambda results: (results[0].logical_not_(), results[1][3].logical_not_()),
        lambda results: (results[0].logical_not_(), results[2][5].add_(1e-3)),
        lambda results: results.__setitem__(0, results[0].int()),
        lambda results: results.__setitem__(0, results[0][:4]),
    ],
    ids=["flag", "flag beside noise", "number beside noise", "dtype", "shape"],
)
def test_all_else_must_be_equal(change: Callable[[list[torch.Tensor]], object]) -> None:
    assert not agrees(change)


def test_whole_numbers_that_no_rounding_reaches() -> None:
    """Integers of integers do not turn."""
    x = torch.arange(8)
    assert not agree_at_new_sizes([x + 1], [x], [x], lambda moved: [moved(x)])


class Widened(nn.Module):
    """Numbers of float32 in a result of float64. No rounding of the input moves them: its signs are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.atan2(x, x)).exp().double()


@pytest.mark.filterwarnings("error::hypatia.errors.VerificationWarning")
def test_what_is_cast_to_float64_has_the_digits_that_it_had() -> None:
    torch.manual_seed(0)
    model = Widened().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for rows in (3, 5, 9, 17):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_coarse_numbers_on_the_way_of_a_result() -> None:
    def results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        short = x * 2
        return x + y.double(), short, short.double() + 1, (y.to(torch.bfloat16) > 0).double()

    traced = make_fx(results)(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float32))
    assert roundings_of(traced.graph) == [
        torch.finfo(d).eps for d in (torch.float64, torch.float64, torch.float64, torch.bfloat16)
    ]
    traced = make_fx(results)(torch.ones(2), torch.ones(2))
    assert [roundings_of(traced.graph)[i] for i in (1, 2)] == [torch.finfo(torch.float32).eps] * 2


def test_a_result_is_judged_by_the_digits_of_its_dtype_if_none_are_coarser() -> None:
    x = torch.rand(8, dtype=torch.float64)
    for eps, right in ((0.0, False), (torch.finfo(torch.float32).eps, True)):
        assert agree_at_new_sizes([x + 1e-7], [x], [x], lambda _: [x], [eps]) == right
