"""Changes in place of which the strides of inputs decide what they reach.

`reshape`, `flatten` and `contiguous` return a view for some strides and a copy for others. What shares memory
that way with a tensor that is changed afterwards is changed with it, or is not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import fx

from .._torch import OpOverload
from .op_facts import changed_by, changes, makes_views, name_of

_EITHER = frozenset(("view", "_unsafe_view", "reshape", "reshape_as", "flatten", "ravel", "contiguous"))
"""Views that may come of ops which return copies for other strides, and these ops."""

_COPIES = frozenset(("clone", "_to_copy", "to"))
"""Copies of tensors as they lie; those into another memory format may come of such ops, too."""


@functools.lru_cache(1024)
def _kind(target: OpOverload) -> tuple[bool, bool, bool]:
    """Whether an op returns a view, one only for some strides, and a copy."""
    name = name_of(target)
    return makes_views(target), name in _EITHER, name in _COPIES


class SharedMemory:
    """Which values may lie in the memory of which others, op by op."""

    def __init__(self) -> None:
        self._base: dict[fx.Node, fx.Node] = {}
        self._unsure: set[fx.Node] = set()
        self.strides_decide = False
        """A tensor was changed that others may share memory with, for some strides."""

    def made(self, node: fx.Node, target: object, kwargs: Mapping[str, object]) -> None:
        """A value was made by this op."""
        inputs = node.all_input_nodes
        if not isinstance(target, OpOverload) or not inputs:
            return
        views, unsure, copies = _kind(target)
        unsure = unsure or (copies and kwargs.get("memory_format") not in (None, torch.preserve_format))
        if unsure or views:
            self.same(node, inputs[0])
        if unsure:
            self._unsure.add(self._base[node])

    def same(self, node: fx.Node, other: fx.Node) -> None:
        """A value is in the memory of another one."""
        self._base[node] = self._base.get(other, other)

    def changed(self, node: fx.Node) -> None:
        """A value is changed in place."""
        self.strides_decide |= self._base.get(node, node) in self._unsure


def strides_decide(graph: fx.Graph) -> bool:
    """Whether strides decide what is changed in a graph of torch.export's."""
    memory = SharedMemory()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if not changes(node.target):
            memory.made(node, node.target, node.kwargs)
            continue
        for changed in changed_by(node):
            memory.changed(changed)
            memory.same(node, changed)
    return memory.strides_decide
