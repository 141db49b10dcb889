"""Models as graphs of torch's functional ops: by one run on fake tensors, or by torch.export.

A run on fake tensors under a dispatch mode sees every op once, which is all that a model without gradients
needs; it takes a small part of torch.export's time. Whatever it does not serve (open sizes, changes of
inputs, tensors from elsewhere, control flow on values that depend on inputs) torch.export does.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .. import _torch
from .._torch import PyTreeCodeGen, disable_current_modes, pytree
from ..errors import UnsupportedError
from ..timeline import CAPTURE, stage
from . import repeated_writes
from .constant_values import remember_numbers
from .model_state import Reads, unchanged
from .op_facts import changed_inputs, changes, is_composite, stays_whole
from .recorder import recorded
from .rewritten import copied, copied_for_autograd
from .size_ranges import Ranges, ranges_of
from .stride_changes import strides_decide

log = logging.getLogger(__name__)


class NotFunctionalError(UnsupportedError):
    """A graph that changes tensors in place, and cannot be had without."""


class Captured(NamedTuple):
    """A model as a graph, its weights as attributes."""

    gm: fx.GraphModule
    ranges: Ranges
    """Of sizes that are left open."""
    reads: Reads
    strides_decide: bool
    """What the model changes in place depends on the strides of its inputs."""


@stage(CAPTURE)
def captured(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], dynamic_shapes: object
) -> Captured:
    """A model's graph, and what is known of it."""
    args, kwargs = distinct(model, (args, dict(kwargs)))
    if dynamic_shapes is None and not torch.is_grad_enabled():
        try:
            with unchanged(model) as reads:
                gm, decide = recorded(model, args, kwargs)
            return Captured(gm, {}, reads, decide)
        except UnsupportedError:
            raise
        # Fake tensors refuse by many kinds of exceptions, and the model has its own.
        except Exception as reason:
            log.debug("torch.export is asked for the graph: %s", reason)
    program, reads = _exported(model, args, kwargs, dynamic_shapes)
    decide = strides_decide(program.graph)
    if not _is_functional(program.graph):
        _check_changes(program.graph)
        if torch.is_grad_enabled() and _is_changed_behind_autograd(program.graph_module):
            raise NotFunctionalError("a value that has gradients is changed by way of detach()")
        try:
            copy = copied_for_autograd if torch.is_grad_enabled() else copied
            program = program.run_decompositions({torch.ops.aten.copy.default: copy})
        except (RuntimeError, AssertionError) as error:
            raise NotFunctionalError(f"torch.export cannot make the graph functional: {error}") from error
    gm = _without_checks(program.module(check_guards=False))
    _values_of_attributes(gm)
    return Captured(gm, ranges_of(program, gm), reads, decide)


def as_written(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], dynamic_shapes: object
) -> fx.GraphModule:
    """A model's graph with its views and changes in place, as torch.export has it."""
    args, kwargs = distinct(model, (args, dict(kwargs)))
    program, _ = _exported(model, args, kwargs, dynamic_shapes)
    return _without_checks(program.module(check_guards=False))


def _without_checks(gm: fx.GraphModule) -> fx.GraphModule:
    """Without torch.export's own check of sizes at every call."""
    gm._forward_pre_hooks.clear()
    gm._forward_pre_hooks_with_kwargs.clear()
    return gm


class Exported(NamedTuple):
    """A differentiable model as a graph of flat inputs and results."""

    gm: fx.GraphModule
    spec: pytree.TreeSpec
    """The form of the results."""
    wanted: list[bool]
    """Which of the results that are tensors have gradients in eager."""
    reads: Reads
    ranges: Ranges


def exported(model: nn.Module, args: tuple[object, ...], dynamic_shapes: object = None) -> Exported:
    """A differentiable model as a graph."""
    wanted: list[bool] = []
    program, reads = _exported(model, args, dynamic_shapes=dynamic_shapes, wanted=wanted)
    _check_changes(program.graph)
    gm = program.module(check_guards=False)
    spec = out_spec(gm)
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return Exported(gm, spec, wanted, reads, ranges_of(program, gm))


