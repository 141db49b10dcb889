"""Attention that is written anew in training is compared with what the model wrote."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.capture import constant_masks
from hypatia.capture.written_attention import Attention
from hypatia.frontend import rewritten
from tests.capture.spellings import SPELLINGS, Model, inputs

ENTRIES: dict[str, Callable[..., Any]] = {
    "torch.compile": lambda model, **options: torch.compile(model, backend="hypatia", options=options),
    "hypatia.compile": lambda model, **options: hypatia.compile(model, **options),
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is twice as sharp as it was written."""
    right = Attention.scale.fget
    monkeypatch.setattr(Attention, "scale", property(lambda self: 2 * right(self)))  # type: ignore[misc]


def _gradients(call: Callable[..., Any], model: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    given[0].requires_grad_()
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [given[0], *model.parameters()])]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.usefixtures("planted")
def test_a_wrong_call_is_found(entry: str) -> None:
    torch._dynamo.reset()
    spelling = SPELLINGS["scores divided"]
    model = Model(spelling)
    twin = copy.deepcopy(model)
    given = inputs(spelling)
    compiled = ENTRIES[entry](model)
    with pytest.warns(hypatia.VerificationWarning, match="written anew is wrong"):
        found = _gradients(compiled, model, given)
    for seed in (0, 1):
        given = inputs(spelling, seed=seed)
        found = _gradients(compiled, model, given)
        for ours, theirs in zip(found, _gradients(twin, twin, given), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_inputs_that_are_not_changed_are_not_written(entry: str) -> None:
    """They may be kept for another backward pass, or be expanded."""
    torch._dynamo.reset()
    spelling = SPELLINGS["scores divided"]
    model = Model(spelling)
    first, *others = inputs(spelling)
    expanded = first[:1].expand_as(first)
    weight = torch.ones((), requires_grad=True)
    kept = (first * weight).sum()
    for given in (first, expanded):
        before = given._version
        ENTRIES[entry](model)(given, *others).sum().backward()
        assert given._version == before
    kept.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("entry", ENTRIES)
def test_over_one_key_queries_and_keys_have_no_gradient(entry: str) -> None:
    """Eager subtracts equal numbers; an optimizer that divides by its size would make steps of roundings."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (3, 1, 1))

    class Written(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v

    found = torch.autograd.grad(ENTRIES[entry](Written())(q, k, v).square().sum(), (q, k, v))
    assert not found[0].any()
    assert not found[1].any()
    assert found[2].any()


@pytest.mark.usefixtures("planted")
def test_nothing_is_checked_where_that_is_off() -> None:
    torch._dynamo.reset()
    spelling = SPELLINGS["scores divided"]
    model = Model(spelling)
    given = inputs(spelling)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hypatia.VerificationWarning)
        found = _gradients(ENTRIES["torch.compile"](model, verify="off"), model, given)
    assert not torch.allclose(found[0], model(*given), rtol=1e-4, atol=1e-4)


class Masked(nn.Module):
    """Attention with a mask that depends on nothing, among layers that change with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.dropout(self.norm(x)))[:, None]
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]


def test_buffers_and_random_numbers_are_as_if_nothing_was_compared() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Masked()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hypatia")
    for seed in (1, 2):
        x = torch.randn(3, 5, 8)
        torch.manual_seed(seed)
        ours = compiled(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, twin(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
        assert model.norm.num_batches_tracked == twin.norm.num_batches_tracked


def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(constant_masks, "_form", lambda *_: constant_masks._ALL)
    model = Masked().eval()
    x = torch.randn(3, 5, 8)
    with pytest.warns(hypatia.VerificationWarning, match="written anew is wrong"):
        found = torch.compile(model, backend="hypatia")(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


class Dropped(nn.Module):
    """The same with dropout in it, by position or by keyword."""

    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.linear, self.by_keyword = nn.Linear(8, 8), by_keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)[:, None]
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()
        if self.by_keyword:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.5)[:, 0]
        return F.scaled_dot_product_attention(x, x, x, mask, 0.5)[:, 0]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_dropout_of_attention_is_left_out_of_the_comparison(
    entry: str, by_keyword: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another kernel other entries are dropped: random numbers are as if those were."""
    torch._dynamo.reset()
    compared: list[list[object]] = []

    def noted(found: list[object], expected: list[object], *_: object) -> bool:
        compared.append([*found, *expected])
        return True

    monkeypatch.setattr(rewritten, "agree_at_new_sizes", noted)
    model = Dropped(by_keyword)
    x = torch.randn(3, 5, 8)
    ENTRIES[entry](model)(x).sum().backward()
    ((ours, theirs),) = compared
    y = model.linear(x)[:, None]
    expected = F.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(theirs, expected)
