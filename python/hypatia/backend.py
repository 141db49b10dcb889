"""The backend of ``torch.compile(model, backend="hypatia")``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy

from .culprit import Part
from .guard import Guard
from .native import NativeGraph
from .options import Options
from .pipeline import compile_count, optimize_graph
from .planner import PLAN
from .report import GraphReport
from .yardstick import changed_inputs

__all__ = ["collecting", "compile_count", "hypatia", "reports", "reset"]

_REMEMBERED = 64
_reports: list[GraphReport] = []
_collectors: list[list[GraphReport]] = []
_lock = threading.Lock()


def hypatia(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    reports: list[GraphReport] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph that Dynamo captured; ``reports`` gets those of its parts, now and later."""
    parsed = Options.parse(options, mode)
    _compile = functools.partial(_compile_part, collected=reports)
    compiler = aot_autograd(
        fw_compiler=functools.partial(_compile, options=parsed, kind="forward"),
        bw_compiler=functools.partial(_compile, options=parsed, kind="backward"),
        inference_compiler=functools.partial(_compile, options=parsed, kind="inference"),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )
    # Common subexpressions are found in the e-graph; torch's own search for them would import
    # all of Inductor, which takes seconds.
    with torch._functorch.config.patch(cse=False):
        return compiler(gm, example_inputs)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled last, oldest first."""
    return list(_reports)


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphReport]]:
    """Collects the reports of all graphs that are compiled inside."""
    collected: list[GraphReport] = []
    with _lock:
        _collectors.append(collected)
    try:
        yield collected
    finally:
        with _lock:
            _collectors[:] = [c for c in _collectors if c is not collected]


def reset() -> None:
    """Forgets the reports."""
    _reports.clear()


hypatia.reset = reset  # type: ignore[attr-defined]


def _compile_part(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    kind: str,
    collected: list[GraphReport] | None,
) -> Any:
    weights = _frozen(gm, options, kind)
    optimized, report = optimize_graph(gm, options, kind, weights)
    if report is None:
        return boxed(optimized)
    _remember(report)
    if collected is not None:
        collected.append(report)
    mode = options.checksum_mode
    if mode == "off":
        return boxed(optimized)

    def recompile(without: frozenset[Part]) -> tuple[fx.GraphModule, GraphReport | None]:
        return optimize_graph(gm, options, kind, weights, without=without)

    guard = Guard(gm, optimized, report, mode, recompile, _runnable)
    return _boxed(lambda args: guard.forward(args), optimized)


def _partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partition; what is read from an input that changes is kept for the backward graph,
    which would read it again too late."""
    stack = changed_inputs(joint)
    while stack:
        for user in stack.pop().users:
            if isinstance(user.target, torch._ops.OpOverload) and not user.target._schema.is_mutable:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                if user.target.is_view:
                    stack.append(user)
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def _remember(report: GraphReport) -> None:
    with _lock:
        _reports.append(report)
        del _reports[:-_REMEMBERED]
        for collected in _collectors:
            collected.append(report)


def _frozen(gm: fx.GraphModule, options: Options, kind: str) -> set[str]:
    """Names of the placeholders whose values stay the same from call to call."""
    freeze = kind == "inference" if options.freeze is None else options.freeze
    context = TracingContext.try_get()
    if not freeze or kind == "backward" or context is None or context.fw_metadata is None:
        return set()
    static = set(context.fw_metadata.static_input_indices or ())
    placeholders = gm.graph.find_nodes(op="placeholder")
    changed = {n.args[0] for n in gm.graph.nodes if _is_change(n) and n.args}
    return {
        n.name
        for i, n in enumerate(placeholders)
        if i in static and n not in changed and isinstance(n.meta.get("val"), torch.Tensor)
    }


def _is_change(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A callable that takes its arguments as a list and empties it, so that they can be freed early."""
    forward = _runnable(gm)
    return _boxed(lambda args: forward(args), gm)


def _runnable(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()
    return NativeGraph(gm, gm.forward) if PLAN in gm.meta else gm.forward


def _boxed(run: Any, gm: fx.GraphModule) -> Any:
    run._boxed_call = True
    run.graph_module = gm
    return run
