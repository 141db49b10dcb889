"""The direct calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .checking import References
from .culprit import Part
from .guard import Guard
from .native import NativeGraph
from .options import Options
from .pipeline import optimize_graph
from .planner import PLAN
from .report import GraphReport
from .state import Reads
from .tracing import Ranges, captured
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
    result = optimized(model, example_inputs, kwargs, options, dynamic_shapes, native=False).kept
    # A plan can be neither copied nor written down, and the graph runs without it.
    result.meta.pop(PLAN, None)
    report = result.meta.get("hypatia")
    if report is not None and report.kept == "plan":
        report.kept = "graph"
    return result


@dataclasses.dataclass
class Optimized:
    """A compiled model, checked, and what else is known of it."""

    kept: fx.GraphModule
    """The graph that was found, or the captured one."""
    original: fx.GraphModule
    """The graph that was captured."""
    report: GraphReport | None
    """None: there was nothing to do."""
    ranges: Ranges
    reads: Reads
    graph: NativeGraph | None
    """Runs the graph by its plan, which is all that was checked then; none if there is no plan."""
    check: Callable[[], fx.GraphModule]
    """Checks how torch's ops run the graph; what to keep."""


def optimized(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    *,
    native: bool,
) -> Optimized:
    """The same with all that is known; with ``native`` it is to run by its plan, if it has one."""
    parsed = Options.parse(options)
    gm, ranges, reads = captured(model, tuple(example_inputs), dict(kwargs or {}), dynamic_shapes)
    freeze = parsed.freeze if parsed.freeze is not None else not torch.is_grad_enabled()
    weights = {n.name for n in gm.graph.nodes if n.op == "get_attr"} if freeze else set()
    weights -= _changed(gm)
    kind = "inference" if freeze else "training"

    def compiled(without: frozenset[Part] = frozenset()) -> tuple[fx.GraphModule, GraphReport | None]:
        return optimize_graph(gm, parsed, kind, weights, autograd=not freeze, without=without)

    result, report = compiled()
    mode = parsed.checksum_mode
    references = References()
    plans: dict[fx.GraphModule, NativeGraph] = {}

    def by_plan(form: fx.GraphModule) -> Forward:
        if not native or PLAN not in form.meta:
            return _interpreted(form)
        plans[form] = NativeGraph(form, _interpreted(form))
        return plans[form]

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
        return kept

    kept = checked(by_plan)
    if native and PLAN in kept.meta and kept not in plans:
        by_plan(kept)
    return Optimized(kept, gm, report, ranges, reads, plans.get(kept), lambda: checked(_interpreted))


def _interpreted(gm: fx.GraphModule) -> Forward:
    """Runs a graph on flat inputs, whatever calling convention it has."""

    def forward(args: list[Any]) -> Any:
        results = fx.Interpreter(gm).run(*args, enable_io_processing=False)
        return pytree.tree_leaves(results)

    return forward


def _changed(gm: fx.GraphModule) -> set[str]:
    """Attributes that the graph changes in place."""
    return {
        n.args[0].name
        for n in gm.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable and n.args
    }
