"""Which attributes of modules are read.

While somebody wants to know, the modules in question, and no others, are of classes that note it: a class of
their own below the one that they have, as if it were that one. Other threads read the same modules meanwhile
without being noted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

from torch import nn

__all__ = ["Reads", "reading"]

Reads = dict[int, tuple[nn.Module, set[str]]]
"""The modules whose attributes were read, and the names of these."""

_lock = threading.Lock()
_listeners: dict[int, tuple[type[nn.Module], int]] = {}
"""By module: the class that it has, and how many threads want to know what is read of it."""
_here = threading.local()


@contextlib.contextmanager
def reading(modules: Sequence[nn.Module]) -> Iterator[Reads]:
    """What this thread reads of modules meanwhile."""
    reads: Reads = {}
    before = getattr(_here, "reads", None)
    noting: dict[type[nn.Module], type[nn.Module] | None] = {}
    begun: list[nn.Module] = []
    try:
        for module in modules:
            if _begin(module, noting):
                begun.append(module)
            else:
                # What cannot be noted counts as read.
                reads[id(module)] = (module, set(vars(module)))
        _here.reads = reads
        yield reads
    finally:
        _here.reads = before
        for module in begun:
            _end(module)


def _begin(module: nn.Module, noting: dict[type[nn.Module], type[nn.Module] | None]) -> bool:
    with _lock:
        own, count = _listeners.get(id(module), (type(module), 0))
        if count == 0:
            if own not in noting:
                noting[own] = _noting(own)
            other = noting[own]
            if other is None or not _turn(module, other):
                return False
        _listeners[id(module)] = (own, count + 1)
        return True


def _end(module: nn.Module) -> None:
    with _lock:
        own, count = _listeners.pop(id(module))
        if count > 1:
            _listeners[id(module)] = (own, count - 1)
        else:
            _turn(module, own)


def _turn(module: nn.Module, into: type[nn.Module]) -> bool:
    try:
        object.__setattr__(module, "__class__", into)
    except TypeError:
        # Objects of it lie otherwise in memory.
        return False
    return True


def _noting(own: type[nn.Module]) -> type[nn.Module] | None:
    """The same class, which notes what is read of its objects."""
    plain = own.__getattribute__

    def read(module: nn.Module, name: str) -> object:
        if name == "__class__":
            return own
        reads = getattr(_here, "reads", None)
        if reads is not None:
            reads.setdefault(id(module), (module, set()))[1].add(name)
        return plain(module, name)

    def reduced(module: nn.Module, protocol: SupportsIndex) -> object:
        """A copy that another thread makes meanwhile is of the class itself."""
        made = own.__reduce_ex__(module, protocol)
        if not isinstance(made, tuple):
            return made
        return (made[0], tuple(own if a is made_class else a for a in made[1]), *made[2:])

    names = {
        "__getattribute__": read,
        "__reduce_ex__": reduced,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    if type(own) is not type:
        # Classes of classes do more than can be foreseen.
        return None
    try:
        # It is put below the class afterwards: `__init_subclass__` is for classes that somebody wrote.
        made_class = type(own.__name__, (nn.Module,), names)
        made_class.__bases__ = (own,)
    except TypeError:
        return None
    return made_class
