"""The direct calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .culprit import Part
from .guard import Guard
from .native import GRAPH, NativeGraph
from .options import Options
from .pipeline import optimize_graph
from .planner import PLAN
from .report import GraphReport


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
    """The same; with ``native`` the graph's native plan is checked and timed too, or taken off."""
    parsed = Options.parse(options)
    program = torch.export.export(
        model, tuple(example_inputs), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
    )
    if not _is_functional(program.graph):
        program = program.run_decompositions({})
    gm = program.module(check_guards=False)
    _values_of_attributes(gm)
    freeze = parsed.freeze if parsed.freeze is not None else not torch.is_grad_enabled()
    weights = {n.name for n in gm.graph.nodes if n.op == "get_attr"} if freeze else set()
    weights -= _changed(gm)
    kind = "inference" if freeze else "training"

    def compiled(without: frozenset[Part] = frozenset()) -> tuple[fx.GraphModule, GraphReport | None]:
        return optimize_graph(gm, parsed, kind, weights, autograd=not freeze, without=without)

    result, report = compiled()
    mode = parsed.checksum_mode
    for run in (_interpreted, _by_plan) if native else (_interpreted,):
        if report is not None and mode != "off" and (run is _interpreted or PLAN in result.meta):
            guard = Guard(gm, result, report, mode, compiled, run, training=not freeze)
            with torch.set_grad_enabled(not freeze):
                result = guard.examine(pytree.tree_leaves((example_inputs, dict(kwargs or {}))))
    result.graph.set_codegen(gm.graph._codegen)
    result.recompile()
    result.training = model.training
    result.meta["hypatia"] = report
    result.meta["hypatia_ranges"] = _ranges(program, gm)
    if not native:
        # A plan can be neither copied nor written down, and the graph runs without it.
        result.meta.pop(PLAN, None)
        result.meta.pop(GRAPH, None)
    return result


def _is_functional(graph: fx.Graph) -> bool:
    """Whether torch's decompositions would leave a graph as it is; they take longer than all the rest."""
    try:
        from torch._export.utils import _is_preservable_cia_op
    except ImportError:
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd

    def stays(target: Any) -> bool:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        decomposes = composite in target.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), composite
        )
        return not decomposes or _is_preservable_cia_op(target)

    return all(stays(n.target) for n in graph.nodes if n.op == "call_function")


def exported(model: nn.Module, args: tuple[Any, ...]) -> tuple[fx.GraphModule, pytree.TreeSpec]:
    """A differentiable model as a graph of flat inputs and results, and the form of the results."""
    gm = torch.export.export(model, args, strict=False).module(check_guards=False)
    spec = gm.graph._codegen.pytree_info.out_spec
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return gm, spec


def _ranges(
    program: torch.export.ExportedProgram, gm: fx.GraphModule
) -> dict[tuple[int, int], tuple[int, int]]:
    """The least and greatest value of symbolic sizes, by input and dimension; none if they depend on more."""
    if getattr(program, "_guards_code", None):
        return {}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        for d, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                known = program.range_constraints.get(size.node.expr)
                if known is None:
                    return {}
                greatest = int(known.upper) if known.upper < 2**62 else 2**62
                found[i, d] = (max(2, int(known.lower)), greatest)
    return found


def _interpreted(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Runs a graph on flat inputs, whatever calling convention it has."""

    def forward(args: list[Any]) -> Any:
        results = fx.Interpreter(gm).run(*args, enable_io_processing=False)
        return pytree.tree_leaves(results)

    return forward


def _by_plan(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
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


def _values_of_attributes(gm: fx.GraphModule) -> None:
    """Export keeps fake values of calls and inputs; attributes get theirs here."""
    mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    for node in gm.graph.find_nodes(op="get_attr"):
        value = node.meta.get("val")
        if value is None and mode is not None:
            attribute = gm
            for part in node.target.split("."):
                attribute = getattr(attribute, part)
            if isinstance(attribute, torch.Tensor):
                node.meta["val"] = mode.from_tensor(attribute, static_shapes=True)
