"""Values that depend on no input: which nodes have one, and what it is.

Models make positions, masks and tables of buckets of ``arange`` and comparisons at every call. Torch's own
ops compute them here, on their device. What has open sizes or is made of weights has no such value.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload, TorchDispatchMode, disable_current_modes, make_graph_module, pytree
from .op_facts import changed_by, changes, draws, is_composite, makes_new_memory, name_of
from .records import value_of

_MOST_BYTES = 64 * 2**20
"""Values that take more than this are not computed."""

_OF_AOTAUTOGRAD = re.compile(r"_tensor_constant\d+")
"""Names of tensors that a graph of AOTAutograd's made itself: all others are its inputs."""

_written: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Tensors of graphs of torch.export's that are numbers in the model's code, by their addresses."""


def is_closed(value: object) -> bool:
    """Whether a value is a tensor whose sizes are all known."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride()))


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they are made of."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What torch calls on a tensor that is made of Python's numbers."""


def remember_number(held: torch.Tensor) -> None:
    """Remembers that a tensor is written in the model's code, such as ``torch.tensor(0.0)``."""
    _written[id(held)] = held


def remember_numbers(program: torch.export.ExportedProgram) -> None:
    """Remembers which tensors of a program are written in the model's code, such as ``torch.tensor(0.0)``.

    torch.export lifts these. Other constants that it has are plain attributes and globals, which may change.
    """
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in program.graph.find_nodes(op="placeholder"):
        held = program.constants.get(names.get(node.name, ""))
        if type(held) is torch.Tensor and node.users and all(u.target in LIFTS for u in node.users):
            remember_number(held)


def is_number(node: fx.Node) -> bool:
    """Whether a node is a number that is written in the model's code, as a tensor."""
    if node.op != "get_attr":
        return False
    try:
        held = operator.attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        # The graph is not whole yet.
        return False
    written = _written.get(id(held)) is held or _OF_AOTAUTOGRAD.fullmatch(str(node.target)) is not None
    return written and type(held) is torch.Tensor and held.numel() == 1 and not held.requires_grad


def constants_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input and no weight, and that nothing changes."""
    changed, functional = _changed(graph), _is_functional(graph)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        made_of_them = all(n in found for n in node.all_input_nodes)
        steady = is_number(node) or _is_steady(node, functional)
        if made_of_them and node not in changed and steady:
            found.add(node)
    return found


def computed(wanted: Iterable[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """The values of constant nodes, as far as torch can tell."""
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, torch.Tensor] = {}
    wanted = list(wanted)
    needed = ancestors(wanted)
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad(), _Pure():
        for node in wanted[0].graph.nodes if wanted else ():
            if node in needed and all(n in values for n in node.all_input_nodes):
                # Whatever torch does not like here stays as it is, with all that is made of it.
                try:
                    values[node] = _called(node, values)
                except Exception:
                    continue
    for node in wanted:
        value, known = values.get(node), value_of(node)
        if type(value) is torch.Tensor and _alike(value, known):
            found[node] = value
    return found


def _alike(value: torch.Tensor, known: torch.Tensor) -> bool:
    return (value.shape, value.dtype, value.device) == (known.shape, known.dtype, known.device)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, whose nodes have the names and values of the original's."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node]._rename(node.name)
    graph.set_codegen(gm.graph._codegen)
    copy = make_graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


def drop_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Takes nodes out that nothing reads any more, with what they were made of."""
    needed = ancestors(nodes)
    for node in reversed(graph.nodes):
        if node in needed and not node.users and node.op in ("call_function", "call_method"):
            graph.erase_node(node)


def _called(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _changed(graph: fx.Graph) -> set[fx.Node]:
    """What ops that change tensors may change: what they write into, and all that this may be a view of."""
    found: set[fx.Node] = set()
    stack = [written for node in graph.nodes for written in changed_by(node)]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        op = node.target
        if not isinstance(op, OpOverload) or not makes_new_memory(op) or is_composite(op):
            stack.extend(node.all_input_nodes)
    return found


def _is_functional(graph: fx.Graph) -> bool:
    """Whether schemas say of every call whether it changes tensors, as in graphs of AOTAutograd's."""
    targets = [n.target for n in graph.nodes if n.op in ("call_function", "call_method", "call_module")]
    return all(isinstance(t, OpOverload) or t is operator.getitem for t in targets)


class _Pure(TorchDispatchMode):
    """Lets only calls through that always return the same."""

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call."""
        if not isinstance(func, OpOverload) or changes(func) or draws(func) or "empty" in name_of(func):
            raise _VaryingError
        return func(*args, **(kwargs or {}))


class _VaryingError(Exception):
    """A value is not the same in every call."""


def _is_steady(node: fx.Node, functional: bool) -> bool:
    """Whether a node is a call, not an input or a weight, with values of a known, small size that nobody
    changes later: in graphs of Dynamo's, fake tensors count their changes."""
    if node.op not in ("call_function", "call_method"):
        return False

    def fits(value: object) -> bool:
        if not isinstance(value, torch.Tensor):
            return type(value) in (int, float, bool)
        unchanged = functional or (not value.is_inference() and value._version == 0)
        return unchanged and is_closed(value) and value.untyped_storage().nbytes() <= _MOST_BYTES

    values = pytree.tree_leaves(value_of(node))
    return bool(values) and all(map(fits, values))
