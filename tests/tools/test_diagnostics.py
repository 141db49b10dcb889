"""The diagnostics of bench/ hold today, and fall short when something is wrong."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hypatia.tools import bench, measure
from hypatia.tools.workloads import KERNELS

BENCH = Path(__file__).parents[2] / "bench"
BINARY = BENCH.parent / "target" / "release" / "hypatia-opt"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a diagnostic and gives a function that runs it and returns its exit code and its cases."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.0)

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(module: ModuleType, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        file = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["diagnostic", "--json", str(file), *arguments])
        code = module.main()
        assert "cases in" in capsys.readouterr().out
        return code, json.loads(file.read_text())["cases"]

    return call


def test_dual_mode(load: Any, run: Any) -> None:
    code, cases = run(load("dual_mode"), "--device", "cpu")
    assert code == 0, cases
    assert len(cases) == 9


def test_dual_mode_falls_short_when_faults_are_not_noticed(load: Any, run: Any, monkeypatch: Any) -> None:
    module = load("dual_mode")
    monkeypatch.setattr(module, "FAULTS", [("no fault at all", contextlib.nullcontext)])
    code, cases = run(module, "--device", "cpu")
    assert code == 1
    assert [c["ok"] for c in cases] == [False] * 3


def test_fused_modules(load: Any, run: Any) -> None:
    module = load("fused_modules")
    code, cases = run(module, "--device", "cpu")
    assert code == 0, [c for c in cases if c["short"]]
    assert len(cases) == 3 * len(module.PAIRS)


def test_fused_modules_fall_short_with_the_wrong_activation(load: Any, run: Any, monkeypatch: Any) -> None:
    module = load("fused_modules")
    swapped = module._layer("swapped", module.FusedLinearGELU, module._tanh_gelu)
    monkeypatch.setattr(module, "PAIRS", [swapped])
    code, cases = run(module, "--device", "cpu")
    assert code == 1
    assert not cases[0]["ok"], "the two forms of GELU differ by more than fp32 rounds"


def test_kernel_only(load: Any, run: Any, monkeypatch: Any) -> None:
    module = load("kernel_only")
    monkeypatch.setattr(module, "KERNELS", KERNELS[:1])
    monkeypatch.setattr(module, "timed", lambda *_: (1.0, 1.0))
    code, cases = run(module, "--device", "cpu", "--rows", "1")
    assert code == 0
    assert cases[0]["ratio"] == 1.0
    assert cases[0]["error"] <= 2 * cases[0]["eager_error"] + 1e-5
    monkeypatch.setattr(module, "timed", lambda *_: (0.8, 1.0))
    code, cases = run(module, "--device", "cpu", "--rows", "1")
    assert code == 1
    assert "slower: 0.80x" in cases[0]["short"]


def test_kernel_only_falls_short_on_a_wrong_kernel(load: Any, run: Any, monkeypatch: Any) -> None:
    module = load("kernel_only")
    monkeypatch.setattr(module, "KERNELS", KERNELS[:1])
    monkeypatch.setattr(module, "timed", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(module.FusedLinearReLU, "activate", lambda _, x: torch.relu(x) * 1.001)
    code, cases = run(module, "--device", "cpu", "--rows", "1")
    assert code == 1
    assert "roundings from float64" in cases[0]["short"]


def test_kernel_only_measures_a_slow_module_again(load: Any, monkeypatch: Any) -> None:
    module = load("kernel_only")
    times = iter([(1.0, 2.0), (1.0, 1.5), (1.0, 1.0), (9.0, 1.0)])

    def compare(*_: Any, **__: Any) -> dict[str, float]:
        return dict(zip(("eager", "fused"), next(times), strict=True))

    monkeypatch.setattr(module, "compare", compare)
    assert module.timed(nn.ReLU(), nn.ReLU(), torch.ones(2), "cpu") == (1.0, 1.0)


def test_mlp_sweep(load: Any, run: Any, monkeypatch: Any) -> None:
    module = load("mlp_sweep")
    monkeypatch.setattr(module, "LEAST_RATIO", 0.0)
    code, cases = run(module, "--device", "cpu", "--only", "tiny_b64", "--repeats", "1")
    assert code == 0, cases
    assert cases[0]["hypatia"]["correct"] is True


def test_mlp_sweep_falls_short(load: Any) -> None:
    shortfall = load("mlp_sweep").shortfall

    def ours(*samples: float, **changed: Any) -> bench.Cell:
        return bench.Cell(
            "m",
            "hypatia",
            microseconds=samples[-1],
            correct=True,
            samples=[*samples],
            **{"error": 1e-7, **changed},
        )

    eager = bench.Cell("m", "eager", microseconds=1.0, correct=True, samples=[1.0, 1.0])
    slow = bench.Cell("m", "aot-eager", microseconds=1.3, samples=[1.3, 1.3])
    assert shortfall(eager, ours(1.0, 1.1), eager) == ""
    assert shortfall(eager, ours(1.0, 5.0), eager) == "", "one undisturbed sample is enough"
    assert "slower: 0.80x of eager" in shortfall(eager, ours(1.25, 1.25), eager)
    assert shortfall(eager, ours(1.25, 1.25), slow) == "", "no slower than torch.compile alone"
    wrong = ours(1.0)
    wrong.correct = False
    assert "wrong" in shortfall(eager, wrong, eager)
    assert "tired" in shortfall(eager, bench.Cell("m", "hypatia", reason="tired"), eager)


@pytest.mark.skipif(
    not BINARY.exists(), reason="hypatia-opt is not built (cargo build --release -p hypatia-core)"
)
def test_without_pytorch() -> None:
    command = [sys.executable, BENCH / "without_pytorch.py", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert len(cases) > 10
    assert all(c["holds"] and c["cost_after"] < c["cost_before"] for c in cases)


FAKE = """#!/bin/sh
cat > /dev/null
echo '(relu (linear w:[1,1] none x:[1,1]))'
echo '; cost 2.00 -> 3.00 us on cpu (at most 0.0% above the optimum), rules: none'
echo '; proof, 0 steps'
echo '; checked: 0 steps evaluated in float64, 0 skipped, THE PROOF DOES NOT HOLD'
"""


def test_without_pytorch_falls_short(tmp_path: Path) -> None:
    script = [sys.executable, BENCH / "without_pytorch.py"]
    missing = subprocess.run(
        [*script, "--binary", tmp_path / "none"], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "cargo build --release -p hypatia" in missing.stdout
    binary = tmp_path / "hypatia-opt"
    binary.write_text(FAKE)
    binary.chmod(0o755)
    done = subprocess.run(
        [*script, "--binary", binary, "--json", "-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    first = json.loads(done.stdout)["cases"][0]["short"]
    for reason in ("without fused_linear_relu", "relu left over", "did not go down", "does not hold"):
        assert reason in first
    binary.write_text("#!/bin/sh\necho broken >&2\nexit 2\n")
    done = subprocess.run(
        [*script, "--binary", binary, "--json", "-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["cases"][0]["short"] == "broken"
