"""Reports: what they say, in every form, and that making one leaves no trace."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from hypatia.compiler.comparison import Result
from hypatia.compiler.report import Check, Removed
from hypatia.options import OptionError
from hypatia.tools.demo import Block
from hypatia.tools.explain import Report, explain, words
from hypatia.tools.explain.placing import straighten
from hypatia.tools.explain.repetition import repetitions
from hypatia.tools.explain.savings import replaced, savings
from hypatia.verifier.verify import Verification


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


@pytest.fixture(scope="module")
def block() -> Report:
    torch.manual_seed(0)
    return explain(Block().eval(), torch.randn(2, 64, 256))


def texts(page: str) -> str:
    """What is read of a page: no scripts, no tags."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]*>", " ", bare))


def data(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_text_of_a_block_names_what_was_done(block: Report) -> None:
    text = str(block)
    assert text == block.text()
    for part in ("Block", "merge-linears", "fused_linear_gelu", "verification  passed", "hypatia", "eager"):
        assert part in text, part
    assert "\x1b" not in text


def test_print_goes_to_the_console(block: Report) -> None:
    buffer = io.StringIO()
    block.print(Console(file=buffer, width=80, color_system=None))
    assert "merge-linears" in buffer.getvalue()
    assert max(map(len, buffer.getvalue().splitlines())) <= 80


def test_json_is_plain_and_complete(block: Report) -> None:
    found = block.json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (graph,) = found["graphs"]
    assert found["cost"] == {"before": graph["cost_before"], "after": graph["cost_after"]}
    assert found["cost"]["after"] < found["cost"]["before"]
    assert found["verification"]["status"] == "passed"
    assert len(graph["proof"]) == graph["steps"] > 0
    assert graph["replay"]["holds"]
    assert graph["replay"]["evaluated"] > 0
    assert {n["kind"] for n in graph["drawn"]["after"]} >= {"input", "weight", "op", "fused", "result"}
    assert found["timings"]["samples"].keys() == found["timings"]["medians"].keys() == {"eager", "hypatia"}
    assert all(seconds > 0 for seconds in found["timings"]["medians"].values())


def test_page_shows_rules_costs_errors_and_the_proof(block: Report) -> None:
    page = block.html()
    read = texts(page)
    for part in ("Block", "merge-linears", "Verification", "Passed", "torch " + torch.__version__):
        assert part in read, part
    for rule in block.json()["graphs"][0]["rules"]:
        assert rule["law"] in read
    (drawn,) = data(page)
    assert len(drawn["proof"]) == block.json()["graphs"][0]["steps"]
    assert {node["op"] for node in drawn["after"]["nodes"]} >= {"fused_linear_gelu", "attention"}
    if not torch.cuda.is_available():
        assert "no GPU found on this machine" in read


def test_page_loads_nothing(block: Report) -> None:
    page = block.html()
    assert re.findall(r"\w+://|[\"'(=]//", page) == [], "addresses"
    for loading in ("src=", "<link", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert loading not in page, loading
    assert "default-src 'none'" in page


def test_every_drawn_node_has_its_own_place(block: Report) -> None:
    (drawn,) = data(block.html())
    for side in ("before", "after"):
        nodes = {n["id"]: n for n in drawn[side]["nodes"]}
        for form in ("flow", "all"):
            places = drawn[side][form]["nodes"]
            shown = {place[0] for place in places}
            hidden = {i for i, n in nodes.items() if n["kind"] in ("weight", "folded")}
            assert shown == (set(nodes) if form == "all" else set(nodes) - hidden)
            layers: dict[int, list[tuple[float, float]]] = {}
            for _, x, y, width in places:
                layers.setdefault(y, []).append((x - width / 2, x + width / 2))
            for spans in layers.values():
                spans.sort()
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "nodes overlap"
            tops = {place[0]: place[2] for place in places}
            edges = {(edge[0], edge[1]) for edge in drawn[side][form]["edges"]}
            assert edges == {(i, n) for n in shown for i in nodes[n]["inputs"] if i in shown}
            assert all(tops[a] < tops[b] for a, b in edges), "an edge goes up"


def test_costs_of_the_groups_lead_from_before_to_after(block: Report) -> None:
    (graph,) = block.json()["graphs"]
    found = savings(replaced(graph["drawn"]["before"], graph["drawn"]["after"]))
    for side in ("before", "after"):
        assert sum(s[f"cost_{side}"] for s in found) == pytest.approx(graph[f"cost_{side}"])
    assert any(s["after"] == "fused_linear_gelu" and "gelu" in s["before"] for s in found)


def test_repetitions_of_a_sequence() -> None:
    found = repetitions(["embed", *("a", "b", "b", "c") * 3, "head"])
    assert found == [range(1, 5), range(5, 9), range(9, 13)]
    assert repetitions(list("abcdefgh")) == []
    assert repetitions([]) == []


def test_straightened_places_keep_their_distance_and_stay_near() -> None:
    assert straighten([0.0, 10.0, 30.0], [0.0, 5.0, 5.0]) == [0.0, 10.0, 30.0]
    assert straighten([0.0, 0.0], [0.0, 10.0]) == [-5.0, 5.0]
    assert straighten([9.0, 0.0, 0.0], [0.0, 3.0, 3.0]) == [0.0, 3.0, 6.0]


def test_layers_of_a_deep_model_are_found() -> None:
    model = nn.Sequential(*(Block(32, 2) for _ in range(4))).eval()
    (drawn,) = data(explain(model, torch.randn(1, 8, 32), timings=False).html())
    assert len(drawn["before"]["flow"]["bands"]) == len(drawn["after"]["flow"]["bands"]) == 4


def test_save_goes_by_the_suffix(block: Report, tmp_path: Path) -> None:
    assert block.save(tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert json.loads(block.save(tmp_path / "a.json").read_text()) == block.json()
    assert block.save(str(tmp_path / "a.txt")).read_text() == str(block)
    with pytest.raises(ValueError, match=r"\.html.*a\.pdf"):
        block.save(tmp_path / "a.pdf")
    assert not (tmp_path / "a.pdf").exists()


class Hostile(nn.Module):
    """A model whose names are markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><script>alert(1)</script>", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (inner,) = self.children()
        return torch.relu(inner(x))


def test_names_cannot_leave_their_place() -> None:
    Hostile.__name__ = "<script>alert('x')</script>&"
    report = explain(Hostile().eval(), torch.randn(2, 8), timings=False)
    for graph in report.graphs:
        for node in graph.graphs["before"]:
            node["name"] = "</script><script>alert(2)</script><!--"
        graph.data["rules"][0]["law"] = "<img src=x onerror=alert(3)>"
        graph.proof[0]["after"] = "</script><script>alert(4)</script>"
    page = report.html()
    assert page.count("<script") == page.count("</script>") == 2, "the data and the script of the page"
    assert "<img" not in page
    assert "alert('x')" in texts(page)
    assert data(page)[0]["before"]["nodes"][0]["name"] == "</script><script>alert(2)</script><!--"


def test_graph_breaks_give_several_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return torch.relu(self.second(x))

    for _ in range(2):
        report = explain(Broken().eval(), torch.randn(3, 8), timings=False)
        assert [g.kind for g in report.graphs] == ["inference", "inference"]
    assert report.json()["cost"]["before"] == sum(g.data["cost_before"] for g in report.graphs)
    page = report.html()
    assert page.count('role="tab"') == page.count('role="tabpanel"') == 2
    assert "Inference graph 2" in str(report)


def test_training_reports_both_passes_and_compares_gradients() -> None:
    model = mlp()
    x = torch.randn(4, 32, requires_grad=True)
    report = explain(model, x, training=True)
    assert [g.kind for g in report.graphs] == ["forward", "backward"]
    assert report.verification
    assert len(report.verification.candidate) == 1 + 1 + len(list(model.parameters()))
    names = [result["name"] for result in report.json()["verification"]["results"]]
    assert names == [
        "result 0",
        "gradient of input 0",
        *(f"gradient of {n}" for n, _ in model.named_parameters()),
    ]
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert "Backward graph" in texts(report.html())


def test_training_without_anything_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="training needs"):
        explain(torch.sin, torch.randn(3), training=True)


class Counting(nn.Module):
    """Changes buffers, draws random numbers and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.line = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        x.mul_(scale)
        self.calls = self.calls + 1
        return self.dropout(self.norm(self.line(x)))


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_changed(training: bool) -> None:
    model = Counting().train()
    model.line.weight.grad = torch.ones(8, 8)
    x, scale = torch.randn(4, 8), torch.tensor(2.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random, given, calls = torch.get_rng_state(), x.clone(), model.calls
    explain(model, x, kwargs={"scale": scale}, training=training)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert model.training
    assert model.calls is calls
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model.line.weight.grad, torch.ones(8, 8))
    assert model.line.bias.grad is None
    assert not model._forward_hooks
    assert "_compiled_call_impl" not in vars(model) or model._compiled_call_impl is None


def test_other_compiled_functions_stay_compiled() -> None:
    model, x = mlp(), torch.randn(4, 32)
    seen: list[int] = []

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(1)
        return gm.forward

    compiled = torch.compile(model, backend=counting)
    with torch.no_grad():
        compiled(x)
        for _ in range(10):
            assert len(explain(model, x, timings=False).graphs) == 1
        compiled(x)
    assert len(seen) == 1


def test_a_compiled_model_is_explained_as_what_was_compiled() -> None:
    report = explain(torch.compile(mlp(), backend="eager"), torch.randn(4, 32), timings=False)
    assert report.name == "Sequential"
    assert len(report.graphs) == 1


def test_times_that_overlap_are_not_told_apart() -> None:
    assert "noise" in words.speed([1.0, 1.2, 1.4, 1.1], [0.9, 1.1, 1.3, 1.0])
    assert words.speed([2.0, 2.1, 2.0], [1.0, 1.0, 1.1]) == "2.00 times as fast as eager"
    assert words.speed([1.0, 1.0, 1.1], [2.0, 2.1, 2.0]) == "2.00 times as long as eager"


def test_sizes_of_an_earlier_report_do_not_make_later_ones_symbolic() -> None:
    model = mlp()
    for rows in (4, 5, 6):
        (graph,) = explain(model, torch.randn(rows, 32), timings=False).graphs
        assert f"f32[{rows},8]" in {node["type"] for node in graph.graphs["after"]}


def test_a_model_that_cannot_run_fails_with_its_own_error() -> None:
    model, x = mlp(), torch.randn(4, 5)
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        explain(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(TypeError, match="not int"):
        explain(3, torch.randn(4))
    with pytest.raises(OptionError, match="nonsense"):
        explain(mlp(), torch.randn(4, 32), options={"nonsense": 1})


def test_a_model_that_cannot_run_in_float64_is_still_reported() -> None:
    class Single(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ torch.ones(8, 8)) + 1

    report = explain(Single(), torch.randn(4, 8), timings=False)
    assert report.verification is None
    assert "float64" in report.json()["verification"]["reason"]
    assert "Not compared" in texts(report.html())
    assert "not compared" in str(report)


def test_a_graph_that_was_rolled_back_says_so(block: Report) -> None:
    (graph,) = block.graphs
    kept = graph.check
    result = {"name": "<b>out</b>", "type": "float32[2]", "error": math.inf, "eager_error": 1e-7}
    result |= {"to_eager": math.nan, "scale": 1.0, "allowed": 1e-6, "ok": False}
    removed = Removed("rule", "merge-linears", "a law")
    graph.check = Check("strict", "rolled back", 0, [Result(**result)], [removed], ["a note"], 0.1)
    try:
        read = texts(block.html())
        assert "First call: rolled back." in re.sub(r"\s+", " ", read)
        assert "<b>out</b>" in read
        assert "inf" in read
        assert "without rule merge-linears" in str(block)
        assert json.dumps(block.json(), allow_nan=False)
    finally:
        graph.check = kept


def test_a_failed_comparison_is_not_called_passed(block: Report) -> None:
    verification = dataclasses.replace(block.verification, ok=False, reason="result 0 is far away")
    failed = dataclasses.replace(block, verification=verification)
    assert failed.json()["verification"]["status"] == "failed"
    assert "result 0 is far away" in str(failed)
    assert 'class="value bad">Failed' in failed.html()
    differing = Verification(False, "2 results instead of 1", [], [])
    odd = dataclasses.replace(block, verification=differing, compared=[])
    assert "2 results instead of 1" in texts(odd.html())


def test_options_reach_the_compiler() -> None:
    report = explain(
        mlp(), torch.randn(4, 32), options={"numerics": "exact", "target": "h200"}, timings=False
    )
    (graph,) = report.json()["graphs"]
    assert graph["target"] == "h200"
    assert {rule["numerics"] for rule in graph["rules"]} <= {"exact"}
    unproven = explain(mlp(), torch.randn(4, 32), options={"proof": False}, timings=False)
    assert unproven.json()["graphs"][0]["proof"] == []
    assert "The proof was not kept" in texts(unproven.html())
    assert unproven.timings is None
    assert "Not timed" in texts(unproven.html())


def test_a_function_without_anything_to_compile_is_reported() -> None:
    report = explain(lambda x: x, torch.randn(3), timings=False)
    assert report.graphs == []
    assert "No graph" in str(report)
    assert "No graph" in texts(report.html())