def out_spec(gm: fx.GraphModule) -> pytree.TreeSpec:
    """The form of the results of a graph that is called like its model."""
    codegen = gm.graph._codegen
    assert isinstance(codegen, PyTreeCodeGen)
    spec = codegen.pytree_info.out_spec
    assert spec is not None
    return spec


def _exported(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
    wanted: list[bool] | None = None,
) -> tuple[torch.export.ExportedProgram, Reads]:
    with unchanged(model) as reads, _without_own_gradients(model, wanted), warnings.catch_warnings():
        # It puts tensors that are attributes back, and goes on without them.
        warnings.filterwarnings("error", message="The tensor attributes? ")
        program = torch.export.export(
            model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    remember_numbers(program)
    return program, reads


def _check_changes(graph: fx.Graph) -> None:
    """Refuses changes in place that torch would make functional wrongly."""
    if (found := repeated_writes.written(graph)) is not None:
        raise NotFunctionalError(f"{found.name} changes a tensor that expand() repeated")


@contextlib.contextmanager
def _without_own_gradients(model: nn.Module, wanted: list[bool] | None = None) -> Iterator[None]:
    """Refuses a model whose results have gradients that are written by hand: a graph of torch's ops has
    others. ``wanted`` gets whether the results that are tensors have gradients.

    Raises:
        UnsupportedError: there is such a gradient.
    """
    found: list[str] = []

    def look(_module: nn.Module, _args: object, results: object) -> None:
        tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        if wanted is not None:
            wanted[:] = [t.requires_grad for t in tensors]
        # Of a view that was changed in place, asking for it runs ops, which nobody is to trace.
        with disable_current_modes():
            stack = [t.grad_fn for t in tensors]
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                found.append(type(node).__name__.removesuffix("Backward"))

    if not torch.is_grad_enabled():
        yield
        return
    handle = model.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()
    if found:
        raise UnsupportedError(f"{found[0]} has a backward of its own, which a captured graph would lose")


def distinct(model: nn.Module, args: object) -> Any:
    """Inputs of which each is a tensor object of its own: one that comes twice, or that is a weight, would
    be taken for the other in every call."""
    seen = {id(t) for t in (*model.parameters(), *model.buffers())}

    def own(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            value = value.detach().requires_grad_(value.requires_grad)
        seen.add(id(value))
        return value

    return pytree.tree_map(own, args)


def _is_changed_behind_autograd(gm: fx.GraphModule) -> bool:
    """Whether a value is changed in place where autograd does not see it: made functional, what reads the
    value would read the changed copy, which has no gradient."""
    for changed in changed_inputs(gm):
        node = changed
        while node.op == "call_function" and getattr(node.target, "is_view", False):
            if node.target is torch.ops.aten.detach.default:
                return True
            node = node.all_input_nodes[0]
    return False


def _is_functional(graph: fx.Graph) -> bool:
    """Whether torch's decompositions would leave a graph as it is; they take longer than all the rest."""

    def stays(target: object) -> bool:
        if not isinstance(target, _torch.OpOverload) or changes(target):
            return False
        return not is_composite(target) or stays_whole(target)

    try:
        return all(stays(n.target) for n in graph.nodes if n.op == "call_function")
    except ImportError:
        return False


def _values_of_attributes(gm: fx.GraphModule) -> None:
    """Export keeps fake values of calls and inputs; attributes get theirs here."""
    mode = _torch.detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    for node in gm.graph.find_nodes(op="get_attr"):
        value = node.meta.get("val")
        if value is None and mode is not None:
            attribute = gm
            for part in node.target.split("."):
                attribute = getattr(attribute, part)
            if isinstance(attribute, torch.Tensor):
                node.meta["val"] = mode.from_tensor(attribute, static_shapes=True)
