"""A model compiled, compared and timed, so that a report can be written about it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import nn

from ... import timeline
from ..._torch import pytree
from ...capture.model_state import buffers_kept, untouched
from ...compiler.pipeline import UncompiledGraph, listening_for_uncompiled
from ...compiler.report import GraphReport, Replay
from ...devices import machine
from ...execute.step_times import plan_calls
from ...frontend import dynamo
from ...options import Options
from ...verifier.verify import Verification, verify
from .. import steps
from ..measure import wait
from ..steps import Line
from .breaks import Breaks
from .report import Report, Timings

log = logging.getLogger(__name__)

REPLAY_LIMIT = 2_000_000
"""Elements of a graph's inputs and weights up to which the steps of its proof are evaluated again.

The steps of larger graphs are only connected: evaluating them would take longer than all the rest.
"""

TIMING_SECONDS = 3.0
"""Time spent on timing, about; few repetitions of a slow model, many of a quick one."""

REPETITIONS = (5, 50)
"""Fewest and most repetitions of a timing."""

STEP_REPETITIONS = 5
"""Calls of which the times of steps are medians."""

_explained = itertools.count()

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def explain(
    model: Callable[..., object],
    *inputs: object,
    kwargs: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    training: bool = False,
    timings: bool = True,
    name: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compiles a model for these inputs and reports what was done to it, how exact and how fast it is.

    The model, its gradients, the inputs and the random number generators are left as they were.
    With ``training``, a backward pass of the summed floating results is compiled, compared and timed too.
    ``name`` is the title; without it the class or the function gives it. ``progress`` is told what begins.
    """
    model = _original(model)
    parsed = Options.parse(options)
    arguments, busy = (inputs, dict(kwargs or {})), machine.busy()
    device = _device(model, arguments)
    eager = Step(model, model, training)
    with untouched(model, device):
        progress("the model as it is")
        # First as it is: a model that cannot run fails with its own error, not with a compiler's.
        _call(eager, arguments)
        left: list[UncompiledGraph] = []
        breaks = Breaks()
        compiled = Step(model, _compiled(model, options, breaks), training)
        with (
            dynamo.collecting() as graphs,
            listening_for_uncompiled(left.append),
            timeline.watching(progress) as times,
            timeline.dynamo(),
        ):
            _call(compiled, arguments)
        progress("comparison with float64")
        verification, reason = _verified(eager, compiled, arguments)
        progress("times of calls")
        timed = _timed(eager, compiled, arguments, device, busy) if timings else None
        lines = _steps(compiled, arguments) if timings and not training else []
    for graph in graphs:
        graph.inputs = _own_names(model, arguments, graph.inputs)
    progress("the proof, once more")
    return Report(
        name=name or _name(model),
        device=device,
        threads=torch.get_num_threads(),
        training=training,
        graphs=list(graphs),
        replays=[_replayed(graph) if parsed.proof else None for graph in graphs],
        verification=verification,
        unverified=reason,
        compared=eager.names(len(verification.candidate)) if verification else [],
        timeline=times.seconds,
        breaks=breaks.listed(),
        left=left,
        weights=_weights(model),
        timings=timed,
        steps=lines,
    )


def _original(model: Callable[..., object]) -> Callable[..., object]:
    """A compiled model is explained as the model that was compiled."""
    if not callable(model):
        raise TypeError(f"a model is a module or a function, not {type(model).__name__}")
    return getattr(model, "_orig_mod", model)


