"""The page of a report in a real browser: it opens without complaint, and everything on it works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import browser
from hypatia.tools.explain import explain
from hypatia.tools.workloads import BertLayer

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())

BEFORE, AFTER = "[data-side=before]", "[data-side=after]"
LOADED = "const [t] = performance.getEntriesByType('navigation'); return t.loadEventEnd - t.startTime"


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.browser() as opened:
        opened.resize(1440, 1200)
        yield opened


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of BERT-base; its layers are narrow, which the page does not show."""
    torch.manual_seed(0)
    model = nn.Sequential(*(BertLayer(96, 12, 384) for _ in range(12))).eval()
    report = explain(model, torch.randn(1, 16, 96), timings=False, name="bert-base")
    torch._dynamo.reset()
    return report.save(tmp_path_factory.mktemp("page") / "bert.html")


@pytest.fixture
def page(window: browser.Browser, bert: Path) -> Iterator[browser.Browser]:
    window.open(bert)
    yield window
    assert window.complaints() == []


def scale(page: browser.Browser, side: str) -> float:
    return float(page.run(f"return document.querySelector('{side}').dataset.scale"))


def count(page: browser.Browser, selector: str) -> int:
    return page.run("return document.querySelectorAll(arguments[0]).length", selector)


def visible(page: browser.Browser, selector: str) -> int:
    script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.offsetHeight).length"
    return page.run(script, selector)


def becomes(page: browser.Browser, condition: str) -> None:
    """Waits for what the browser does in its own time, such as scrolling."""
    look = f"({condition}) ? done() : setTimeout(look, 10)"
    page.wait(f"const done = arguments[0]; const look = () => {look}; look()")


def test_the_page_of_bert_opens_and_is_readable(page: browser.Browser, bert: Path) -> None:
    size = bert.stat().st_size
    print(f"page of BERT-base: {size / 1e3:.0f} kB, loaded after {page.run(LOADED):.0f} ms")
    assert size < 3_000_000
    assert count(page, f"{BEFORE} .node") > 350
    assert 200 < count(page, f"{AFTER} .node") < count(page, f"{BEFORE} .node")
    assert count(page, f"{AFTER} .node.fused") == 36
    # Text is as large as it was laid out, or a little smaller; the first nodes are in sight.
    assert scale(page, BEFORE) >= 0.6
    script = """const box = document.querySelector(arguments[0]).getBoundingClientRect();
        return [...document.querySelectorAll(arguments[0] + ' .node')].filter((n) => {
          const r = n.getBoundingClientRect();
          return r.top >= box.top && r.bottom <= box.bottom && r.left >= box.left && r.right <= box.right;
        }).length"""
    assert page.run(script, f"{BEFORE} .stage") > 10


@pytest.mark.parametrize("side", [BEFORE, AFTER])
def test_zoom_by_buttons_and_keys(page: browser.Browser, side: str) -> None:
    start = scale(page, side)
    page.click(f"{side} [data-do=in]")
    assert scale(page, side) > start
    page.click(f"{side} [data-do=out]")
    assert scale(page, side) == pytest.approx(start, rel=0.01)
    page.click(f"{side} [data-do=fit]")
    assert scale(page, side) < 0.2
    page.click(f"{side} [data-do=start]")
    assert scale(page, side) == pytest.approx(start, rel=0.01)
    page.type(f"{side} svg", "0")
    assert scale(page, side) < 0.2
    page.type(f"{side} svg", "1++")
    assert scale(page, side) > start


def test_the_wheel_zooms_a_graph_that_has_the_focus(page: browser.Browser) -> None:
    page.run("document.querySelector('.panes').scrollIntoView({block: 'center'})")
    start, top = scale(page, BEFORE), page.run("return scrollY")
    page.wheel(f"{BEFORE} svg", 60)
    becomes(page, f"scrollY > {top}")
    assert scale(page, BEFORE) == start
    page.run("document.querySelector(arguments[0]).focus()", f"{BEFORE} svg")
    page.wheel(f"{BEFORE} svg", -60)
    becomes(page, f"document.querySelector('{BEFORE}').dataset.scale > {start}")


def test_dragging_moves_the_graph(page: browser.Browser) -> None:
    page.run("document.querySelector('.panes').scrollIntoView({block: 'center'})")
    where = "return document.querySelector('[data-side=before] .node').getBoundingClientRect().top"
    top = page.run(where)
    page.drag(f"{BEFORE} svg", 0, -120)
    assert page.run(where) == pytest.approx(top - 120, abs=2)
    assert count(page, "svg.chosen") == 0, "a drag chooses nothing"


def test_a_click_shows_a_node_its_neighbours_and_what_it_replaces(page: browser.Browser) -> None:
    page.click(f"{AFTER} .node.fused")
    assert count(page, f"{AFTER} .node.self.fused") == 1
    assert count(page, f"{AFTER} .node.from") == 2
    assert count(page, f"{AFTER} .node.to") == 1
    assert count(page, f"{BEFORE} .node.self") == 1
    assert count(page, f"{BEFORE} .node.peer") == 4
    facts = page.run("return document.querySelector('.facts').innerText")
    assert "fused_linear_add" in facts
    assert "f32[1,16,96]" in facts
    page.run("document.querySelector(arguments[0]).scrollIntoView()", ".drawing")
    page.click(f"{AFTER} .node.new")
    assert count(page, f"{AFTER} .node.self.new") == 1
    assert count(page, f"{BEFORE} .node.self") == 0
    assert count(page, f"{BEFORE} .node.peer") == 7, "three projections, and the reshapes around them"
    page.type(f"{AFTER} svg", "\ue013")  # arrow up
    assert count(page, f"{AFTER} .node.self.fused") == 0
    page.type(f"{AFTER} svg", "\ue00c")  # escape
    assert count(page, ".node.self") == 0
    assert visible(page, ".facts") == 0


