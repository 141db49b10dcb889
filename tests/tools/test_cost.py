"""Predictions beside measurements: ratios, kinds, and what is printed."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    sys.modules.pop("cost", None)
    return importlib.import_module("cost")


def step(name: str, kind: str, predicted: float, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "model": "net",
        "name": name,
        "kind": kind,
        "call": "",
        "predicted": predicted,
        "seconds": seconds,
        "again": 1.0,
    }


def test_shares_of_ratios(cost: ModuleType) -> None:
    found = cost.shares([1.0, 1.2, 0.78, 1.5, 3.0])
    assert found == {"count": 5, "median": 1.2, "within 20%": 0.4, "within 25%": 0.6, "within 50%": 0.8}
    assert math.isnan(cost.shares([])["median"])
    rows = [step("a", "linear", 2.0), step("b", "linear", 1.0, seconds=0.0)]
    assert cost.ratios(rows) == [2.0], "what took no time has no ratio"


def test_the_worst_kinds_come_first(cost: ModuleType) -> None:
    steps = [
        step("linear + relu", "linear", 1.1),
        step("linear", "linear", 0.9, seconds=2.0),
        step("pointwise over [8]", "region", 0.25),
        step("aten.mean.dim", "torch", 2.0),
    ]
    told = cost.summary(steps, [{"predicted": 1.0, "seconds": 1.0, "again": 1.0}])
    assert [*told["kinds"]][:2] == ["region: pointwise", "torch reduction: aten.mean.dim"]
    assert told["kinds"]["linear: linear"]["count"] == 2
    assert told["kinds"]["linear: linear"]["share of time"] == pytest.approx(3 / 5)
    assert told["plans"]["within 20%"] == 1.0


def test_the_best_of_several_calibrations(cost: ModuleType) -> None:
    from hypatia.devices.calibration import Rates

    def made(speed: float) -> Rates:
        return Rates(
            bandwidth=speed,
            products={"f32": speed},
            by_size=[[1e3, speed]],
            products_by_size={"f32": [[1e3, speed]]},
            vector=speed,
            launch=1 / speed,
            host=1 / speed,
            parallel=False,
            calls={"other": [1 / speed, 2.0]},
        )

    assert cost.fastest([made(1.0), made(4.0), made(2.0)]) == made(4.0)


def test_a_model_is_measured_and_written(
    cost: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert cost.main(["--only", "^mlp_2$", "--seconds", "0", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("predicted over measured", "worst kinds of steps", "| mlp_2 | 2 |"):
        assert text in printed
    found = json.loads(file.read_text())
    assert [s["kind"] for s in found["steps"]] == ["linear", "linear"]
    assert all(s["predicted"] > 0 and s["seconds"] > 0 for s in found["steps"])
    assert found["summary"]["steps"]["count"] == 2
    assert not found["failed"]
