"""The direct entry: ``hypatia.compile(model, *inputs)``, without Dynamo's guards at every call.

A call checks what can have changed (weights, modules, attributes, hooks, shapes) and goes into Rust. Shapes
that were not seen before are compiled when they are: the second one with sizes left open, so that later
ones need no search. With gradients on, an autograd function runs the compiled forward and backward graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from .api import Optimized, optimized
from .guard import effects_of
from .likeness import lies_alike
from .locks import COMPILING
from .native import NativeGraph, distance
from .options import Options
from .planner import CLOSE
from .report import GraphReport
from .signature import Signature, TensorKind, signature_of
from .state import Parts
from .timing import in_turns
from .trained import Trained
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
        self._trained: dict[Any, Trained] = {}
        self._last_trained: Trained | None = None
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
        entry = self.prepare(*args, **kwargs)
        return self.model(*args, **kwargs) if entry is None else entry(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> _Entry | None:
        """Compiles for these inputs, if that was not done before; none if the model runs as it is."""
        leaves, signature = signature_of(args, kwargs)
        if signature is None:
            log.info("the model runs as it is: an argument is of a type that nothing is known of")
            return None
        key = (self.model.training, signature)
        entry = self._entries.get(key)
        if entry is None or entry.outdated():
            # While another thread traces the model, its weights look replaced: once more, when that is over.
            with COMPILING:
                entry = self._entries.get(key)
                if entry is None or entry.outdated():
                    entry = self._keep(key, args, kwargs, leaves)
        self._last = entry
        return entry

    def _keep(
        self,
        key: tuple[bool, Signature],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> _Entry:
        signature = key[1]
        with _uncollected():
            entry = self._open(signature, leaves)
            if entry is None and self._is_restless(key):
                entry = _Entry(self.model, args, kwargs, signature, self._options, compiled=False)
            entry = entry or self._new(args, kwargs, signature)
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

    def _open(self, signature: Signature, leaves: list[Any]) -> _Entry | None:
        """An entry whose open sizes can be these."""
        for entry in self._entries.values():
            if entry.open and entry.accepts(signature, leaves) and not entry.outdated():
                return entry
        return None

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> _Entry:
        """A new entry; sizes are left open in which it differs from one that is there."""
        for other in self._entries.values():
            dims = other.differing(signature)
            # One compiled for other strides would serve contiguous tensors of other sizes.
            if dims and all(t.is_contiguous() for t in args) and not other.outdated():
                entry = _Entry(self.model, args, kwargs, signature, self._options, dims)
                if entry.open:
                    return entry
                break
        return _Entry(self.model, args, kwargs, signature, self._options)

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
        leaves, signature = signature_of(args, kwargs)
        if signature is None or signature.shared:
            return self._by_torch()(*args)
        wanted = [t.requires_grad for t in (*self.model.parameters(), *leaves) if isinstance(t, torch.Tensor)]
        key = (self.model.training, signature, tuple(wanted))
        trained = self._trained.get(key)
        if trained is None or not trained.parts.hold():
            with COMPILING, _uncollected():
                trained = self._trained.get(key)
                if trained is None or not trained.parts.hold():
                    while len(self._trained) >= _KEPT:
                        self._trained.pop(next(iter(self._trained)))
                    compiled = not self._is_restless(("training", *key))
                    trained = Trained(self.model, args, self._options, compiled=compiled)
                    self._trained[key] = trained
        if not trained.usable:
            return self._by_torch()(*args)
        self._last_trained = trained
        return trained(leaves)

    def _by_torch(self) -> Callable[..., Any]:
        """The model through torch.compile, or as it is where that fails."""
        if self._captured is None:
            captured = torch.compile(self.model, backend="hypatia", options=self._options or None)

            def call(*args: Any, **kwargs: Any) -> Any:
                if any(b.grad_fn is not None for b in self.model.buffers()):
                    # It has the history of a compiled function, which has no second backward pass.
                    return self.model(*args, **kwargs)
                try:
                    return captured(*args, **kwargs)
                except torch._dynamo.exc.TorchDynamoException:
                    # Nothing of the model has run where its capture failed.
                    log.info("the model runs as it is: torch.compile cannot capture it", exc_info=True)
                    return self.model(*args, **kwargs)

            self._captured = call
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


def _computes_the_same(
    captured: fx.GraphModule, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a captured graph computes what its model does: a run on fake tensors may take another way."""
    random = RandomState(devices_of(pytree.tree_leaves((args, kwargs))))
    results = []
    with torch.no_grad():
        for call in (captured, model):
            results.append(pytree.tree_leaves(call(*args, **kwargs)))
            random.restore()
        return len(results[0]) == len(results[1]) and all(
            distance(a, b) <= 1 if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            for a, b in zip(*results, strict=True)
        )


