"""The repeated layers of a model, found in the sequence of its ops."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4000
"""Longer sequences are not searched: the search takes their square."""

SHORTEST_PERIOD = 3
"""Fewer ops than this are no layer."""


def repetitions(ops: Sequence[str]) -> list[range]:
    """Ranges of the sequence that repeat one after the other; none if less than half of it repeats."""
    n = len(ops)
    if n > LONGEST:
        return []
    best: tuple[int, int, int] = (0, 0, 0)
    for period in range(SHORTEST_PERIOD, n // 2 + 1):
        start, length = _longest_run(ops, period)
        times = length // period + 1
        covered = times * period if length >= period else 0
        # A multiple of a period covers no more than the period itself, and comes later.
        if covered > best[0]:
            best = (covered, start, period)
    covered, start, period = best
    if not covered or 2 * covered < n:
        return []
    return [range(at, at + period) for at in range(start, start + covered, period)]


def _longest_run(ops: Sequence[str], period: int) -> tuple[int, int]:
    """Start and length of the longest stretch in which every op is the one a period later."""
    start = length = run = 0
    for at in range(len(ops) - period):
        run = run + 1 if ops[at] == ops[at + period] else 0
        if run > length:
            start, length = at - run + 1, run
    return start, length
