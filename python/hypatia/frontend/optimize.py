"""The direct calls."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from .._torch import pytree
from ..capture.layout import reshape_views
from ..capture.model_state import Reads, buffers_kept
from ..capture.op_facts import changed_inputs, changes_inputs, effects_of, name_of
from ..capture.records import value_of
from ..capture.size_ranges import Ranges
from ..capture.trace import NotFunctionalError, as_written, captured
from ..compiler.changed_inputs import protect
from ..compiler.pipeline import CompiledGraph, Part, Request, compile_graph
from ..compiler.report import GraphReport
from ..devices.table import random_devices
from ..execute import choose
from ..execute.changes import RandomState
from ..execute.native import NativeGraph
from ..options import Options
from ..verifier.candidates import Forward
from ..verifier.compare import References
from ..verifier.first_call import Guard, device_of
from ..verifier.same_layout import has_same_layout
from . import programs
from .input_check import with_checked_inputs

log = logging.getLogger(__name__)


def optimize(
    model: nn.Module,
    *example_inputs: object,
    kwargs: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
) -> fx.GraphModule:
    """An optimized graph of a model, for the shapes of the example inputs.

    The result shares the model's parameters and can be trained. Weights are folded and merged
    only when gradients are off (``with torch.no_grad():``) or ``options={"freeze": True}``.
    Called with other sizes or dtypes, it raises `InputError`; ``dynamic_shapes``, as torch.export takes
    them, leave sizes open. For inputs with other strides than the examples', results may have other strides
    than the model's; where strides decide what the model changes in place, such inputs raise an `InputError`,
    too. The report is at ``result.meta["hypatia"]``.
    """
    leaves = pytree.tree_leaves((example_inputs, dict(kwargs or {})))
    try:
        made = optimized(model, example_inputs, kwargs, options, dynamic_shapes, native=False)
    except NotFunctionalError as reason:
        log.info("the graph stays as it was captured: %s", reason)
        result = as_written(model, example_inputs, dict(kwargs or {}), dynamic_shapes)
        reshape_views(result)
        with_checked_inputs(result, leaves, {}, strides_decide=True)
        return result
    result = _with_same_layout(made, model, example_inputs, dict(kwargs or {}), dynamic_shapes)
    report: GraphReport | None = result.meta.get("hypatia")
    if report is not None and not report.no_plan:
        report.kept, report.no_plan = "graph", "hypatia.optimize returns a graph, which runs by torch's ops"
    reshape_views(result)
    with_checked_inputs(result, leaves, made.ranges, strides_decide=made.strides_decide)
    return result


def _with_same_layout(
    made: Optimized,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    dynamic_shapes: object,
) -> fx.GraphModule:
    """The graph that was found, or the captured one if that is faster or results have other strides."""
    changes = bool(changed_inputs(made.original))
    if effects_of(made.original):
        return made.kept
    why = "results would have other strides"
    try:
        training = torch.is_grad_enabled() and not made.frozen
        if has_same_layout(made.kept, model, args, kwargs, changes=changes, training=training):
            if changes or _is_faster(made, model, args, kwargs, training=training):
                return made.kept
            why = "the model is faster as it is"
    except Exception:
        log.info("the optimized graph cannot be compared with the model", exc_info=True)
    log.info("the graph stays as it was captured: %s", why)
    kept = as_written(model, args, kwargs, dynamic_shapes)
    kept.meta["hypatia"] = made.report
    if made.report is not None:
        made.report.kept, made.report.no_plan = "eager", why
    return kept


def _is_faster(
    made: Optimized, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], *, training: bool
) -> bool:
    """Whether the graph that was found is not slower than the model, with both passes in training."""
    if made.report is None:
        return True
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    forms: dict[str, Callable[[], object]] = {
        "graph": lambda: made.kept(*args, **kwargs),
        "eager": lambda: model(*args, **kwargs),
    }
    wanted = [t for t in (*model.parameters(), *leaves) if t.requires_grad]
    if training and wanted:
        forms = {name: choose.with_backward(call, wanted) for name, call in forms.items()}
    random = RandomState(random_devices(leaves))
    with buffers_kept(model):
        choice = choose.fastest(forms, device_of(leaves))
    random.restore()
    made.report.chose(choice)
    return choice.kept == "graph"


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
    frozen: bool
    """Weights count as constants: there are no gradients."""
    returned: list[object] | None
    """What the captured graph returned on the example inputs when it was checked, flat, if that is kept."""
    strides_decide: bool
    """What the model changes in place depends on the strides of its inputs."""


def optimized(
    model: nn.Module,
    example_inputs: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    options: Mapping[str, object] | None,
    dynamic_shapes: object,
    *,
    native: bool,
) -> Optimized:
    """The same with all that is known; with ``native`` it is to run by its plan, if it has one."""
    parsed = Options.parse(options)
    given = captured(model, tuple(example_inputs), dict(kwargs or {}), dynamic_shapes)
    gm = given.gm
    request = _request(gm, parsed)
    freeze = not request.autograd
    left_out: frozenset[Part] = frozenset()

    def compiled(without: frozenset[Part] = frozenset()) -> CompiledGraph:
        found = compile_graph(gm, dataclasses.replace(request, without=without | left_out))
        if not freeze and found.report is not None and _reached(found.optimized.graph) != _reached(gm.graph):
            log.info("the graph stays as it was captured: some gradients would be none instead of zeros")
            return CompiledGraph(gm, gm)
        return found

    result = compiled()
    leaves = pytree.tree_leaves((example_inputs, dict(kwargs or {})))
    if native and freeze:
        result, left_out = programs.faster(result, compiled, _plan_of, list(leaves))
    report, mode = result.report, parsed.checksum_mode
    references = References()
    plans: dict[fx.GraphModule, NativeGraph] = {}

    def by_plan(form: CompiledGraph) -> Forward:
        if not native or form.planner is None:
            return _interpreted(form)
        plans[form.optimized] = _plan_of(form)
        return plans[form.optimized]

    def checked(run: Callable[[CompiledGraph], Forward]) -> CompiledGraph:
        kept = result
        if report is not None and mode != "off":
            guard = Guard(result, report, mode, compiled, run, training=not freeze, references=references)
            with torch.set_grad_enabled(not freeze):
                kept = guard.examine(leaves)
        made = kept.optimized
        made.graph.set_codegen(gm.graph._codegen)
        made.recompile()
        made.training = model.training
        made.meta["hypatia"] = report
        return kept

    kept = checked(by_plan)
    if kept.optimized not in plans:
        by_plan(kept)
    found = (kept.optimized, gm, report, given.ranges, given.reads, plans.get(kept.optimized))
    again, returned = (lambda: checked(_interpreted).optimized), references.results(gm)
    return Optimized(*found, again, freeze, returned, given.strides_decide)


def _request(gm: fx.GraphModule, options: Options) -> Request:
    """What is asked of the compilation of a captured graph."""
    freeze = options.freeze if options.freeze is not None else not torch.is_grad_enabled()
    weights = {n.name for n in gm.graph.nodes if n.op == "get_attr"} if freeze else set()
    weights -= _changed(gm)
    if not freeze:
        protect(gm, gm)
    return Request(options, "inference" if freeze else "training", frozenset(weights), autograd=not freeze)


def _plan_of(form: CompiledGraph) -> NativeGraph:
    """Runs a graph by its plan."""
    assert form.planner is not None
    return NativeGraph(form.optimized, form.planner, _interpreted(form))


_PLAIN = ("detach", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")
"""Ops whose results have no gradients."""


def _reached(graph: fx.Graph) -> list[set[str]]:
    """By result, the inputs and attributes that it has gradients for."""
    (output,) = graph.find_nodes(op="output")
    return [_sources(node) for node in pytree.tree_leaves(output.args) if isinstance(node, fx.Node)]


def _sources(result: fx.Node) -> set[str]:
    found: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        values = pytree.tree_leaves(value_of(node))
        floats = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
        if node not in found and floats and name_of(node.target) not in _PLAIN:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {str(n.target) for n in found if n.op in ("placeholder", "get_attr")}


def _interpreted(compiled: CompiledGraph) -> Forward:
    """Runs a graph on flat inputs, whatever calling convention it has."""
    gm = compiled.optimized

    def forward(args: list[object]) -> object:
        results = fx.Interpreter(gm).run(*args, enable_io_processing=False)
        return pytree.tree_leaves(results)

    return forward


def _changed(gm: fx.GraphModule) -> set[str]:
    """Attributes that the graph changes in place."""
    return {n.args[0].name for n in gm.graph.nodes if changes_inputs(n) and n.args}
