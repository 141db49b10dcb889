"""What tells one call of a model from another: the structure of its arguments, and what each of them is.

Everything that a model can see of its arguments but the values of tensors is part of it: how lists and
dictionaries are nested, names of keywords, types, numbers and texts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..capture.size_ranges import Ranges
from .structure import TENSOR, Flat, Node


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

    spec: Node
    kinds: tuple[Any, ...]
    """Of tensors and numbers, in order; of a number its type and the value, a float as text."""
    shared: tuple[int, ...]
    """For each tensor the first one in the same memory; empty if none share any."""

    @property
    def plain(self) -> bool:
        """Whether the arguments are tensors, by place."""
        args, kwargs = self.spec.parts
        return not kwargs.parts and all(part == TENSOR for part in args.parts)

    def is_tensor(self, place: int) -> bool:
        """Whether this leaf is a tensor."""
        return isinstance(self.kinds[place], TensorKind)

    def family(self) -> object:
        """The same without sizes, strides and the values of numbers."""
        return self.spec, tuple(map(_family, self.kinds)), self.shared

    def numbers(self) -> tuple[object, ...]:
        """The values of numbers."""
        return tuple(kind[1] for i, kind in enumerate(self.kinds) if not self.is_tensor(i))

    def differing(self, known: Signature) -> dict[int, set[int]]:
        """Numbers, and dimensions of tensors, that differ from those of another call, by leaf; nothing if
        more than that differs, or if it cannot be left open."""
        if self.family() != known.family():
            return {}
        found: dict[int, set[int]] = {}
        for i, (new, old) in enumerate(zip(self.kinds, known.kinds, strict=True)):
            if self.is_tensor(i):
                dims = {d for d, size in enumerate(new.shape) if size != old.shape[d]}
                # Sizes of 0 and 1 are cases of their own.
                if any(min(new.shape[d], old.shape[d]) < 2 for d in dims):
                    return {}
                if dims:
                    found[i] = dims
            elif new != old:
                if new[0] is float or min(new[1], old[1]) < 2:
                    return {}
                found[i] = set()
        return found

    def is_within(self, known: Signature, opened: Ranges, leaves: Sequence[Any]) -> bool:
        """Whether this call is another one but for what is left open there, by leaf and dimension."""
        if self.family() != known.family():
            return False
        values: dict[str, int] = {}
        for i, (new, old) in enumerate(zip(self.kinds, known.kinds, strict=True)):
            tensor = self.is_tensor(i)
            if tensor and not (leaves[i].is_contiguous() or new[1:] == old[1:]):
                return False
            pairs: Any = zip(new.shape, old.shape, strict=True) if tensor else [(new[1], old[1])]
            for d, (value, wanted) in enumerate(pairs):
                size = opened.get((i, d if tensor else None))
                if size is None:
                    if value != wanted:
                        return False
                elif (
                    not size.least <= value <= size.greatest
                    or values.setdefault(size.symbol, value - size.offset) != value - size.offset
                ):
                    return False
        return True


def to_open(
    signature: Signature, leaves: Sequence[object], known: Sequence[Signature]
) -> dict[int, set[int]]:
    """What a call differs in from the one of several that is most like it, if that can be left open."""
    found = [(signature.differing(other), other) for other in known]
    return min((dims for dims, other in found if _can_open(dims, other, leaves)), key=len, default={})


def _can_open(dims: Mapping[int, object], known: Signature, leaves: Sequence[object]) -> bool:
    """Whether tensors whose sizes are left open are contiguous, and others too or as those of another call: a
    graph for other strides would serve contiguous tensors of other sizes."""
    return bool(dims) and all(
        leaf.is_contiguous() or (i not in dims and kind_of(leaf) == known.kinds[i])
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    )


def kinds_check(
    known: Signature, places: Sequence[int], inputs: Sequence[int], opened: Ranges
) -> Callable[[Sequence[object]], bool]:
    """Whether these inputs are of the kinds that a graph was compiled for, for what does not see that itself:
    a plan of tensors that it does not read, and a recording.

    ``inputs`` and ``opened`` count flat inputs, of which ``places`` says the leaves.
    """
    wanted = [(i, known.kinds[places[i]]) for i in inputs if known.is_tensor(places[i])]

    def alike(flat: Sequence[Any]) -> bool:
        values: dict[str, int] = {}
        for (i, d), size in opened.items():
            value = flat[i] if d is None else flat[i].shape[d]
            if values.setdefault(size.symbol, value - size.offset) != value - size.offset:
                return False
        for i, kind in wanted:
            now = kind_of(flat[i])
            if now != kind and not (
                (now.type, now.dtype, now.device) == (kind.type, kind.dtype, kind.device)
                and len(now.shape) == len(kind.shape)
                and flat[i].is_contiguous()
                and all(
                    n == k or ((i, d) in opened and opened[i, d].least <= n <= opened[i, d].greatest)
                    for d, (n, k) in enumerate(zip(now.shape, kind.shape, strict=True))
                )
            ):
                return False
        return True

    def check(flat: Sequence[object]) -> bool:
        try:
            return alike(flat)
        except (AttributeError, IndexError):
            # What should be a tensor is none, or has fewer dimensions.
            return False

    return check


def contiguous(leaves: Sequence[object]) -> bool:
    """Whether all tensors are: a graph for other strides would serve contiguous tensors of other sizes."""
    return all(t.is_contiguous() for t in leaves if isinstance(t, torch.Tensor))


def _family(kind: Any) -> object:
    if isinstance(kind, TensorKind):
        return kind.type, len(kind.shape), kind.dtype, kind.device
    return kind[0]


def signature_of(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], Signature | None]:
    """The tensors and numbers of a call and its signature; none if a part is of a type that nothing is known
    of."""
    try:
        flat = Flat((tuple(args), dict(kwargs)))
        signature = Signature(flat.node, tuple(map(kind_of, flat.leaves)), shared_memory(flat.leaves))
        hash(signature)
    except (TypeError, RuntimeError, NotImplementedError):
        return [], None
    return flat.leaves, signature


def kind_of(leaf: object) -> Any:
    """What a compilation depends on."""
    if isinstance(leaf, torch.Tensor):
        layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return TensorKind(type(leaf), leaf.shape, leaf.dtype, leaf.device, layout)
    # A float not by value: zeros of both signs are equal, and NaN is not.
    return (float, repr(leaf)) if isinstance(leaf, float) else (int, leaf)


def kind_in_training(leaf: object) -> object:
    """What the compilation of a training step depends on."""
    return (*kind_of(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else kind_of(leaf)


def shared_memory(leaves: Sequence[object]) -> tuple[int, ...]:
    """For each tensor the first one in the same memory; empty if none share any."""
    places = [
        leaf.untyped_storage().data_ptr()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    if len({*places}) == len(places):
        return ()
    # Tensors without elements have no memory to share.
    alike = tuple(places.index(place) if place else i for i, place in enumerate(places))
    return () if alike == tuple(range(len(alike))) else alike