class Step(nn.Module):
    """One call of a model; in training with the gradients of the summed floating results."""

    def __init__(self, model: Callable[..., object], call: Callable[..., object], training: bool) -> None:
        super().__init__()
        # A member, so that copying the step in float64 copies the model, and its buffers are found.
        self.model = model
        self.call = None if call is model else call
        self.with_gradients = training
        self.gradients: list[str] = []

    def forward(self, *args: object, **kwargs: object) -> object:
        """The results, and the gradients after them."""
        call = self.model if self.call is None else self.call
        if not self.with_gradients:
            with torch.no_grad():
                return call(*args, **kwargs)
        with torch.enable_grad():
            args, kwargs = pytree.tree_map(_leaf, (args, kwargs))
            results = call(*args, **kwargs)
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if _needs_gradient(t)]
            sources = {f"input {i}": t for i, t in enumerate(inputs)}
            if isinstance(self.model, nn.Module):
                sources |= {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            leaves = [t for t in pytree.tree_leaves(results) if _needs_gradient(t)]
            ends = [t for t in leaves if t.is_floating_point()]
            if not ends or not sources:
                raise ValueError("training needs a floating result that depends on something with gradients")
            total = torch.stack([t.sum().double() for t in ends]).sum()
            gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
            self.gradients = [n for n, g in zip(sources, gradients, strict=True) if g is not None]
            return results, gradients

    def names(self, total: int) -> list[str]:
        """Names of the tensors that a call returned."""
        results = [f"result {i}" for i in range(total - len(self.gradients))]
        return results + [f"gradient of {name}" for name in self.gradients]


def _own_names(
    model: Callable[..., object], arguments: tuple[Sequence[object], dict[str, object]], inputs: list[str]
) -> list[str]:
    """What the model calls its inputs, which reach it through `explained`."""
    args, kwargs = arguments
    names = {f"kwargs['{name}']": name for name in kwargs}
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        positional = [p.name for p in signature.parameters.values() if p.kind in _BY_PLACE]
        names |= {f"args[{i}]": name for i, (name, _) in enumerate(zip(positional, args, strict=False))}

    def own(name: str) -> str:
        whole = next((w for w in names if name == w or name.startswith(w + "[")), None)
        return name if whole is None else names[whole] + name[len(whole) :]

    return [own(name) for name in inputs]


def _weights(model: Callable[..., object]) -> frozenset[str]:
    """Names of parameters and buffers."""
    if not isinstance(model, nn.Module):
        return frozenset()
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return frozenset(name for part in named for name, _ in part)


def _compiled(
    model: Callable[..., object], options: Mapping[str, object] | None, breaks: Breaks
) -> Callable[..., object]:
    """The model compiled for this report alone.

    Dynamo keeps what it compiled at the code object and takes it for every equal backend. A code object
    and a backend of our own leave other compiled functions alone, and get every graph of this model. Its
    name is new too, since sizes that differ from those of an earlier code of that name become symbolic.
    """

    def own_backend(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> object:
        breaks.saw(gm)
        return dynamo.hypatia(gm, example_inputs, options=options)

    def explained(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    code = explained.__code__.replace(co_name=f"explained_{next(_explained)}")
    own = types.FunctionType(code, explained.__globals__, closure=explained.__closure__)
    return torch.compile(own, backend=own_backend)


def _call(step: Step, arguments: tuple[object, dict[str, object]]) -> None:
    """Runs a step on copies of the inputs, with the random numbers and buffers of the first run."""
    args, kwargs = pytree.tree_map(_copied, arguments)
    with buffers_kept(step):
        step(*args, **kwargs)


def _verified(
    eager: Step, compiled: Step, arguments: tuple[Sequence[object], dict[str, object]]
) -> tuple[Verification | None, str]:
    """Both compared with float64; a model that cannot run in float64 is a reason, not an error."""
    args, kwargs = arguments
    try:
        return verify(eager, compiled, *args, kwargs=kwargs), ""
    except (RuntimeError, TypeError, ValueError, AttributeError) as e:
        message = str(e).strip().splitlines()
        return None, f"the model does not run in float64: {message[0] if message else type(e).__name__}"


def _replayed(graph: GraphReport) -> Replay:
    values = [n.meta.get("val") for n in graph.before.find_nodes(op="placeholder")]
    sizes = [v.numel() for v in values if isinstance(v, torch.Tensor)]
    small = all(isinstance(size, int) for size in sizes) and sum(sizes) <= REPLAY_LIMIT
    return graph.replay(budget=1e9 if small else -1.0)


def _timed(
    eager: Step,
    compiled: Step,
    arguments: tuple[object, dict[str, object]],
    device: torch.device,
    warning: str,
) -> Timings:
    """Both in turn, so that a slow moment of the machine hits both."""
    steps = {"eager": eager, "hypatia": compiled}
    args, kwargs = pytree.tree_map(_copied, arguments)

    def seconds(step: Step) -> float:
        wait(device)
        start = time.perf_counter()
        step(*args, **kwargs)
        wait(device)
        return time.perf_counter() - start

    with buffers_kept(eager):
        slowest = max(seconds(step) for step in steps.values())
        fewest, most = REPETITIONS
        repetitions = min(most, max(fewest, int(TIMING_SECONDS / (2 * slowest + 1e-9))))
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(repetitions):
            for name, step in steps.items():
                samples[name].append(seconds(step))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return Timings(samples, medians, warning)


def _steps(compiled: Step, arguments: tuple[object, dict[str, object]]) -> list[Line]:
    """Steps of the plans that a call runs."""
    with plan_calls() as calls:
        _call(compiled, arguments)
    try:
        return steps.timed(calls, STEP_REPETITIONS)[0]
    except RuntimeError:
        log.info("steps are not timed", exc_info=True)
        return []


def _device(model: Callable[..., object], arguments: object) -> torch.device:
    """Where the model runs: the first tensor of its parameters, else of the inputs."""
    own = list(model.parameters()) if isinstance(model, nn.Module) else []
    tensors = own + [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return next((t.device for t in tensors), torch.device("cpu"))


def _copied(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _leaf(value: object) -> object:
    """An input cut off from whatever computed it, so that its gradient ends here."""
    return value.detach().requires_grad_() if _needs_gradient(value) else value


def _needs_gradient(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _name(model: Callable[..., object]) -> str:
    return getattr(model, "__name__", None) or type(model).__name__
