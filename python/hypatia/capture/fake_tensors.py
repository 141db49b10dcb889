"""Results of calls on fake tensors, remembered by what their inputs look like.

A model has the same layer many times. Torch computes what a call returns anew each time, a composite op by
all of its parts; here that is done once for every kind of inputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import _torch
from .._torch import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from .predicted_strides import as_it_lies

_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


_aten = torch.ops.aten

_NORM = _aten._native_batch_norm_legit_no_training.default
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The dtypes that norms have, and what they compute in."""


class _Known(NamedTuple):
    several: type | None
    """The type that holds the results, if there are several."""
    kinds: list[_Kind]


class Fakes:
    """What calls on the fake tensors of one mode return."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = weakref.ref(mode)
        self._known: dict[object, _Known] = {}

    def call(
        self, name: object, run: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """What ``run`` returns, which ``name`` stands for; it returns new memory and changes nothing."""
        try:
            key = (name, _key(args), _key(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:
            # A size is open, or an argument is no plain value.
            return run(*args, **kwargs)
        if known is not None:
            results = [self.like(*kind) for kind in known.kinds]
            return results[0] if known.several is None else known.several(results)
        quick = self._normed(name, args)
        results = as_it_lies(name, args, run(*args, **kwargs) if quick is None else quick)
        several = type(results) if type(results) in (tuple, list) else None
        flat = [results] if several is None else list(results)
        memory = [storage_of(t) for t in (*flat, *_tensors((args, kwargs)))]
        own = all(memory.count(place) == 1 for place in memory[: len(flat)])
        if own and all(_is_plain(t) and not t.storage_offset() for t in flat):
            kinds = [kind_of(t) for t in flat]
            with contextlib.suppress(TypeError):
                # Not if a size depends on values.
                hash(tuple(kinds))
                self._known[key] = _Known(several, kinds)
        return results

    def _normed(self, name: object, args: tuple[object, ...]) -> tuple[FakeTensor, ...] | None:
        """What a batch norm by given statistics returns, as fake tensors say, which differ by device.

        Torch takes it apart to know, which takes longer than all other calls of a convolutional net.
        """
        if (
            name is not _NORM
            or not isinstance(args[0], torch.Tensor)
            or not isinstance(args[3], torch.Tensor)
        ):
            return None
        x, mean = args[0], args[3]
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if not (x.is_contiguous() or last) or not _is_closed(x) or x.dtype not in _WIDER:
            return None
        on_cpu = x.device.type == "cpu"
        kind = (torch.Size([0]), (1,), x.dtype) if on_cpu else (mean.shape, (1,), _WIDER[x.dtype])
        results = [self.like(x.shape, x.stride(), x.dtype, x.device)]
        return (*results, *(self.like(*kind, x.device) for _ in range(2)))

    def view(self, op: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """What an op returns that makes views: the same without torch's look-ups for each."""
        mode = self._mode()
        given = _tensors((args, kwargs))
        if mode is None or not all(_is_plain(t) and _is_closed(t) for t in given):
            return op(*args, **kwargs)
        device = given[0].device
        try:
            with torch.no_grad(), in_kernel_invocation_manager(mode):
                results = op(*args, **kwargs)
        except RuntimeError:
            # An argument is open, or where the memory begins.
            return op(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return FakeTensor(mode, results, device)
        return [FakeTensor(mode, t, device) for t in results]

    def like(
        self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """A fake tensor with memory of its own."""
        mode = self._mode()
        assert mode is not None
        with torch.no_grad(), in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, device)


_of: weakref.WeakKeyDictionary[FakeTensorMode, Fakes] = weakref.WeakKeyDictionary()


def fakes_of(mode: FakeTensorMode) -> Fakes:
    """What is remembered for a mode."""
    return _of.setdefault(mode, Fakes(mode))


def kind_of(t: torch.Tensor) -> _Kind:
    """What a tensor looks like."""
    return t.shape, t.stride(), t.dtype, t.device


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and value.constant is None
        and not value.is_conj()
        and not value.is_neg()
    )


def _is_closed(value: torch.Tensor) -> bool:
    """Whether no size is open."""
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def _key(value: object) -> object:
    """A hashable stand-in; types count, for 1 and 1.0 and True are equal."""
    if isinstance(value, torch.Tensor):
        if not _is_plain(value):
            raise TypeError("no plain tensor")
        return (*kind_of(value), value.storage_offset())
    if isinstance(value, (tuple, list)):
        return (type(value), *[_key(v) for v in value])
    return type(value), value


def storage_of(t: object) -> int | None:
    """Which memory a tensor lies in."""
    return t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []
