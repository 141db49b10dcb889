"""Inputs that a graph changes in place, where autograd keeps what its ops read.

The change is the last thing that the graph does. An op that reads the input itself, and not what the model
made of it, such as ``x * 1``, would have its operand changed before the backward pass reads it.
"""

from __future__ import annotations

import torch
from torch import fx

from ..capture.op_facts import changed_inputs, changes_inputs, name_of

_CLONE = torch.ops.aten.clone.default


def protect(captured: fx.GraphModule, optimized: fx.GraphModule) -> None:
    """Gives ops of an optimized graph copies of inputs that it changes, unless an op like them reads that
    input itself in the captured graph."""
    names = {n.name for n in changed_inputs(captured)}
    known = {n.name: _readers(n) for n in captured.graph.nodes if n.name in names}
    done = False
    for node in list(optimized.graph.nodes):
        if node.name not in known or node.op not in ("placeholder", "get_attr"):
            continue
        new = [u for u in node.users if _keeps_what_changes(u, known[node.name])]
        if not new:
            continue
        with optimized.graph.inserting_before(next(n for n in optimized.graph.nodes if n in new)):
            copy = optimized.graph.call_function(_CLONE, (node,))
        copy.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        for user in new:
            user.replace_input_with(node, copy)
        done = True
    if done:
        optimized.graph.lint()
        optimized.recompile()


def _keeps_what_changes(user: fx.Node, known: set[object]) -> bool:
    """Whether autograd would keep what a node reads, and find it changed. A batch norm moves its statistics
    itself; its functional form reads them, and they are moved later."""
    if changes_inputs(user):
        return False
    return user.target not in known or name_of(user.target).endswith("_functional")


def _readers(node: fx.Node) -> set[object]:
    return {u.target for u in node.users}
