"""The CPU benchmark: targets from results, tables, the page, the chart, interruptions, wrong results."""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hypatia.tools import bench, measure, peers
from hypatia.tools.peers import NotMeasured

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmark, with short samples."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(bench, "REST_SECONDS", 0.0)
    return importlib.import_module


def cell(case: str, backend: str, us: float | None, **more: Any) -> dict[str, Any]:
    made = bench.Cell(case, backend, us, None, 1.0, 1e-7, True, least=us).data()
    made["ratio"] = 100 / us if us else None
    # Only ours and eager go on after the first round.
    rounds = 3 if backend in ("eager", "hypatia-direct") else 1
    made["samples_us"] = [us, us, 2 * us][:rounds] if us else []
    return {"case": case, "dtype": "fp32", "batch": 64, "small": True, "rows": 64, **made, **more}


def section(**more: Any) -> dict[str, Any]:
    machine = {"hypatia": "0", "torch": "2", "python": "3", "cpu": "A & B", "threads": 2, "cores": 2}
    return {"machine": machine, "when": "today", "complete": True, "repeats": 1, "others": 0.0, **more}


@pytest.fixture
def results() -> dict[str, Any]:
    mlp = [
        *(cell("tiny_b64", "eager", 100), cell("tiny_b64", "hypatia-direct", 50)),
        *(cell("tiny_b64", "inductor", 80), cell("tiny_b64", "openvino", 40)),
        cell("tiny_b64", "inductor-freezing", 90, compile_seconds=30.0),
        cell("tiny_b64", "onnxruntime", None, reason="has no bf16 kernels | for it"),
        *(cell("large4", "eager", 100, small=False), cell("large4", "hypatia-direct", 110, small=False)),
    ]
    flops = {"flops_before": 600, "flops_after": 100, "flops_counted": 200, "note": "a <b>"}
    rewrites = [cell("chain", "eager", 100, **flops), cell("chain", "hypatia-direct", 25, **flops)]
    step = {"eager_us": 9.0, "call_us": 4.0, "plan_us": None, "work_us": 1.0, "overhead_us": 3.0}
    memory = {"section": "mlp", "case": "tiny", "dtype": "fp32", "plan": True, "weight_bytes": 1}
    memory |= {"eager_bytes": 100, "ours_bytes": 150, "packed_bytes": 2, "folded_bytes": 3}
    return {
        "mlp": section(cells=mlp, cold=[]),
        "rewrites": section(cells=rewrites),
        "overhead": section(rows=[{"case": "one 8x8 linear layer", **step, "steps": None}]),
        "memory": section(rows=[memory], leaks=[{"case": "MLP", "calls": 9, "grown_bytes": 2**21}]),
    }


def test_targets(load: Any, results: dict[str, Any]) -> None:
    gates = {gate.name: gate for gate in load("speed.gates").gates(results)}

    def is_at(name: str, value: float, met: bool) -> None:
        assert math.isclose(gates[name].value, value)
        assert gates[name].met is met

    is_at("MLPs over eager, everywhere", 100 / 110, False)
    is_at("tiny to medium MLPs over eager", 2.0, True)
    is_at("tiny to medium MLPs over the best peer of each", 40 / 50, False)
    is_at("compile time under Inductor max-autotune's", 30.0, True)
    is_at("rewrites: measured over predicted", 4 / 6, False)
    is_at("overhead of a call, one 8x8 linear layer", 3.0, True)
    is_at("activations over eager's", 1.5, False)
    is_at("growth over 10,000 calls", 2**21, False)
    assert "NO PLAN" in gates["overhead of a call, one 8x8 linear layer"].note
    assert "pointwise chains over eager" not in gates, "nothing was measured for it"
    assert "large4" in gates["MLPs over eager, everywhere"].note


def test_a_disturbed_or_partial_run_meets_no_target(load: Any, results: dict[str, Any]) -> None:
    results["mlp"]["others"] = 1.0
    results["overhead"]["complete"] = False
    rows = {row[0]: row[3] for row in load("cpu")._verdict(results).rows}
    assert rows["tiny to medium MLPs over eager"] == "? (disturbed)"
    assert rows["overhead of a call, one 8x8 linear layer"] == "yes (not all cases)"
    assert rows["rewrites: measured over predicted"] == "NO"


def test_tables(load: Any, results: dict[str, Any]) -> None:
    tables = load("speed.tables").tables
    times, seconds = (t.markdown() for t in tables("mlp", results["mlp"]))
    assert "| tiny_b64 | 100 | 50.0 (2.00x) |" in times
    assert "has no bf16 kernels / for it" in times
    assert "| 0.80x |" in times
    assert "30.00" in seconds
    results["mlp"]["cells"][1]["correct"] = False
    assert "50.0 (2.00x, WRONG)" in next(iter(tables("mlp", results["mlp"]))).markdown()
    (rewrites,) = tables("rewrites", results["rewrites"])
    assert rewrites.rows[0][2].endswith("not found"), "the graph has more operations than the best form"
    for name, data in results.items():
        for table in tables(name, data):
            assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


def test_the_chart_is_well_formed(load: Any, results: dict[str, Any]) -> None:
    chart = load("speed.chart").chart
    circles = ElementTree.fromstring(chart(results)).iter("{http://www.w3.org/2000/svg}circle")
    named = [c for c in circles if len(c)]
    assert len(named) == 6, "a dot for each time that was measured, none for eager"
    ElementTree.fromstring(chart({}))


