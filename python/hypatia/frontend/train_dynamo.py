"""A training step without AOTAutograd's wrappers: the compiled passes behind one autograd function.

AOTAutograd makes the forward and the backward graph. What it does around them at every call, for inputs that
change and results that are views, most models do not need; those run by the function here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from .. import _native, _torch
from ..capture.op_facts import draws
from ..capture.records import value_of
from ..compiler import pipeline
from ..devices import table
from ..execute.changes import State
from ..execute.cuda_graph import note_thread_of_autograd
from ..execute.train_step import Backward, GivenTangents, Gradients, RecordedStep, Tensors
from .dynamo_pass import Pass
from .step_forms import PLANS, Passes, Run, by_plan, by_torch, let_go, lost, masked, native_form, right_ones

log = logging.getLogger(__name__)


class _Context(Protocol):
    """What a forward pass leaves for its backward pass."""

    besides: object
    run: Backward
    step: Step
    saved_tensors: Tensors

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, step: Step, *primals: torch.Tensor) -> object:
        passes = step.passes
        results, saved, ctx.besides = passes.forward(list(primals))
        ctx.run = passes.backward
        ctx.step = step
        ctx.set_materialize_grads(False)
        # Inputs are kept for those who ask for gradients of gradients.
        ctx.save_for_backward(*[primals[i] for i in step.open], *saved)
        if step.plain:
            ctx.mark_non_differentiable(*[results[i] for i in step.plain])
        return tuple(results)

    @staticmethod
    def backward(ctx: _Context, *tangents: torch.Tensor) -> object:
        note_thread_of_autograd()
        if not torch.is_grad_enabled():
            with _torch.without_autocast():
                return _backward(ctx, *tangents)
        again = ctx.step.again
        return _backward_once(ctx, *tangents) if again is None else _differentiable(ctx, again, tangents)


def _backward(ctx: _Context, *tangents: torch.Tensor) -> object:
    step = ctx.step
    given = step.given([tangents[i] for i in step.wanted])
    return (None, *ctx.run(ctx.saved_tensors[step.inputs :], ctx.besides, given))


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: the graph that takes it was traced with them, and may view it."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _differentiable(
    ctx: _Context,
    again: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    tangents: tuple[torch.Tensor, ...],
) -> object:
    """Gradients that have gradients: by torch's own ops."""
    inputs = ctx.saved_tensors[: ctx.step.inputs]
    primals = [*ctx.step.parameters, *inputs]
    results = again(inputs)
    # Weights may be tied: of a tensor that is given twice, the first one has the whole gradient.
    first = {id(t): i for i, t in reversed([*enumerate(primals)]) if t.requires_grad}
    wanted = [t for i, t in enumerate(primals) if first.get(id(t)) == i]
    outputs = [(results[i], tangents[i]) for i in ctx.step.wanted if tangents[i] is not None]
    found = iter(
        torch.autograd.grad(
            [r for r, _ in outputs], wanted, [t for _, t in outputs], create_graph=True, allow_unused=True
        )
    )
    return (None, *[next(found) if first.get(id(t)) == i else None for i, t in enumerate(primals)])


_backward_once = torch.autograd.function.once_differentiable(_backward)
"""Gradients of gradients are an error that says so: the model draws random numbers, and would draw others, or
changes buffers, and would change them again."""

_apply = super(torch.autograd.Function, _Function).apply
"""Without what PyTorch does for its function transforms, which are not active here."""


class UnforetoldError(RuntimeError):
    """A result has another shape than torch foretold: the backward pass was captured for that one."""


