"""One graph through the compiler: capture, optimize, rebuild. What cannot be done is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import fx

from .. import _native, timeline
from .._torch import trace_structured
from ..capture import (
    attention_calls,
    constant_folding,
    constant_masks,
    cudnn_norms,
    filled_by_tensors,
    predicted_strides,
)
from ..capture.layout import reshape_views
from ..capture.records import Captured, capture
from ..devices import table, targets
from ..errors import UnsupportedError
from ..execute import plans
from ..execute.folding import folded_bytes
from ..execute.plans import Planner
from ..options import Options
from . import changed_inputs, order, program_cache
from .rebuild import Rebuilt, rebuild
from .report import GraphReport

log = logging.getLogger(__name__)

raise_errors = False
"""Lets internal errors through instead of leaving the graph as it was: for tests."""

_lock = threading.Lock()
_compiled = 0


def compile_count() -> int:
    """How many graphs were given to the compiler in this process."""
    return _compiled


def _no_kernels(device: torch.device, kind: str) -> str:
    """Why no graph of this kind has a plan on this device, if none has."""
    return table.of(device).no_kernels(device, kind)


def _searched(text: str, options: str) -> program_cache.Optimization:
    """The optimized program; parts of the search are stages of their own."""
    found = program_cache.optimized(text, options)
    if isinstance(found, _native.Optimization):
        spent = {name: ms * 1e-3 for name, ms in json.loads(found.report())["times"].items()}
        parts = {timeline.EXTRACTION: spent.get("extract", 0.0), timeline.PROOF: spent.get("prove", 0.0)}
        timeline.moved(timeline.SEARCH, parts)
    return found


@dataclasses.dataclass(frozen=True)
class UncompiledGraph:
    """A graph that runs as it was captured."""

    kind: str
    reason: str


_listeners: list[Callable[[UncompiledGraph], None]] = []


@contextlib.contextmanager
def listening_for_uncompiled(told: Callable[[UncompiledGraph], None]) -> Iterator[None]:
    """Tells of every graph that is left as it is."""
    with _lock:
        _listeners.append(told)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(told)


def _tell_uncompiled(kind: str, reason: str) -> None:
    with _lock:
        listeners = list(_listeners)
    for told in listeners:
        told(UncompiledGraph(kind, reason))


Part = tuple[str, str]
"""A rule or kernel that a compilation can do without: ("rule", name), ("kernel", name)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of a compilation."""

    options: Options
    kind: str
    """inference, training, or the forward or backward graph of a training step"""
    weights: frozenset[str] = frozenset()
    """Inputs and attributes whose values stay the same from call to call."""
    autograd: bool = False
    """Autograd will see the ops of the graph."""
    plain: int | None = None
    """Of a graph of a training step: how many results are not kept for the backward pass."""
    without: frozenset[Part] = frozenset()
    """What is not to be used."""


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph as it was captured, and what the compiler made of it."""

    captured: fx.GraphModule
    optimized: fx.GraphModule
    """The captured one itself where nothing could be done."""
    planner: Planner | None = None
    """What makes its native plans, if it has some."""
    report: GraphReport | None = None
    """None: the graph is left as it was captured."""


def _rebuilt(
    gm: fx.GraphModule, captured: Captured, request: Request
) -> tuple[program_cache.Optimization, Rebuilt]:
    """The optimized program and its graph; what comes from disk and does not fit is searched anew."""
    costs = "shipped" if request.options.target else request.options.costs
    options = request.options.native(targets.target(captured.device, costs))
    kernels = {name for part, name in request.without if part == "kernel"}
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


def compile_graph(gm: fx.GraphModule, request: Request) -> CompiledGraph:
    """The graph through all stages. What cannot be compiled is left as it was captured."""
    global _compiled
    with _lock:
        _compiled += 1
    kind = request.kind
    try:
        compiled = _compile(gm, request)
    except UnsupportedError as e:
        log.info("%s graph left as it is: %s", kind, e)
        _tell_uncompiled(kind, str(e))
        return CompiledGraph(gm, gm)
    except Exception as e:
        if raise_errors:
            raise
        # A user's model never fails because of the compiler.
        log.warning("%s graph left as it is after an internal error", kind, exc_info=True)
        _tell_uncompiled(kind, f"internal error: {type(e).__name__}: {e}")
        return CompiledGraph(gm, gm)
    report, optimized = compiled.report, compiled.optimized
    if log.isEnabledFor(logging.INFO):
        log.info("%s", report)
    log.debug("optimized graph\n%s", optimized.graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hypatia_{kind}", "encoding": "string"},
        payload_fn=lambda: f"{report}\n\n{optimized.graph}",
    )
    return compiled


