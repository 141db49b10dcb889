"""Training by ``torch.compile`` on a CPU: compiled passes run only where they are faster than eager.

A CPU has no plans for training, so that the passes are torch's ops in another order. Often they gain nothing,
and what AOTAutograd does around them costs a little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..capture.op_facts import effects_in
from ..execute import choose
from ..execute.changes import State
from .dynamo_pass import Pass

log = logging.getLogger(__name__)


def as_captured(gm: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule | None:
    """A copy of a graph that may be trained on a CPU, to be kept as it is now; none of any other graph."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    trained = any(t.requires_grad for t in (*tensors, *gm.parameters()))
    if not trained or not torch.is_grad_enabled() or not all(t.device.type == "cpu" for t in tensors):
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class Contest:
    """Runs the compiled passes; once both are verified, they are timed beside eager."""

    def __init__(self, eager: fx.GraphModule, compiled: Callable[..., Any], passes: Sequence[Pass]) -> None:
        """``passes`` gets the backward pass when it is first needed."""
        self._eager = eager
        self._passes = passes
        self._run: Callable[..., Any] = compiled
        self._decided = False

    def __call__(self, *args: Any) -> Any:
        """The results, which know their gradients."""
        if not self._decided and self._is_time(args):
            self._decided = True
            self._decide(args)
        return self._run(*args)

    def _is_time(self, args: Sequence[Any]) -> bool:
        if len(self._passes) < 2 or not all(p.settled() for p in self._passes):
            return False
        plain = all(
            type(t) in (torch.Tensor, torch.nn.Parameter) for t in args if isinstance(t, torch.Tensor)
        )
        return plain and torch.is_grad_enabled() and choose.is_unobserved(torch.device("cpu"))

    def _decide(self, args: Sequence[Any]) -> None:
        changed = self._changed(args)
        if changed is None or any(effects_in(p.graph) for p in self._passes):
            return
        before = State(changed, torch.device("cpu"))
        given = [
            t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in args
        ]
        wanted = [*self._eager.parameters(), *(t for t in given if isinstance(t, torch.Tensor))]
        compiled, eager = self._run, self._eager
        calls = {"eager": lambda: eager(*given), "plain": lambda: compiled(*given)}
        steps = {name: choose.with_backward(call, wanted) for name, call in calls.items()}
        try:
            choice = choose.fastest(steps, torch.device("cpu"), counts=before.counts)
        except Exception:
            log.info("a training step cannot be timed", exc_info=True)
            return
        finally:
            before.restore()
        log.info("training steps are kept: %s %s", choice.kept, choice.times.taken)
        if choice.kept == "eager":
            self._run = eager
            for report in (p.report for p in self._passes):
                if report is not None:
                    report.kept = "eager"

    def _changed(self, args: Sequence[Any]) -> list[torch.Tensor] | None:
        """Inputs and buffers that a step changes; none if that is not known."""
        known = next((p.metadata for p in self._passes if p.kind != "backward"), None)
        own: list[tuple[str, torch.Tensor]] = [
            *self._eager.named_parameters(remove_duplicate=False),
            *self._eager.named_buffers(remove_duplicate=False),
        ]
        values = [*(t for _, t in own), *args]
        if known is None or len(known.input_info) != len(values):
            return None
        if any(info.mutates_metadata or info.mutates_storage_metadata for info in known.input_info):
            return None
        changed = [v for v, info in zip(values, known.input_info, strict=True) if info.mutates_data]
        return None if any(t.requires_grad for t in changed) else changed
