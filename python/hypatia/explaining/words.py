"""Numbers as people read them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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


def digits(value: float) -> str:
    """A number with about four digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


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


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def titles(kinds: Sequence[str]) -> list[str]:
    """Titles of graphs by their kinds, numbered where a kind comes more than once."""
    return [
        f"{kind.capitalize()} graph" + (f" {kinds[: at + 1].count(kind)}" if kinds.count(kind) > 1 else "")
        for at, kind in enumerate(kinds)
    ]
