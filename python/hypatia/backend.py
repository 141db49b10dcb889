"""The backend of ``torch.compile(model, backend="hypatia")``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from .options import Options
from .pipeline import compile_count, optimize_graph
from .report import GraphReport

__all__ = ["compile_count", "hypatia", "reports", "reset"]

_REMEMBERED = 64
_reports: list[GraphReport] = []


def hypatia(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph that Dynamo captured."""
    parsed = Options.parse(options, mode)
    compiler = aot_autograd(
        fw_compiler=functools.partial(_compile, options=parsed, kind="forward"),
        bw_compiler=functools.partial(_compile, options=parsed, kind="backward"),
        inference_compiler=functools.partial(_compile, options=parsed, kind="inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    # Common subexpressions are found in the e-graph; torch's own search for them would import
    # all of Inductor, which takes seconds.
    with torch._functorch.config.patch(cse=False):
        return compiler(gm, example_inputs)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled last, oldest first."""
    return list(_reports)


def reset() -> None:
    """Forgets the reports."""
    _reports.clear()


hypatia.reset = reset  # type: ignore[attr-defined]


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Options, kind: str) -> Any:
    optimized, report = optimize_graph(gm, options, kind, _frozen(gm, options, kind))
    if report is not None:
        _reports.append(report)
        del _reports[:-_REMEMBERED]
    return boxed(optimized)


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
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.graph_module = gm  # type: ignore[attr-defined]
    return run
