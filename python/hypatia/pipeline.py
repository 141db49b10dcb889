"""One graph through the compiler: capture, optimize, rebuild. What cannot be done is left as it was."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Collection

import torch
from torch import fx
from torch._logging import trace_structured

from . import cuda, planner, programs
from .capture import Captured, capture
from .errors import UnsupportedError
from .folding import folded_bytes
from .options import Options
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
    # In training, weights change at every step: a CPU's kernels would pack them each time.
    if device.type == "cpu":
        return kind == "inference"
    return device.type == "cuda" and cuda.available() is None


def _rebuilt(
    gm: fx.GraphModule, captured: Captured, options: str, kernels: Collection[str]
) -> tuple[programs.Optimization, fx.GraphModule]:
    """The optimized program and its graph; what comes from disk and does not fit is searched anew."""
    optimization = programs.optimized(captured.text, options)
    try:
        return optimization, rebuild(gm, captured, json.loads(optimization.emission()), kernels)
    except Exception:
        anew = programs.again(optimization, captured.text, options)
        if anew is None:
            raise
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
        captured = capture(gm, weights, autograd=autograd)
        optimization, optimized = _rebuilt(gm, captured, options.native(captured.device), kernels)
        copies = folded_bytes(optimized)
        if options.weight_copies is not None and copies > options.weight_copies:
            log.info("%s graph: weights are not folded, that would take %d bytes", kind, copies)
            return optimize_graph(gm, options, kind, (), autograd=autograd, without=without, plain=plain)
        if planner.KERNEL not in kernels and _has_kernels(captured.device, kind):
            reason = planner.attach(optimized, optimization, captured, options, plain)
            if reason:
                log.debug("%s", reason)
    except UnsupportedError as e:
        log.info("%s graph left as it is: %s", kind, e)
        return gm, None
    except Exception:
        if raise_errors:
            raise
        # A user's model never fails because of the compiler.
        log.warning("%s graph left as it is after an internal error", kind, exc_info=True)
        return gm, None
    report = GraphReport(kind, optimization, gm.graph, optimized.graph, copies)
    if log.isEnabledFor(logging.INFO):
        log.info("%s", report)
    log.debug("optimized graph\n%s", optimized.graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hypatia_{kind}", "encoding": "string"},
        payload_fn=lambda: f"{report}\n\n{optimized.graph}",
    )
    return optimized, report