class Step:
    """A model's training step: called with its inputs, it returns results that know their gradients."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        forward: Pass,
        backward: Pass,
        results: Sequence[_torch.OutputAliasInfo],
        changed: Sequence[int] = (),
        steady: Sequence[int] | None = None,
    ) -> None:
        """``steady`` says where the forward graph takes the parameters: first, if nothing is said."""
        self.parameters = parameters
        self.changed = changed
        """Buffers that the forward pass changes, as places among the parameters."""
        count = len(forward.graph.find_nodes(op="placeholder"))
        self.steady = [*range(len(parameters))] if steady is None else list(steady)
        self.open = sorted({*range(count)} - {*self.steady})
        """Where it takes the inputs."""
        self.inputs = len(self.open)
        self._first = self.steady == [*range(len(parameters))]
        self.again: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
        """The model by torch's own ops, for gradients of gradients."""
        self.random = any(draws(n.target) for n in forward.graph.nodes)
        self._graphs = (forward, backward)
        self.count = len(results)
        self.wanted = [i for i, r in enumerate(results) if r.requires_grad]
        self.plain = [i for i, r in enumerate(results) if not r.requires_grad]
        taken = backward.graph.find_nodes(op="placeholder")
        self._tangents = [value_of(n) for n in taken[len(taken) - len(self.wanted) :]]
        self.strides = [t.stride() for t in self._tangents]
        self.passes = self._as_they_are(
            lambda args: forward.latest()(args), lambda args: backward.latest()(args)
        )
        self.settled = False
        self._is_new = True
        self.in_caller = False
        """Backward passes run in the thread that asks for them."""
        self.times: dict[str, float] = {}
        """Seconds of a step in each form, once they were compared."""
        self.apart: dict[str, tuple[float, float]] = {}
        """On a GPU, those of the device and of the host."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the model."""
        return self.run(self._primals(inputs))

    def run(self, primals: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same; parameters and inputs are where the forward graph takes them."""
        if self.in_caller:
            # Autograd asks for it when a backward pass begins. What it is told at the end of one, it forgets.
            _torch.set_multithreaded_backward(False)
        results: tuple[torch.Tensor, ...] = _apply(self, *primals)
        if self._is_new:
            self._check(results)
        return results

    def _check(self, results: Sequence[torch.Tensor]) -> None:
        """Compares shapes with those that torch foretold, by which the backward pass was captured."""
        for i, tangent in zip(self.wanted, self._tangents, strict=True):
            if results[i].shape != tangent.shape:
                raise UnforetoldError(f"a result has the shape {results[i].shape}, not {tangent.shape}")
        self._is_new = False

    def _primals(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = iter(inputs)
        if self._first:
            return [*self.parameters, *given]
        known = dict(zip(self.steady, self.parameters, strict=True))
        return [known[i] if i in known else next(given) for i in range(len(self.parameters) + self.inputs)]

    def given(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Tangents as a backward pass takes them: zeros for those that it reads and nobody gave."""
        whole = self._whole(tangents) is not None
        return [
            laid_out(tangent, like.stride())
            if tangent is not None
            else torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
            if whole or i not in self._graphs[1].unread
            else None
            for i, (tangent, like) in enumerate(zip(tangents, self._tangents, strict=True))
        ]

    def _whole(self, tangents: Sequence[torch.Tensor | None]) -> Run | None:
        """What runs the backward pass where a tangent is given that is rarely given."""
        backward = self._graphs[1]
        return backward.whole if any(tangents[i] is not None for i in backward.unread) else None

    def _as_they_are(self, forward: Run, backward: Run) -> Passes:
        count = self.count

        def first(args: list[torch.Tensor]) -> tuple[Tensors, Tensors, None]:
            returned = forward(args)
            return returned[:count], returned[count:], None

        def last(saved: Tensors, _: object, tangents: GivenTangents) -> Gradients:
            run = self._whole(tangents) or backward
            return run([*saved, *tangents])

        return Passes(first, last)

    @property
    def ready(self) -> bool:
        """Whether both passes are verified, so that forms of them can be compared."""
        return all(p.settled() for p in self._graphs)

    def forms(self, inputs: Sequence[torch.Tensor]) -> dict[str, Passes]:
        """Forms of the passes that compute the same, by name; none while somebody records a CUDA graph."""
        forward, backward = (p.latest() for p in self._graphs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return {}
        self.passes = self._as_they_are(forward, backward)
        forms = {"plain": self.passes}
        on_device = next((t.device for t in inputs if table.of(t.device).records), None)
        if on_device is None:
            return forms
        before = self.state(on_device)
        try:
            return self._recorded_forms(forward, backward, inputs, before)
        except UnforetoldError:
            # No form of it can run.
            before.restore()
            raise
        except RuntimeError:
            if pipeline.raise_errors:
                raise
            before.restore()
            log.warning("forms of the training step cannot be compared; it runs as it is", exc_info=True)
            return forms

    def _recorded_forms(
        self, forward: Run, backward: Run, inputs: Sequence[torch.Tensor], before: State
    ) -> dict[str, Passes]:
        """All that a GPU can have; the plain one among them."""
        forms = {"plain": self.passes}
        primals = [t.detach() for t in self._primals(inputs)]
        first, last = native_form(forward), native_form(backward)
        with torch.no_grad():
            results = self.passes.forward(list(primals))[0]
            self._check(results)

            def add(name: str, make: Callable[[], Passes | None]) -> None:
                # Of a cache that a pass fills, the next place may be past the end.
                before.restore()
                _add(forms, name, make)

            unread = [self.wanted[i] for i in self._graphs[1].unread]
            ones = [None if i in unread else torch.ones_like(results[i]) for i in self.wanted]
            # Results may lie otherwise than the gradients that the passes were captured with.
            tangents = self.given(ones)
            calls = True
            if first is not None and last is not None:
                add("masked", lambda: masked(first, last, self.count, self._whole))
                calls = bool(first.binding.calls or last.binding.calls)
            if calls:
                add("recorded", lambda: self._recorded(self.passes, primals, tangents))
            if (first is not None or last is not None) and "recorded" in forms:
                # Torch's ops, where its kernels are the faster ones.
                torchs = self._as_they_are(*[by_torch(f) for f in (forward, backward)])
                add("torch's, recorded", lambda: self._recorded(torchs, primals, tangents))
            if "recorded" in forms and any(lost(f) is not None for f in (forward, backward)):
                # Plans that lost because of the host, which a recording needs no more.
                plans = self._as_they_are(*[by_plan(f) for f in (forward, backward)])
                add(PLANS, lambda: self._recorded(plans, primals, tangents))
            right = right_ones(forms, primals, tangents, before)
            # Of equals the recorded one: its time does not depend on what else the host does.
            return dict(sorted(right.items(), key=lambda form: form[0] != "recorded"))

    def keep(self, name: str, forms: Mapping[str, Passes]) -> None:
        """Runs by one of these forms from now on."""
        self.passes, self.settled = forms.get(name, self.passes), True
        if name != PLANS:
            runs = [each.latest() for each in self._graphs]
            let_go(filter(lost, runs) if name in forms else runs)
            return
        for each in self._graphs:
            if each.report is not None and lost(each.latest()) is not None:
                each.report.kept = "plan"

    def state(self, device: torch.device) -> State:
        """What a forward pass changes, as it is now."""
        return State([self.parameters[i] for i in self.changed], device)

    def by(self, passes: Passes, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the model by these passes, and by them from now on."""
        self.passes = passes
        return self(inputs)

    def _recorded(self, passes: Passes, primals: list[torch.Tensor], tangents: GivenTangents) -> Passes:
        changed = [self.steady[i] for i in self.changed]
        step = RecordedStep(*passes, primals, self.steady, tangents, changed)
        return Passes(step.forward, step.backward)


def _add(forms: dict[str, Passes], name: str, make: Callable[[], Passes | None]) -> None:
    try:
        made = make()
    except (_native.HypatiaError, RuntimeError) as e:
        log.info("no %s training step: %s", name, e)
        return
    if made is not None:
        forms[name] = made
