"""Adds calls to a graph, with their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import fx

from .._torch import FakeTensor, FakeTensorMode, detect_fake_mode, pytree
from .records import value_of

_META = ("stack_trace", "seq_nr", "partitioner_tag")
"""What is said of a node that also holds for what stands in its place."""


def mode_of(values: object) -> FakeTensorMode | None:
    """The mode of fake tensors. In graphs of Dynamo's that is not the one that detect_fake_mode() finds."""
    leaves = pytree.tree_leaves(values)
    own = next((t.fake_mode for t in leaves if isinstance(t, FakeTensor)), None)
    return detect_fake_mode(leaves) if own is None else own


class Writer:
    """Adds calls to a graph, before a node, with their values."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph, self.before = graph, before

    def __call__(
        self, op: Callable[..., object], *args: fx.node.Argument, **kwargs: fx.node.Argument
    ) -> fx.Node:
        """The call of an op."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(op, args, kwargs)
        given = fx.node.map_arg((args, kwargs), value_of)
        with mode_of((given, value_of(self.before))) or contextlib.nullcontext():
            node.meta["val"] = op(*given[0], **given[1])
        node.meta |= {k: v for k, v in self.before.meta.items() if k in _META}
        return node
