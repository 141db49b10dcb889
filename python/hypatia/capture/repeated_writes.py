"""Changes in place of tensors that ``expand`` repeated.

Made functional by torch, such a change adds the sum of what changed in all repetitions to the tensor that was
expanded: several times too much where all of them change, and with roundings where one does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .._torch import pytree
from .layout import overlaps, storage_of
from .op_facts import changed_by
from .records import value_of

_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {operator.setitem, *(getattr(operator, f"__i{name}__") for name in _NAMES)}


def written(graph: fx.Graph) -> fx.Node | None:
    """The first change in place of a repeated tensor or of a view of one, in a graph of Dynamo's or of
    torch.export's; None if there is none."""
    if not any(_is_repeated(n) for n in graph.nodes):
        return None
    calls = (n for n in graph.nodes if n.op.startswith("call_"))
    return next((n for n in calls if any(_comes_from_repeated(t) for t in _targets(n))), None)


def _targets(node: fx.Node) -> list[fx.Node]:
    """What a call may change in place."""
    found: list[object] = [*changed_by(node)]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = node.op != "call_module" and name.endswith("_") and not name.endswith("__")
    if node.args and (by_name or node.target in _IN_PLACE or node.kwargs.get("inplace")):
        found.append(node.args[0])
    found += pytree.tree_leaves(node.kwargs.get("out"))
    return [n for n in found if isinstance(n, fx.Node)]


def _comes_from_repeated(node: fx.Node) -> bool:
    """Whether a value is repeated, or a view of one that is."""
    while True:
        if _is_repeated(node):
            return True
        memory = storage_of(node)
        inputs = [n for n in node.all_input_nodes[:1] if storage_of(n) == memory]
        if memory is None or not inputs:
            return False
        (node,) = inputs


def _is_repeated(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and overlaps(value)
