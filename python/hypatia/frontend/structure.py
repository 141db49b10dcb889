"""Arguments and results taken apart into tensors, and put together again.

Lists, tuples, dictionaries, what is registered with torch's pytree, and plain objects (dataclasses, caches of
language models) are taken apart; numbers and texts are leaves or part of the structure.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .._torch import pytree

_VALUES = (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of which equal values are alike in everything, if their types are equal too."""

_COPIED = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__new__", "__slots__")
"""What a class has whose objects are more than their attributes."""


class Node(NamedTuple):
    """A value without its tensors and numbers. Equal ones are alike in all that a model can see of them."""

    kind: str
    about: Any = None
    """A class, keys, a constant, or which of several is meant."""
    parts: tuple[Node, ...] = ()


TENSOR = Node("tensor")


class Context:
    """What pytree knows of a container beside its parts: as it is, and in a form that can be compared."""

    def __init__(self, raw: object) -> None:
        self.raw = raw
        self._key = _frozen(raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Flat:
    """A value that is taken apart.

    Raises:
        TypeError: a part is of a type that nothing is known of, or is reached in two ways.
    """

    def __init__(
        self, value: object, given: Mapping[int, Node] | None = None, leaves: list[object] | None = None
    ) -> None:
        self.leaves: list[object] = [] if leaves is None else leaves
        """Tensors and numbers, in order. Among results a tensor is there once."""
        self.owned: list[object] = []
        """Lists, dictionaries and objects, which a model may change."""
        self.registered: list[tuple[object, list[object]]] = []
        """Containers that pytree takes apart, with their parts."""
        self._given = given
        """Results: what is known of the arguments, by identity. Numbers are constants then."""
        try:
            self.node = self._node(value)
        except RecursionError as error:
            raise TypeError("a value contains itself") from error

    def _node(self, value: Any) -> Node:
        kind = type(value)
        if self._given is not None and id(value) in self._given:
            return self._given[id(value)]
        if isinstance(value, torch.Tensor) or (kind is torch.SymInt and self._given is not None):
            return self._leaf(value)
        if kind in (int, float, torch.SymInt) and self._given is None:
            self.leaves.append(value)
            return Node("number", float if kind is float else int)
        if kind in (float, complex):
            # Not by value: zeros of both signs are equal, and NaN is not.
            return Node("constant", (kind, repr(value)))
        if kind in _VALUES or isinstance(value, (enum.Enum, type)):
            return Node("constant", (kind, value))
        if kind is tuple:
            return Node("tuple", len(value), self._parts(value))
        if kind is list:
            self._own(value)
            return Node("list", len(value), self._parts(value))
        if kind is dict:
            self._own(value)
            return Node("dict", _keys(value), self._parts(value.values()))
        if issubclass(kind, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
            return Node("named tuple", kind, self._parts(value))
        known = pytree.SUPPORTED_NODES.get(kind)
        if known is not None:
            parts, context = known.flatten_fn(value)
            self.registered.append((value, list(parts)))
            output = _output(value) if self._given is not None else None
            if output is not None:
                return Node("output", output, self._parts(parts))
            return Node("registered", (kind, Context(context)), self._parts(parts))
        if _is_plain_object(value):
            self._own(value)
            return Node("object", (kind, _keys(value.__dict__)), self._parts(value.__dict__.values()))
        raise TypeError(f"nothing is known of a {kind.__name__}")

    def _parts(self, values: Iterable[object]) -> tuple[Node, ...]:
        return tuple([self._node(v) for v in values])

    def _leaf(self, value: torch.Tensor) -> Node:
        if self._given is None:
            self.leaves.append(value)
            return TENSOR
        place = next((i for i, t in enumerate(self.leaves) if t is value), len(self.leaves))
        if place == len(self.leaves):
            self.leaves.append(value)
        return Node("result", place)

    def _own(self, value: object) -> None:
        if any(v is value for v in self.owned):
            raise TypeError("a list, a dictionary or an object is there twice")
        self.owned.append(value)


def _output(value: object) -> tuple[type, tuple[object, ...], tuple[tuple[str, int | None], ...]] | None:
    """Of a dataclass that is an ordered dictionary too, as transformers' ModelOutput: its class, its keys,
    and which values its attributes are. Its own `__init__` takes longer than a small model."""
    kind = type(value)
    if not issubclass(kind, OrderedDict) or not dataclasses.is_dataclass(kind):
        return None
    values = list(value.values())
    places = []
    for name, attribute in vars(value).items():
        place = next((i for i, v in enumerate(values) if v is attribute), None)
        if place is None and attribute is not None:
            return None
        places.append((name, place))
    return kind, tuple(value.keys()), tuple(places)


def content(container: object) -> Any:
    """What of a container can change."""
    return container if type(container) in (list, dict) else container.__dict__


def _keys(mapping: Mapping[object, object]) -> tuple[tuple[object, type], ...]:
    keys = tuple([(key, type(key)) for key in mapping])
    if not all(kind in (str, int) for _, kind in keys):
        raise TypeError("a key of a dictionary is neither a text nor a number")
    return keys


def _frozen(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return (dict, *((_frozen(k), _frozen(v)) for k, v in value.items()))
    hash(value)
    return (type(value), value)


def _is_plain_object(value: object) -> bool:
    """Whether an object is its attributes and nothing else, so that one with the same attributes is equal."""
    kind = type(value)
    if callable(value) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    classes = kind.__mro__[:-1]
    return not any(vars(c).get(name) for c in classes for name in _COPIED) and not any(
        c.__module__.partition(".")[0] in ("builtins", "torch", "collections") for c in classes
    )