class _Prepared(NamedTuple):
    """A graph as the search gets it."""

    module: fx.GraphModule
    masks: list[str]
    """What was done to constant masks."""
    constants: frozenset[str]
    """Attributes that stand for values which depend on no input."""
    passes: list[str]
    """What was done, and can be left out."""


def _prepared(gm: fx.GraphModule, request: Request) -> _Prepared:
    """The graph without what its constants decide."""
    left_out = {name for part, name in request.without if part == "pass"}
    masks: list[str] = []
    constants: list[str] = []
    written: list[str] = []
    seen: list[str] = []
    # In a training step, what one graph computes others may read.
    inference = request.kind == "inference" and not request.autograd
    # Torch's attention rounds elsewhere.
    may_round = request.options.numerics in ("reassoc", "approx")
    if inference and may_round and attention_calls.PASS not in left_out:
        gm, seen, written = attention_calls.as_calls(gm)
    as_given = gm
    if inference and filled_by_tensors.PASS not in left_out:
        gm = filled_by_tensors.expanded(gm)
    filled = gm is not as_given
    if constant_masks.PASS not in left_out:
        gm, masks = constant_masks.without_masks(gm)
    before = gm
    if inference and constant_folding.PASS not in left_out:
        gm, constants = constant_folding.with_constants(gm, request.weights)
    done = [
        (bool(written), attention_calls.PASS),
        (filled, filled_by_tensors.PASS),
        (bool(masks), constant_masks.PASS),
        (gm is not before, constant_folding.PASS),
    ]
    passes = [name for was_done, name in done if was_done]
    return _Prepared(gm, written + masks, frozenset(seen + constants), passes)


def _compile(gm: fx.GraphModule, request: Request) -> CompiledGraph:
    rules = sorted(name for part, name in request.without if part == "rule")
    options = dataclasses.replace(request.options, disabled_rules=(*request.options.disabled_rules, *rules))
    request = dataclasses.replace(request, options=options)
    with timeline.stage(timeline.RECORDS):
        cudnn_norms.for_any_strides(gm)
        reshape_views(gm, of_images=True)
        predicted_strides.put_right(gm)
        prepared = _prepared(gm, request)
        searched = prepared.module
        weights = constant_folding.apart_from_open_sizes(searched.graph, request.weights | prepared.constants)
        captured = capture(searched, weights, autograd=request.autograd)
    optimization, rebuilt = _rebuilt(searched, captured, request)
    optimized = rebuilt.module
    if request.autograd:
        order.as_captured(optimized.graph, rebuilt.origins)
        optimized.recompile()
        changed_inputs.protect(searched, optimized)
    copies = folded_bytes(optimized)
    if options.weight_copies is not None and copies > options.weight_copies:
        log.info("%s graph: weights are not folded, that would take %d bytes", request.kind, copies)
        return _compile(gm, dataclasses.replace(request, weights=frozenset()))
    planner: Planner | str = _no_kernels(captured.device, request.kind)
    if ("kernel", plans.KERNEL) in request.without:
        planner = "it is left out"
    elif not planner:
        with timeline.stage(timeline.PLANNING):
            planner = plans.planner_of(
                optimized,
                rebuilt.names,
                optimization,
                captured,
                options,
                request.plain,
                tf32=("kernel", plans.TF32) not in request.without,
            )
    report = GraphReport(
        request.kind, optimization, searched.graph, optimized.graph, copies, prepared.masks, prepared.passes
    )
    if isinstance(planner, str):
        report.no_plan, report.kept = planner, "graph"
        return CompiledGraph(gm, optimized, None, report)
    report.may_use_tf32 = planner.may_use_tf32
    return CompiledGraph(gm, optimized, planner, report)
