"""Plans of training steps: on a CPU, and for a GPU, made without one: what their steps are."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.capture import channels_last, recorder
from hypatia.compiler import pipeline
from hypatia.devices import cuda, table
from hypatia.options import Options


class Net(nn.Module):
    """Convolutions with batch norms, one of them in a residual branch, and one over rows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 8), (8, 8)
        self.convolutions = nn.ModuleList([nn.Conv2d(*n, 3, padding=1, bias=False) for n in sizes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.rows, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.convolutions[0](x)))
        x = torch.relu(self.norms[1](self.convolutions[1](x)) + x)
        return self.last(self.rows(x.mean((2, 3))))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Steps of the plans that are made; what is captured on a CPU counts as a GPU's."""
    monkeypatch.setattr(cuda, "available", lambda: None)
    monkeypatch.setattr(table.Cpu, "rewrites_training", lambda self: True)
    monkeypatch.setattr(channels_last, "LEAST", 1)
    monkeypatch.setattr(channels_last, "_DTYPES", (torch.float32,))
    capture, planner_of = pipeline.capture, pipeline.plans.planner_of
    found: list[list[str]] = []

    def captured(*args: Any, **kwargs: Any) -> Any:
        made = capture(*args, **kwargs)
        text = made.text.replace('"cpu"', '"cuda:0"').replace(" cpu", " cuda:0")
        return dataclasses.replace(made, device=torch.device("cuda:0"), text=text)

    def noted(*args: Any, **kwargs: Any) -> Any:
        planner = planner_of(*args, **kwargs)
        assert not isinstance(planner, str), planner
        found.append(json.loads(planner.at(planner.hints).describe())["steps"])
        return "nothing runs it"

    monkeypatch.setattr(pipeline, "capture", captured)
    monkeypatch.setattr(pipeline.plans, "planner_of", noted)
    return found


def test_batch_norms_are_columns_and_regions(plans: list[list[str]]) -> None:
    torch.manual_seed(0)
    hypatia.compile(Net())(torch.randn(4, 3, 6, 5)).square().mean().backward()
    forward, backward = (Counter(steps) for steps in plans[:2])
    assert forward["column moments of [4, 6, 5, 8]"] == 2
    assert forward["column moments of [4, 8]"] == 1
    # Each norm is one step after its moments, with the ReLU and the sum; so are both sums of its gradient.
    assert forward["pointwise over [4, 6, 5, 8]"] == 2
    assert backward["column sums and sums of [4, 6, 5, 8]"] == 2
    assert backward["column sums and sums of [4, 8]"] == 1
    # What moves and counts is written where it lies, all norms of a size in one step.
    assert forward["pointwise over []"] == 1
    assert forward["pointwise over [8]"] == 4
    assert not any("copy_" in step or "batch_norm" in step for step in [*forward, *backward])
    # Nothing is turned from channels last to channels first and back.
    assert not any(step.startswith("pointwise over [4, 8, 6, 5]") for step in [*forward, *backward])


class Cache(nn.Module):
    """Fills a cache, and keeps what was in it before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, size in (("cache", (3, 4)), ("old", (3, 4)), ("sums", (4,))):
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.old.copy_(self.cache * 2)
        self.cache.mul_(0.5).add_(y.detach()[:3])
        self.sums.add_(self.cache.sum(0))
        self.count.add_(1)
        return y * self.cache.sum()


def test_what_is_written_back_is_computed_of_what_was_there(plans: list[list[str]]) -> None:
    hypatia.compile(Cache())(torch.randn(5, 4)).square().mean().backward()
    steps = plans[0]
    assert not any("copy_" in step for step in steps), steps
    # Both are computed of what was there, and then written by one step, when everything has read that.
    places = [at for at, step in enumerate(steps) if step == "pointwise over [3, 4]"]
    assert len(places) == 3, steps
    assert all(step.startswith("pointwise") for step in steps[places[-1] :]), steps


@pytest.mark.parametrize("images", [1, 3])
def test_a_norm_of_one_number_is_torchs(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    """It is the number without its sign, and does not overflow where a square would."""
    monkeypatch.setattr(cuda, "available", lambda: None)

    def fake(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        return self._fakes.like(tensor.shape, tensor.stride(), tensor.dtype, torch.device("cuda:0"))

    monkeypatch.setattr(recorder._Recorder, "_fake", fake)
    x = torch.randn(images, 8, 6, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        gm, _ = recorder.recorded(_Scaled(), (x,), {})
        planner = pipeline.compile_graph(gm, pipeline.Request(Options.parse(None), "inference")).planner
    assert planner is not None
    steps = json.loads(planner.at(planner.hints).describe())["steps"]
    assert any("column norms" in step for step in steps) == (images > 1), steps


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x * 2, dim=0)


class Layers(nn.Module):
    """Two linear layers over rows of a batch, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.first(x)) * 2)


def test_both_passes_have_plans_on_a_cpu() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 5, 16)
    run = hypatia.compile(model)
    for _ in range(2):
        run(x).square().mean().backward()
    assert [(r.kind, r.kept) for r in run.reports] == [("forward", "plan"), ("backward", "plan")]


def test_a_linear_layer_over_rows_of_a_batch_rounds_once() -> None:
    """Torch's own ``linear`` into given memory is a product and an addition, each of which rounds."""
    torch.manual_seed(0)
    model, x = Layers().bfloat16(), torch.randn(3, 37, 16, dtype=torch.bfloat16)
    run = hypatia.compile(model)
    run(x).sum().backward()
    assert run.reports[0].kept == "plan"
    found = run(x)
    rounded = model(x)
    # Where the activation is rounded otherwise, a few results are.
    assert (found != rounded).float().mean() < 0.05
