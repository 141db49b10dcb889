"""The direct entry: ``hypatia.compile(model, *inputs)``, without Dynamo's guards at every call.

A call checks what can have changed (weights, modules, mode, hooks, shapes) and goes into Rust. Shapes that
were not seen before are compiled when they are: the second one with sizes left open, so that later ones
need no search. With gradients on, an autograd function runs the compiled forward and backward graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from .api import optimized
from .backend import Pass
from .backend import hypatia as backend
from .guard import effects_of
from .locks import COMPILING
from .native import CHECK, GRAPH, ORIGINAL, NativeGraph
from .options import Options
from .planner import CLOSE, PLAN
from .report import GraphReport
from .state import READS, Parts
from .timing import in_turns
from .tracing import distinct, exported
from .training import Step, step_of
from .yardstick import RandomState, changed_inputs, devices_of

log = logging.getLogger(__name__)

_KEPT = 64
"""Shapes that a compiled model remembers."""

_AGAIN = 16
"""How many times it is compiled for the same shapes, because parts of it changed."""


def compile(
    model: nn.Module,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> CompiledModel:
    """A callable like the model, compiled for the example inputs and for other shapes as they come."""
    compiled = CompiledModel(model, options)
    if example_inputs or kwargs:
        with torch.no_grad():
            compiled.prepare(*example_inputs, **dict(kwargs or {}))
    return compiled


class CompiledModel:
    """A model that runs compiled."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"hypatia.compile takes a torch.nn.Module, not {type(model).__name__}")
        Options.parse(options)
        self.model = model
        self._options = dict(options or {})
        self._entries: dict[Any, _Entry] = {}
        self._last: _Entry | None = None
        self._trained: dict[Any, _Trained] = {}
        self._last_trained: _Trained | None = None
        self._captured: Callable[..., Any] | None = None
        self._compiled: Counter[Any] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if torch.is_grad_enabled():
            trained = self._last_trained
            known = trained is not None and not kwargs and trained.accepts(args)
            if known and not torch._C._is_any_autocast_enabled():
                return trained(args)
            if self._needs_gradients(args, kwargs):
                return self._train(args, kwargs)
        entry = self._last
        if entry is not None and entry.native is not None and not kwargs and entry.watch.holds():
            results = entry.native(args)
            if results is not None:
                return results[0] if entry.single else entry.structured(results)
        return self._by_name(args, kwargs)

    def step(
        self,
        *inputs: torch.Tensor,
        loss: Callable[[Any], torch.Tensor] | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Any:
        """Forward and backward pass as one: ``loss(model(*inputs)).backward()``, and what the loss is.

        Gradients are added to ``.grad`` as always. Autograd's engine is asked for the loss alone, which saves
        small models more than half of their time. Instead of a loss, the ``gradient`` of the model's result
        can be given; then that result is returned. What this form does not serve, hooks of parameters for
        example, autograd does.
        """
        if (loss is None) == (gradient is None):
            raise TypeError("step takes a loss or the gradient of the model's result")
        trained = self._last_trained
        if (
            trained is not None
            and trained.accepts(inputs)
            and trained.is_direct()
            and not any(t.requires_grad for t in inputs)
            and torch.is_grad_enabled()
            and not torch._C._is_any_autocast_enabled()
        ):
            return trained.both(inputs, loss, gradient)
        result = self(*inputs)
        if loss is None:
            result.backward(gradient)
            return result.detach()
        value = loss(result)
        value.backward()
        return value.detach()

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._is_any_autocast_enabled():
            return self._by_torch()(*args, **kwargs)
        return self.prepare(*args, **kwargs)(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> _Entry:
        """Compiles for these inputs, if that was not done before."""
        leaves = pytree.tree_leaves((args, kwargs))
        key = (self.model.training, *(_kind(leaf) for leaf in leaves))
        entry = self._entries.get(key)
        if entry is None or entry.outdated():
            # While another thread traces the model, its weights look replaced: once more, when that is over.
            with COMPILING:
                entry = self._entries.get(key)
                if entry is None or entry.outdated():
                    entry = self._keep(key, args, kwargs, leaves)
        self._last = entry
        return entry

    def _keep(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> _Entry:
        with _uncollected():
            entry = self._open(leaves)
            if entry is None and self._is_restless(key):
                entry = _Entry(self.model, args, kwargs, self._options, compiled=False)
            entry = entry or self._new(args, kwargs, leaves)
        self._entries.pop(key, None)
        self._entries[key] = entry
        while len(self._entries) > _KEPT:
            self._entries.pop(next(iter(self._entries)))
        return entry

    def _is_restless(self, key: Any) -> bool:
        """Whether the model was changed so often that compiling it again does not pay."""
        if len(self._compiled) > 64 * _KEPT:
            self._compiled.clear()
        self._compiled[key] += 1
        return self._compiled[key] > _AGAIN

    def _open(self, leaves: list[Any]) -> _Entry | None:
        """An entry whose open sizes can be these."""
        for entry in self._entries.values():
            if entry.open and entry.accepts(leaves) and not entry.outdated():
                return entry
        return None

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> _Entry:
        """A new entry; sizes are left open in which it differs from one that is there."""
        for other in self._entries.values():
            dims = other.differing(leaves)
            if dims and not other.outdated():
                entry = _Entry(self.model, args, kwargs, self._options, dims)
                if entry.open:
                    return entry
                break
        return _Entry(self.model, args, kwargs, self._options)

    @property
    def reports(self) -> list[GraphReport]:
        """A report for every graph that was compiled."""
        entries = {id(e): e for e in self._entries.values()}
        found = [e.report for e in entries.values() if e.report is not None]
        return found + [r for t in self._trained.values() for r in t.reports]

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if any(p.requires_grad for p in self.model.parameters()):
            return True
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._is_any_autocast_enabled() or kwargs:
            return self._by_torch()(*args, **kwargs)
        leaves = pytree.tree_leaves(args)
        parameters = tuple(p.requires_grad for p in self.model.parameters())
        key = (self.model.training, parameters, *(_trained_kind(leaf) for leaf in leaves))
        trained = self._trained.get(key)
        if trained is None or not trained.parts.hold():
            with COMPILING, _uncollected():
                trained = self._trained.get(key)
                if trained is None or not trained.parts.hold():
                    while len(self._trained) >= _KEPT:
                        self._trained.pop(next(iter(self._trained)))
                    compiled = not self._is_restless(("training", *key))
                    trained = _Trained(self.model, args, self._options, compiled=compiled)
                    self._trained[key] = trained
        if not trained.usable:
            return self._by_torch()(*args)
        self._last_trained = trained
        return trained(leaves)

    def _by_torch(self) -> Callable[..., Any]:
        if self._captured is None:
            self._captured = torch.compile(self.model, backend="hypatia", options=self._options or None)
        return self._captured

    def __repr__(self) -> str:
        return f"hypatia.compile({self.model!r})"


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Compilations make many objects that stay: looking through all of torch's for cycles takes longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Entry:
    """The model compiled for one kind of inputs."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        dims: dict[int, set[int]] | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        self.model = model
        self.report: GraphReport | None = None
        self.positional = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        self.single = False
        self.native: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...] | None] | None = None
        self.open: dict[tuple[int, int], tuple[int, int]] = {}
        """The least and greatest value of sizes that are left open, by input and dimension."""
        self._kinds = [_kind(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        self._run: Callable[..., Any] = model
        self._parts = Parts(model)
        self.watch = self._parts.watch
        if self._parts.hooked or not compiled:
            why = "has hooks" if compiled else "changes too often"
            log.info("the model runs as it is: it %s", why)
            return
        dynamic = None
        if dims and self.positional:
            auto = torch.export.Dim.AUTO
            dynamic = tuple(dict.fromkeys(dims.get(i, ()), auto) or None for i in range(len(args)))
        try:
            # Most graphs never run: where the plan does, nobody needs their Python code.
            with torch.no_grad(), _use_lazy_graph_module(True):
                gm = optimized(model, args, kwargs, options, dynamic, native=self.positional)
        except Exception:
            log.info("the model runs as it is: it cannot be exported", exc_info=True)
            return
        if gm.meta["hypatia"] is None:
            return
        self.report = gm.meta["hypatia"]
        self._run = gm
        self._spec = gm.graph._codegen.pytree_info.out_spec
        if dynamic is not None:
            self.open = gm.meta["hypatia_ranges"]
        timed = not changed_inputs(gm) and not effects_of(gm)
        if PLAN in gm.meta:
            self._plan(gm, model, args, timed=timed)
        elif timed:
            self._without_plan(gm, model, args, kwargs)
        if self._run is not model:
            self._parts.count_on(gm.meta.pop(READS, {}))
            self.watch = self._parts.watch

    def _plan(self, gm: fx.GraphModule, model: nn.Module, args: tuple[Any, ...], *, timed: bool) -> None:
        self.single = self._spec.is_leaf()
        graph: NativeGraph = gm.meta.get(GRAPH) or NativeGraph(gm, gm)
        graph.graph = lambda flat: gm(*flat)
        # Not the model itself: while another thread traces it, its weights are fake ones.
        original = gm.meta.pop(ORIGINAL)
        graph.fallback = lambda flat: original(*flat)
        graph.ranges = dict(self.open)
        if timed:
            with torch.no_grad():
                self.report.times = graph.choose(args, lambda: model(*args))
        times = self.report.times or {}
        self.report.memory = graph.bytes
        check = gm.meta.pop(CHECK)
        if graph.native:
            graph.settled = True
            self.native, self._run = graph.direct, original
        elif times.get("graph", math.inf) <= times["eager"]:
            self.report.kept, self._run = "graph", check()
        else:
            self.report.kept, self._run = "eager", model

    def _without_plan(
        self, gm: fx.GraphModule, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keeps the graph or eager, whichever is faster."""
        devices = devices_of(pytree.tree_leaves((args, kwargs)))
        random = RandomState(devices)
        forms = {"eager": lambda: model(*args, **kwargs), "graph": lambda: gm(*args, **kwargs)}
        with torch.no_grad():
            times = self.report.times = in_turns(forms, 0.05, gpu=any(d.type == "cuda" for d in devices))
        random.restore()
        self.report.kept = "graph"
        if times.get("graph", math.inf) > CLOSE * times["eager"]:
            self.report.kept, self._run = "eager", model

    def outdated(self) -> bool:
        """Whether a part of the model is another one now, or has another dtype."""
        return not self._parts.hold()

    def differing(self, leaves: list[Any]) -> dict[int, set[int]]:
        """Dimensions in which tensors differ from those of this entry, if they differ in nothing else."""
        if self.open or not self.positional or len(leaves) != len(self._kinds):
            return {}
        found: dict[int, set[int]] = {}
        for i, (leaf, kind) in enumerate(zip(leaves, self._kinds, strict=True)):
            if not isinstance(leaf, torch.Tensor) or not isinstance(kind, tuple):
                return {}
            shape, dtype, device, _ = kind
            if (len(shape), dtype, device) != (leaf.dim(), leaf.dtype, leaf.device) or min(leaf.shape) < 2:
                return {}
            dims = {d for d in range(leaf.dim()) if shape[d] != leaf.shape[d]}
            if dims:
                found[i] = dims
        return found

    def accepts(self, leaves: list[Any]) -> bool:
        """Whether these inputs are those of this entry but for sizes that are left open."""
        if len(leaves) != len(self._kinds):
            return False
        for i, (leaf, kind) in enumerate(zip(leaves, self._kinds, strict=True)):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() != len(kind[0]) or not leaf.is_contiguous():
                return False
            if (leaf.dtype, leaf.device) != kind[1:3]:
                return False
            for d, size in enumerate(leaf.shape):
                least, greatest = self.open.get((i, d), (kind[0][d], kind[0][d]))
                if not least <= size <= greatest:
                    return False
        return True

    def structured(self, results: tuple[torch.Tensor, ...]) -> Any:
        """Flat results in the form that the model returns."""
        return pytree.tree_unflatten(list(results), self._spec)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            if self.native is not None and not kwargs:
                results = self.native(args)
                if results is not None:
                    return results[0] if self.single else self.structured(results)
            return self._run(*args, **kwargs)


class _Trained:
    """The model compiled for training: forward and backward graphs behind one autograd function."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any], *, compiled: bool = True
    ) -> None:
        self.model = model
        self.parts = Parts(model)
        self.reports: list[GraphReport] = []
        self.eager = False
        """The model trains faster as it is."""
        self.step: Step | None = None
        """Runs both graphs without what AOTAutograd does around them."""
        self._run: Callable[..., Any] | None = None
        self._parameters = list(model.parameters())
        self._wanted = [p.requires_grad for p in self._parameters]
        args = distinct(model, args)
        leaves = pytree.tree_leaves(args)
        self._kinds = [_trained_kind(leaf) for leaf in leaves]
        self._positional = all(isinstance(a, torch.Tensor) for a in args)
        if self.parts.hooked or not compiled:
            return
        passes: list[Pass] = []
        try:
            gm, self._spec = exported(model, args)
            self.parts.count_on(gm.meta.pop(READS, {}))
            # There AOTAutograd tells what it knows of inputs and results.
            with tracing(TracingContext(FakeTensorMode())):
                self._run = backend(gm, leaves, options=options, reports=self.reports, passes=passes)
            self._single = self._spec.is_leaf()
            self.step = step_of(gm, leaves, passes)
            if self.step is not None and self._positional and not self.step.random:
                self.step.again = lambda inputs: pytree.tree_leaves(model(*inputs))
            if self.step is not None and any(t.is_cuda for t in leaves):
                asked = Options.parse(options).backward_in_caller
                self.step.in_caller = torch.cuda.device_count() == 1 if asked is None else asked
        except Exception:
            log.info("the model trains through torch.compile: it cannot be exported", exc_info=True)

    @property
    def usable(self) -> bool:
        """Whether the model could be compiled here."""
        return self._run is not None

    def _settle(self, step: Step, leaves: Sequence[Any]) -> None:
        """Keeps the fastest form of the step, or eager if that is faster than all of them."""
        devices = [t.device for t in leaves if t.is_cuda]
        with torch.random.fork_rng(sorted({d.index for d in devices})):
            step.settle(leaves)
            if step.settled and self._positional:
                times = self._timed(step, leaves)
                step.times |= times
                self.eager = times["eager"] < 0.97 * times["compiled"]

    def _timed(self, step: Step, leaves: Sequence[Any]) -> dict[str, float]:
        """What a step takes, with all that autograd does."""
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
        wanted = [t for t in (*self.model.parameters(), *leaves) if t.requires_grad]
        wait = torch.cuda.synchronize if any(t.is_cuda for t in leaves) else lambda: None

        def once(call: Callable[[], Any]) -> float:
            wait()
            start = time.perf_counter()
            results = [t for t in pytree.tree_leaves(call()) if t.requires_grad]
            torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results], allow_unused=True)
            wait()
            return time.perf_counter() - start

        forms = {"compiled": lambda: step(leaves), "eager": lambda: self.model(*leaves)}
        taken: dict[str, list[float]] = {name: [] for name in forms}
        begun = time.perf_counter()
        while len(taken["eager"]) < 3 or (len(taken["eager"]) < 15 and time.perf_counter() - begun < 0.1):
            for name, call in forms.items():
                taken[name].append(once(call))
        return {name: statistics.median(times[1:]) for name, times in taken.items()}

    def is_direct(self) -> bool:
        """Whether both passes can run without autograd: there is one result, and nobody else listens."""
        step = self.step
        return (
            step is not None
            and step.settled
            and not self.eager
            and self._single
            and step.wanted == [0]
            and not torch._C._are_functorch_transforms_active()
            and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters)
        )

    def both(
        self,
        inputs: tuple[torch.Tensor, ...],
        loss: Callable[[Any], Any] | None,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """Both passes; the loss, or the result."""
        step = self.step
        leaves = [*step.parameters, *inputs]
        with torch.no_grad():
            (result,), saved, besides = step.passes.forward(list(leaves))
        returned = result
        if loss is not None:
            with torch.enable_grad():
                returned = loss(result.requires_grad_())
            (gradient,) = torch.autograd.grad(returned, result)
            returned = returned.detach()
        elif gradient.shape != result.shape:
            raise RuntimeError(f"the gradient of a result of {result.shape} has the shape {gradient.shape}")
        if gradient.stride() != step.strides[0] or gradient.dtype != result.dtype:
            gradient = gradient.to(result.dtype).contiguous()
        with torch.no_grad():
            found = step.passes.backward(saved, besides, [gradient])
            for leaf, grad in zip(leaves, found, strict=True):
                if grad is None:
                    continue
                if leaf.grad is None:
                    leaf.grad = grad
                else:
                    leaf.grad.add_(grad)
        return returned

    def accepts(self, args: tuple[Any, ...]) -> bool:
        """Whether these inputs and the model are as they were, at a glance."""
        return (
            self._positional
            and len(args) == len(self._kinds)
            and all(_trained_kind(a) == kind for a, kind in zip(args, self._kinds, strict=True))
            and (self.eager or self._holds())
        )

    def _holds(self) -> bool:
        return [p.requires_grad for p in self._parameters] == self._wanted and self.parts.hold()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        step = self.step
        if step is None or torch._C._are_functorch_transforms_active():
            results = self._run(*leaves)
        else:
            if not step.settled and step.ready:
                self._settle(step, leaves)
            if self.eager:
                return self.model(*leaves)
            results = step(leaves)
        return results[0] if self._single else pytree.tree_unflatten(list(results), self._spec)


def _trained_kind(leaf: Any) -> Any:
    """What the compilation of a training step depends on."""
    return (*_kind(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else _kind(leaf)


def _kind(leaf: Any) -> Any:
    """What a compilation depends on."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.stride())
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf)
