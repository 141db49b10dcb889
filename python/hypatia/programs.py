"""Optimized programs, kept on disk: a graph that was searched once is not searched again.

What is kept is the emission, the program and the report. The rest (proof, drawing) is asked for rarely,
and the same search gives it again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Protocol

from . import _native, cache

KIND = "program"
WORTH_MS = 10.0
"""Searches that took less are not kept."""


class Optimization(Protocol):
    """An optimized program."""

    def emission(self) -> str:
        """The program as calls into torch, as JSON."""

    def report(self) -> str:
        """What was done, as JSON."""

    def plan(self, wish: str) -> _native.NativePlan:
        """The program as a native plan for what is asked, as JSON; see ``_native.Optimization.plan``."""

    def graphs(self) -> str:
        """The programs in and out as lists of nodes, as JSON."""

    def steps(self) -> str:
        """The proof, as JSON."""

    def step_emission(self) -> str:
        """Both sides of the steps of the proof as calls into torch, as JSON."""

    def texts(self) -> tuple[str, str]:
        """The programs in and out as text."""

    def replay(self, seed: int, budget: float) -> str:
        """The proof checked again, as JSON."""


class _Kept:
    """An optimized program from disk."""

    def __init__(self, graph: str, options: str, emission: str, report: str, program: str | None) -> None:
        self._source = (graph, options)
        self._emission = emission
        self._report = report
        self._program = program

    @functools.cached_property
    def _again(self) -> _native.Optimization:
        return _native.optimize(*self._source)

    def emission(self) -> str:
        return self._emission

    def report(self) -> str:
        return self._report

    def plan(self, wish: str) -> _native.NativePlan:
        if self._program is None:
            return self._again.plan(wish)
        return _native.kept_plan(self._source[0], self._program, wish)

    def graphs(self) -> str:
        return self._again.graphs()

    def steps(self) -> str:
        return self._again.steps()

    def step_emission(self) -> str:
        return self._again.step_emission()

    def texts(self) -> tuple[str, str]:
        return self._again.texts()

    def replay(self, seed: int, budget: float) -> str:
        return self._again.replay(seed, budget)


def optimized(graph: str, options: str) -> Optimization:
    """The optimized program of a captured graph, searched or from disk."""
    key = hashlib.sha256("\0".join((_build(), options, graph)).encode()).hexdigest()
    found = cache.get(KIND, key)
    if found is not None:
        try:
            kept = json.loads(found)
            return _Kept(graph, options, kept["emission"], kept["report"], kept["program"])
        except (ValueError, KeyError, TypeError):
            pass
    fresh = _native.optimize(graph, options)
    report = fresh.report()
    if sum(json.loads(report)["times"].values()) >= WORTH_MS:
        kept = {"emission": fresh.emission(), "report": report, "program": fresh.kept()}
        cache.put(KIND, key, json.dumps(kept).encode())
    return fresh


@functools.cache
def _build() -> str:
    """What identifies this build of the core: another one may know other rules."""
    made = Path(_native.__file__).stat()
    return f"{_native.__version__} {made.st_size} {made.st_mtime_ns}"
