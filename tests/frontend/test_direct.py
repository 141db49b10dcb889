"""`hypatia.compile`: other sizes, limits for weights, hooks, training, models that are gone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import hypatia
from hypatia.execute import choose, native
from hypatia.execute.timing import Times
from hypatia.frontend import compiled_call
from hypatia.frontend.dynamo import compile_count
from plan_models import Layers, Mixed, _fresh, assert_right  # noqa: F401  (a fixture for this file too)


def test_other_sizes_are_planned_without_a_new_search() -> None:
    model = Mixed(lambda x: x.softmax(-1)).eval()
    compiled = hypatia.compile(model, torch.randn(8, 16))
    before = compile_count()
    with torch.no_grad():
        for rows in (3, 64, 5, 8, 100, 7):
            x = torch.randn(rows, 16)
            assert_right(compiled(x), model, x)
        assert compile_count() == before + 1
        # One row and none are cases of their own.
        for rows in (1, 0):
            x = torch.randn(rows, 16)
            assert torch.equal(compiled(x).isnan(), model(x).isnan())
            torch.testing.assert_close(compiled(x), model(x))
    assert compile_count() == before + 3


def test_sizes_on_which_the_model_branches_are_not_left_open() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() if x.shape[0] < 6 else x.exp()

    model = Branching()
    compiled = hypatia.compile(model, torch.randn(3, 4))
    with torch.no_grad():
        for rows in (4, 5, 6, 7, 3, 9, 2):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), model(x))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(19, 19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x).relu(), 0.5, training=True)


class Adding(Dropping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        x.add_(y)
        return y * 2


@pytest.mark.parametrize("make", [lambda: Layers(F.relu), Dropping, Adding])
def test_a_plan_that_is_wrong_at_other_sizes_is_dropped(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().eval()
    compiled = hypatia.compile(model, torch.randn(8, 19))
    run = native.NativeGraph._settle_sizes

    def wrong(self: native.NativeGraph, args: Any, sizes: Any, results: Any, before: Any) -> Any:
        return run(self, args, sizes, tuple(t + 0.01 for t in results), before)

    def assert_like_the_model(given: torch.Tensor) -> None:
        found, expected = [], []
        for call, into in ((compiled, found), (model, expected)):
            torch.manual_seed(0)
            x = given.clone()
            into += [call(x), x, torch.rand(1)]
        torch.testing.assert_close(found, expected)

    with torch.no_grad():
        compiled(torch.randn(9, 19))
        monkeypatch.setattr(native.NativeGraph, "_settle_sizes", wrong)
        x = torch.randn(10, 19)
        with pytest.warns(hypatia.VerificationWarning, match="at the sizes"):
            assert_like_the_model(x)
        assert_like_the_model(x)


def test_plans_at_several_sizes_share_packed_weights() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    compiled = hypatia.compile(model, torch.randn(8, 256))
    with torch.no_grad():
        compiled(torch.randn(9, 256))
        graph = compiled._last.native.__self__
        once = graph.binding.bytes[1]
        for rows in (10, 11, 12):
            compiled(torch.randn(rows, 256))
    plans = list(graph.binding.bound.values())
    assert len(plans) == 4
    assert graph.binding.bytes[1] == once > 0


def test_copies_of_weights_are_counted_and_capped() -> None:
    model, x = Layers(F.relu).eval(), torch.randn(64, 19)
    free = hypatia.compile(model, x)
    assert free.reports[0].memory[1] > 0
    capped = hypatia.compile(model, x, weight_copies=0)
    with torch.no_grad():
        assert_right(capped(x), model, x)
    assert capped._last.native is None or capped.reports[0].memory[1] == 0


def test_folded_weights_count_too() -> None:
    model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 48)).eval()
    x = torch.randn(32, 40)
    assert hypatia.compile(model, x).reports[0].folded >= 40 * 48 * 4
    capped = hypatia.compile(model, x, weight_copies=1000)
    assert capped.reports[0].folded == 0
    with torch.no_grad():
        assert_right(capped(x), model, x)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "global"])
def test_hooks_are_seen_whenever_they_come(hook: str) -> None:
    model, x, seen = Layers(F.relu).eval(), torch.randn(7, 19), []
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        compiled(x)
        if hook == "global":
            handle = register_module_forward_hook(lambda *_: seen.append(1))
        else:
            handle = getattr(model.second, f"register_{hook}_hook")(lambda *_: seen.append(1))
        try:
            compiled(x)
            assert seen
        finally:
            handle.remove()
        seen.clear()
        assert_right(compiled(x), model, x)
        assert not seen


def test_training_needs_no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    twin = copy.deepcopy(model)
    compiled = hypatia.compile(model)
    monkeypatch.setattr(compiled, "_by_torch", None)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    for step in range(4):
        x, y = torch.randn(16, 12, requires_grad=step == 2), torch.randn(16, 4)
        grads = []
        for m, optimizer in zip((compiled, twin), optimizers, strict=True):
            x.grad = None
            optimizer.zero_grad()
            F.mse_loss(m(x), y).backward()
            optimizer.step()
            grads.append(x.grad)
        if step == 2:
            torch.testing.assert_close(*grads)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert {r.kind for r in compiled.reports} >= {"forward", "backward"}


def test_frozen_parameters_get_no_gradient() -> None:
    model, x = Layers(F.relu), torch.randn(7, 19)
    compiled = hypatia.compile(model)
    compiled(x).sum().backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    model.first.requires_grad_(False)
    compiled(x).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None


@pytest.mark.parametrize("kind", ["torch.compile", "hypatia.compile"])
def test_weights_of_a_model_that_is_gone_are_freed(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).eval(), torch.randn(3, 8)
    with torch.no_grad():
        if kind == "torch.compile":
            compiled = torch.compile(model, backend="hypatia")
        else:
            compiled = hypatia.compile(model, x)
        compiled(x)
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    weights = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    gc.collect()
    assert not any(w() for w in weights)
    assert not any(s() for s in storages)


def test_a_functional_graph_is_not_decomposed() -> None:
    from torch.export import ExportedProgram

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            y.view(-1)[:3].relu_()
            return y.reshape(2, -1)

    plain, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval(), torch.randn(4, 8)
    decomposed = ExportedProgram.run_decompositions
    for model, calls in ((plain, 0), (Reshaped(), 1)):
        with torch.no_grad(), mock.patch.object(ExportedProgram, "run_decompositions", autospec=True) as run:
            run.side_effect = decomposed
            compiled = hypatia.compile(model, x)
            torch.testing.assert_close(compiled(x), model(x))
            assert run.call_count == calls


class _Anything:
    """Stands for recordings, which take tensors of any size."""

    def __init__(self, gm: Any, run: Any, device: torch.device) -> None:
        self._run = run

    def try_on(self, inputs: Any) -> Any:
        return lambda: self._run(list(inputs))

    def direct(self, flat: Any) -> Any:
        return self._run(list(flat))


def test_a_recording_is_for_the_sizes_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes may be numbers in a graph; called in turns, another size must not run it."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().sum(0) / x.shape[0]

    def recorded(
        forms: Any, device: Any, *, plan: Any = None, args: Any = (), record: Any = None, counts: Any = None
    ) -> Any:
        assert record is not None
        record("eager")
        if plan is not None:
            plan.native = False
        return choose.Choice("recording", Times({"recording": 1.0}, {}))

    monkeypatch.setattr(compiled_call, "Recordings", _Anything)
    monkeypatch.setattr(compiled_call, "why_not", lambda gm, device: "")
    monkeypatch.setattr(choose, "fastest", recorded)
    model = Mean()
    with torch.no_grad():
        compiled = hypatia.compile(model)
        for size in (4, 6, 4, 6, 9, 4, 12):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled(x), model(x))