def test_the_page_has_a_place_for_every_part(load: Any, results: dict[str, Any], tmp_path: Path) -> None:
    cpu, page, tables = (load(name) for name in ("cpu", "speed.page", "speed.tables"))
    text = cpu.PAGE.read_text()
    for name in (*cpu.SECTIONS, "gates", "chart"):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1
    copy = tmp_path / "cpu.md"
    copy.write_text(text)
    results["mlp"]["others"] = 1.5
    parts = {name: [*tables.tables(name, data)] for name, data in results.items()}
    for _ in range(2):
        page.write(copy, results, parts, "![dots](cpu.svg)")
    assert copy.read_text().count("| tiny_b64 | 100 |") == 1
    assert copy.read_text().count("OTHER WORK TOOK 1.5 OF 2 CORES") == 1
    with pytest.raises(ValueError, match="no lines <!-- sun -->"):
        page.put("", "sun", "")


def run(cpu: Any, path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cpu.main([*arguments, "--quick", "--repeats", "1", "--json", str(path)])
    return code, json.loads(path.read_text())


def test_sections_run_and_keep_each_other(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    cpu, memory = load("cpu"), load("speed.memory")
    monkeypatch.setattr(memory, "CALLS", 50)
    monkeypatch.setattr(memory, "SECTIONS", ("rewrites",))
    path = tmp_path / "cpu.json"
    code, _ = run(cpu, path, "--only", "linear", "rewrites", "--dtype", "fp32")
    assert code == 0
    code, found = run(cpu, path, "--only", "overhead", "memory")
    assert code == 0
    assert list(found["sections"]) == ["linear", "rewrites", "overhead", "memory"]
    assert {c["backend"] for c in found["sections"]["linear"]["cells"]} == {"eager", "hypatia-direct"}
    (rewrite, _) = found["sections"]["rewrites"]["cells"]
    assert rewrite["flops_counted"] == rewrite["flops_after"] < rewrite["flops_before"]
    assert found["gates"]
    assert found["wrong"] == []


def test_wrong_results_fail(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    cpu = load("cpu")
    right = peers.hypatia_compile
    monkeypatch.setattr(peers, "hypatia_compile", lambda m, *x: lambda *y: right(m, *x)(*y) * 1.01)
    code, found = run(cpu, tmp_path / "cpu.json", "--only", "linear", "--dtype", "fp32")
    assert code == 1
    assert "hypatia.compile: wrong result" in found["wrong"][0]


def test_an_interrupted_run_is_written(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    cpu, timed = load("cpu"), load("speed.timed")
    measured = timed.Run.measure

    def once(self: Any, case: Any, *args: Any) -> Any:
        if case.dtype == "bf16":
            raise KeyboardInterrupt
        return measured(self, case, *args)

    monkeypatch.setattr(timed.Run, "measure", once)
    code, found = run(cpu, tmp_path / "cpu.json", "--only", "linear", "pointwise")
    assert code == 130
    assert {c["dtype"] for c in found["sections"]["linear"]["cells"]} == {"fp32"}
    assert found["sections"]["linear"]["complete"] is False
    assert "pointwise" not in found["sections"]


def test_a_peer_that_is_missing_is_one_line(load: Any, monkeypatch: Any) -> None:
    peers = load("speed.peers")
    monkeypatch.setitem(peers.NEEDS, "openvino", ("onnx", "no_such_package"))
    assert "no_such_package" in peers.missing("openvino")
    assert "\n" not in peers.missing("openvino")
    assert peers.missing("eager") == ""


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_peers_compute_the_model(load: Any, name: str) -> None:
    peers, cases = load("speed.peers"), load("speed.cases")
    if peers.missing(name):
        pytest.skip(peers.missing(name))
    case = cases.BY_KEY["linear/1x64→64/fp32"]
    (peer,) = bench.bench(case.workload, [name], repeats=1, makers=peers.makers([name]))
    assert peer.reason == ""
    assert peer.correct is True
    assert peer.microseconds is not None
    assert peer.compile_seconds is not None


def test_the_other_process(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inductor, cases = load("speed.inductor"), load("speed.cases")
    # Torch is imported once for the two processes.
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["torch._dynamo", "hypatia.frontend.dynamo"])
    monkeypatch.setattr(inductor.multiprocessing, "get_context", lambda _: forking)
    case = cases.BY_KEY["linear/1x64→64/fp32"]
    workshop = inductor.Workshop(1, 100.0, warm=False)
    try:
        makers = {"there": workshop.maker("aot-eager", case)}
        (cell,) = bench.bench(case.workload, ["there"], repeats=2, makers=makers)
        assert cell.reason == ""
        assert cell.correct is True, "it builds the same model"
        assert len(cell.samples) == 2
        with pytest.raises(RuntimeError, match="there is no backend 'gcc'"):
            workshop.maker("gcc", case)(None, ())
        process = workshop._process
        # Nobody waits for an answer: it may be there at once where this process has to wait for a core.
        pipe = mock.Mock(wraps=workshop._pipe)
        pipe.poll = lambda limit: False
        workshop._pipe = pipe
        with pytest.raises(NotMeasured, match="took longer than 0 s"):
            workshop.ask(0.0, "compile", "aot-eager", case.key)
        assert not process.is_alive()
        assert workshop.ask(100.0, "drop", "aot-eager") is None, "it is started again"
    finally:
        workshop.close()


def test_memory_of_a_call(load: Any) -> None:
    x = torch.zeros(1000)
    assert load("speed.memory").peak(lambda: (x + x) + x) == 2 * 4000
    assert load("speed.memory").peak(lambda: x) == 0
