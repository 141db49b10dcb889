"""The page of ``hypatia bench --html``: one file, no script, nothing from outside."""

from __future__ import annotations

import itertools
from importlib import resources
from typing import Any

import jinja2

COLOURS = {
    "eager": "var(--eager)",
    "eager-graph": "var(--graph)",
    "aot-eager": "var(--graph)",
    "inductor": "var(--peer)",
    "inductor-max-autotune": "var(--peer2)",
    "inductor-freezing": "var(--peer2)",
    "hypatia": "var(--ours)",
    "hypatia-direct": "var(--ours)",
}


def page(results: dict[str, Any]) -> str:
    """The results of a benchmark as a page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    source = resources.files(__package__).joinpath("bench_page.html.j2").read_text(encoding="utf-8")
    groups = [
        _group(name, list(cells))
        for name, cells in itertools.groupby(results["cells"], key=lambda c: c["workload"])
    ]
    names = list(dict.fromkeys(c["backend"] for c in results["cells"]))
    legend = [(name, COLOURS.get(name, "var(--peer)")) for name in names]
    return environment.from_string(source).render(groups=groups, legend=legend, **results)


def _group(name: str, cells: list[dict[str, Any]]) -> dict[str, object]:
    """One workload: a bar for each backend, as a share of the slowest."""
    slowest = max((c["microseconds"] or 0.0 for c in cells), default=0.0)
    bars = [
        {
            **c,
            "colour": COLOURS.get(c["backend"], "var(--peer)"),
            "share": 100 * c["microseconds"] / slowest if c["microseconds"] and slowest else 0.0,
            "time": _time(c["microseconds"]),
        }
        for c in cells
    ]
    return {"name": name, "bars": bars}


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    if microseconds < 1e3:
        return f"{microseconds:.1f} \u00b5s"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"
