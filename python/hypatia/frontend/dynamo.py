"""The backend of ``torch.compile(model, backend="hypatia")``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch
from .._torch import TracingContext, aot_autograd, min_cut_partition
from ..capture import (
    attention_calls,
    attention_gradients,
    channels_last,
    constant_masks,
    joint_graph,
    repeated_writes,
    source_names,
    tangents,
    whole_calls,
)
from ..capture.op_facts import changed_inputs, changes, changes_inputs
from ..capture.rewritten import windows
from ..compiler.pipeline import CompiledGraph, Part, Request, compile_count, compile_graph
from ..compiler.report import GraphReport
from ..execute.native import NativeGraph
from ..locks import COMPILING
from ..options import Options
from ..timeline import AUTOGRAD, REBUILD, stage
from ..verifier.first_call import Guard
from .dynamo_pass import Pass
from .rewritten import Checked, Rewritten, copy_to_compare
from .train_contest import Contest, as_captured

__all__ = ["collecting", "compile_count", "hypatia", "register", "reports", "reset"]

log = logging.getLogger(__name__)

_REMEMBERED = 64
_reports: list[GraphReport] = []
_collectors: list[list[GraphReport]] = []
_lock = threading.Lock()


def register() -> None:
    """Makes ``backend="hypatia"`` known where the package is not installed, as beside a checkout: torch finds
    backends by what installed packages say of themselves."""
    if "hypatia" not in torch.compiler.list_backends(exclude_tags=()):
        _torch.register_backend(hypatia, name="hypatia")


def hypatia(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    name: str | None = None,
    options: Mapping[str, object] | None = None,
    reports: list[GraphReport] | None = None,
    passes: list[Pass] | None = None,
    checks: list[Rewritten] | None = None,
) -> Callable[..., object]:
    """Compiles a graph that Dynamo captured; ``reports`` gets those of its parts, now and later.

    ``mode`` and ``name`` are those of ``torch.compile``; modes are all served alike, the name is for logs.
    ``passes`` gets the graphs themselves, for a caller who runs them without AOTAutograd, and ``checks`` what
    that one has to check.
    """
    parsed = Options.parse(options, mode)
    if name:
        log.info("compiling %s", name)
    if (written := repeated_writes.written(gm.graph)) is not None:
        log.info("the graph runs as it is: %s changes a tensor that expand() repeated", written.name)
        return gm.forward
    eager = as_captured(gm, example_inputs) if passes is None else None
    noted: list[Pass] = [] if passes is None else passes
    # Here and not later: AOTAutograd takes attention apart by the kernel that the mask asks for.
    captured = copy_to_compare(gm) if parsed.checksum_mode != "off" else None
    masks = constant_masks.simplified(gm)
    if torch.is_grad_enabled() and parsed.numerics in ("reassoc", "approx"):
        masks += attention_calls.trained(gm)
    check = Rewritten(captured, gm) if masks and captured is not None else None
    if checks is not None and check is not None:
        checks.append(check)
    whole_calls.hide(gm)
    if torch.is_grad_enabled():
        channels_last.turned(gm)
    gm.recompile()
    _compile = functools.partial(
        _compile_part, collected=reports, passes=noted, inputs=source_names.inputs_of(gm), masks=masks
    )
    backward = _compile if passes is None else functools.partial(_compile_backward, _compile, passes)
    compiler = aot_autograd(
        fw_compiler=functools.partial(_compile, options=parsed, kind="forward"),
        bw_compiler=functools.partial(backward, options=parsed, kind="backward"),
        inference_compiler=functools.partial(_compile, options=parsed, kind="inference"),
        partition_fn=_partition,
        decompositions={torch.ops.aten.im2col.default: windows},
        keep_inference_input_mutations=True,
    )
    # Common subexpressions are found in the e-graph; torch's own search for them would import
    # all of Inductor, which takes seconds.
    settings = {"cse": False}
    if passes is not None and hasattr(_torch.functorch_config, "force_non_lazy_backward_lowering"):
        settings["force_non_lazy_backward_lowering"] = True
    with COMPILING, _torch.functorch_config.patch(settings), stage(AUTOGRAD):
        compiled = compiler(gm, example_inputs)
    if eager is not None:
        compiled = Contest(eager, compiled, noted, parsed.backward_in_caller)
    return compiled if check is None or checks is not None else Checked(check, compiled)


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
    example_inputs: Sequence[object],
    *,
    options: Options,
    kind: str,
    collected: list[GraphReport] | None,
    passes: list[Pass],
    inputs: list[str],
    masks: list[str],
) -> object:
    whole_calls.show(gm)
    attention_gradients.lay_as_before(gm)
    weights = _frozen(gm, options, kind)
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    request = Request(options, kind, frozenset(weights), plain=_plain(gm, kind, metadata))
    with COMPILING:
        compiled = compile_graph(gm, request)
    guard: Guard | None = None
    report = compiled.report
    forward = _runnable(compiled)
    if report is not None and options.checksum_mode != "off":

        def recompile(without: frozenset[Part]) -> CompiledGraph:
            return compile_graph(gm, dataclasses.replace(request, without=without))

        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        steady = [i for i, name in enumerate(names) if name in weights]
        guard = Guard(compiled, report, options.checksum_mode, recompile, _runnable, weights=steady)

    def latest() -> Callable[[list[object]], object]:
        return forward if guard is None else guard.forward

    if report is not None:
        report.inputs = inputs
        report.masks += masks if kind != "backward" else []
        _remember(report)
        if collected is not None:
            collected.append(report)
    passes.append(Pass(kind, gm.graph, metadata, latest, lambda: guard is None or guard.settled, report))
    return _boxed(lambda args: latest()(args), compiled.optimized)


def _compile_backward(
    compile_part: Callable[..., Any],
    passes: list[Pass],
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    **kwargs: object,
) -> object:
    """A backward graph of a model that is trained by its loss: without the gradients of its other results.
    The whole graph is compiled if somebody asks for those."""
    unread = tangents.rarely_given(gm)
    reduced = tangents.without(gm, unread) if unread else None
    if reduced is None:
        return compile_part(gm, example_inputs, **kwargs)
    compile_part(reduced, example_inputs, **kwargs)
    mine = passes[-1]
    made: list[Callable[[list[object]], object]] = []

    def whole(args: list[object]) -> object:
        with COMPILING:
            if not made:
                made.append(compile_part(gm, example_inputs, **{**kwargs, "passes": []}))
        return made[0](args)

    mine.unread, mine.whole = tuple(unread), whole
    return _boxed(whole, gm)


def _plain(gm: fx.GraphModule, kind: str, metadata: object) -> int | None:
    """How many results of a training step's graph are not kept for the backward pass; none in inference."""
    if kind == "inference":
        return None
    if kind == "backward":
        return 0
    (output,) = gm.graph.find_nodes(op="output")
    counted = getattr(metadata, "num_forward_returns", None)
    return len(output.args[0]) if counted is None else counted


