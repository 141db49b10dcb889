"""Plans at new sizes beside torch's ops: what noise decides is not judged, everything else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hypatia.execute.agreement import agree_at_new_sizes

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
