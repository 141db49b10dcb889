"""Values that depend on no input are computed when a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import hypatia
from hypatia.capture import constant_folding
from hypatia.compiler import pipeline
from hypatia.compiler.report import GraphReport
from tests.support import assert_as_close_as_eager, run_by


@pytest.fixture(autouse=True)
def _errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)
    torch._dynamo.reset()


def _targets(reports: list[GraphReport]) -> str:
    return " ".join(str(n.target) for r in reports for n in r.after.nodes if n.op == "call_function")


class Distances(nn.Module):
    """Attention with a learned bias for each bucket of distances, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, 8).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        places = torch.arange(n)
        far = (places[None, :] - places[:, None]).abs()
        large = 4 + (torch.log(far.float() / 4) * 2).to(torch.long)
        buckets = torch.where(far < 4, far, torch.min(large, torch.full_like(large, 7)))
        bias = self.table(buckets).permute(2, 0, 1)[None]
        mask = torch.where((places[None, :] <= places[:, None]).expand(b, 1, n, n), bias, -1e30)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.contiguous())
        return out.transpose(1, 2).reshape(b, n, d)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_by_distance_is_a_weight(entry: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Distances().to(dtype).eval(), torch.randn(2, 12, 32).to(dtype)
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        exact = Distances().double().eval()
        exact.load_state_dict(model.state_dict())
        assert_as_close_as_eager(found, model(x), exact(x.double()))
    # Neither the buckets nor the lookup are left, nor a copy into another order.
    assert not any(word in _targets(reports) for word in ("arange", "log", "embedding", "where", "clone"))
    assert all(constant_folding.PASS in r.passes for r in reports)


def test_equal_values_of_several_layers_are_there_once() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(12)
            bias = self.table(places.flip(0))
            for _ in range(3):
                x = torch.softmax(x + torch.where(places[None] <= places[:, None], bias, -1e30), -1)
            return x

    model, x = Layers().eval(), torch.randn(2, 12, 12)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    (folded,) = [n for n in compiled.reports[0].after.nodes if n.target == "folded_weights"]
    assert len(folded.users) == 1


def test_changed_weights_are_looked_up_again() -> None:
    torch.manual_seed(0)
    model, x = Distances().eval(), torch.randn(2, 12, 32)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        before = compiled(x)
        model.table.weight.mul_(3.0)
        torch.testing.assert_close(compiled(x), model(x))
        assert not torch.allclose(before, compiled(x))


def _kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(x.shape[-1], dtype=x.dtype)
    return x + places.view(1, -1), places.view(1, -1)


@pytest.mark.parametrize("entry", ["compile", "backend"])
def test_results_are_new_tensors(entry: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _kept(x)

    model, x = Model(), torch.randn(3, 5)
    with torch.no_grad():
        compiled = (
            hypatia.compile(model, x) if entry == "compile" else torch.compile(model, backend="hypatia")
        )
        for _ in range(2):
            found = compiled(x)
            torch.testing.assert_close(found, model(x))
            found[1].add_(1.0)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize(
    "made",
    [
        lambda n: torch.rand(n),
        lambda n: torch.empty(n).zero_() + torch.arange(n),
        lambda n: torch.zeros(n),
    ],
)
def test_what_may_vary_or_is_one_number_stays(entry: str, made: Callable[[int], torch.Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * made(x.shape[-1])

    model, x = Model(), torch.randn(3, 5)
    with torch.no_grad():
        torch.manual_seed(0)
        compiled = (
            hypatia.compile(model, x) if entry == "compile" else torch.compile(model, backend="hypatia")
        )
        compiled(x)
        torch.manual_seed(1)
        found = compiled(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, model(x))


def test_sizes_that_are_open_stay_open() -> None:
    model = Distances().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="hypatia", dynamic=True)
        for n in (12, 16):
            x = torch.randn(2, n, 32)
            torch.testing.assert_close(compiled(x), model(x))


def test_wrong_constants_are_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = constant_folding.computed
    monkeypatch.setattr(
        constant_folding, "computed", lambda nodes: {n: v.flip(0) for n, v in computed(nodes).items()}
    )

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.arange(x.shape[-1], dtype=x.dtype)

    model, x = Model(), torch.randn(3, 5)
    with torch.no_grad():
        with pytest.warns(hypatia.VerificationWarning, match="pass 'constants'"):
            compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))


class Shifted(nn.Module):
    """Scores by distance, as XLNet lays them: what is picked lies side by side."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, i, j = x.shape
        shifted = x.reshape(b, j, i)[:, 1:].reshape(b, i, j - 1)
        picked = torch.index_select(shifted, 2, torch.arange(i))
        picked = picked + torch.index_select(shifted.abs(), 2, torch.arange(i))
        return picked * 2, torch.index_select(x, -1, torch.arange(1, 3))


@pytest.mark.parametrize("entry", ["compile", "backend"])
def test_places_that_follow_each_other_are_a_part(entry: str) -> None:
    model, x = Shifted(), torch.randn(3, 4, 8)
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        for ours, eager in zip(found, model(x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)
            assert ours.stride() == eager.stride()
            assert ours.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert "index_select" not in _targets(reports)


class Numbers(nn.Module):
    """A number that is written in the code, and others that only look so in a graph of torch.export's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.tensor(0.5)
        self.parts = [torch.tensor(2.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        written = torch.where(x > 0, torch.tensor(1.0), torch.tensor(-1.0))
        return written * x + (self.shift.clone() + 1) * (self.parts[0] * 3)


@pytest.mark.parametrize("entry", ["compile", "backend", "optimize"])
def test_tensors_that_may_change_are_no_constants(entry: str) -> None:
    model, x = Numbers().eval(), torch.randn(2, 3)
    with torch.no_grad():
        if entry == "optimize":
            call = hypatia.optimize(model, x)
        else:
            call = (
                hypatia.compile(model, x) if entry == "compile" else torch.compile(model, backend="hypatia")
            )
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x))
            model.shift.add_(1)
            model.parts[0].mul_(2)


class Scaled(nn.Module):
    """Numbers that are computed as tensors, as in DeBERTa."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float) * 3)
        return (x / scale + scale.half()) - scale.double() * x * scale.to(x.dtype)


@pytest.mark.parametrize("entry", ["compile", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_arithmetic_with_one_number_has_the_number(entry: str, dtype: torch.dtype) -> None:
    model, x = Scaled(), torch.randn(4, 8).to(dtype)
    with torch.no_grad():
        found, reports = run_by(entry, model, x)
        exact = model(x.double())
        assert_as_close_as_eager(found, model(x), exact)
        assert found.dtype == dtype
    assert not any(n.op == "get_attr" or "sqrt" in str(n.target) for r in reports for n in r.after.nodes)


class Cache(nn.Module):
    """Places that depend on no input, beside changes in place of what does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1) + self.count
        self.kept.index_copy_(0, places, x)
        seen = torch.arange(8) <= places
        changed = torch.arange(4.0)
        changed.view(2, 2).add_(x.sum())
        self.count.add_(1)
        return (self.kept * seen[:, None]).sum(0) + changed


@pytest.mark.parametrize("entry", ["compile", "backend"])
def test_places_are_constants_beside_changes_in_place(entry: str) -> None:
    torch.manual_seed(0)
    model, twin = Cache(), Cache()
    graphs: list[fx.Graph] = []
    folded = constant_folding.with_constants

    def noted(gm: fx.GraphModule, weights: Any) -> Any:
        found = folded(gm, weights)
        graphs.append(found[0].graph)
        return found

    with torch.no_grad(), mock.patch.object(constant_folding, "with_constants", noted):
        x = torch.randn(1, 4)
        call = hypatia.compile(model, x) if entry == "compile" else torch.compile(model, backend="hypatia")
        for _ in range(3):
            x = torch.randn(1, 4)
            torch.testing.assert_close(call(x), twin(x))
            torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    left = [n for n in graphs[0].nodes if n.target is torch.ops.aten.arange.default]
    assert not left, graphs[0]
