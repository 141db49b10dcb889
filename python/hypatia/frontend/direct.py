"""The direct entry: ``hypatia.compile(model, *inputs)``, without Dynamo's guards at every call.

A call checks what can have changed (weights, modules, attributes, hooks, shapes) and goes into Rust. Shapes
that were not seen before are compiled when they are: the second one with sizes left open, so that later
ones need no search. With gradients on, an autograd function runs the compiled forward and backward graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._torch import pytree
from ..compiler.report import GraphReport
from ..locks import COMPILING
from ..options import Options
from .call_key import Signature, signature_of
from .compiled_call import CompiledCall
from .train import Trained

log = logging.getLogger(__name__)

_KEPT = 64
"""Shapes that a compiled model remembers."""

_AGAIN = 16
"""How many times it is compiled for the same shapes, because parts of it changed."""


def compile(
    model: nn.Module,
    *example_inputs: object,
    kwargs: Mapping[str, object] | None = None,
    **options: object,
) -> CompiledModel:
    """A callable like the model, compiled for the example inputs and for other shapes as they come.

    Args:
        model: the model; its parameters are shared, and changes of them are noticed.
        example_inputs: compiled for these at once; without any, at the first call.
        kwargs: example inputs that are given by keyword.
        options: those of the backend, such as ``verify="off"``.

    Returns:
        A `CompiledModel`. It is called like the model, trains like it, and has ``reports`` that say what was
        done. What cannot be compiled runs as the model would.

    Example:
        >>> compiled = hypatia.compile(model.eval(), x)
        >>> with torch.no_grad():
        ...     y = compiled(x)
        >>> print(compiled.reports[0].kept)
        plan
    """
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
        self._entries: dict[object, CompiledCall] = {}
        self._last: CompiledCall | None = None
        self._trained: dict[object, Trained] = {}
        self._last_trained: Trained | None = None
        self._captured: Callable[..., object] | None = None
        self._compiled: Counter[object] = Counter()
        self._forgotten: set[object] = set()
        """What it was compiled for, and had to make room."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """What the model returns."""
        if torch.is_grad_enabled():
            trained = self._last_trained
            if trained is not None and not kwargs and trained.accepts(args) and not _torch.any_autocast():
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
            and not _torch.any_autocast()
        ):
            return trained.both(inputs, loss, gradient)
        result = self(*inputs)
        if loss is None:
            result.backward(gradient)
            return result.detach()
        value = loss(result)
        value.backward()
        return value.detach()

    def _by_name(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if _torch.any_autocast():
            return self._by_torch()(*args, **kwargs)
        entry = self.prepare(*args, **kwargs)
        return self.model(*args, **kwargs) if entry is None else entry(args, kwargs)

    def prepare(self, *args: object, **kwargs: object) -> CompiledCall | None:
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
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
    ) -> CompiledCall | None:
        """The entry that serves a call; none if the model runs as it is."""
        signature = key[1]
        entry = self._open(signature, leaves)
        if len(self._entries) >= _KEPT and key not in self._entries:
            # More shapes in turns than are remembered: each would push out the next one.
            if entry is not None:
                return entry
            if key in self._forgotten:
                log.info("the model runs as it is: it is called with too many shapes in turns")
                return None
        with _uncollected():
            if entry is None and self._is_restless(key):
                entry = CompiledCall(self.model, args, kwargs, signature, self._options, compiled=False)
            entry = entry or self._new(args, kwargs, signature)
        self._entries.pop(key, None)
        self._entries[key] = entry
        while len(self._entries) > _KEPT:
            oldest = next(iter(self._entries))
            self._entries.pop(oldest)
            self._forgotten.add(oldest)
        return entry

    def _is_restless(self, key: object) -> bool:
        """Whether the model was changed so often that compiling it again does not pay."""
        if len(self._compiled) > 64 * _KEPT:
            self._compiled.clear()
            self._forgotten.clear()
        self._compiled[key] += 1
        return self._compiled[key] > _AGAIN

    def _open(self, signature: Signature, leaves: list[object]) -> CompiledCall | None:
        """An entry whose open sizes can be these."""
        for entry in self._entries.values():
            if entry.open and entry.accepts(signature, leaves) and not entry.outdated():
                return entry
        return None

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, object], signature: Signature) -> CompiledCall:
        """A new entry; sizes are left open in which it differs from one that is there."""
        for other in self._entries.values():
            dims = other.differing(signature)
            # One compiled for other strides would serve contiguous tensors of other sizes.
            if dims and all(t.is_contiguous() for t in args) and not other.outdated():
                entry = CompiledCall(self.model, args, kwargs, signature, self._options, dims)
                if entry.open:
                    return entry
                break
        return CompiledCall(self.model, args, kwargs, signature, self._options)

    @property
    def reports(self) -> list[GraphReport]:
        """A report for every graph that was compiled."""
        entries = {id(e): e for e in self._entries.values()}
        found = [e.report for e in entries.values() if e.report is not None]
        return found + [r for t in self._trained.values() for r in t.reports]

    def _needs_gradients(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        if any(p.requires_grad for p in self.model.parameters()):
            return True
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)

    def _train(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if _torch.any_autocast() or kwargs:
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

    def _by_torch(self) -> Callable[..., object]:
        """The model through torch.compile, or as it is where that fails."""
        if self._captured is None:
            captured = torch.compile(self.model, backend="hypatia", options=self._options or None)

            def call(*args: object, **kwargs: object) -> Any:
                if any(b.grad_fn is not None for b in self.model.buffers()):
                    # It has the history of a compiled function, which has no second backward pass.
                    return self.model(*args, **kwargs)
                try:
                    return captured(*args, **kwargs)
                except _torch.TorchDynamoException:
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
