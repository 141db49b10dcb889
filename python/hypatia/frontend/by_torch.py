"""What `hypatia.compile` leaves to torch.compile: autocast, numbers that change, what cannot be exported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..execute import choose
from ..verifier.first_call import device_of
from .compiled_call import CompiledCall

log = logging.getLogger(__name__)

VALUES = 4
"""Values of a number that are compiled for, one by one."""


def is_unsettled(alike: Sequence[CompiledCall]) -> bool:
    """Whether numbers, or the caches of a model, are others in every call and cannot be left open."""
    numbers = {e.signature.numbers() for e in alike if not e.open}
    closed = sum(e.closed for e in alike)
    return len(numbers) >= VALUES or (closed >= VALUES - 1 and any(e.effects for e in alike))


def by_torch(model: nn.Module, options: Mapping[str, Any]) -> Callable[..., object]:
    """The model through torch.compile, or as it is where that fails."""
    captured = torch.compile(model, backend="hypatia", options=dict(options) or None)

    def call(*args: object, **kwargs: object) -> object:
        if any(b.grad_fn is not None for b in model.buffers()):
            # It has the history of a compiled function, which has no second backward pass.
            return model(*args, **kwargs)
        try:
            return captured(*args, **kwargs)
        except _torch.TorchDynamoException:
            # Nothing of the model has run where its capture failed.
            log.info("the model runs as it is: torch.compile cannot capture it", exc_info=True)
            return model(*args, **kwargs)

    return call


def contest(entry: CompiledCall, captured: Callable[..., object], leaves: Sequence[object]) -> None:
    """Runs a model by torch.compile, and as it is from some call on if that turns out to be faster."""
    model = entry.model

    def ended(calls: int, seconds: dict[str, float], won: bool) -> None:
        entry.later, entry.by_torch = None, not won
        if won:
            log.info("the model runs as it is: after %d calls that is faster: %s", calls, seconds)

    entry.later = choose.LaterTiming(
        lambda call: (captured(*call[0], **call[1]),),
        lambda call: (model(*call[0], **call[1]),),
        device_of(leaves),
        ended,
    )
