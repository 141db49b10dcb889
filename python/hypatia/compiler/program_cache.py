"""Optimized programs, kept on disk: a graph that was searched once is not searched again.

What is kept is the program and the report. The calls into torch are made from the program by the op table, so
that a file names none of them. The rest (proof, drawing) is asked for rarely, and the same search gives it
again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Protocol

from .. import _native, store

log = logging.getLogger(__name__)

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

    def __init__(self, graph: str, options: str, kept: _native.KeptProgram) -> None:
        self._source = (graph, options)
        self._kept = kept

    @functools.cached_property
    def _again(self) -> _native.Optimization:
        return _native.optimize(*self._source)

    def emission(self) -> str:
        return self._kept.emission()

    def report(self) -> str:
        return self._kept.report()

    def plan(self, wish: str) -> _native.NativePlan:
        return self._kept.plan(wish)

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
    key = _key(graph, options)
    found = store.get(KIND, key)
    if found is not None:
        try:
            kept = json.loads(found)
            return _Kept(graph, options, _native.KeptProgram(graph, kept["program"], kept["report"]))
        except (ValueError, KeyError, TypeError, RecursionError, _native.HypatiaError) as e:
            log.debug("a kept program counts as absent: %s", e)
    return _searched(graph, options, key)


def again(found: Optimization, graph: str, options: str) -> Optimization | None:
    """The program searched anew, if one from disk was of no use."""
    if not isinstance(found, _Kept):
        return None
    key = _key(graph, options)
    store.drop(KIND, key)
    return _searched(graph, options, key)


def _searched(graph: str, options: str, key: str) -> Optimization:
    fresh = _native.optimize(graph, options)
    report = fresh.report()
    program = fresh.kept()
    if program is not None and sum(json.loads(report)["times"].values()) >= WORTH_MS:
        store.put(KIND, key, json.dumps({"program": program, "report": report}).encode())
    return fresh


def _key(graph: str, options: str) -> str:
    return hashlib.sha256("\0".join((_build(), options, graph)).encode()).hexdigest()


@functools.cache
def _build() -> str:
    """What identifies this build of the core: another one may know other rules."""
    made = Path(_native.__file__).stat()
    return f"{_native.__version__} {made.st_size} {made.st_mtime_ns}"
