"""A training step without AOTAutograd's wrappers: the compiled passes behind one autograd function.

AOTAutograd makes the forward and the backward graph. What it does around them at every call, for inputs that
change and results that are views, most models do not need; those run by the function here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import _native
from .backend import Pass
from .capture import value_of
from .native import NativeGraph, distance

log = logging.getLogger(__name__)

_TIMED = 7
"""Steps of each form that are timed, beside one that is not."""


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *primals: torch.Tensor) -> Any:
        passes = step.passes
        returned = passes.forward(list(primals))
        results, saved = returned[: step.count], returned[step.count :]
        ctx.passes = passes
        ctx.step = step
        ctx.save_for_backward(*saved)
        if step.plain:
            ctx.mark_non_differentiable(*[results[i] for i in step.plain])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        return (_backward_once if torch.is_grad_enabled() else _backward)(ctx, *tangents)


def _backward(ctx: Any, *tangents: torch.Tensor) -> Any:
    step = ctx.step
    given = [
        t if t.stride() == strides else t.contiguous()
        for t, strides in zip([tangents[i] for i in step.wanted], step.strides, strict=True)
    ]
    return (None, *ctx.passes.backward([*ctx.saved_tensors, *given], len(given)))


_backward_once = torch.autograd.function.once_differentiable(_backward)
"""Gradients of gradients are an error that says so."""

_apply = super(torch.autograd.Function, _Function).apply
"""Without what PyTorch does for its function transforms, which are not active here."""


class Passes:
    """What runs the forward and the backward graph."""

    def __init__(
        self,
        forward: Callable[[list[Any]], Sequence[Any]],
        backward: Callable[[list[Any], int], Sequence[Any]],
    ) -> None:
        self.forward = forward
        """Takes what the graph takes."""
        self.backward = backward
        """Takes what was kept, the tangents, and how many these are."""


class Step:
    """A model's training step: called with its inputs, it returns results that know their gradients."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], forward: Pass, backward: Pass, results: Sequence[Any]
    ) -> None:
        self.parameters = parameters
        self._passes = (forward, backward)
        self.count = len(results)
        self.wanted = [i for i, r in enumerate(results) if r.requires_grad]
        self.plain = [i for i, r in enumerate(results) if not r.requires_grad]
        inputs = backward.graph.find_nodes(op="placeholder")
        self.strides = [value_of(n).stride() for n in inputs[len(inputs) - len(self.wanted) :]]
        self.passes = Passes(
            lambda args: forward.latest()(args),
            lambda args, _: backward.latest()(args),
        )
        self._tried = False
        self.times: dict[str, float] = {}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the model."""
        if not self._tried:
            self._settle(inputs)
        return _apply(self, *self.parameters, *inputs)

    def _settle(self, inputs: Sequence[torch.Tensor]) -> None:
        """Once both passes are verified: keeps the fastest form of them that computes the same."""
        forward, backward = (p.latest() for p in self._passes)
        if not all(p.settled() for p in self._passes):
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._tried = True
        self.passes = Passes(forward, lambda args, _: backward(args))
        native = isinstance(forward, NativeGraph) and isinstance(backward, NativeGraph)
        if not native or not (forward.native and backward.native):
            return
        primals = [p.detach() for p in (*self.parameters, *inputs)]
        try:
            masked = _Masked.of(forward, backward, self.count)
            if masked is None:
                return
            forms = {"plain": self.passes, "masked": Passes(masked.forward, masked.backward)}
            with torch.no_grad():
                self.times = _compare(forms, primals, self.count, self._tangents(primals))
        except _native.HypatiaError as e:
            log.info("masks of ReLU are not kept as bits: %s", e)
            return
        if self.times.get("masked", torch.inf) < self.times["plain"]:
            self.passes = forms["masked"]

    def _tangents(self, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = self.passes.forward(list(primals))
        return [torch.ones_like(results[i]) for i in self.wanted]


def _compare(
    forms: dict[str, Passes], primals: Sequence[torch.Tensor], count: int, tangents: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Seconds of a step in each form whose gradients are those of the first."""

    def step(passes: Passes) -> Sequence[Any]:
        saved = passes.forward(list(primals))[count:]
        return passes.backward([*saved, *tangents], len(tangents))

    found = {name: step(passes) for name, passes in forms.items()}
    expected = next(iter(found.values()))
    for name, got in found.items():
        pairs = [(a, b) for a, b in zip(got, expected, strict=True) if isinstance(b, torch.Tensor)]
        if any(distance(a, b) > 1 for a, b in pairs):
            log.warning("gradients of a %s training step are wrong; it is not used", name)
            forms = {n: p for n, p in forms.items() if n != name}
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 + _TIMED):
        for name, passes in forms.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step(passes)
            torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) / 3 for name, times in taken.items()}


