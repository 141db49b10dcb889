"""Numbers as people read them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ...capture.source_names import LineData
from ..units import digits
from ..units import size as size
from .form import GraphForm

NUMERICS = {
    "exact": "bit for bit the same",
    "wider": "the same real number, with fewer roundings",
    "reassoc": "the same real number, rounded in another order",
    "approx": "another real number, close by",
}
"""What the numerics classes of rules mean."""


def duration(seconds: float) -> str:
    """A time with the unit that fits it, four digits at most."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds * 1e6)} µs"


def cost(microseconds: float) -> str:
    """A cost of the cost model."""
    return duration(microseconds * 1e-6)


def change(before: float, after: float) -> str:
    """How much less or more the second number is."""
    if not before or before == after:
        return "unchanged"
    share = 100 * (after - before) / before
    size = f"{abs(share):.0f}" if abs(share) >= 10 else f"{abs(share):.1f}"
    return "less than 0.1 % apart" if size == "0.0" else f"{size} % {'less' if share < 0 else 'more'}"


def speed(eager: Sequence[float], ours: Sequence[float]) -> str:
    """Which of two series of times is shorter; not told apart when the middle halves of both overlap."""
    ratio = statistics.median(eager) / statistics.median(ours)
    (low, _, high), (our_low, _, our_high) = (statistics.quantiles(s, n=4) for s in (eager, ours))
    if low <= our_high and our_low <= high:
        return "as fast as eager, within the noise"
    return f"{ratio:.2f} times as fast as eager" if ratio > 1 else f"{1 / ratio:.2f} times as long as eager"


def error(value: float | str | None) -> str:
    """A difference to float64; what is not finite is text already."""
    if value is None or isinstance(value, str):
        return value or "none"
    return "0" if value == 0 else f"{value:.1e}"


def ops(graph: GraphForm) -> tuple[int, int]:
    """How many ops a call of a graph has before and after; what is computed once from weights is none."""
    return sum(graph["ops_before"].values()), sum(graph["ops_after"].values())


def runs(graph: GraphForm) -> str:
    """Which form of a graph runs, why, and what forms take."""
    by = {
        "plan": "by its native plan",
        "recording": "by torch's ops, recorded as a CUDA graph",
        "graph": "by torch's ops",
        "eager": "as it was captured",
    }
    text = by.get(graph["kept"], graph["kept"])
    if graph["no_plan"]:
        text += f"; no native plan: {graph['no_plan']}"
    if graph["forms"]:
        names = {"plan": "plan", "graph": "torch's ops", "eager": "eager"}
        each = (f"{names.get(name, name)} {duration(seconds)}" for name, seconds in graph["forms"].items())
        text += f" ({', '.join(each)})"
    return text


def line(place: LineData | None) -> str:
    """A line of a program, without its folders."""
    return f"{Path(place['file']).name}:{place['line']}" if place else ""


class ModuleCost(TypedDict):
    """Ops and costs of a module, and the lines that they are from."""

    module: str
    lines: list[str]
    before: int
    after: int
    cost_before: float
    cost_after: float


def _nothing(module: str) -> ModuleCost:
    return {"module": module, "lines": [], "before": 0, "after": 0, "cost_before": 0.0, "cost_after": 0.0}


def modules(graph: GraphForm) -> list[ModuleCost]:
    """Ops and costs by module, in the order in which they are called."""
    found: dict[str, ModuleCost] = {}
    for side in ("before", "after"):
        for node in graph["drawn"][side]:
            if node["kind"] in ("op", "fused", "opaque") and not node["folded"]:
                entry = found.setdefault(node["module"], _nothing(node["module"]))
                if side == "before":
                    entry["before"] += 1
                    entry["cost_before"] += node["cost"]
                else:
                    entry["after"] += 1
                    entry["cost_after"] += node["cost"]
                place = line(node["line"])
                if place and place not in entry["lines"]:
                    entry["lines"].append(place)
    return list(found.values())


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def titles(kinds: Sequence[str]) -> list[str]:
    """Titles of graphs by their kinds, numbered where a kind comes more than once."""
    return [
        f"{kind.capitalize()} graph" + (f" {kinds[: at + 1].count(kind)}" if kinds.count(kind) > 1 else "")
        for at, kind in enumerate(kinds)
    ]
