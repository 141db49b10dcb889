"""A training step without AOTAutograd's wrappers: the compiled passes behind one autograd function.

AOTAutograd makes the forward and the backward graph. What it does around them at every call, for inputs that
change and results that are views, most models do not need; those run by the function here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _native, _torch
from ..capture.op_facts import draws
from ..capture.records import value_of
from ..execute.agreement import agree
from ..execute.changes import State, note_changes
from ..execute.native import NativeGraph
from ..execute.train_step import Backward, Forward, Gradients, RecordedStep, Tensors
from .dynamo_pass import Pass

log = logging.getLogger(__name__)

Run = Callable[[list[Any]], Any]
"""Runs a graph on a list of arguments that it empties."""


class Passes(NamedTuple):
    """What runs the forward and the backward pass."""

    forward: Forward
    backward: Backward


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *primals: torch.Tensor) -> object:
        passes = step.passes
        results, saved, ctx.besides = passes.forward(list(primals))
        ctx.run = passes.backward
        ctx.step = step
        # Inputs are kept for those who ask for gradients of gradients.
        ctx.save_for_backward(*primals[len(step.parameters) :], *saved)
        if step.plain:
            ctx.mark_non_differentiable(*[results[i] for i in step.plain])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> object:
        if not torch.is_grad_enabled():
            return _backward(ctx, *tangents)
        again = ctx.step.again
        return _backward_once(ctx, *tangents) if again is None else _differentiable(ctx, again, tangents)


def _backward(ctx: Any, *tangents: torch.Tensor) -> object:
    step = ctx.step
    given = [laid_out(tangents[i], strides) for i, strides in zip(step.wanted, step.strides, strict=True)]
    return (None, *ctx.run(ctx.saved_tensors[step.inputs :], ctx.besides, given))


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: the graph that takes it was traced with them, and may view it."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _differentiable(
    ctx: Any,
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
    outputs = [(results[i], tangents[i]) for i in ctx.step.wanted]
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


class Step:
    """A model's training step: called with its inputs, it returns results that know their gradients."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        forward: Pass,
        backward: Pass,
        results: Sequence[Any],
        changed: Sequence[int] = (),
    ) -> None:
        self.parameters = parameters
        self.changed = changed
        """Buffers that the forward pass changes, as places among the parameters."""
        self.inputs = len(forward.graph.find_nodes(op="placeholder")) - len(parameters)
        self.again: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
        """The model by torch's own ops, for gradients of gradients."""
        self.random = any(draws(n.target) for n in forward.graph.nodes)
        self._graphs = (forward, backward)
        self.count = len(results)
        self.wanted = [i for i, r in enumerate(results) if r.requires_grad]
        self.plain = [i for i, r in enumerate(results) if not r.requires_grad]
        taken = backward.graph.find_nodes(op="placeholder")
        self.strides = [value_of(n).stride() for n in taken[len(taken) - len(self.wanted) :]]
        self.passes = self._as_they_are(
            lambda args: forward.latest()(args), lambda args: backward.latest()(args)
        )
        self.settled = False
        self.in_caller = False
        """Backward passes run in the thread that asks for them."""
        self.times: dict[str, float] = {}
        """Seconds of a step in each form, once they were compared."""
        self.apart: dict[str, tuple[float, float]] = {}
        """On a GPU, those of the device and of the host."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the model."""
        if self.in_caller:
            # Autograd asks for it when a backward pass begins. What it is told at the end of one, it forgets.
            _torch.set_multithreaded_backward(False)
        return _apply(self, *self.parameters, *inputs)

    def _as_they_are(self, forward: Run, backward: Run) -> Passes:
        count = self.count

        def first(args: list[torch.Tensor]) -> tuple[Tensors, Tensors, None]:
            returned = forward(args)
            return returned[:count], returned[count:], None

        return Passes(first, lambda saved, _, tangents: backward([*saved, *tangents]))

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
        on_device = next((t.device for t in inputs if t.is_cuda), None)
        if on_device is None:
            return forms
        before = self.state(on_device)
        primals = [t.detach() for t in (*self.parameters, *inputs)]
        first, last = _native_form(forward), _native_form(backward)
        with torch.no_grad():
            results = self.passes.forward(list(primals))[0]
            tangents = [torch.ones_like(results[i]) for i in self.wanted]
            calls = True
            if first is not None and last is not None:
                self._add(forms, "masked", lambda: masked(first, last, self.count))
                calls = bool(first.binding.calls or last.binding.calls)
            if calls:
                self._add(forms, "recorded", lambda: self._recorded(self.passes, primals, tangents))
            if (first is not None or last is not None) and "recorded" in forms:
                # Torch's ops, where its kernels are the faster ones.
                torchs = self._as_they_are(*[_by_torch(f) for f in (forward, backward)])
                self._add(forms, "torch's, recorded", lambda: self._recorded(torchs, primals, tangents))
            return _right(forms, primals, tangents, before)

    def state(self, device: torch.device) -> State:
        """What a forward pass changes, as it is now."""
        return State([self.parameters[i] for i in self.changed], device)

    def by(self, passes: Passes, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the model by these passes, and by them from now on."""
        self.passes = passes
        return self(inputs)

    def _recorded(self, passes: Passes, primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Passes:
        step = RecordedStep(*passes, primals, len(self.parameters), tangents, self.changed)
        return Passes(step.forward, step.backward)

    def _add(self, forms: dict[str, Passes], name: str, make: Callable[[], Passes | None]) -> None:
        try:
            made = make()
        except (_native.HypatiaError, RuntimeError) as e:
            log.info("no %s training step: %s", name, e)
            return
        if made is not None:
            forms[name] = made


def _native_form(run: Run) -> NativeGraph | None:
    return run if isinstance(run, NativeGraph) and run.native else None


def _by_torch(forward: Run) -> Run:
    return forward.graph if isinstance(forward, NativeGraph) else forward


def _right(
    forms: dict[str, Passes],
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    before: State,
) -> dict[str, Passes]:
    """The forms whose results, gradients and changes are those of the first, with the same random numbers."""
    expected: list[object] | None = None
    right: dict[str, Passes] = {}
    for name, passes in forms.items():
        before.restore()
        results, saved, besides = passes.forward(list(primals))
        changes = [t.clone() for t in before.tensors]
        got: list[object] = [*results, *passes.backward(saved, besides, list(tangents)), *changes]
        expected = got if expected is None else expected
        pairs = [(a, b) for a, b in zip(got, expected, strict=True) if isinstance(b, torch.Tensor)]
        if all(isinstance(a, torch.Tensor) and agree(a, b) for a, b in pairs):
            right[name] = passes
        else:
            # Where an input of a ReLU is nearly zero, another order of sums decides otherwise.
            log.info("a %s training step has other gradients than the plain one; it is not used", name)
    before.restore()
    return right


def masked(forward: NativeGraph, backward: NativeGraph, count: int) -> Passes | None:
    """Both passes by plans that hand masks of ReLUs over as bits; none if there are no such masks."""
    ours, theirs = forward.binding, backward.binding
    keeps = {place - count: output for place, output in ours.keeps.items()}
    pairs = [(keeps[place], taken) for place, taken in theirs.masks.items() if place in keeps]
    if not pairs:
        return None
    kept, taken = zip(*pairs, strict=True)
    first = ours.bound_to(forward.planner.with_masks(keep=kept), more=len(pairs))
    second = theirs.bound_to(backward.planner.with_masks(masked=taken))

    def run(args: list[torch.Tensor]) -> tuple[Tensors, Tensors, int]:
        outputs = None
        if not _torch.dispatch_mode_count():
            given = ours.given(args)
            outputs = first(ours.lead(), *given)
        if outputs is None:
            returned = forward(args)
            return returned[:count], returned[count:], 0
        note_changes([given[i] for i in ours.changes])
        returned = forward.finished(outputs)
        return returned[:count], returned[count:], len(pairs)

    def back(saved: Tensors, bits: int, tangents: list[torch.Tensor]) -> Gradients:
        args = [*saved[: len(saved) - bits], *tangents]
        outputs = None
        if bits and not _torch.dispatch_mode_count():
            given = theirs.given(args)
            outputs = second(theirs.lead(), *given, *saved[len(saved) - bits :])
        return backward(args) if outputs is None else backward.finished(outputs)

    return Passes(run, back)


def step_of(gm: fx.GraphModule, inputs: Sequence[Any], passes: Sequence[Pass]) -> Step | None:
    """The step that these passes make, if nothing has to be done around them."""
    kinds = [p.kind for p in passes]
    if sorted(kinds) != ["backward", "forward"] or not all(isinstance(t, torch.Tensor) for t in inputs):
        return None
    forward, backward = (passes[kinds.index(k)] for k in ("forward", "backward"))
    about = forward.metadata
    parameters = lifted(gm)
    given = forward.graph.find_nodes(op="placeholder")
    if about is None or not _is_plain(about) or len(given) != len(parameters) + len(inputs):
        return None
    # Weights may be tied, but nothing else may be given twice.
    tied = {id(t) for t in parameters}
    if len(tied | {id(t) for t in inputs}) != len(tied) + len(inputs):
        return None
    changed = _changed(about, parameters)
    if changed is None:
        return None
    for node, tensor in zip(given, (*parameters, *inputs), strict=True):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            return None
    (output,) = forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    results, kept = about.output_info, returned[about.num_outputs :]
    if not all(isinstance(value_of(n), torch.Tensor) for n in returned if isinstance(n, fx.Node)):
        return None
    if not all(isinstance(n, fx.Node) for n in returned) or len(set(returned[: about.num_outputs])) < len(
        results
    ):
        return None
    if any(given[i] in kept for i in changed):
        # A backward pass would find other values there after a second forward pass.
        return None
    wanted = sum(r.requires_grad for r in results)
    taken = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    if taken[: len(kept)] != [n.name for n in kept] or len(taken) != len(kept) + wanted:
        return None
    (gradients,) = backward.graph.find_nodes(op="output")
    if len(gradients.args[0]) != len(given):
        return None
    return Step(parameters, forward, backward, results, changed)


def _is_plain(about: Any) -> bool:
    """Whether no input changes but in the graph, no result is a view, and nothing but tensors is kept."""
    none = (
        "num_mutated_inp_runtime_indices",
        "num_outputs_aliased",
        "num_intermediate_bases",
        "num_symints_saved_for_bw",
        "num_outputs_rng_offset",
    )
    if any(getattr(about, name, None) != 0 for name in none):
        return False
    gone = ("num_backward_tokens", "num_graphsafe_rng_states", "num_opaque_objects_saved_for_bw")
    return not any(getattr(about, name, 0) for name in gone) and not about.tokens


def _changed(about: Any, parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """Buffers that the forward graph changes, as places among the parameters; none if it changes anything
    that is an input, has gradients or is there twice."""
    found = [i for i, info in enumerate(about.input_info) if info.mutates_data or info.mutates_metadata]
    if found and (found[-1] >= len(parameters) or any(about.input_info[i].mutates_metadata for i in found)):
        return None
    times = Counter(id(t) for t in parameters)
    alone = all(times[id(parameters[i])] == 1 and not parameters[i].requires_grad for i in found)
    return found if alone else None


def lifted(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Parameters and buffers in the order in which AOTAutograd lifts them."""
    named = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    return [t for _, t in named]
