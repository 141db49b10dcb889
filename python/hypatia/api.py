"""The direct calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .checking import References
from .culprit import Part
from .guard import Guard
from .native import CHECK, GRAPH, ORIGINAL, NativeGraph
from .options import Options
from .pipeline import optimize_graph
from .planner import PLAN
from .report import GraphReport
from .state import READS
from .tracing import captured
from .trial import Forward


def optimize(
    model: nn.Module,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> fx.GraphModule:
    """An optimized graph of a model, for the shapes of the example inputs.

    The result shares the model's parameters and can be trained. Weights are folded and merged
    only when gradients are off (``with torch.no_grad():``) or ``options={"freeze": True}``.
    The report is at ``result.meta["hypatia"]``.
    """
    return optimized(model, example_inputs, kwargs, options, dynamic_shapes)


def optimized(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    native: bool = False,
) -> fx.GraphModule:
    """The same; with ``native`` the graph's native plan is checked, and `CHECK` is what checks the rest."""
    parsed = Options.parse(options)
    gm, ranges = captured(model, tuple(example_inputs), dict(kwargs or {}), dynamic_shapes)
    reads = gm.meta.pop(READS, {})
    freeze = parsed.freeze if parsed.freeze is not None else not torch.is_grad_enabled()
    weights = {n.name for n in gm.graph.nodes if n.op == "get_attr"} if freeze else set()
    weights -= _changed(gm)
    kind = "inference" if freeze else "training"

    def compiled(without: frozenset[Part] = frozenset()) -> tuple[fx.GraphModule, GraphReport | None]:
        return optimize_graph(gm, parsed, kind, weights, autograd=not freeze, without=without)

    result, report = compiled()
    mode = parsed.checksum_mode
    references = References()

    def checked(run: Callable[[fx.GraphModule], Forward]) -> fx.GraphModule:
        kept = result
        if report is not None and mode != "off":
            guard = Guard(gm, result, report, mode, compiled, run, training=not freeze, references=references)
            with torch.set_grad_enabled(not freeze):
                kept = guard.examine(pytree.tree_leaves((example_inputs, dict(kwargs or {}))))
        kept.graph.set_codegen(gm.graph._codegen)
        kept.recompile()
        kept.training = model.training
        kept.meta["hypatia"] = report
        kept.meta["hypatia_ranges"] = ranges
        return kept

    result = checked(_by_plan if native and PLAN in result.meta else _interpreted)
    if native and PLAN in result.meta:
        result.meta[CHECK] = lambda: checked(_interpreted)
        result.meta[ORIGINAL] = gm
    if native:
        result.meta[READS] = reads
    else:
        # A plan can be neither copied nor written down, and the graph runs without it.
        result.meta.pop(PLAN, None)
        result.meta.pop(GRAPH, None)
    return result


def _interpreted(gm: fx.GraphModule) -> Forward:
    """Runs a graph on flat inputs, whatever calling convention it has."""

    def forward(args: list[Any]) -> Any:
        results = fx.Interpreter(gm).run(*args, enable_io_processing=False)
        return pytree.tree_leaves(results)

    return forward


def _by_plan(gm: fx.GraphModule) -> Forward:
    if PLAN not in gm.meta:
        return _interpreted(gm)
    gm.meta[GRAPH] = NativeGraph(gm, _interpreted(gm))
    return gm.meta[GRAPH]


def _changed(gm: fx.GraphModule) -> set[str]:
    """Attributes that the graph changes in place."""
    return {
        n.args[0].name
        for n in gm.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable and n.args
    }
