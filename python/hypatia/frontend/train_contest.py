"""Training by ``torch.compile``: the form of both passes that is fastest, which eager may be.

AOTAutograd compiles the passes one by one, and does something around them at every call. Where they are a
whole training step they run without that, on a GPU as CUDA graphs; where neither is faster, eager runs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .. import _torch
from ..capture.op_facts import effects_in
from ..devices import table
from ..execute import choose
from ..execute.changes import State
from ..verifier.first_call import device_of
from .dynamo_pass import Pass
from .step_forms import Passes, let_go
from .step_of_passes import lifted, step_of
from .train_dynamo import Step

log = logging.getLogger(__name__)


def as_captured(gm: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule | None:
    """A copy of a graph that may be trained, to be kept as it is now; none of any other graph."""
    tensors = [t for t in (*inputs, *gm.parameters()) if isinstance(t, torch.Tensor)]
    trained = any(t.requires_grad for t in tensors)
    if not trained or not torch.is_grad_enabled() or len({t.device for t in tensors}) > 1:
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class Contest:
    """Runs the compiled passes; once both are verified, their forms are timed beside eager."""

    def __init__(
        self,
        eager: fx.GraphModule,
        compiled: Callable[..., object],
        passes: Sequence[Pass],
        in_caller: bool = False,
    ) -> None:
        """``passes`` gets the backward pass when it is first needed; ``in_caller`` is of `Step`."""
        self._in_caller = in_caller
        self._eager = eager
        self._passes = passes
        self._compiled = compiled
        self._run: Callable[..., object] = compiled
        self._own = lifted(eager)
        """Parameters and buffers that are part of the graph."""
        self._decided = False
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        """What the step that runs is for."""

    def __call__(self, *args: torch.Tensor) -> object:
        """The results, which know their gradients."""
        if not self._decided and self._is_time(args):
            self._decided = True
            self._decide(args)
        return self._run(*args)

    def _is_time(self, args: Sequence[torch.Tensor]) -> bool:
        if len(self._passes) < 2 or not all(p.settled() for p in self._passes):
            return False
        plain = all(
            type(t) in (torch.Tensor, torch.nn.Parameter) for t in args if isinstance(t, torch.Tensor)
        )
        return plain and torch.is_grad_enabled() and not _is_observed(device_of(args))

    def _decide(self, args: Sequence[torch.Tensor]) -> None:
        changed = self._changed(args)
        if changed is None or any(effects_in(p.graph) for p in self._passes):
            return
        device = device_of(args)
        before = State(changed, device)
        given = [
            t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in args
        ]
        wanted = [*self._eager.parameters(), *(t for t in given if isinstance(t, torch.Tensor))]
        step = self._step(given)
        forms: dict[str, Passes] = {}
        try:
            if step is not None:
                forms = step.forms([[*self._own, *given][i] for i in step.open])
                before.restore()
                if not forms:
                    return
            calls = self._calls(given, step, forms)
            steps = {name: choose.with_backward(call, wanted) for name, call in calls.items()}
            choice = choose.fastest(steps, device, counts=before.counts)
        except Exception:
            log.info("a training step cannot be timed", exc_info=True)
            return
        finally:
            before.restore()
        log.info("training steps are kept: %s %s", choice.kept, choice.times.taken)
        if choice.kept == "eager":
            self._run = self._eager
            let_go([p.latest() for p in self._passes])
            for report in (p.report for p in self._passes):
                if report is not None:
                    report.kept = "eager"
        elif step is not None:
            step = self._step(args)
            assert step is not None
            step.keep(choice.kept, forms)
            step.in_caller = self._in_caller and table.of(device).backward_in_threads
            self._run = self._by(step)

    def _calls(
        self, args: Sequence[torch.Tensor], step: Step | None, forms: dict[str, Passes]
    ) -> dict[str, Callable[[], object]]:
        """Calls by name, in order of preference."""

        def by(step: Step, passes: Passes) -> Callable[[], object]:
            def call() -> object:
                step.passes = passes
                with _torch.without_autocast():
                    return step.run([*self._own, *args])

            return call

        calls: dict[str, Callable[[], object]] = {"plain": lambda: self._compiled(*args)}
        if step is not None:
            calls = {name: by(step, passes) for name, passes in forms.items()}
        eager = {"eager": lambda: self._eager(*args)}
        first = table.of(device_of(args)).eager_wins_ties
        return {**eager, **calls} if first else {**calls, **eager}

    def _step(self, args: Sequence[torch.Tensor]) -> Step | None:
        """Both passes without what AOTAutograd does around them, if that is all they need."""
        about = next((p.metadata for p in self._passes if p.kind == "forward"), None)
        (output,) = self._eager.graph.find_nodes(op="output")
        results: object = output.args[0]
        primals = [*self._own, *args]
        static = getattr(about, "static_input_indices", None) or ()
        steady = sorted({*range(len(self._own)), *static})
        if any(i >= len(primals) for i in steady) or not isinstance(results, (tuple, list)):
            return None
        step = step_of(primals, steady, self._passes)
        alike = step is not None and step.count == len(results)
        return step if alike and all(isinstance(n, fx.Node) for n in results) else None

    def _by(self, step: Step) -> Callable[..., object]:
        """Runs the step on the parameters that it was made for, as long as the model has them."""
        own, compiled = self._own, self._compiled
        device = device_of(step.parameters)
        parts = [
            (i - len(own), p) for i, p in zip(step.steady, step.parameters, strict=True) if i >= len(own)
        ]
        at = [place for place, _ in parts]
        known = [id(p) for _, p in parts]
        self._parameters = [weakref.ref(p, self._forget) for _, p in parts]
        step.parameters = ()

        def run(*args: torch.Tensor) -> object:
            if [id(args[i]) for i in at] != known or _is_observed(device):
                return compiled(*args)
            with _torch.without_autocast():
                return step.run([*own, *args])

        return run

    def _forget(self, _: object) -> None:
        """The model is gone, or has other parameters: what was recorded for these is of no use."""
        self._run, self._parameters = self._compiled, []

    def _changed(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Inputs and buffers that a step changes; none if that is not known."""
        known = next((p.metadata for p in self._passes if p.kind != "backward"), None)
        values = [*self._own, *args]
        if known is None or len(known.input_info) != len(values):
            return None
        if any(info.mutates_metadata or info.mutates_storage_metadata for info in known.input_info):
            return None
        changed = [v for v, info in zip(values, known.input_info, strict=True) if info.mutates_data]
        return None if any(t.requires_grad for t in changed) else changed


def _is_observed(device: torch.device) -> bool:
    """Whether somebody looks at the ops of this call, or, as checkpoints do, at what autograd keeps of it."""
    return choose.is_observed(device) or _torch.saved_tensors_are_seen()
