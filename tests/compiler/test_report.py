"""What a report says of a graph in the model's own words, and why a graph has no native plan."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hypatia
from hypatia import timeline
from hypatia.capture import source_names
from hypatia.compiler import pipeline
from hypatia.compiler.report import GraphReport
from hypatia.devices import table
from hypatia.execute import plans
from hypatia.frontend.dynamo import collecting
from hypatia.tools.explain import Report, explain, words
from hypatia.tools.explain.memory import between
from hypatia.tools.workloads import BertLayer
from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fresh_dynamo()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Encoder(nn.Module):
    """Named parts, a buffer, and lines to be found."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.register_buffer("shift", torch.ones(8))
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two linear layers and more."""
        x = self.encoder["down"](torch.relu(self.encoder["up"](x)))
        if self.cut:
            torch._dynamo.graph_break()
        return torch.tanh(x) + self.shift


WEIGHTS = {"encoder.up.weight", "encoder.up.bias", "encoder.down.weight", "encoder.down.bias", "shift"}


def named(report: GraphReport, side: str, key: str) -> set[str]:
    return {node[key] for node in report.graphs[side]}


@pytest.mark.parametrize("by", ["torch.compile", "hypatia.compile", "hypatia.optimize"])
def test_weights_modules_and_lines_have_the_names_of_the_model(by: str) -> None:
    model, x = Encoder().eval(), torch.randn(4, 8)
    with torch.no_grad(), collecting() as reports:
        if by == "torch.compile":
            torch.compile(model, backend="hypatia")(x)
        elif by == "hypatia.compile":
            reports = hypatia.compile(model, x).reports
        else:
            reports = [hypatia.optimize(model, x).meta["hypatia"]]
    (report,) = reports
    for side in ("before", "after"):
        assert named(report, side, "called") >= WEIGHTS | {"x"}
        lines = {n["line"]["code"] for n in report.graphs[side] if n["line"]}
        assert any("torch.tanh(x)" in code for code in lines)
        assert {n["line"]["file"] for n in report.graphs[side] if n["line"]} == {__file__}
    assert named(report, "before", "module") >= {"encoder.up", "encoder.down"}
    assert json.dumps(report.graphs, allow_nan=False)


def test_passes_of_training_have_the_names_of_the_model() -> None:
    model, x = Encoder(), torch.randn(4, 8)
    with collecting() as reports:
        torch.compile(model, backend="hypatia")(x).sum().backward()
    assert [r.kind for r in reports] == ["forward", "backward"]
    assert named(reports[0], "before", "called") >= WEIGHTS | {"x"}
    assert "encoder.down.weight" in named(reports[1], "before", "called")
    assert named(reports[1], "before", "module") >= {"encoder.up", "encoder.down"}


def test_values_that_are_new_belong_to_the_module_of_their_weights() -> None:
    model = nn.Sequential(BertLayer(32, 4, 64), BertLayer(32, 4, 64)).eval()
    with torch.no_grad():
        (report,) = by_torch(model, torch.randn(2, 3, 32))
    merged = [n for n in report.graphs["after"] if n["op"] == "linear" and n["line"] is None]
    assert [n["module"] for n in merged] == ["0", "1"]


def test_inputs_have_the_names_of_the_model_in_an_explanation() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, *, parts: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.relu(x * parts["mask"])

    x = torch.randn(4, 8)
    report = explain(Masked(), x, kwargs={"parts": {"mask": x > 0}}, timings=False)
    assert named(report.graphs[0], "before", "called") >= {"x", "parts['mask']"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("L['m']._modules['a']._modules['0']._buffers['b.c']", "a.0.b.c"),
        ("G['model']._parameters['w']", "w"),
        ("L['x']", "x"),
        ("L['args'][0]['mask']", "args[0]['mask']"),
        ("L['self'].table", "self.table"),
        ("something else", "something else"),
    ],
)
def test_sources_as_people_write_them(source: str, name: str) -> None:
    assert source_names.plain(source) == name


def test_a_common_module() -> None:
    assert source_names.common(["a.b.c", "a.b.d", "", "a.b"]) == "a.b"
    assert source_names.common(["a.bc", "a.bd"]) == "a"
    assert source_names.common(["a", "b"]) == source_names.common([]) == ""


class Sorted(nn.Module):
    """Nothing here has a kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sorts."""
        return torch.sort(x)[0]


class Conjugate(nn.Module):
    """The conjugate is lazy: its memory has the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers in pairs."""
        return torch.view_as_complex(self.linear(x).view(-1, 4, 2)).conj()


def by_keyword(model: nn.Module, x: torch.Tensor) -> list[GraphReport]:
    return hypatia.compile(model, kwargs={"x": x}).reports


def by_torch(model: nn.Module, x: torch.Tensor) -> list[GraphReport]:
    with collecting() as reports:
        torch.compile(model, backend="hypatia")(x)
    return reports


def by_optimize(model: nn.Module, x: torch.Tensor) -> list[GraphReport]:
    return [hypatia.optimize(model, x).meta["hypatia"]]


REASONS: dict[str, tuple[Callable[..., list[GraphReport]], nn.Module, str]] = {
    "no kernel": (by_torch, Sorted(), "no step has a kernel"),
    "optimize": (by_optimize, Encoder().eval(), "hypatia.optimize returns a graph"),
    "lazy": (by_torch, Conjugate(), "a result is no plain tensor"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_graph_without_a_plan_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    compiled, model, why = REASONS[name]
    with torch.no_grad(), caplog.at_level(logging.INFO, "hypatia"):
        (report,) = compiled(model, torch.randn(4, 8))
    assert report.no_plan
    assert why in report.no_plan
    assert "malformed" not in report.no_plan
    assert report.kept != "plan"
    assert f"no plan   {report.no_plan}" in str(report)
    if name != "optimize":
        assert report.no_plan in caplog.text


@pytest.mark.parametrize("compiled", [by_torch, by_keyword])
def test_a_graph_with_a_plan_has_no_reason(compiled: Callable[..., list[GraphReport]]) -> None:
    with torch.no_grad():
        (report,) = compiled(Encoder().eval(), torch.randn(4, 8))
    assert (report.no_plan, report.kept) == ("", "plan")
    assert "no plan" not in str(report)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """No graph has a plan."""
    why = "there are <no> kernels for it"
    monkeypatch.setattr(table.Cpu, "no_kernels", lambda *_: why)
    return why


def test_training_says_why_it_has_no_plan(no_kernels: str) -> None:
    model = Encoder()
    with collecting() as reports:
        torch.compile(model, backend="hypatia")(torch.randn(4, 8)).sum().backward()
    assert {r.no_plan for r in reports} == {no_kernels}
    assert {r.kept for r in reports} == {"graph"}


def test_a_plan_that_was_rolled_back_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hypatia.execute.native.NativeGraph.run
    monkeypatch.setattr(
        hypatia.execute.native.NativeGraph, "run", lambda self, args: tuple(t + 0.1 for t in run(self, args))
    )
    with torch.no_grad(), pytest.warns(hypatia.VerificationWarning, match=plans.KERNEL):
        (report,) = by_torch(Encoder().eval(), torch.randn(4, 8))
    assert "rolled back" in report.no_plan
    assert report.kept == "graph"


@pytest.fixture(scope="module")
def cut() -> Report:
    fresh_dynamo()
    return explain(Encoder(cut=True).eval(), torch.randn(4, 8), timings=False)


def test_graph_breaks_have_reasons_and_lines(cut: Report) -> None:
    (found,) = cut.json()["breaks"]
    assert "graph_break()" in found["reason"]
    assert found["line"]["file"] == __file__
    assert found["line"]["code"] == "torch._dynamo.graph_break()"
    for text in (str(cut), cut.html()):
        assert "Graph breaks" in text
        assert f"test_report.py:{found['line']['line']}" in text
    whole = explain(Encoder().eval(), torch.randn(4, 8), timings=False)
    assert whole.json()["breaks"] == []
    assert "Graph breaks" not in str(whole)


def test_breaks_that_leave_no_graph_are_listed_too() -> None:
    class Printing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(x.shape, end="")
            return torch.tanh(x)

    (found,) = explain(Printing(), torch.randn(4, 8), timings=False).json()["breaks"]
    assert "print" in found["reason"]


def test_a_graph_that_is_left_as_it_is_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise hypatia.errors.UnsupportedError("an input is changed <before> the end of the graph")

    monkeypatch.setattr(pipeline, "capture", refuse)
    report = explain(Encoder().eval(), torch.randn(4, 8), timings=False)
    assert report.graphs == []
    assert report.json()["left"] == [
        {"kind": "inference", "reason": "an input is changed <before> the end of the graph"}
    ]
    assert "an input is changed <before> the end" in str(report)
    assert "an input is changed &lt;before&gt; the end" in report.html()


def test_text_page_and_json_say_what_runs_and_why(cut: Report, no_kernels: str) -> None:
    report = explain(Encoder().train(), torch.randn(4, 8), training=True, timings=False)
    for graph in report.json()["graphs"]:
        assert (graph["kept"], graph["no_plan"]) == ("graph", no_kernels)
    assert report.graphs[0].no_plan in " ".join(str(report).split())
    assert report.graphs[0].no_plan in html.unescape(report.html())
    assert "by its native plan" in str(cut)
    assert "by its native plan" in cut.html()


def test_ops_are_counted_one_way() -> None:
    """Work on weights alone is done once, and counts nowhere."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)), nn.ReLU()).eval()
    report = explain(model, torch.randn(4, 16), timings=False)
    (graph,) = report.json()["graphs"]
    before, after = words.ops(graph)
    for side, counted in (("before", before), ("after", after)):
        nodes = [n for n in graph["drawn"][side] if n["kind"] in ("op", "fused", "opaque")]
        assert counted == sum(not n["folded"] for n in nodes)
    assert any(n["folded"] and n["kind"] == "op" for n in graph["drawn"]["after"])
    assert f"{before} -> {after}," in str(report)
    assert f"{before} -> {after}," in str(report.graphs[0])
    for counted in (before, after):
        assert f"<span>{words.count(counted, 'op')}, " in report.html()


