"""Training by a loss: cross-entropy over a vocabulary, and results beside the loss that nobody uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.capture import cross_entropy
from hypatia.devices import table
from hypatia.frontend import dynamo

ROWS, WIDTH, WORDS = 37, 16, 1001


class Language(nn.Module):
    """Returns a loss and the logits, as models of transformers do."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.loss = loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.layer(x).relu())
        return self.loss(logits, target), logits


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "sum": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"),
    "in float32": lambda y, t: F.cross_entropy(y.float().view(-1, WORDS), t.view(-1)),
    "other number": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=7),
    "written": lambda y, t: F.nll_loss(F.log_softmax(y.flatten(0, 1).float(), -1), t.flatten()),
}
OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "smoothed": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weights": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=y.new_ones(WORDS)),
    "probabilities": lambda y, t: F.log_softmax(y.flatten(0, 1), -1)[:, 0].mean(),
    "each": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none").mean(),
}


@pytest.fixture(autouse=True)
def taken_apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a CPU as on a GPU, however few; gets how many were."""
    monkeypatch.setattr(cross_entropy, "LEAST", 1)
    monkeypatch.setattr(table.Cpu, "rewrites_training", lambda self: True)
    counts: list[int] = []
    take_apart = cross_entropy.take_apart

    def noted(joint: Any) -> int:
        counts.append(take_apart(joint))
        return counts[-1]

    monkeypatch.setattr(cross_entropy, "take_apart", noted)
    return counts


def by_torch(model: nn.Module) -> Any:
    torch.compiler.reset()
    # Both passes as they were compiled, whether they are faster than eager or not.
    with mock.patch.object(dynamo, "Contest", lambda eager, compiled, *_: compiled):
        return torch.compile(model, backend="hypatia")


def _gradients(call: Any, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss, logits = call(x, target)
    loss.backward()
    return [
        loss.detach(),
        logits.detach(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def _assert_right(call: Any, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    """At most twice eager's error to float64, and four roundings."""
    wide = copy.deepcopy(model).double()
    eager = _gradients(model, model, x, target)
    exact = _gradients(wide, wide, x.double(), target)
    ours = _gradients(call, model, x, target)
    for a, e, w in zip(ours, eager, exact, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        unit = torch.finfo(a.dtype).eps * w.abs().max()
        error, own = ((t.double() - w).abs().max() for t in (a, e))
        assert error <= 2 * own + 4 * unit, (error, own)


def _inputs(dtype: torch.dtype, *, hidden: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(0, WORDS, (2, ROWS))
    target[torch.rand(2, ROWS) < hidden] = -100
    return torch.randn(2, ROWS, WIDTH, dtype=dtype), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str, dtype: torch.dtype, taken_apart: list[int]) -> None:
    torch.manual_seed(0)
    model = Language(LOSSES[name]).to(dtype)
    call = by_torch(model)
    hidden = 0.0 if name == "other number" else 0.2
    for scale in (1, 30):
        x, target = _inputs(dtype, hidden=hidden)
        _assert_right(call, model, scale * x, target)
    assert taken_apart == [1]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else(name: str, taken_apart: list[int]) -> None:
    torch.manual_seed(0)
    model = Language(OTHERS[name])
    _assert_right(by_torch(model), model, *_inputs(torch.float32, hidden=0.0))
    assert taken_apart == [0]


def test_rows_that_do_not_count() -> None:
    """No row counts: the loss has no number, and the gradients are eager's."""
    torch.manual_seed(0)
    model = Language(LOSSES["mean"])
    call = by_torch(model)
    for hidden in (0.5, 1.0):
        x, target = _inputs(torch.float32, hidden=hidden)
        ours, eager = (_gradients(each, model, x, target) for each in (call, model))
        torch.testing.assert_close(ours, eager, equal_nan=True)


def test_numbers_that_are_none() -> None:
    """NaN and infinities are where eager has them."""
    torch.manual_seed(0)
    model = Language(LOSSES["mean"])
    call = by_torch(model)
    for number in (float("nan"), float("inf"), -float("inf")):
        x, target = _inputs(torch.float32)
        x[0, 3] = number
        ours, eager = (_gradients(each, model, x, target) for each in (call, model))
        torch.testing.assert_close(ours, eager, equal_nan=True)


def test_targets_outside_are_an_error() -> None:
    model = Language(LOSSES["mean"])
    call = by_torch(model)
    x, target = _inputs(torch.float32)
    call(x, target)
    target[0, 0] = WORDS
    with pytest.raises((IndexError, RuntimeError)):
        call(x, target)


def test_results_beside_the_loss_have_gradients() -> None:
    """Whoever differentiates them gets what eager gives, in whatever order they are asked for."""
    torch.manual_seed(0)
    model = Language(LOSSES["mean"])
    call = hypatia.compile(model)
    x, target = _inputs(torch.float32)
    asked: list[Callable[..., torch.Tensor]] = [
        lambda loss, logits: loss,
        lambda loss, logits: loss,
        lambda loss, logits: loss + logits.square().mean(),
        lambda loss, logits: logits.square().mean(),
        lambda loss, logits: loss,
    ]
    for ask in asked:
        found = []
        for each in (call, model):
            model.zero_grad()
            ask(*each(x, target)).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_dropout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the gradient and the mask is what torch's op computes, bit for bit."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.layer(x), 0.3).square().mean()

    found = []
    for rewrites in (True, False):
        monkeypatch.setattr(table.Cpu, "rewrites_training", lambda self, said=rewrites: said)
        torch.manual_seed(0)
        model = Dropping().to(dtype)
        call = by_torch(model)
        x = torch.randn(8, WIDTH, dtype=dtype)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(7)
            call(x).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_parts_are_permuted_before_they_are_stacked() -> None:
    """As in the gradient of a layer that makes query, key and value at once."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.all(x).reshape(2, ROWS, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).square().sum()

    torch.manual_seed(0)
    model = Attention()
    call = by_torch(model)
    x = torch.randn(2, ROWS, WIDTH)
    found = []
    for each in (call, call, model):
        model.zero_grad()
        each(x).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])
