"""However attention is written, it becomes one call of torch's, in inference and in training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline
from hypatia.frontend.dynamo import collecting
from tests.capture.spellings import OTHERS, SPELLINGS, Model, Spelling, calls, heads, inputs, merged, plain
from tests.support import assert_as_close_as_eager

UNFUSED_ON_CPU = {"relative positions", "positions of images"}
"""In training, torch's kernel for a CPU makes no gradient of a bias."""


@pytest.fixture(autouse=True)
def _errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)
    torch._dynamo.reset()


def _close(model: nn.Module, found: torch.Tensor, given: list[torch.Tensor]) -> None:
    exact = copy.deepcopy(model).double()
    wide = [t.double() if t.is_floating_point() else t for t in given]
    assert_as_close_as_eager(found, model(*given), exact(*wide))


def _inferred(name: str, entry: str, dtype: torch.dtype) -> tuple[int, int]:
    """Runs a spelling twice, with other values; how many calls and parts there are."""
    spelling = {**SPELLINGS, **OTHERS}[name]
    torch.manual_seed(0)
    model = Model(spelling).eval().to(dtype)
    first, later = (inputs(spelling, dtype, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        if entry == "compile":
            compiled = hypatia.compile(model, *first)
            found = [compiled(*first), compiled(*later)]
            reports = compiled.reports
        else:
            with collecting() as reports:
                run = torch.compile(model, backend="hypatia")
                found = [run(*first), run(*later)]
        for result, given in zip(found, (first, later), strict=True):
            _close(model, result, given)
    return calls(reports)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_call(name: str, entry: str) -> None:
    assert _inferred(name, entry, torch.float32) == (1, 0)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_16_bits(name: str) -> None:
    assert _inferred(name, "compile", torch.bfloat16) == (1, 0)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_stays(name: str, entry: str) -> None:
    fused, _ = _inferred(name, entry, torch.float32)
    assert fused == 0


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_trains_as_one_call(name: str, entry: str) -> None:
    fused, parts = _trained(name, entry)
    # Forward and backward.
    assert (fused, parts > 0) == ((0, True) if name in UNFUSED_ON_CPU else (2, False))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_trains_as_it_is(name: str) -> None:
    fused, _ = _trained(name, "backend")
    assert fused == 0


def _trained(name: str, entry: str) -> tuple[int, int]:
    spelling = {**SPELLINGS, **OTHERS}[name]
    torch.manual_seed(0)
    model = Model(spelling)
    gradients: dict[str, list[torch.Tensor]] = {}
    with collecting() as reports:
        if entry == "compile":
            run = hypatia.compile(model, *inputs(spelling))
        else:
            run = torch.compile(model, backend="hypatia")
        for seed in (0, 1):
            given = inputs(spelling, seed=seed)
            wide = copy.deepcopy(model).double()
            doubled = [t.double() if t.is_floating_point() else t for t in given]
            for what, call, args, weights in (
                ("found", run, given, model.parameters()),
                ("eager", model, given, model.parameters()),
                ("exact", wide, doubled, wide.parameters()),
            ):
                args[0].requires_grad_()
                out = call(*args)
                made = torch.autograd.grad(out.square().sum(), [args[0], *weights])
                gradients[what] = [out.detach(), *made]
            for each in zip(*gradients.values(), strict=True):
                assert_as_close_as_eager(*each)
    return calls(list(reports))


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["added", "padding added", "filled", "filled with the least", "where", "both in one", "alibi"]
)
def test_rows_that_see_nothing_are_as_in_eager(name: str, entry: str, dtype: torch.dtype) -> None:
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    model, given = Model(spelling).eval().to(dtype), inputs(spelling, dtype)
    if spelling.extra == "kept":
        given[1][1] = 0
    else:
        given[1][1] = -math.inf if name == "added" else torch.finfo(dtype).min
    with torch.no_grad():
        run = (
            hypatia.compile(model, *given) if entry == "compile" else torch.compile(model, backend="hypatia")
        )
        found, expected = run(*given), model(*given)
    assert found.isnan().equal(expected.isnan())
    assert bool(expected.isnan().any()) == (name in ("added", "filled", "where"))
    numbers = expected.isfinite()
    # Of 16 bits, eager rounds scores and shares.
    allowed = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[numbers], expected[numbers], **allowed)


def test_what_drops_at_random_stays() -> None:
    torch.manual_seed(0)
    model = Model(Spelling(lambda q, k, v: merged(F.dropout(plain(q, k), 0.5) @ heads(v))))
    with collecting() as reports:
        torch.compile(model, backend="hypatia")(*inputs(model.spelling)).sum().backward()
    assert calls(list(reports))[0] == 0


def test_a_graph_that_changes_something_stays_in_training() -> None:
    def write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = heads(q) @ heads(k).mT
        scores[:, :, 0] = 0.0
        return merged(scores.softmax(-1) @ heads(v))

    torch.manual_seed(0)
    model, given = Model(Spelling(write)), inputs(Spelling(write))
    with collecting() as reports:
        found = torch.compile(model, backend="hypatia")(*given)
        torch.testing.assert_close(found, model(*given))
    assert calls(list(reports))[0] == 0