class _Entry:
    """The model compiled for one kind of inputs."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
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
        self._signature = signature
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
                found = optimized(model, args, kwargs, options, dynamic, native=self.positional)
        except Exception:
            log.info("the model runs as it is: it cannot be exported", exc_info=True)
            return
        if found.report is None:
            return
        changed = changed_inputs(found.original)
        if changed and signature.shared:
            log.info("the model runs as it is: it changes inputs, and some share memory")
            return
        timed = not changed and not effects_of(found.original)
        checked = Options.parse(options).checksum_mode != "off"
        if checked and timed and not _computes_the_same(found.original, model, args, kwargs):
            log.warning("the model runs as it is: what was captured of it computes something else")
            return
        self.report = found.report
        if found.graph is None and not found.report.no_plan:
            found.report.kept = "graph"
            found.report.no_plan = "arguments of the call are given by keyword or are no tensors"
            log.info("no native plan: %s", found.report.no_plan)
        gm = self._run = found.kept
        self._spec = gm.graph._codegen.pytree_info.out_spec
        if dynamic is not None:
            self.open = found.ranges
        if found.graph is not None:
            self._plan(found, found.graph, model, args, timed=timed)
        elif timed:
            self._without_plan(gm, model, args, kwargs)
        if not effects_of(gm):
            self._check_lying(found, model, args, kwargs)
        if self._run is not model:
            self._parts.count_on(found.reads)
            self.watch = self._parts.watch

    def _check_lying(
        self, found: Optimized, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keeps the model itself where results would lie otherwise: a user may write into them."""
        if self._run is model:
            return
        changes = bool(changed_inputs(found.original))
        try:
            alike = lies_alike(lambda *a, **k: self(a, k), model, args, kwargs, changes=changes)
        except Exception:
            log.info("the compiled model cannot be compared with the model", exc_info=True)
            alike = False
        if not alike:
            self.native, self._run, self.open = None, model, {}
            self.report.kept, self.report.no_plan = "eager", "results would lie otherwise in memory"
            log.info("the model runs as it is: results would lie otherwise in memory")

    def _plan(
        self, found: Optimized, graph: NativeGraph, model: nn.Module, args: tuple[Any, ...], *, timed: bool
    ) -> None:
        self.single = self._spec.is_leaf()
        graph.graph = lambda flat, gm=found.kept: gm(*flat)
        # Not the model itself: while another thread traces it, its weights are fake ones.
        original = found.original
        graph.fallback = lambda flat: original(*flat)
        graph.ranges = dict(self.open)
        if timed:
            with torch.no_grad():
                self.report.times = graph.choose(args, lambda: model(*args))
        times = self.report.times or {}
        self.report.memory = graph.bytes
        if graph.native:
            graph.settled = True
            self.native, self._run = graph.direct, original
        elif times.get("graph", math.inf) <= times["eager"]:
            self.report.kept, self._run = "graph", found.check()
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

    def differing(self, signature: Signature) -> dict[int, set[int]]:
        """Dimensions in which tensors differ from those of this entry, if they differ in nothing else."""
        if self.open or not self.positional or not self._is_alike(signature):
            return {}
        found: dict[int, set[int]] = {}
        for i, (new, known) in enumerate(zip(signature.kinds, self._signature.kinds, strict=True)):
            if min(new.shape, default=2) < 2:
                return {}
            dims = {d for d, size in enumerate(new.shape) if size != known.shape[d]}
            if dims:
                found[i] = dims
        return found

    def _is_alike(self, signature: Signature) -> bool:
        """Whether another call has the same structure and tensors that differ in sizes and strides alone."""
        known = self._signature
        return (signature.spec, signature.shared) == (known.spec, known.shared) and all(
            isinstance(a, TensorKind)
            and isinstance(b, TensorKind)
            and (a.type, len(a.shape), a.dtype, a.device) == (b.type, len(b.shape), b.dtype, b.device)
            for a, b in zip(signature.kinds, known.kinds, strict=True)
        )

    def accepts(self, signature: Signature, leaves: list[Any]) -> bool:
        """Whether these inputs are those of this entry but for sizes that are left open."""
        if not self._is_alike(signature) or not all(t.is_contiguous() for t in leaves):
            return False
        for i, known in enumerate(self._signature.kinds):
            for d, size in enumerate(leaves[i].shape):
                least, greatest = self.open.get((i, d), (known.shape[d], known.shape[d]))
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
