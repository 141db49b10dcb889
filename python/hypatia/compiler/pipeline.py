"""One graph through the compiler: capture, optimize, rebuild. What cannot be done is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator

import torch
from torch import fx
from torch._logging import trace_structured

from .. import _native, timeline
from ..capture.records import Captured, capture
from ..devices import cuda
from ..errors import UnsupportedError
from ..execute import plans
from ..execute.folding import folded_bytes
from ..options import Options
from . import program_cache
from .rebuild import rebuild
from .report import GraphReport

log = logging.getLogger(__name__)

raise_errors = False
"""Lets internal errors through instead of leaving the graph as it was: for tests."""

_lock = threading.Lock()
_compiled = 0


def compile_count() -> int:
    """How many graphs were given to the compiler in this process."""
    return _compiled


def _has_kernels(device: torch.device, kind: str) -> bool:
    return not _no_kernels(device, kind)


def _no_kernels(device: torch.device, kind: str) -> str:
    """Why no graph of this kind has a plan on this device, if none has."""
    # In training, weights change at every step: a CPU's kernels would pack them each time.
    if device.type == "cpu":
        return (
            "" if kind == "inference" else "a CPU's plans pack weights, which change at every training step"
        )
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    return cuda.available() or ""


def _searched(text: str, options: str) -> program_cache.Optimization:
    """The optimized program; parts of the search are stages of their own."""
    found = program_cache.optimized(text, options)
    if isinstance(found, _native.Optimization):
        spent = {name: ms * 1e-3 for name, ms in json.loads(found.report())["times"].items()}
        parts = {timeline.EXTRACTION: spent.get("extract", 0.0), timeline.PROOF: spent.get("prove", 0.0)}
        timeline.moved(timeline.SEARCH, parts)
    return found


@dataclasses.dataclass(frozen=True)
class Left:
    """A graph that runs as it was captured."""

    kind: str
    reason: str


_listeners: list[Callable[[Left], None]] = []


@contextlib.contextmanager
def hearing_of_left(told: Callable[[Left], None]) -> Iterator[None]:
    """Tells of every graph that is left as it is."""
    with _lock:
        _listeners.append(told)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(told)


def _tell_left(kind: str, reason: str) -> None:
    with _lock:
        listeners = list(_listeners)
    for told in listeners:
        told(Left(kind, reason))


def _rebuilt(
    gm: fx.GraphModule, captured: Captured, options: str, kernels: Collection[str]
) -> tuple[program_cache.Optimization, fx.GraphModule]:
    """The optimized program and its graph; what comes from disk and does not fit is searched anew."""
    with timeline.stage(timeline.SEARCH):
        optimization = _searched(captured.text, options)
    try:
        with timeline.stage(timeline.REBUILD):
            return optimization, rebuild(gm, captured, json.loads(optimization.emission()), kernels)
    except Exception:
        with timeline.stage(timeline.SEARCH):
            anew = program_cache.again(optimization, captured.text, options)
        if anew is None:
            raise
        with timeline.stage(timeline.REBUILD):
            return anew, rebuild(gm, captured, json.loads(anew.emission()), kernels)


def optimize_graph(
    gm: fx.GraphModule,
    options: Options,
    kind: str,
    weights: Collection[str] = (),
    *,
    autograd: bool = False,
    without: Collection[tuple[str, str]] = (),
    plain: int | None = None,
) -> tuple[fx.GraphModule, GraphReport | None]:
    """The optimized graph and its report; the graph itself when nothing can be done.

    ``without`` names rules and kernels that are not to be used: ("rule", name), ("kernel", name). Of a graph
    of a training step, ``plain`` tells how many results are not kept for the backward pass.
    """
    global _compiled
    with _lock:
        _compiled += 1
    rules = sorted(name for part, name in without if part == "rule")
    options = dataclasses.replace(options, disabled_rules=(*options.disabled_rules, *rules))
    kernels = {name for part, name in without if part == "kernel"}
    try:
        with timeline.stage(timeline.RECORDS):
            captured = capture(gm, weights, autograd=autograd)
        optimization, optimized = _rebuilt(gm, captured, options.native(captured.device), kernels)
        copies = folded_bytes(optimized)
        if options.weight_copies is not None and copies > options.weight_copies:
            log.info("%s graph: weights are not folded, that would take %d bytes", kind, copies)
            return optimize_graph(gm, options, kind, (), autograd=autograd, without=without, plain=plain)
        if plans.KERNEL in kernels:
            why = "it is left out"
        elif not _has_kernels(captured.device, kind):
            why = _no_kernels(captured.device, kind)
        else:
            with timeline.stage(timeline.PLANNING):
                why = plans.attach(optimized, optimization, captured, options, plain)
    except UnsupportedError as e:
        log.info("%s graph left as it is: %s", kind, e)
        _tell_left(kind, str(e))
        return gm, None
    except Exception as e:
        if raise_errors:
            raise
        # A user's model never fails because of the compiler.
        log.warning("%s graph left as it is after an internal error", kind, exc_info=True)
        _tell_left(kind, f"internal error: {type(e).__name__}: {e}")
        return gm, None
    report = GraphReport(kind, optimization, gm.graph, optimized.graph, copies)
    report.no_plan = why.removeprefix("no native plan: ")
    report.kept = "graph" if report.no_plan else "plan"
    if log.isEnabledFor(logging.INFO):
        log.info("%s", report)
    log.debug("optimized graph\n%s", optimized.graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hypatia_{kind}", "encoding": "string"},
        payload_fn=lambda: f"{report}\n\n{optimized.graph}",
    )
    return optimized, report