def test_search_finds_nodes_of_both_graphs_and_rows(page: browser.Browser) -> None:
    rules = visible(page, "tbody.rule")
    page.type("#search", "gelu")
    assert count(page, f"{BEFORE} .node.hit") == count(page, f"{AFTER} .node.hit") == 12
    assert visible(page, "tbody.rule") == 1 < rules
    assert "12 before, 12 after" in page.run("return document.getElementById('found').value")
    page.type("#search", "\ue007")  # enter
    assert count(page, ".node.now") == 1
    page.type("#search", "zzz")
    assert count(page, ".node.hit") == visible(page, "tbody.rule") == 0
    page.type("#search", "\ue00c")  # escape
    assert visible(page, "tbody.rule") == rules
    assert count(page, "svg.finding") == 0


def test_search_finds_modules_weights_and_lines(page: browser.Browser) -> None:
    page.type("#search", "3.query.weight")
    assert count(page, f"{BEFORE} .node.hit") == 1, "what reads it is drawn"
    assert count(page, f"{AFTER} .node.hit") == 1
    page.type("#search", "\ue00c")  # escape
    page.click(f"{AFTER} .node.fused")
    module, line = page.run(
        "return [...document.querySelectorAll('.facts .find')].map((b) => b.textContent)"
    )[:2]
    assert module == "0"
    assert line.startswith("workloads.py:")
    page.run("document.querySelectorAll('.facts .find')[1].click()")
    assert page.run("return document.getElementById('search').value") == line
    assert count(page, f"{AFTER} .node.hit") > 10
    assert count(page, ".node.now") == 1
    page.type("#search", "\ue00c")


def test_memory_and_the_first_call_are_shown(page: browser.Browser) -> None:
    assert visible(page, "#memory tbody tr") == 6
    assert visible(page, "#modules tbody tr") > 100
    assert visible(page, ".stages tr") > 10


def test_weights_can_be_shown(page: browser.Browser) -> None:
    few = count(page, f"{AFTER} .node")
    assert count(page, ".node.weight") == count(page, ".node.folded") == 0
    page.click("[data-do=weights]")
    assert count(page, f"{AFTER} .node") > few
    assert count(page, f"{AFTER} .node.weight") == 16 * 12
    assert count(page, f"{AFTER} .node.folded") == 2 * 12
    page.click("[data-do=weights]")
    assert count(page, f"{AFTER} .node") == few


def test_layers_are_stepped_through_in_both_graphs(page: browser.Browser) -> None:
    layer = "return document.querySelector('.layer').textContent"
    assert page.run(layer) == "layer 1 of 12"
    for _ in range(3):
        page.click("[data-do=layer-on]")
    assert page.run(layer) == "layer 4 of 12"
    page.click("[data-do=layer-back]")
    assert page.run(layer) == "layer 3 of 12"


def test_rules_and_the_proof_expand(page: browser.Browser) -> None:
    assert count(page, ".list li") == 0, "steps are made when they are asked for"
    page.click("tbody[data-rule=merge-linears] .more")
    assert visible(page, "tbody[data-rule=merge-linears] .list li") == 21, "20 steps and a button"
    page.click("tbody[data-rule=merge-linears] .more")
    assert count(page, ".list li") == 0
    page.click(".steps summary")
    becomes(page, "document.querySelector('.steps .list li')")
    assert visible(page, ".steps .list li") == 201
    page.click(".steps .list button")
    steps = page.run("return JSON.parse(document.getElementById('data').textContent)[0].proof.length")
    assert visible(page, ".steps .list li") == steps > 300


@pytest.mark.parametrize(("width", "height"), [(500, 900), (3840, 2160)])
def test_small_and_large_windows(page: browser.Browser, width: int, height: int) -> None:
    page.resize(width, height)
    try:
        overflow = page.run(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, "the page scrolls sideways"
        assert visible(page, ".stage") == 2
    finally:
        page.resize(1440, 1200)


def test_graphs_of_a_training_step_are_tabs(window: browser.Browser, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    report = explain(model, torch.randn(4, 8), training=True, timings=False)
    torch._dynamo.reset()
    window.open(report.save(tmp_path / "training.html"))
    assert visible(window, ".graph") == 1
    window.click("#tab-graph-1")
    assert visible(window, "#graph-1") == 1
    assert visible(window, "#graph-0") == 0
    assert count(window, f"#graph-1 {AFTER} .node") > 0
    window.type("#tab-graph-1", "\ue012")  # arrow left
    assert visible(window, "#graph-0") == 1
    assert window.complaints() == []


def test_hostile_names_run_nothing(window: browser.Browser, tmp_path: Path) -> None:
    report = explain(nn.Linear(4, 4), torch.randn(2, 4), timings=False, name="<img src=x onerror=alert(1)>")
    torch._dynamo.reset()
    for node in report.graphs[0].graphs["before"]:
        node["name"] = "<img src=x onerror=alert(2)>"
    window.open(report.save(tmp_path / "hostile.html"))
    window.click(f"{BEFORE} .node.input")
    assert count(window, "img") == 0
    assert "<img" in window.run("return document.querySelector('.facts').innerText")
    assert window.complaints() == []
