"""The results as a picture: how many times as fast as eager, a row for each case, a dot for each backend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

from .gates import Cells
from .run import LABELS, OURS

COLOURS = {
    OURS: ("#1f6f5c", "#4fb89a"),
    "hypatia": ("#8fbfae", "#2f7a66"),
    "inductor": ("#c98a2b", "#e0b060"),
    "inductor-freezing": ("#8a5a14", "#b98435"),
    "onnxruntime": ("#3f6fb5", "#7aa5e0"),
    "openvino": ("#8d4fa3", "#c58ad8"),
}
"""On a light and on a dark ground."""

ROW, LABEL, PLOT, GAP = 17, 150, 300, 40
HEAD, TOP, BOTTOM = 34, 66, 16
LEAST, MOST = 0.25, 8.0
TICKS = (0.25, 0.5, 1, 2, 4, 8)

TITLE = "How many times as fast as eager (to the right: faster; at an edge: beyond it)"

COLUMNS = (
    (("mlp", "fp32", "MLPs, fp32"), ("pointwise", "fp32", "4 M floats, fp32"), ("models", None, "models")),
    (("mlp", "bf16", "MLPs, bf16"), ("rewrites", "fp32", "rewrites, fp32")),
    (("linear", "fp32", "linear layers, fp32"), ("linear", "bf16", "linear layers, bf16")),
)
"""Panels: section, dtype (or all), title."""


def chart(sections: dict[str, Any]) -> str:
    """The picture as SVG; panels without results are left out."""
    columns = []
    for panels in COLUMNS:
        found = [(title, _rows(sections, name, dtype)) for name, dtype, title in panels]
        columns.append([(title, rows) for title, rows in found if rows])
    columns = [column for column in columns if column]
    width = max(1, len(columns)) * (LABEL + PLOT + GAP)
    height = TOP + BOTTOM + max((sum(map(_height, column)) for column in columns), default=0)
    parts = [*_legend(columns)]
    for i, column in enumerate(columns):
        y = TOP
        for panel in column:
            parts += _panel(i * (LABEL + PLOT + GAP), y, *panel)
            y += _height(panel)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">'
    return "\n".join([head, style(COLOURS), *parts, "</svg>"]) + "\n"


Row = tuple[str, dict[str, float]]
"""A name, and ratios over eager by backend."""


def _rows(sections: dict[str, Any], name: str, dtype: str | None) -> list[Row]:
    cells: Cells = sections.get(name, {}).get("cells", [])
    rows: dict[str, dict[str, float]] = {}
    for c in cells:
        if dtype in (None, c["dtype"]) and c["ratio"]:
            label = c["case"] if dtype else f"{c['case']} {c['dtype']}"
            rows.setdefault(label, {})[c["backend"]] = c["ratio"]
    return list(rows.items())


def _height(panel: tuple[str, list[Row]]) -> int:
    return HEAD + ROW * len(panel[1])


def _x(ratio: float) -> float:
    """Where a ratio is on the axis, by its logarithm; what is beyond the ends is at them."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(LABEL + share * PLOT, 1)


def _panel(left: int, top: int, title: str, rows: list[Row]) -> Iterator[str]:
    bottom = HEAD + ROW * len(rows) - 8
    yield f'<g transform="translate({left} {top})">'
    yield f'<text class="title" x="0" y="12">{escape(title)}</text>'
    for tick in TICKS:
        kind = "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{_x(tick)}" x2="{_x(tick)}" y1="18" y2="{bottom}"/>'
        yield f'<text class="tick" x="{_x(tick)}" y="12">{tick:g}x</text>'
    for i, (name, ratios) in enumerate(rows):
        y = HEAD + ROW * i - 6
        yield f'<text class="name" x="{LABEL - 8}" y="{y + 4}">{escape(name)}</text>'
        for backend in reversed(COLOURS):
            if backend in ratios:
                radius = 5 if backend == OURS else 3.5
                value = f"{name}: {LABELS[backend]} {ratios[backend]:.2f}x"
                yield (
                    f'<circle class="{backend}" cx="{_x(ratios[backend])}" cy="{y}" r="{radius}">'
                    f"<title>{escape(value)}</title></circle>"
                )
    yield "</g>"


def _legend(columns: list[list[tuple[str, list[Row]]]]) -> Iterator[str]:
    there = {b for column in columns for _, rows in column for _, ratios in rows for b in ratios}
    yield f'<text class="title" x="0" y="16">{escape(TITLE)}</text>'
    x = 6
    for backend in COLOURS:
        if backend in there:
            yield f'<circle class="{backend}" cx="{x}" cy="36" r="{5 if backend == OURS else 3.5}"/>'
            yield f'<text x="{x + 10}" y="40">{escape(LABELS[backend])}</text>'
            x += 34 + 6 * len(LABELS[backend])


def style(colours: Mapping[str, tuple[str, str]]) -> str:
    """Colours of classes on light and dark pages, and how texts and lines look."""
    light = "".join(f".{name}{{fill:{pair[0]}}}" for name, pair in colours.items())
    dark = "".join(f".{name}{{fill:{pair[1]}}}" for name, pair in colours.items())
    return (
        "<style>text{font-family:system-ui,sans-serif;fill:#333}.title{font-weight:600}"
        ".name{text-anchor:end}.tick{text-anchor:middle;fill:#888;font-size:9px}"
        ".grid{stroke:#ddd}.one{stroke:#888}"
        f"{light}"
        "@media (prefers-color-scheme: dark){text{fill:#ddd}.grid{stroke:#3a3a3a}.one{stroke:#999}"
        f"{dark}}}</style>"
    )