def test_parts_of_the_first_call_add_up(cut: Report) -> None:
    data = cut.json()
    parts = {part["stage"]: part["seconds"] for part in data["timeline"]}
    assert sum(parts.values()) == pytest.approx(data["first_call"])
    wanted = {timeline.CAPTURE, timeline.AUTOGRAD, timeline.SEARCH, timeline.EXTRACTION, timeline.PROOF}
    wanted |= {timeline.RECORDS, timeline.REBUILD, timeline.PLANNING, timeline.BINDING, timeline.CALL}
    assert parts.keys() >= wanted | {timeline.EAGER, timeline.COMPARISON, timeline.OTHER}
    assert all(seconds >= 0 for seconds in parts.values())
    for name in wanted:
        assert name in str(cut)
        assert f'<th scope="row">{name}</th>' in cut.html()


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timeline, "time", self)

    def perf_counter(self) -> float:
        return self.now


def test_the_time_of_a_stage_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), []

    @timeline.stage("inner")
    def inner() -> None:
        clock.now += 2

    with timeline.watching(told.append) as times:
        clock.now += 1
        with timeline.stage("outer"):
            clock.now += 4
            inner()
            inner()
            timeline.moved("outer", {"search": 3.0})
        number = times.enter("never left")
        times.enter("nor this")
        clock.now += 8
        times.leave(number)
    assert times.seconds == {
        "other": 1, "outer": 1, "inner": 4, "search": 3, "nor this": 8, "never left": 0
    }  # fmt: skip
    assert told == ["outer", "inner", "never left", "nor this"]
    inner()
    assert times.seconds["inner"] == 4, "nobody watches"


