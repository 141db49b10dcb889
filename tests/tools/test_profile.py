"""Profiles: steps of plans with their times and limits, and kernels of peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hypatia
from hypatia import store
from hypatia.devices import cuda_steps
from hypatia.devices.calibration import Rates
from hypatia.devices.rates import rates
from hypatia.execute.native import NativeGraph
from hypatia.execute.step_times import plan_calls, step_times
from hypatia.tools.cli import cli
from hypatia.tools.profile import OTHERS, kind_of

RATES = Rates(
    bandwidth=1e9,
    products={"f32": 1e9, "bf16": 4e9},
    by_size=[],
    products_by_size={},
    vector=1e9,
    launch=1e-6,
    host=1e-6,
    parallel=False,
    calls={"other": [1e-6, 1.0]},
)


class Net(nn.Module):
    """Two layers around a call of torch's, and a buffer that each call adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.last(torch.cumsum(torch.relu(self.first(x)), -1))


def profiled(x: torch.Tensor) -> tuple[Net, Any]:
    model = Net().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        compiled(x)
        with plan_calls() as calls:
            compiled(x)
    (call,) = calls
    return model, call


def test_every_step_has_a_time_and_what_it_has_to_do() -> None:
    model, (native, args) = profiled(torch.randn(8, 32))
    before = model.calls.clone()
    steps = step_times(native, args, repeats=3)
    assert steps is not None
    assert [step.name for step in steps] == native.binding.steps
    assert all(step.seconds > 0 and step.least > 0 and step.predicted > 0 for step in steps)
    assert torch.equal(model.calls, before), "what a plan changes is copied"
    products = {step.multiplications: step for step in steps if step.multiplications}
    assert set(products) == {8 * 32 * 64, 8 * 64 * 16}
    assert products[8 * 32 * 64].sizes == "f32[8, 32] f32[64, 32] f32[64] -> f32[8, 64]"
    assert products[8 * 32 * 64].moved == 4 * (8 * 32 + 64 * 32 + 64 + 8 * 64)


def test_arguments_without_a_plan_have_no_steps() -> None:
    _, (native, args) = profiled(torch.randn(8, 32))
    others = [torch.randn(3, 5) if a is args[-1] else a for a in args]
    assert step_times(native, others, repeats=1) is None


def test_only_calls_of_this_context_are_collected() -> None:
    model = nn.Linear(8, 8).eval()
    compiled = hypatia.compile(model, torch.randn(2, 8))
    with torch.no_grad(), plan_calls() as calls:
        compiled(torch.randn(2, 8))
    assert len(calls) == 1
    with torch.no_grad():
        compiled(torch.randn(2, 8))
    assert len(calls) == 1


def test_calls_are_collected_until_the_last_one_asks_no_more() -> None:
    run = NativeGraph.run
    first, second = plan_calls(), plan_calls()
    first.__enter__()
    calls = second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        hypatia.compile(nn.Linear(8, 8).eval())(torch.randn(2, 8))
    assert calls
    second.__exit__(None, None, None)
    assert NativeGraph.run is run


def test_a_limit_is_what_takes_longer() -> None:
    assert RATES.seconds(1e9, 5e8, "f32") == 1.0
    assert RATES.seconds(1e8, 5e8, "f32") == 0.5
    assert RATES.seconds(1e8, 8e8, "bf16") == 0.2
    assert RATES.seconds(0, 1e9, "f64") == 1.0, "what was not measured counts as fp32"


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(store.SWITCH_VARIABLE, "on")
    from hypatia.devices import rates as module

    times: list[torch.device] = []
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "measured", lambda device: times.append(device) or RATES)
    cpu = torch.device("cpu")
    assert rates(cpu) == rates(cpu) == RATES
    assert len(times) == 1
    (entry,) = [e for e in store.entries() if e.kind == module.KIND]
    entry.path.write_bytes(b"{")
    assert rates(cpu) == RATES, "what cannot be read is measured again"


