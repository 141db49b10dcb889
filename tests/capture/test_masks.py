"""Constant masks of attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline
from hypatia.frontend.dynamo import collecting


@pytest.fixture(autouse=True)
def _errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)
    torch._dynamo.reset()


Mask = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Self-attention with a mask that is made at every call."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, 8).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return out.transpose(1, 2).reshape(b, n, d)


def _true(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[1])[None, None, :, None] >= 0).expand(x.shape[0], -1, -1, x.shape[1])


def _later(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    return (places[None, :] <= places[:, None]).expand(x.shape[0], 1, -1, -1)


def _infinite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(_later(x), 0.0, float("-inf"))


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(_later(x), 0.0, -100.0)


def _strictly(x: torch.Tensor) -> torch.Tensor:
    return _later(x) & (torch.arange(x.shape[1])[:, None] > 3)


def _window(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    return _later(x) & (places[None, :] > places[:, None] - 4)


def _given(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :, 0] < 1e9)[:, None, None, :].expand(-1, 1, x.shape[1], -1)


def _changed_later(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1])
    mask[1:, 0] = x[0, 1:, 0]
    return mask


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape[1], x.shape[1]) * 0


NOTHING, LATER = "hides nothing, dropped", "hides what comes later, the causal flag instead"
MASKS = [
    (_true, NOTHING),
    (lambda x: torch.zeros(x.shape[1], x.shape[1]), NOTHING),
    (lambda x: torch.zeros(1, x.shape[1]), NOTHING),
    (_later, LATER),
    (_infinite, LATER),
    (lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), LATER),
    (_finite, ""),
    (_strictly, ""),
    (_window, ""),
    (_given, ""),
    (_changed_later, ""),
    (_random, ""),
]


def _run(entry: str, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[object]]:
    if entry == "compile":
        compiled = hypatia.compile(model, x)
        return compiled(x), compiled.reports
    with collecting() as reports:
        return torch.compile(model, backend="hypatia")(x), reports


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize(("mask", "form"), MASKS)
def test_a_constant_mask_that_says_nothing_is_left_out(entry: str, mask: Mask, form: str) -> None:
    model, x = Attention(mask).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        found, reports = _run(entry, model, x)
        torch.testing.assert_close(found, model(x), equal_nan=True)
    told = [line for r in reports for line in r.masks]
    assert told == ([f"constant mask of 1 attention calls: {form}"] if form else [])
    assert all(("  masks     " in str(r)) == bool(form) for r in reports)
    if form:
        assert not any("arange" in str(n.target) for r in reports for n in r.after.nodes)


@pytest.mark.parametrize("mask", [_true, _later, _window])
def test_gradients_are_the_same(mask: Mask) -> None:
    model, x = Attention(mask), torch.randn(2, 12, 32, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    compiled = torch.compile(model, backend="hypatia")
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected)


def test_open_sizes_keep_their_masks() -> None:
    model = Attention(_later).eval()
    with torch.no_grad(), collecting() as reports:
        compiled = torch.compile(model, backend="hypatia", dynamic=True)
        for n in (12, 16):
            x = torch.randn(2, n, 32)
            torch.testing.assert_close(compiled(x), model(x))
    assert not any(r.masks for r in reports)


@pytest.mark.parametrize("keys", [8, 20])
def test_the_flag_is_for_as_many_keys_as_queries(keys: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, k, mask)

    q, k = torch.randn(2, 4, 12, 16), torch.randn(2, 4, keys, 16)
    with torch.no_grad():
        compiled = torch.compile(attend, backend="hypatia")
        torch.testing.assert_close(compiled(q, k), attend(q, k), equal_nan=True)


def test_a_wrong_mask_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypatia.capture import constant_masks

    monkeypatch.setattr(constant_masks, "_form", lambda *_: constant_masks._ALL)
    model, x = Attention(_later).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        with pytest.warns(hypatia.VerificationWarning, match="pass 'constant masks'"):
            compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("mask", [_true, _later])
def test_results_lie_in_memory_as_with_the_mask(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels with a mask and without return other strides; here torch is told that these differ."""
    from hypatia.capture import constant_masks

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 12, 4, 8).transpose(1, 2).contiguous()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask(x)) + 1

    monkeypatch.setattr(constant_masks, "_strides", lambda _: (384, 8, 32, 1))
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        found, reports = _run("backend", attend, x)
        expected = attend(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert [bool(r.masks) for r in reports] == [True]


def _attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(2, 12, 4, 8).transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


class Plain(nn.Module):
    """Attention without a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 12, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def _reported(model: nn.Module, x: torch.Tensor) -> str:
    found, reports = _run("backend", model, x)
    torch.testing.assert_close(found, model(x))
    return " ".join(str(n.target) for r in reports for n in r.before.nodes)


def test_attention_stays_whole_in_inference() -> None:
    x = torch.randn(2, 12, 32)
    # AOTAutograd would take it apart here, as it does where torch has no other kernel.
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        calls = _reported(Plain(), x)
    assert "aten.scaled_dot_product_attention.default" in calls
    assert "bmm" not in calls


def test_attention_is_torchs_to_take_apart_where_more_than_values_are_asked_for() -> None:
    class Scoped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _attend(x)

    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        assert "bmm" in _reported(Scoped(), x)
        with torch.autocast("cpu", torch.bfloat16):
            assert "scaled_dot_product_attention.default" not in _reported(Plain(), x)
    x.requires_grad_()
    assert "scaled_dot_product_attention.default" not in _reported(Plain(), x)
