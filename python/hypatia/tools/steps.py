"""Steps of plans as people read them: equal ones together, the longest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..execute.step_times import Call, StepTime, step_times


@dataclasses.dataclass(frozen=True)
class Line:
    """Steps that are the same, such as those of equal layers."""

    name: str
    sizes: str
    count: int
    microseconds: float
    """Of all of them, as is what follows."""
    predicted: float
    limit: float
    bound_by: str


def timed(calls: Sequence[Call], repeats: int) -> tuple[list[Line], int]:
    """The steps of all plans that were called, and how many plans cannot run step by step."""
    steps: list[StepTime] = []
    refused = 0
    for native, args in calls:
        times = step_times(native, args, repeats)
        refused += times is None
        steps += times or []
    return _lines(steps), refused


def _lines(steps: Sequence[StepTime]) -> list[Line]:
    groups: dict[tuple[str, str], list[StepTime]] = {}
    for step in steps:
        groups.setdefault((step.name, step.sizes), []).append(step)
    lines = [
        Line(
            name,
            sizes,
            len(each),
            1e6 * sum(s.seconds for s in each),
            1e6 * sum(s.predicted for s in each),
            1e6 * sum(s.least for s in each),
            each[0].bound_by,
        )
        for (name, sizes), each in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.microseconds)
