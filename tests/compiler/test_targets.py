"""What the search counts with: targets by name, or by numbers that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hypatia
from hypatia import _native, store
from hypatia.compiler import program_cache
from hypatia.devices import rates as rates_module
from hypatia.devices.calibration import Rates
from hypatia.devices.targets import measured, target
from hypatia.options import OptionError, Options

CPU = torch.device("cpu")
RATES = Rates(
    bandwidth=1e10,
    products={"f32": 6.1234e10, "bf16": 1.3e10, "f16": 7e8},
    by_size=[[1e6, 4e10], [1e8, 1e10]],
    products_by_size={},
    vector=2.9876e10,
    launch=1.9876e-6,
    host=2e-6,
    parallel=False,
    calls={},
)


class Net(nn.Module):
    """Something to search in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Graphs that are searched, and with which options."""
    found: list[tuple[str, str]] = []
    search = program_cache.optimized

    def noted(graph: str, options: str) -> Any:
        found.append((graph, options))
        return search(graph, options)

    monkeypatch.setattr(program_cache, "optimized", noted)
    return found


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store, and rates that need no measuring."""
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(store.SWITCH_VARIABLE, "on")
    monkeypatch.setattr(rates_module, "_known", {})
    monkeypatch.setattr(rates_module, "measured", lambda _: RATES)


def compiled(**options: Any) -> None:
    with torch.no_grad():
        hypatia.compile(Net().eval(), torch.randn(2, 32), **options)


@pytest.mark.parametrize("name", _native.targets())
def test_numbers_of_a_target_are_the_target(name: str, searches: list[tuple[str, str]]) -> None:
    compiled()
    graph, _ = searches[-1]
    numbers = json.loads(_native.target_numbers(name))
    assert numbers["name"] == name
    by_name, by_numbers = (_native.optimize(graph, Options().native(given)) for given in (name, numbers))
    assert by_name.texts() == by_numbers.texts()
    reports = [json.loads(o.report()) for o in (by_name, by_numbers)]
    assert all(report.pop("times") for report in reports)
    assert reports[0] == reports[1]
    slower = numbers | {"launch": 10 * numbers["launch"], "name": "slower"}
    other = json.loads(_native.optimize(graph, Options().native(slower)).report())
    assert (other["target"], other["cost_after"] > reports[0]["cost_after"]) == ("slower", True)


def test_numbers_that_are_none_are_refused(searches: list[tuple[str, str]]) -> None:
    compiled()
    graph, _ = searches[-1]
    numbers = json.loads(_native.target_numbers("cpu"))
    for broken in (numbers | {"vector": 0.0}, numbers | {"launch": -1.0}, numbers | {"more": 1.0}):
        with pytest.raises((ValueError, _native.HypatiaError)):
            _native.optimize(graph, Options().native(broken))
    with pytest.raises(ValueError, match="abacus"):
        _native.target_numbers("abacus")


def test_measured_numbers_have_two_digits() -> None:
    numbers = measured("cpu", RATES)
    shipped = json.loads(_native.target_numbers("cpu"))
    assert isinstance(numbers, dict)
    assert numbers == {
        "name": "cpu, measured",
        "vector": 30000.0,
        "matrix32": 120000.0,
        "matrix16": 26000.0,
        "bandwidth": 17000.0,
        "launch": 2.0,
        "view": shipped["view"],
    }


@pytest.mark.usefixtures("kept")
def test_costs_are_shipped_unless_they_are_asked_for(searches: list[tuple[str, str]]) -> None:
    def counted_with() -> Any:
        return json.loads(searches[-1][1])["target"]

    compiled()
    assert counted_with() == "cpu"
    compiled(costs="measured")
    assert counted_with() == measured("cpu", RATES)
    compiled(costs="measured", target="h200")
    assert counted_with() == "h200", "a target that was named is the target"
    with pytest.raises(OptionError, match="costs"):
        compiled(costs="guessed")


@pytest.mark.usefixtures("kept")
def test_programs_of_other_costs_are_kept_apart(searches: list[tuple[str, str]]) -> None:
    compiled()
    compiled(costs="measured")
    (graph, shipped), (same, ours) = searches[-2:]
    assert graph == same
    assert program_cache._key(graph, shipped) != program_cache._key(graph, ours)


@pytest.mark.usefixtures("kept")
def test_all_processes_count_with_what_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    first = target(CPU, "measured")
    monkeypatch.setattr(rates_module, "_known", {})
    monkeypatch.setattr(rates_module, "measured", lambda _: pytest.fail("they are kept"))
    assert target(CPU, "measured") == first


def test_without_a_store_costs_are_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.SWITCH_VARIABLE, "off")
    monkeypatch.setattr(rates_module, "measured", lambda _: pytest.fail("nothing is measured"))
    assert target(CPU, "measured") == "cpu"


@pytest.mark.usefixtures("kept")
def test_a_report_says_what_it_counts_with() -> None:
    report = hypatia.explain(Net().eval(), torch.randn(2, 32), options={"costs": "measured"}, timings=False)
    assert "cost model 'cpu, measured'" in str(report.graphs[0])
    assert "cpu, measured" in report.html()
