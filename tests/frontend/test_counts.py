"""Models that count their calls: compiling tries calls, and none of them may count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hypatia

ROOM, WIDTH = 4, 8


class Cached(nn.Module):
    """Writes each input to the next place of a cache that it fills to the end, as static caches do."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.buffers_own = buffers
        self.register_buffer("cache", torch.zeros(ROOM, WIDTH))
        self.register_buffer("end", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        cache, end = (self.cache, self.end) if self.buffers_own else given
        y = self.layer(x).relu()
        cache.index_copy_(0, end.clone(), y)
        end.add_(1)
        return torch.softmax(y @ cache.t(), -1) @ cache + self.layer(y)


@pytest.fixture(autouse=True)
def forms_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users: each form is called many times. Which one is kept does not matter here."""
    monkeypatch.setattr("hypatia.execute.timing.instead", None)


def by_torch(model: nn.Module) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(model, backend="hypatia")


@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "inputs"])
@pytest.mark.parametrize("compiled", [by_torch, hypatia.compile], ids=["torch.compile", "hypatia.compile"])
def test_a_cache_is_filled_to_its_end(compiled: Callable[[nn.Module], Any], buffers: bool) -> None:
    torch.manual_seed(0)
    model = Cached(buffers=buffers).eval()
    twin = copy.deepcopy(model)
    call = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = (
                () if buffers else (torch.zeros(ROOM, WIDTH), torch.zeros(1, dtype=torch.int64)) for _ in "ab"
            )
            for each in (model, twin):
                each.end.zero_()
            for _ in range(ROOM):
                x = torch.randn(1, WIDTH)
                torch.testing.assert_close(call(x, *ours), twin(x, *theirs))
                kept = ours or (model.cache, model.end)
                torch.testing.assert_close(kept, theirs or (twin.cache, twin.end))


@pytest.mark.parametrize("compiled", [by_torch, hypatia.compile], ids=["torch.compile", "hypatia.compile"])
def test_the_last_place_of_a_cache(compiled: Callable[[nn.Module], Any]) -> None:
    """The first call is the only one that there is room for."""
    torch.manual_seed(0)
    model = Cached(buffers=True).eval()
    model.end.fill_(ROOM - 1)
    twin = copy.deepcopy(model)
    x = torch.randn(1, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), twin(x))
    torch.testing.assert_close((model.cache, model.end), (twin.cache, twin.end))


def test_training_counts_each_step_once() -> None:
    """A cache that is filled in training."""
    for compiled in (by_torch, hypatia.compile):
        torch.manual_seed(0)
        model = Cached(buffers=True).train()
        twin = copy.deepcopy(model)
        call = compiled(model)
        for _ in range(ROOM):
            x = torch.randn(1, WIDTH)
            for each, run in ((model, call), (twin, twin)):
                each.cache = each.cache.detach()
                run(x).sum().backward()
            torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
            torch.testing.assert_close(model.end, twin.end)


def test_optimize_leaves_inputs_as_they_were() -> None:
    """Forms are timed on the inputs that were given."""
    torch.manual_seed(0)
    model = Cached(buffers=False).eval()
    given = (torch.randn(1, WIDTH), torch.zeros(ROOM, WIDTH), torch.zeros(1, dtype=torch.int64))
    before = [t.clone() for t in given]
    with torch.no_grad():
        call = hypatia.optimize(model, *given)
        torch.testing.assert_close(list(given), before)
        theirs = [t.clone() for t in given]
        torch.testing.assert_close(call(*given), model(*theirs))
    torch.testing.assert_close(list(given), theirs)