def _partition(
    joint: fx.GraphModule, inputs: object, **kwargs: object
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partition; what is read from an input that changes is kept for the backward graph,
    which would read it again too late."""
    joint_graph.prepare(joint)
    stack = changed_inputs(joint)
    while stack:
        for user in stack.pop().users:
            if isinstance(user.target, _torch.OpOverload) and not changes(user.target):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                if user.target.is_view:
                    stack.append(user)
    for node in joint.graph.nodes:
        # The gradient of a maximum goes where a value equals it; computed again, it may be rounded apart.
        if node.target in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
            for read in node.all_input_nodes:
                _base(read).meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_partition(joint, inputs, **kwargs)


def _base(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _remember(report: GraphReport) -> None:
    with _lock:
        _reports.append(report)
        del _reports[:-_REMEMBERED]
        for collected in _collectors:
            collected.append(report)


def _frozen(gm: fx.GraphModule, options: Options, kind: str) -> set[str]:
    """Names of the placeholders and constants whose values stay the same from call to call."""
    freeze = kind == "inference" if options.freeze is None else options.freeze
    context = TracingContext.try_get()
    if not freeze or kind == "backward" or context is None or context.fw_metadata is None:
        return set()
    static = set(context.fw_metadata.static_input_indices or ())
    placeholders = gm.graph.find_nodes(op="placeholder")
    changed = {n.args[0] for n in gm.graph.nodes if changes_inputs(n) and n.args}
    steady = [n for i, n in enumerate(placeholders) if i in static]
    steady += gm.graph.find_nodes(op="get_attr")
    return {n.name for n in steady if n not in changed and isinstance(n.meta.get("val"), torch.Tensor)}


@stage(REBUILD)
def _runnable(compiled: CompiledGraph) -> Callable[[list[object]], object]:
    gm = compiled.optimized
    gm.graph.set_codegen(_torch.BoxedCodeGen())
    gm.recompile()
    return gm.forward if compiled.planner is None else NativeGraph(gm, compiled.planner, gm.forward)


def _boxed(run: Any, gm: fx.GraphModule) -> object:
    run._boxed_call = True
    run.graph_module = gm
    return run