class _Masked:
    """Both passes by plans that hand the masks of ReLUs over as bits, one for each element."""

    def __init__(self, graphs: tuple[NativeGraph, NativeGraph], bound: tuple[Any, Any], bits: int) -> None:
        self._graphs = graphs
        self._bound = bound
        self._bits = bits

    @staticmethod
    def of(forward: NativeGraph, backward: NativeGraph, count: int) -> _Masked | None:
        """The pair, if there are masks that one pass can keep and the other take."""
        keeps = {place - count: output for place, output in forward.keeps.items()}
        pairs = [(keeps[place], taken) for place, taken in backward.masks.items() if place in keeps]
        if not pairs:
            return None
        kept, taken = zip(*pairs, strict=True)
        bound = (
            forward.bound_to(forward.planner.with_masks(keep=kept)),
            backward.bound_to(backward.planner.with_masks(masked=taken)),
        )
        return _Masked((forward, backward), bound, len(pairs))

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Results and what is kept, the bits last; no bits where torch's ops have to run."""
        graph = self._graphs[0]
        if torch._C._len_torch_dispatch_stack():
            return graph(args)
        outputs = self._bound[0](graph.lead(), *[args[i] for i in graph.inputs])
        if outputs is None:
            return graph(args)
        return [*graph.finished(args, outputs), *outputs[-self._bits :]]

    def backward(self, args: list[Any], tangents: int) -> Sequence[Any]:
        """Gradients."""
        graph = self._graphs[1]
        extra = len(args) - graph.arity
        if not extra:
            return graph(args)
        saved = graph.arity - tangents
        bits, args = args[saved : saved + extra], args[:saved] + args[saved + extra :]
        outputs = None
        if not torch._C._len_torch_dispatch_stack():
            outputs = self._bound[1](graph.lead(), *[args[i] for i in graph.inputs], *bits)
        return graph(args) if outputs is None else graph.finished(args, outputs)


def step_of(gm: fx.GraphModule, inputs: Sequence[Any], passes: Sequence[Pass]) -> Step | None:
    """The step that these passes make, if nothing has to be done around them."""
    kinds = [p.kind for p in passes]
    if sorted(kinds) != ["backward", "forward"] or not all(isinstance(t, torch.Tensor) for t in inputs):
        return None
    forward, backward = (passes[kinds.index(k)] for k in ("forward", "backward"))
    about = forward.metadata
    parameters = _lifted(gm)
    given = forward.graph.find_nodes(op="placeholder")
    if about is None or not _is_plain(about) or len(given) != len(parameters) + len(inputs):
        return None
    if len({id(t) for t in (*parameters, *inputs)}) != len(given):
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
    wanted = sum(r.requires_grad for r in results)
    taken = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    if taken[: len(kept)] != [n.name for n in kept] or len(taken) != len(kept) + wanted:
        return None
    (gradients,) = backward.graph.find_nodes(op="output")
    if len(gradients.args[0]) != len(given):
        return None
    return Step(parameters, forward, backward, results)


def _is_plain(about: Any) -> bool:
    """Whether no input changes, no result is a view, and nothing but tensors is kept."""
    none = (
        "num_mutated_inp_runtime_indices",
        "num_mutated_graph_handled_indices",
        "num_outputs_aliased",
        "num_intermediate_bases",
        "num_symints_saved_for_bw",
        "num_outputs_rng_offset",
    )
    if any(getattr(about, name, None) != 0 for name in none):
        return False
    gone = ("num_backward_tokens", "num_graphsafe_rng_states", "num_opaque_objects_saved_for_bw")
    return not any(getattr(about, name, 0) for name in gone) and not about.tokens


def _lifted(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Parameters and buffers in the order in which AOTAutograd lifts them."""
    named = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    return [t for _, t in named]