def test_rates_of_an_older_version_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(store.SWITCH_VARIABLE, "on")
    from hypatia.devices import rates as module

    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "measured", lambda device: RATES)
    cpu = torch.device("cpu")
    old = json.dumps({"bandwidth": 1e9, "products": {"f32": 1e9}}).encode()
    store.put(module.KIND, module._key(cpu), old)
    assert rates(cpu) == RATES
    kept = store.get(module.KIND, module._key(cpu))
    assert kept is not None
    assert kept != old
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "measured", lambda device: pytest.fail("they are kept"))
    assert rates(cpu) == RATES


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    def mark(step: int, start: float) -> dict[str, Any]:
        return {"cat": "user_annotation", "name": f"hypatia step {step}", "ts": start, "dur": 10.0}

    def launch(at: float, number: int, by: str = "cuda_driver") -> dict[str, Any]:
        return {"cat": by, "name": "launch", "ts": at, "dur": 1.0, "args": {"correlation": number}}

    def kernel(number: int, taken: float, kind: str = "kernel") -> dict[str, Any]:
        return {"cat": kind, "name": "k", "ts": 999.0, "dur": taken, "args": {"correlation": number}}

    events = [
        *(mark(0, 0.0), mark(1, 20.0), mark(0, 100.0), mark(1, 120.0)),
        *(launch(1.0, 1), launch(5.0, 2, "cuda_runtime"), launch(21.0, 3), launch(15.0, 9)),
        *(launch(101.0, 4), launch(121.0, 5)),
        *(kernel(1, 2.0), kernel(2, 3.0, "gpu_memset"), kernel(3, 7.0), kernel(9, 50.0)),
        *(kernel(4, 7.0), kernel(5, 9.0)),
        {"cat": "cpu_op", "name": "other", "ts": 0.0, "dur": 1.0},
        {"name": "without a kind", "ts": 0.0},
    ]
    assert cuda_steps.by_step(events, 3) == pytest.approx([6e-6, 8e-6, 0.0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear + relu", "products"),
        ("nvjet_tst_128x64", "products"),
        ("aten::addmm", "products"),
        ("aten::mkldnn_convolution", "convolutions"),
        ("depthwise 3x3 over [1, 8, 8, 4]", "convolutions"),
        ("aten.scaled_dot_product_attention.default", "attention"),
        ("flash_fwd_kernel", "attention"),
        ("triton_per_fused_native_layer_norm_0", "norms, softmax and sums"),
        ("triton_poi_fused_add_relu_1", OTHERS),
        ("pointwise over [8]", OTHERS),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_bench_shows_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    asked = ["bench", "tiny_b64", "--backend", "eager", "--profile", "--device", "cpu", "--repeats", "1"]
    ran = CliRunner().invoke(cli, [*asked, "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    for text in ("steps of the plan", "linear + relu", "predicted", "kind of work", "eager: longest"):
        assert text in ran.output
    (profile,) = json.loads(file.read_text())["profiles"]
    assert [line["count"] for line in profile["steps"]] == [1, 1, 1]
    assert profile["kinds"]["hypatia"]["products"] > 0
    assert profile["kinds"]["predicted"]["products"] > 0
    assert all(line["predicted"] > 0 for line in profile["steps"])


def test_a_report_has_the_steps_of_the_plan() -> None:
    report = hypatia.explain(Net().eval(), torch.randn(8, 32))
    names = [line.name for line in report.steps]
    assert any("linear" in name for name in names)
    assert [line["name"] for line in report.json()["steps"]] == names
    for text in (report.text(), report.html()):
        assert "Steps of the plan" in text
        assert "predicted" in text
        assert "f32[8, 32] f32[64, 32] f32[64]" in text
    assert not hypatia.explain(Net().eval(), torch.randn(8, 32), timings=False).steps


def test_a_report_does_without_steps_where_there_is_no_memory_to_time_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> Rates:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("hypatia.execute.step_times.rates", full)
    assert not hypatia.explain(Net().eval(), torch.randn(8, 32)).steps


def test_profiles_are_of_inference() -> None:
    ran = CliRunner().invoke(cli, ["bench", "tiny_b64", "--profile", "--training", "--device", "cpu"])
    assert ran.exit_code == 2
    assert "inference" in ran.output
