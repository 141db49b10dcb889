"""The direct entry: ``hypatia.compile(model, *inputs)``, without Dynamo's guards at every call.

A call checks what can have changed (weights, mode, shapes) and goes into Rust. Shapes that were not
seen before are compiled when they are. With gradients on, ``torch.compile`` runs the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .api import optimized
from .native import GRAPH, PLAN, NativeGraph
from .options import Options
from .report import GraphReport

log = logging.getLogger(__name__)

_KEPT = 64
"""Shapes that a compiled model remembers."""


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
        Options.parse(options)
        self.model = model
        self._options = dict(options or {})
        self._entries: dict[Any, _Entry] = {}
        self._last: _Entry | None = None
        self._trained: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if torch._C._is_any_autocast_enabled() or (
            torch.is_grad_enabled() and self._needs_gradients(args, kwargs)
        ):
            return self._training()(*args, **kwargs)
        entry = self._last
        if entry is not None and not kwargs and entry.positional:
            results = entry.native(args)
            if results is not None:
                return results[0] if entry.single else entry.structured(results)
        return self.prepare(*args, **kwargs)(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> _Entry:
        """Compiles for these inputs, if that was not done before."""
        key = (self.model.training, *(_kind(leaf) for leaf in pytree.tree_leaves((args, kwargs))))
        entry = self._entries.get(key)
        if entry is None or entry.outdated():
            entry = _Entry(self.model, args, kwargs, self._options)
            self._entries.pop(key, None)
            self._entries[key] = entry
            while len(self._entries) > _KEPT:
                self._entries.pop(next(iter(self._entries)))
        self._last = entry
        return entry

    @property
    def reports(self) -> list[GraphReport]:
        """A report for every shape that was compiled."""
        return [e.report for e in self._entries.values() if e.report is not None]

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if any(p.requires_grad for p in self.model.parameters()):
            return True
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)

    def _training(self) -> Callable[..., Any]:
        if self._trained is None:
            self._trained = torch.compile(self.model, backend="hypatia", options=self._options or None)
        return self._trained

    def __repr__(self) -> str:
        return f"hypatia.compile({self.model!r})"


class _Entry:
    """The model compiled for one kind of inputs."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
    ) -> None:
        self.model = model
        self.training = model.training
        self.report: GraphReport | None = None
        self.positional = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        self.single = False
        self._run: Callable[..., Any] = model
        self._graph: NativeGraph | None = None
        # Replaced modules, parameters and buffers, not only changed ones, are noticed.
        self._owners = [
            (owner, name, value, getattr(value, "dtype", None))
            for module in model.modules()
            for owner in (module._parameters, module._buffers, module._modules)
            for name, value in owner.items()
        ]
        try:
            with torch.no_grad():
                gm = optimized(model, args, kwargs, options, native=True)
        except Exception:
            log.info("the model runs as it is: it cannot be exported", exc_info=True)
            return
        self.report = gm.meta["hypatia"]
        self._run = gm
        self._spec = gm.graph._codegen.pytree_info.out_spec
        if PLAN in gm.meta and self.positional:
            self.single = self._spec.is_leaf()
            graph: NativeGraph = gm.meta.get(GRAPH) or NativeGraph(gm, None)
            graph.fallback = lambda flat: gm(*flat)
            with torch.no_grad():
                times = self.report.times = graph.choose(args, lambda: model(*args))
            self.report.memory = graph.bytes
            if graph.native:
                graph.settled = True
                self._graph = graph
            elif times["eager"] < times["graph"]:
                self._run = model

    def outdated(self) -> bool:
        """Whether a part of the model is another one now, or has another dtype."""
        for owner, name, value, dtype in self._owners:
            if owner.get(name) is not value or (dtype is not None and value.dtype is not dtype):
                return True
        return False

    def native(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
        """The flat results of the native plan; none if it is not for these inputs."""
        if self._graph is None or self.model.training != self.training or self.outdated():
            return None
        if torch._C._len_torch_dispatch_stack():
            # A mode that counts or logs ops is to see torch's.
            return None
        return self._graph.run(args)

    def structured(self, results: tuple[torch.Tensor, ...]) -> Any:
        """Flat results in the form that the model returns."""
        return pytree.tree_unflatten(list(results), self._spec)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            if self.positional:
                results = self.native(args)
                if results is not None:
                    return results[0] if self.single else self.structured(results)
            return self._run(*args, **kwargs)


def _kind(leaf: Any) -> Any:
    """What a compilation depends on."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.stride())
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf)
