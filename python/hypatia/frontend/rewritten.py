"""Graphs whose attention or masks were written anew before AOTAutograd saw them.

What AOTAutograd makes of such a graph is checked against the new one, so the new one is compared with what
was captured: both run by torch's own ops, without gradients, on the inputs of the first call.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .._torch import FakeTensor, pytree
from ..capture.constant_values import copied
from ..errors import VerificationWarning
from ..execute.agreement import agree_at_new_sizes, roundings_of
from ..execute.changes import State
from ..timeline import COMPARISON, stage
from ..verifier.first_call import device_of

log = logging.getLogger(__name__)

_WORDS = ("softmax", "exp", "scaled_dot_product")
"""Names of calls that attention is made with."""

_CALL = "scaled_dot_product_attention"
_DROPOUT = 4
"""Which of the arguments of such a call it is."""

_OTHERS = ("c10d", "distributed")
"""Modules and namespaces of calls that other processes take part in."""


class Rewritten:
    """A graph as it was captured, and as it is compiled."""

    def __init__(self, captured: fx.GraphModule, compiled: fx.GraphModule) -> None:
        self.captured = captured
        self._graphs = [_without_dropout(copied(gm)) for gm in (captured, compiled)]

    @stage(COMPARISON)
    def agrees(self, inputs: Sequence[object]) -> bool:
        """Whether both compute the same of these inputs; a warning says so if they do not."""
        tensors = [t for t in (*inputs, *self.captured.buffers()) if isinstance(t, torch.Tensor)]
        state = State([t for t in tensors if not t.requires_grad], device_of(inputs))

        def run(graph: fx.GraphModule, args: Sequence[object]) -> list[object]:
            try:
                with torch.no_grad():
                    found = pytree.tree_leaves(graph(*args))
                    return [t.clone() if isinstance(t, torch.Tensor) else t for t in found]
            finally:
                state.restore_changed()

        def again(move: Callable[[object], object]) -> object:
            return run(self._graphs[0], [move(a) for a in inputs])

        expected, found = (run(graph, inputs) for graph in self._graphs)
        same = len(found) == len(expected) and agree_at_new_sizes(
            found, expected, inputs, again, roundings_of(self.captured.graph)
        )
        if not same:
            text = "hypatia: attention that was written anew is wrong; the graph runs as it was captured"
            warnings.warn(VerificationWarning(text), stacklevel=2)
        return same


class Checked:
    """Runs what was compiled of such a graph, if the first call shows that it is right."""

    def __init__(self, rewritten: Rewritten, compiled: Callable[..., object]) -> None:
        self._rewritten: Rewritten | None = rewritten
        self._run = compiled

    def __call__(self, *args: object) -> object:
        """The results of the graph."""
        rewritten = self._rewritten
        if rewritten is not None and not any(isinstance(a, FakeTensor) for a in args):
            self._rewritten = None
            if not rewritten.agrees(args):
                self._run = rewritten.captured
        return self._run(*args)


def copy_to_compare(gm: fx.GraphModule) -> fx.GraphModule | None:
    """A copy of a graph that may be written anew; none of any other, nor of one that other processes run."""
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    words = {word for n in nodes for word in _WORDS if word in _name(n)}
    apart = any(o in str(getattr(n.target, "__module__", "")) + str(n.target) for n in nodes for o in _OTHERS)
    return copied(gm) if words and not apart else None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _without_dropout(gm: fx.GraphModule) -> fx.GraphModule:
    """The same, changed in place, with attention that drops nothing: kernels draw in ways of their own."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and _CALL in _name(node):
            if len(node.args) > _DROPOUT:
                node.update_arg(_DROPOUT, 0.0)
            elif "dropout_p" in node.kwargs:
                node.update_kwarg("dropout_p", 0.0)
    gm.recompile()
    return gm
