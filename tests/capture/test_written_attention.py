"""Attention that is written as products and a softmax becomes a call of torch's, where that is the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia
from hypatia.capture import attention_calls
from hypatia.compiler import pipeline
from tests.support import assert_as_close_as_eager, run_by

Masked = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)
    torch._dynamo.reset()


class Written(nn.Module):
    """Attention as models write it; ``masked`` does something to the scores."""

    def __init__(self, masked: Masked, *, wide: bool = False, width: int = 32) -> None:
        super().__init__()
        self.masked, self.wide = masked, wide
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, d // 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if self.wide:
            q, k = q.float(), k.float()
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d // 4)
        shares = torch.softmax(self.masked(scores), -1).to(v.dtype)
        return torch.matmul(shares, v).permute(0, 2, 1, 3).contiguous().view(b, n, d)


class Flat(Written):
    """The same with batch and heads in one dimension but where a mask is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        parts = (t.view(b, n, 4, d // 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        q, k, v = (t.reshape(4 * b, n, d // 4) for t in parts)
        scores = torch.bmm(q * (d // 4) ** -0.5, k.transpose(1, 2))
        scores = self.masked(scores.view(b, 4, n, n)).view(4 * b, n, n)
        shares = torch.softmax(scores, -1)
        return torch.bmm(shares, v).view(b, 4, n, d // 4).transpose(1, 2).reshape(b, n, d)


def _later(s: torch.Tensor) -> torch.Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril()


def _window(s: torch.Tensor) -> torch.Tensor:
    return _later(s) & ~_later(s).tril(-4)


def _hidden(seen: torch.Tensor, s: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(seen, torch.zeros((), dtype=s.dtype), value)


TAKEN = {
    "nothing": lambda s: s,
    "least": lambda s: s + _hidden(_later(s), s, torch.finfo(s.dtype).min),
    "infinite": lambda s: s + _hidden(_later(s), s, -math.inf),
    "batches": lambda s: s + _hidden(_later(s).expand(s.shape[0], 1, -1, -1), s, -math.inf),
    "window": lambda s: s + _hidden(_window(s), s, -math.inf),
    "filled": lambda s: s.masked_fill(~_window(s), -math.inf),
    "where": lambda s: torch.where(_later(s), s, -math.inf),
    "twice": lambda s: s.masked_fill(~_later(s), -math.inf) + _hidden(_window(s), s, -math.inf),
    "scaled": lambda s: s * 2.0,
}
ADDED = {
    # Rows that see nothing are NaN, or uniform if what hides is finite.
    "row of nothing": lambda s: s + _hidden(_later(s).tril(-1), s, -math.inf),
    "row of the least": lambda s: s + _hidden(_later(s).tril(-1), s, torch.finfo(s.dtype).min),
    "not hidden": lambda s: s + _hidden(_later(s), s, -100.0),
    "scaled afterwards": lambda s: (s + _hidden(_later(s), s, -1e30)) * 1e-5,
    "a bias": lambda s: s + torch.arange(s.shape[-1], dtype=s.dtype),
    # Keys are queries.
    "turned": lambda s: s.transpose(-1, -2),
}
LEFT = {
    "of the input": lambda s: s.masked_fill(s > 1.0, -math.inf),
    "other rows": lambda s: s.reshape(s.shape[0], -1, *s.shape[-2:]).flip(-2),
    "filled and shrunk": lambda s: s.masked_fill(~_later(s), -1e30) * 1e-5,
}


def _checked(entry: str, model: nn.Module, x: torch.Tensor) -> bool:
    """Whether attention is a call; results are as close as eager's."""
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        exact = copy.deepcopy(model).double()
        assert_as_close_as_eager(found, model(x), exact(x.double()))
    calls = {str(n.target) for r in reports for n in r.after.nodes}
    whole = "aten.scaled_dot_product_attention.default" in calls
    assert whole != any("softmax" in call for call in calls)
    assert all((attention_calls.PASS in r.passes) == whole for r in reports)
    return whole


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("masked", TAKEN)
def test_attention_is_one_call(entry: str, masked: str) -> None:
    torch.manual_seed(0)
    assert _checked(entry, Written(TAKEN[masked]).eval(), torch.randn(2, 12, 32))


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("masked", ["nothing", "least", "batches"])
def test_batch_and_heads_in_one_dimension(entry: str, masked: str) -> None:
    torch.manual_seed(0)
    assert _checked(entry, Flat(TAKEN[masked]).eval(), torch.randn(2, 12, 32))


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("masked", ["nothing", "least", "filled"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [(2, 12, 32), (1, 1, 8), (3, 33, 64)])
def test_of_16_bits_and_other_sizes(entry: str, masked: str, wide: bool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Written(TAKEN[masked], wide=wide, width=sizes[-1]).bfloat16().eval()
    assert _checked(entry, model, torch.randn(sizes).bfloat16())


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("masked", ADDED)
def test_what_is_added_is_as_in_eager(entry: str, masked: str) -> None:
    torch.manual_seed(0)
    model, x = Written(ADDED[masked]).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        torch.testing.assert_close(found, model(x), equal_nan=True)
    assert all(attention_calls.PASS in r.passes for r in reports)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("masked", LEFT)
def test_what_is_not_the_same_stays(entry: str, masked: str) -> None:
    torch.manual_seed(0)
    model, x = Written(LEFT[masked]).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        torch.testing.assert_close(found, model(x), equal_nan=True)
    assert not any(attention_calls.PASS in r.passes for r in reports)


@pytest.mark.parametrize("masked", ["nothing", "least", "window"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_where_eager_has_a_number_there_is_one(masked: str, odd: float) -> None:
    torch.manual_seed(0)
    model, x = Written(TAKEN[masked]).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        compiled(x)
        x[0, 5, 3] = odd
        found, expected = compiled(x), model(x)
    numbers = expected.isfinite()
    torch.testing.assert_close(found[numbers], expected[numbers])
    # What sees the odd number itself has none.
    assert not found[0, 5].isfinite().any()


class Conditional(Written):
    """A buffer says which scores count, as in GPT-Neo; some of its rows hide everything, or all but what the
    mask hides."""

    def __init__(self, number: float, hidden: float, **kwargs: object) -> None:
        def masked(s: torch.Tensor) -> torch.Tensor:
            s = torch.where(self.kept, s, number)
            return s + _hidden(_window(s), s, hidden).to(s.dtype)

        super().__init__(masked, **kwargs)
        self.register_buffer("kept", torch.rand(1, 1, 12, 12) < 0.7)
        self.kept[..., 3, :] = False
        self.kept[..., 7, :8] = False


@pytest.mark.parametrize("number", [-3e38, -1.1e30])
@pytest.mark.parametrize("hidden", [-math.inf, -3.1e38, -2.9e38, -1.1e30])
def test_rows_that_a_condition_hides_are_as_in_the_model(number: float, hidden: float) -> None:
    torch.manual_seed(0)
    model, x = Conditional(number, hidden).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert attention_calls.PASS in compiled.reports[0].passes


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize(("number", "hidden"), [(-3e38, -math.inf), (-3e38, -2.9e38), (-1.1e30, -1.1e30)])
@pytest.mark.parametrize("wide", [False, True])
def test_conditions_of_16_bits(entry: str, number: float, hidden: float, wide: bool) -> None:
    torch.manual_seed(0)
    model, x = Conditional(number, hidden, wide=wide).bfloat16().eval(), torch.randn(2, 12, 32).bfloat16()
    assert _checked(entry, model, x)


def test_a_condition_that_changes_counts() -> None:
    torch.manual_seed(0)
    model, x = Conditional(-3e38, -2.9e38).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
        model.kept.copy_(torch.rand(1, 1, 12, 12) < 0.3)
        torch.testing.assert_close(compiled(x), model(x))
    assert attention_calls.PASS in compiled.reports[0].passes


def test_shares_that_are_a_result_stay() -> None:
    class Model(nn.Module):
        def forward(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shares = torch.softmax(q @ q.transpose(-1, -2), -1)
            return shares @ q, shares

    model, x = Model(), torch.randn(2, 4, 6, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert not any(attention_calls.PASS in r.passes for r in compiled.reports)


def test_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    model, x = Written(TAKEN["least"]), torch.randn(2, 12, 32, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    compiled = torch.compile(model, backend="hypatia")
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("numerics", "calls"), [("exact", False), ("wider", False), ("reassoc", True)])
def test_it_stays_where_nothing_may_be_rounded_otherwise(numerics: str, calls: bool) -> None:
    model, x = Written(TAKEN["infinite"]).eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        compiled = hypatia.compile(model, x, numerics=numerics)
        compiled(x)
    passes = [name for report in compiled.reports for name in report.passes]
    assert (attention_calls.PASS in passes) == calls


@pytest.mark.parametrize("masked", ["nothing", "infinite"])
def test_sizes_that_are_open(masked: str) -> None:
    model, x = Written(TAKEN[masked]).eval(), torch.randn(4, 12, 32)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        made = hypatia.optimize(model, x, dynamic_shapes={"x": {0: batch}})
        for n in (2, 4, 7):
            other = torch.randn(n, 12, 32)
            torch.testing.assert_close(made(other), model(other))
    calls = {str(n.target) for n in made.graph.nodes}
    assert "aten.scaled_dot_product_attention.default" in calls
