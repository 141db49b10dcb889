"""What tells one call of a model from another: the structure of its arguments, and what each of them is.

Everything that a model can see of its arguments but the values of tensors is part of it: how lists and
dictionaries are nested, names of keywords, types, numbers and texts themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._torch import pytree

_VALUES = (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of which equal values are alike in everything, if their types are equal too."""


class TensorKind(NamedTuple):
    """What a compilation depends on, of a tensor."""

    type: type
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: object
    """Strides, or the layout where there are none."""


class Signature(NamedTuple):
    """A call without the values of its tensors. Calls with equal ones are served by one compilation."""

    spec: pytree.TreeSpec
    kinds: tuple[Any, ...]
    shared: tuple[int, ...]
    """For each tensor the first one in the same memory; empty if none share any."""


def signature_of(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], Signature | None]:
    """The leaves of a call and its signature; none if one of them is of a type that nothing is known of."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    try:
        signature = Signature(spec, tuple(map(kind_of, leaves)), _shared(leaves))
        hash(signature)
    except (TypeError, RuntimeError, NotImplementedError):
        return leaves, None
    return leaves, signature


def kind_of(leaf: object) -> Any:
    """What a compilation depends on.

    Raises:
        TypeError: nobody knows; the object can change without a trace.
    """
    if isinstance(leaf, torch.Tensor):
        layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return TensorKind(type(leaf), leaf.shape, leaf.dtype, leaf.device, layout)
    if type(leaf) in _VALUES or isinstance(leaf, enum.Enum):
        return (type(leaf), leaf)
    if type(leaf) in (float, complex):
        # Not by value: zeros of both signs are equal, and NaN is not.
        return (type(leaf), repr(leaf))
    raise TypeError(f"{type(leaf).__name__} is no type that calls are told apart by")


def trained_kind(leaf: object) -> object:
    """What the compilation of a training step depends on."""
    return (*kind_of(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else kind_of(leaf)


def _shared(leaves: Sequence[object]) -> tuple[int, ...]:
    places = [
        leaf.untyped_storage().data_ptr()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    # Tensors without elements have no memory to share.
    alike = tuple(places.index(place) if place else i for i, place in enumerate(places))
    return () if alike == tuple(range(len(alike))) else alike