def test_memory_is_counted_beside_eagers(cut: Report) -> None:
    graph = cut.json()["graphs"][0]
    memory = graph["memory"]
    assert memory["weights"] == {"eager": 1120, "hypatia": 1120}, "two layers of 8 and 16 columns"
    assert memory["results"] == {"eager": 128, "hypatia": 128}
    assert memory["inputs"] == {"eager": 128, "hypatia": 128}
    # The first layer's result and its ReLU.
    assert memory["values in between"]["eager"] == 2 * 4 * 16 * 4
    assert memory["packed copies of weights"]["hypatia"] == cut.graphs[0].memory[1]
    for text in (str(cut), cut.html()):
        assert "packed copies of weights" in text


def test_values_live_until_they_are_read_last() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x.exp()
            b = a.view(-1).sin()
            c = b.cos()
            return c.view(4, 8) + a

    gm = torch.export.export(Chain(), (torch.randn(4, 8),)).module()
    # a and b, then a and c: a view is no value of its own, and the result counts apart.
    assert between(gm.graph) == 3 * 128


def test_the_page_finds_modules_weights_and_lines(cut: Report) -> None:
    page = cut.html()
    assert 'data-search="encoder.up ' in page
    found = json.loads(page.partition('id="data">')[2].partition("</script>")[0])[0]
    assert found["lines"][0][0].startswith("test_report.py:")
    readers = [n for n in found["before"]["nodes"] if "encoder.up.weight" in n["reads"].split()]
    assert readers
    assert all(n["kind"] in ("weight", "folded", "op") for n in readers)


def test_progress_is_told() -> None:
    told: list[str] = []
    explain(Encoder().eval(), torch.randn(4, 8), timings=False, progress=told.append)
    wanted = ["the model as it is", timeline.CAPTURE, timeline.SEARCH, "comparison with float64"]
    assert [t for t in told if t in wanted] == wanted
