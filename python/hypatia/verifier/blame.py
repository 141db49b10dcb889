"""Which part of a compilation is to blame for a wrong result.

A rule is found by computing both sides of every step of the proof on the user's own inputs: a step
whose sides differ is a rewrite that does not hold. What has no proof is found by halving: leaving out
parts until the smallest set remains without which things work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from ..capture.records import capture
from ..compiler.pipeline import Part
from ..compiler.rebuild import rebuild_values
from ..compiler.report import GraphReport
from ..execute.changes import RandomState
from .judge import judge, type_text
from .reference import Script, Stream

BROKEN = 1e-6
"""Difference of two sides in float64, as a share of the largest value, that no rounding explains."""


@dataclasses.dataclass(frozen=True)
class BrokenStep:
    """A step of a proof whose sides differ on real inputs."""

    rule: str
    type: str
    error: float
    text: str

    def __str__(self) -> str:
        return f"on {self.type} it is off by {self.error:.2g}: {self.text}"


def broken_steps(
    gm: fx.GraphModule, report: GraphReport, inputs: dict[str, object], random: RandomState
) -> Iterator[BrokenStep]:
    """The steps of the proof that do not hold; ``inputs`` are the graph's, by name."""
    emission, numbers = json.loads(report.optimization.step_emission())
    if not numbers:
        return
    searched = report.before.owning_module or gm
    values = rebuild_values(searched, capture(searched), emission)
    (output,) = values.graph.find_nodes(op="output")
    sides: list[fx.Node] = list(output.args[0])
    script = Script(values)
    given = {n: inputs[n.name] for n in script.inputs}
    steps = list(zip(numbers, sides[::2], sides[1::2], strict=True))
    waiting: dict[fx.Node, list[tuple[int, fx.Node, fx.Node]]] = {}
    for step in steps:
        for side in {step[1], step[2]}:
            waiting.setdefault(side, []).append(step)
    known: dict[fx.Node, tuple[object, object]] = {}
    runs = (Stream(script, given, random), Stream(script, given, random, wide=True))
    for (node, own), (_, exact) in zip(*runs, strict=True):
        known[node] = (own, exact)
        for step in list(waiting[node]):
            number, before, after = step
            if before in known and after in known:
                error = _error(known[before], known[after])
                if error is not None:
                    yield _broken(report, number, known[before][0], error)
                for side in {before, after}:
                    waiting[side].remove(step)
                    if not waiting[side]:
                        del known[side]


def _broken(report: GraphReport, number: int, value: object, error: float) -> BrokenStep:
    step = report.proof[number]
    return BrokenStep(step["rule"], type_text(value), error, _short(f"{step['before']} = {step['after']}"))


def _error(before: tuple[object, object], after: tuple[object, object]) -> float | None:
    """How far the sides of a step are apart; none if that is rounding."""
    if not all(isinstance(v, torch.Tensor) for v in (*before, *after)):
        return None
    law = judge("", after[1], before[1], None)
    if law.error > BROKEN * (law.scale or 1.0):
        return law.error
    rounding = judge("", after[0], before[0], before[1])
    return None if rounding.error <= 8 * rounding.allowed else rounding.error


def _short(text: str, length: int = 300) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def smallest(parts: Sequence[Part], works: Callable[[frozenset[Part]], bool]) -> list[Part]:
    """A smallest set of parts without which things work, given that they work without all of them."""

    def search(base: frozenset[Part], rest: Sequence[Part], fresh: bool) -> list[Part]:
        if not fresh and works(base):
            return []
        if len(rest) == 1:
            return list(rest)
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        second = search(base | set(left), right, False)
        first = search(base | set(second), left, not second)
        return [*first, *second]

    return search(frozenset(), list(parts), True)
