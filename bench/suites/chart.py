"""The results of a run as a picture: how many times as fast as eager, a row for each model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from speed.chart import style

from .forms import LABELS
from .run import Line
from .tables import ratios

COLOURS = {
    "hypatia": ("#1f6f5c", "#4fb89a"),
    "torch": ("#8fbfae", "#2f7a66"),
    "inductor": ("#c98a2b", "#e0b060"),
    "ro": ("#8a5a14", "#b98435"),
    "ind+g": ("#8d4fa3", "#c58ad8"),
    "graph": ("#3f6fb5", "#7aa5e0"),
}
"""On a light and on a dark ground."""

ROW, LABEL, PLOT, TOP = 15, 250, 520, 74
LEAST, MOST = 0.25, 16.0
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16)


def chart(lines: Sequence[Line], title: str) -> str:
    """The picture as SVG: a dot for each form; to the right of the line at 1x it is faster than eager."""
    dots = {form: ratios(lines, form, ["eager"]) for form in COLOURS}
    names = [line["name"] for line in lines if any(line["name"] in over for over in dots.values())]
    height = TOP + ROW * len(names) + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + PLOT + 30} {height}" font-size="11">'
    )
    parts = [
        head,
        style({_class(form): pair for form, pair in COLOURS.items()}),
        f'<text class="title" x="6" y="16">{escape(title)}: how many times as fast as eager</text>',
    ]
    parts += [*_legend([form for form in COLOURS if dots[form]]), *_grid(height - 12)]
    for number, name in enumerate(names):
        y = TOP + ROW * number + 4
        parts.append(f'<text class="name" x="{LABEL - 8}" y="{y + 4}">{escape(name)}</text>')
        for form in reversed(COLOURS):
            if name in dots[form]:
                parts.append(_dot(form, name, dots[form][name], y))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(form: str, name: str, ratio: float, y: int) -> str:
    text = escape(f"{name}: {LABELS[form]} {ratio:.2f}x")
    radius = 5 if form == "hypatia" else 3.5
    place = f'cx="{_x(ratio)}" cy="{y}" r="{radius}"'
    return f'<circle class="{_class(form)}" {place}><title>{text}</title></circle>'


def _class(form: str) -> str:
    return form.replace("+", "-")


def _x(ratio: float) -> float:
    """Where a ratio is on the axis, by its logarithm; what is beyond the ends is at them."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(LABEL + share * PLOT, 1)


def _grid(bottom: int) -> Iterator[str]:
    for tick in TICKS:
        kind = "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{_x(tick)}" x2="{_x(tick)}" y1="{TOP - 8}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{_x(tick)}" y="{TOP - 14}">{tick:g}x</text>'


def _legend(forms: Sequence[str]) -> Iterator[str]:
    x = 12
    for form in forms:
        yield f'<circle class="{_class(form)}" cx="{x}" cy="36" r="{5 if form == "hypatia" else 3.5}"/>'
        yield f'<text x="{x + 10}" y="40">{escape(LABELS[form])}</text>'
        x += 40 + 7 * len(LABELS[form])
