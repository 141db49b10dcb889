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


class Rewritten:
    """A graph as it was captured, and as it is compiled."""

    def __init__(self, captured: fx.GraphModule, compiled: fx.GraphModule) -> None:
        self.captured, self._compiled = captured, copied(compiled)

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
                state.restore()

        def again(move: Callable[[object], object]) -> object:
            return run(self.captured, [move(a) for a in inputs])

        expected = run(self.captured, inputs)
        found = run(self._compiled, inputs)
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


def as_captured(gm: fx.GraphModule) -> fx.GraphModule | None:
    """A copy of a graph that may be written anew; none of any other."""
    names = (getattr(n.target, "__name__", n.target) for n in gm.graph.nodes if n.op.startswith("call_"))
    return copied(gm) if any(word in str(name) for name in names for word in _WORDS) else None
