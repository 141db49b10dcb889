"""The direct entry: ``hypatia.compile(model, *inputs)``, without Dynamo's guards at every call.

A call checks what can have changed (weights, modules, attributes, hooks, shapes) and goes into Rust. Shapes
that were not seen before are compiled when they are: the second one with sizes left open, so that later
ones need no search. With gradients on, an autograd function runs the compiled forward and backward graphs.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, cast

import torch
from torch import fx, nn

from .. import _torch
from .._torch import pytree
from ..compiler.report import GraphReport
from ..locks import COMPILING, uncollected
from ..options import Options
from .by_torch import VALUES, by_torch, contest, is_unsettled
from .call_key import Signature, contiguous, signature_of, to_open
from .compiled_call import CompiledCall
from .stand_in import StandIn
from .structure_code import Taken
from .train import CompiledTraining, TrainingKey

log = logging.getLogger(__name__)

# Asked at every call: names of modules take as long to look up.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = _torch.is_jit_tracing

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


class CompiledModel(StandIn):
    """A model that runs compiled: a module that stands for it, and can be put where the model could be.

    Traced, exported or compiled by others it is the model itself. Copies and pickles are of the model, and
    are compiled again.
    """

    _options: dict[str, object]
    _entries: dict[object, CompiledCall]
    _last: CompiledCall | None
    _trainings: dict[TrainingKey, CompiledTraining]
    _last_training: CompiledTraining | None
    _captured: Callable[..., object] | None
    _compiled: Counter[object]
    _forgotten: set[object]
    """What it was compiled for, and had to make room."""

    def __init__(self, model: nn.Module, options: Mapping[str, object] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"hypatia.compile takes a torch.nn.Module, not {type(model).__name__}")
        Options.parse(options)
        super().__init__(
            model.model if isinstance(model, CompiledModel) else model,
            _options=dict(options or {}),
            _entries={},
            _last=None,
            _trainings={},
            _last_training=None,
            _captured=None,
            _compiled=Counter(),
            _forgotten=set(),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        # Not `is_compiling`, which other threads set; what else traces does it by modes.
        if _is_compiling() or _is_tracing():
            return self.model(*args, **kwargs)
        if torch.is_grad_enabled():
            training = self._last_training
            if training is not None and not _torch.any_autocast():
                taken = (args, ()) if training.plain and not kwargs else training.take(args, kwargs)
                if taken is not None and training.accepts(taken[0]):
                    return self._training_call(training, taken, args, kwargs)
            if self._needs_gradients(args, kwargs):
                return self._train(args, kwargs)
        entry = self._last
        if entry is not None and entry.native is not None and entry.watch.holds():
            taken = (args, ()) if entry.plain and not kwargs else entry.take(args, kwargs)
            if taken is not None:
                results = entry.native(taken[0])
                if results is not None:
                    return results[0] if entry.single else entry.build_result(taken[0], results, taken[1])
        return self._by_name(args, kwargs)

    def _training_call(
        self, training: CompiledTraining, taken: Taken, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        flat, owned = taken
        results = training(flat)
        if results is None:
            return self.model(*args, **kwargs)
        return results[0] if training.single else training.build_result(flat, results, owned)

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
        training = self._last_training
        if (
            training is not None
            and training.accepts(inputs)
            and training.is_direct()
            and not any(t.requires_grad for t in inputs)
            and torch.is_grad_enabled()
            and not _torch.any_autocast()
        ):
            return training.both(inputs, loss, gradient)
        result = self(*inputs)
        if loss is None:
            result.backward(gradient)
            return result.detach()
        value = loss(result)
        value.backward()
        return value.detach()

    def _by_name(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if _torch.dispatch_mode_count():
            return self.model(*args, **kwargs)
        if _torch.any_autocast():
            return self._by_torch()(*args, **kwargs)
        entry = self.prepare(*args, **kwargs)
        if entry is None:
            return self.model(*args, **kwargs)
        if entry.by_torch and entry.later is not None:
            (results,) = cast(tuple[object], entry.later([args, kwargs]))
            return results
        return self._by_torch()(*args, **kwargs) if entry.by_torch else entry(args, kwargs)

    def prepare(self, *args: object, **kwargs: object) -> CompiledCall | None:
        """Compiles for these inputs, if that was not done before; none if the model runs as it is."""
        leaves, signature = signature_of(args, kwargs)
        if signature is None:
            log.info("the model runs as it is: an argument is of a type that nothing is known of")
            return None
        key = (self.model.training, signature)
        entry = self._entries.get(key)
        if entry is None or entry.outdated() or entry.filled:
            # While another thread traces the model, its weights look replaced: once more, when that is over.
            with COMPILING:
                entry = self._entries.get(key)
                if entry is None or entry.outdated() or entry.filled:
                    entry = self._keep(key, leaves)
        self._last = entry
        return entry

    def _keep(self, key: tuple[bool, Signature], leaves: list[object]) -> CompiledCall | None:
        """The entry that serves a call; none if the model runs as it is."""
        signature = key[1]
        entry = self._open(signature, leaves)
        if len(self._entries) >= _KEPT and key not in self._entries:
            # More shapes in turns than are remembered: each would push out the next one.
            if entry is not None:
                return entry
            if key in self._forgotten:
                log.info("the model runs as it is: it is called with more shapes in turn than are kept")
                return None
        with uncollected():
            if entry is None and self._is_restless(key):
                entry = CompiledCall(self.model, signature, leaves, self._options, compiled=False)
            entry = entry or self._new(signature, leaves)
        if entry.by_torch and entry.later is None:
            contest(entry, self._by_torch(), leaves)
        before = self._entries.pop(key, None)
        if before is not None and before.filled:
            # It was no cache that is filled once.
            entry.changes_itself = False
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
        """An entry whose open sizes and numbers can be these."""
        for entry in self._entries.values():
            if entry.accepts(signature, leaves) and not entry.outdated():
                return entry
        return None

    def _new(self, signature: Signature, leaves: list[object]) -> CompiledCall:
        """A new entry; sizes and numbers are left open in which it differs from one that is there."""
        family, known = signature.family(), {id(e): e for e in self._entries.values()}
        alike = [e for e in known.values() if e.signature.family() == family]
        left = any(e.by_torch for e in alike)
        closed = [] if left else [e.signature for e in alike if not e.open and not e.outdated()]
        dims = to_open(signature, leaves, closed)
        if dims:
            entry = CompiledCall(self.model, signature, leaves, self._options, dims)
            if entry.open:
                return entry
        if left or is_unsettled(alike):
            log.info("the model runs by torch.compile: every call has other numbers or sizes")
            entry = CompiledCall(self.model, signature, leaves, self._options, compiled=False)
            entry.by_torch = True
            return entry
        entry = CompiledCall(self.model, signature, leaves, self._options)
        entry.closed = bool(dims)
        return entry

    @property
    def reports(self) -> list[GraphReport]:
        """A report for every graph that was compiled."""
        entries = {id(e): e for e in self._entries.values()}
        found = [e.report for e in entries.values() if e.report is not None]
        training = {id(t): t for t in self._trainings.values()}
        return found + [r for t in training.values() for r in t.reports]

    def _needs_gradients(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        if any(p.requires_grad for p in self.model.parameters()):
            return True
        leaves, _ = signature_of(args, kwargs)
        return any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)

    def _train(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if _torch.dispatch_mode_count():
            return self.model(*args, **kwargs)
        leaves, signature = signature_of(args, kwargs)
        if signature is None and any(isinstance(v, fx.Proxy) for v in pytree.tree_leaves((args, kwargs))):
            # Somebody traces a module that this one is a part of.
            return self.model(*args, **kwargs)
        if signature is None or signature.shared or _torch.any_autocast():
            return self._by_torch()(*args, **kwargs)
        wanted = [t.requires_grad for t in (*self.model.parameters(), *leaves) if isinstance(t, torch.Tensor)]
        key = (self.model.training, signature, tuple(wanted))
        training = self._trainings.get(key)
        if training is None or not training.parts.hold():
            with COMPILING, uncollected():
                training = self._trainings.get(key)
                if training is None or not training.parts.hold():
                    while len(self._trainings) >= _KEPT:
                        self._trainings.pop(next(iter(self._trainings)))
                    training = self._new_training(key, leaves)
                    self._trainings[key] = training
        taken = training.take(args, kwargs) if training.usable else None
        if taken is None:
            return self._by_torch()(*args, **kwargs)
        self._last_training = training
        return self._training_call(training, taken, args, kwargs)

    def _new_training(self, key: TrainingKey, leaves: list[object]) -> CompiledTraining:
        """As `_new`, with gradients."""
        mode_now, signature, wanted = key
        alike = [
            t
            for (mode, _, w), t in self._trainings.items()
            if (mode, w) == (mode_now, wanted)
            and t.signature.family() == signature.family()
            and t.parts.hold()
        ]
        numbers = {t.signature.numbers() for t in alike}
        if self._is_restless(("training", *key)) or len(numbers) >= VALUES:
            return CompiledTraining(self.model, signature, leaves, self._options, compiled=False)
        for other in alike:
            if other.serves(signature, leaves):
                return other
        for other in alike:
            dims = {} if other.open else signature.differing(other.signature)
            if dims and other.usable and contiguous(leaves):
                training = CompiledTraining(self.model, signature, leaves, self._options, dims)
                if training.usable:
                    return training
                break
        return CompiledTraining(self.model, signature, leaves, self._options)

    def _by_torch(self) -> Callable[..., object]:
        """The model through torch.compile, or as it is where that fails."""
        if self._captured is None:
            self._captured = by_torch(self.model, self._options)
        return self._captured

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledModel:
        return CompiledModel(copy.deepcopy(self.model, memo), self._options)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return CompiledModel, (self.model, self._options)

    def __repr__(self) -> str:
        return f"hypatia.compile({self.model!r})"
