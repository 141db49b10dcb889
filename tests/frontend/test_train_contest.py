"""torch.compile trains by the compiled passes only where they are faster than eager."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hypatia
from hypatia.execute import timing
from hypatia.execute.binding import Binding
from hypatia.frontend.train_contest import Contest
from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def prefer(monkeypatch: pytest.MonkeyPatch, first: str) -> list[str]:
    asked: list[str] = []

    def instead(forms: Sequence[str]) -> dict[str, float]:
        asked.extend(forms)
        return {name: 1.0 if name == first else 2.0 for name in forms}

    monkeypatch.setattr(timing, "instead", instead)
    return asked


def trained(net: nn.Module, run: nn.Module, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(6, 8)
    for _ in range(steps):
        net.zero_grad()
        run(x).square().sum().backward()
    return [*(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]


@pytest.mark.parametrize("kept", ["eager", "plain"])
def test_the_faster_one_runs_and_computes_the_same(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prefer(monkeypatch, kept)
    made = contests(monkeypatch)
    ours, eager = model(), model()
    eager.load_state_dict(ours.state_dict())
    found = trained(ours, torch.compile(ours, backend="hypatia"), 4)
    expected = trained(eager, eager, 4)
    torch.testing.assert_close(found, expected)
    (contest,) = made
    assert "plain" in asked
    assert (contest._run is contest._eager) == (kept == "eager")
    assert kept == "plain" or {p.report.kept for p in contest._passes if p.report} == {"eager"}


def test_plans_of_a_step_that_eager_does_faster_hold_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"plan": 1.0, "eager": 2.0}
    monkeypatch.setattr(timing, "instead", lambda forms: {name: order.get(name, 3.0) for name in forms})
    bound: list[Binding] = []
    bind = Binding.bind

    def noted(self: Binding, *args: Any) -> Any:
        bound.append(self)
        return bind(self, *args)

    monkeypatch.setattr(Binding, "bind", noted)
    for entry in (hypatia.compile, lambda net: torch.compile(net, backend="hypatia")):
        net = model()
        trained(net, entry(net), 4)
    assert len(bound) >= 4
    assert not any(binding.bound or binding.only for binding in bound)


def test_inference_has_no_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prefer(monkeypatch, "eager")
    net = model().eval()
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, backend="hypatia")(x), net(x))
    assert "plain" not in asked


def contests(monkeypatch: pytest.MonkeyPatch) -> list[Contest]:
    made: list[Contest] = []
    start = Contest.__init__
    monkeypatch.setattr(Contest, "__init__", lambda self, *a: (made.append(self), start(self, *a))[1])
    return made


def test_a_step_runs_without_what_aotautograd_does_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "plain")
    made = contests(monkeypatch)
    ours, eager = model(), model()
    eager.load_state_dict(ours.state_dict())
    run = torch.compile(ours, backend="hypatia")
    trained(ours, run, 3)
    trained(eager, eager, 3)
    (contest,) = made

    def never(*args: object) -> object:
        raise AssertionError("AOTAutograd's wrappers ran")

    monkeypatch.setattr(contest, "_compiled", never)
    torch.testing.assert_close(trained(ours, run, 1), trained(eager, eager, 1))
    # Two forward passes, then both backward passes.
    x, y = torch.randn(6, 8), torch.randn(6, 8, requires_grad=True)
    found = []
    for net, call in ((ours, run), (eager, eager)):
        net.zero_grad()
        torch.manual_seed(5)
        first, second = call(x), call(y)
        (first.sum() + second.square().sum()).backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_other_parameters_are_not_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "plain")
    made = contests(monkeypatch)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    run = torch.compile(net, backend="hypatia")
    trained(net, run, 3)
    for _ in range(2):
        net[0].weight = nn.Parameter(torch.randn(16, 8))
        found = [t.clone() for t in trained(net, run, 1)]
        torch.testing.assert_close(found, trained(net, net, 1))
    assert made


@pytest.mark.parametrize("entry", ["torch", "direct"])
def test_what_checkpoints_see_is_what_they_saw_before(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prefer(monkeypatch, "plain")
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    run = torch.compile(net, backend="hypatia") if entry == "torch" else hypatia.compile(net)
    x = torch.randn(6, 8, requires_grad=True)
    found = []
    for call in (run, net):
        torch.manual_seed(2)
        for _ in range(4):
            net.zero_grad()
            checkpoint(call, x, use_reentrant=False).square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*found)
    # Calls that are only timed would be counted.
    assert "plain" not in asked


def test_autocast_is_part_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "plain")
    made = contests(monkeypatch)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    run = torch.compile(net, backend="hypatia")
    x = torch.randn(6, 8)
    for _ in range(4):
        found = []
        for call in (run, net):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                result = call(x)
            result.square().sum().backward()
            assert result.dtype == torch.bfloat16
            found.append([result.detach(), *(p.grad for p in net.parameters())])
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    assert made[0]._run is not made[0]._compiled


def test_a_step_does_not_keep_the_parameters_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "plain")
    made = contests(monkeypatch)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    run = torch.compile(net, backend="hypatia")
    trained(net, run, 4)
    (contest,) = made
    assert contest._run is not contest._compiled
    # Another one, which the step is not for.
    net[0].weight = nn.Parameter(torch.randn(16, 8))
    net.zero_grad()
    gc.collect()
    assert contest._run is contest._compiled
    assert not contest._parameters
