"""On a CPU, torch.compile trains by the compiled passes only where they are faster than eager."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from hypatia.execute import timing
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
    made: list[Contest] = []
    start = Contest.__init__
    monkeypatch.setattr(Contest, "__init__", lambda self, *a: (made.append(self), start(self, *a))[1])
    ours, eager = model(), model()
    eager.load_state_dict(ours.state_dict())
    found = trained(ours, torch.compile(ours, backend="hypatia"), 4)
    expected = trained(eager, eager, 4)
    torch.testing.assert_close(found, expected)
    (contest,) = made
    assert "plain" in asked
    assert (contest._run is contest._eager) == (kept == "eager")
    assert kept == "plain" or {p.report.kept for p in contest._passes if p.report} == {"eager"}


def test_inference_has_no_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prefer(monkeypatch, "eager")
    net = model().eval()
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, backend="hypatia")(x), net(x))
    assert "plain" not in asked
