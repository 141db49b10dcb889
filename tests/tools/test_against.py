"""Two versions beside each other: turns, ratios, and what is said where there is no other version."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("against")


class Told:
    """A version that answers with what it is given."""

    def __init__(self, call: float, compiling: float, log: list[str], name: str) -> None:
        self.call, self.compiling, self.log, self.name = call, compiling, log, name

    def ask(self, **asked: Any) -> float:
        self.log.append(self.name)
        return self.compiling if "compile" in asked else self.call


def test_both_are_called_in_turns_and_ratios_are_of_before_over_now(against: ModuleType) -> None:
    log: list[str] = []
    ours, theirs = Told(1e-3, 0.5, log, "now"), Told(2e-3, 0.25, log, "before")
    row = against.measured(ours, theirs, "mlp", "fp32", rounds=2)
    assert (row["ratio"], row["compile ratio"]) == (2, 0.5)
    assert log[4:] == ["now", "before", "before", "now"]
    assert "| mlp fp32 | 2000.0 | 1000.0 | 2.000 | 250 | 500 | 0.50 |" in against.table([row])


def test_a_checkout_without_an_extension_is_refused(
    against: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", str(tmp_path)])
    assert against.main() == 2
    assert "whose extension is built" in capsys.readouterr().err


def test_short_workloads_are_chosen_by_name(against: ModuleType) -> None:
    chosen = list(against.cases(["tiny"], ["fp32"], "cpu"))
    assert chosen
    assert all("tiny" in name and dtype == "fp32" for name, dtype in chosen)
