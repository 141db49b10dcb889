"""What a compiled model counts on: parts that stay as they are, and a forward that changes tensors alone.

A graph has no place for changes of attributes, lists and counters: a compiled model would forget to make
them, and would go on with the values of the run that was traced. So a model that makes them is not compiled,
and what the traced run has changed is put back.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from .. import _native
from ..devices import table
from ..errors import UnsupportedError
from .attribute_reads import Reads, reading

_MOST = 50_000
"""Containers that are looked at; a model with more is trusted."""

_SKIPPED = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks") or "_hooks_" in name)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class ChangesItselfError(UnsupportedError):
    """A model that changes its attributes when it is called."""


_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_Entries = list[tuple[dict[Any, object], str, object]]
_Absent = list[tuple[dict[Any, object], str]]
_Whole = list[tuple[dict[Any, object], list[tuple[object, object]]]]
_Items = list[tuple[Collection[object], list[object]]]


_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def _owners(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _may_come(module: nn.Module, name: str) -> bool:
    """Whether an attribute may be set that a module has not: neither one of every module nor a part."""
    return not hasattr(nn.Module, name) and not any(name in owner for owner in _owners(module))


class Parts:
    """The modules, parameters and buffers of a model, their modes and hooks: none may change."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        owners = [owner for module in modules for owner in _owners(module)]
        tensors = [v for owner in owners for v in owner.values() if isinstance(v, torch.Tensor)]
        self._tensors = tensors
        self._dtypes = [t.dtype for t in tensors]
        own = [m.__dict__ for m in modules]
        self._entries: _Entries = [(d, n, d[n]) for d in own for n in ("training", "forward") if n in d]
        self._absent: _Absent = [(d, "forward") for d in own if "forward" not in d]
        empty = [getattr(m, name) for m in modules for name in _HOOKS]
        empty += [getattr(hooks, name) for name in _GLOBAL_HOOKS]
        self.hooked = any(empty)
        self._hooks = empty
        self._whole: _Whole = [(d, list(d.items())) for d in owners]
        self._whole += [] if self.hooked else [(d, []) for d in empty]
        self.watch = _native.Watch(self._entries, self._absent, self._whole, [])

    def count_on(self, reads: Reads) -> None:
        """Attributes that were read must not change either, nor what hangs on them: they are in the graph.

        Those that were asked for in vain must not come.
        """
        entries: _Entries = []
        absent: _Absent = []
        for module, names in reads.values():
            own = vars(module)
            names = names - _STANDARD
            entries += [(own, n, own[n]) for n in names if n in own]
            absent += [(own, n) for n in names if n not in own and _may_come(module, n)]
        stack = [(n, v, True) for _, n, v in entries if not isinstance(v, (nn.Module, *_PLAIN))]
        whole: _Whole = []
        items: _Items = []
        for _, container, copy in _walk(stack):
            if isinstance(container, dict):
                whole.append((container, list(container.items())))
            if type(container) is not dict:
                # The order in which an OrderedDict is gone through is its own.
                items.append((container, list(copy)))
        self.watch = _native.Watch(self._entries + entries, self._absent + absent, self._whole + whole, items)

    def why_not(self, *, compiled: bool) -> str:
        """Why the model cannot be compiled, or is not to be; empty if it can."""
        if not compiled:
            return "changes too often"
        return "has hooks" if self.hooked else ""

    def hold(self) -> bool:
        """Whether all parts are what they were, and of the same dtypes."""
        if self.hooked and not any(self._hooks):
            return False
        return self.watch.holds() and [t.dtype for t in self._tensors] == self._dtypes


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[Reads]:
    """Puts back what a run changes in a model, and tells what attributes it reads.

    Raises:
        ChangesItselfError: something was changed.
    """
    before = list(_containers(model))
    tensors = list(_plain_tensors(model, before))
    changed: list[str] = []
    try:
        with reading(_modules(model, before)) as reads:
            yield reads
    finally:
        for name, container, copy in before:
            key = _difference(container, copy)
            if key is not None:
                changed.append(".".join(part for part in (name, key) if part))
                _restore(container, copy)
            else:
                _put_back(container, copy)
        for name, tensor, version, values in tensors:
            if tensor._version != version:
                changed.append(name)
                with torch.no_grad():
                    tensor.copy_(values)
    if changed:
        raise ChangesItselfError(f"the model changes {changed[0]} when it is called")


def _plain_tensors(
    model: nn.Module, containers: list[tuple[str, _Container, _Container]]
) -> Iterator[tuple[str, torch.Tensor, int, torch.Tensor]]:
    """Tensors that are attributes but no parameters or buffers, with their versions and copies: no capture
    replaces these by fake ones, so a run that is traced changes them."""
    registered = {id(d) for m in model.modules() for d in (m._parameters, m._buffers)}
    seen = set()
    for name, container, _ in containers:
        if id(container) in registered:
            continue
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            if plain and value.layout is torch.strided and not value.is_inference() and id(value) not in seen:
                seen.add(id(value))
                yield f"{name}.{key}".lstrip("."), value, value._version, value.detach().clone()


def _modules(model: nn.Module, containers: list[tuple[str, _Container, _Container]]) -> list[nn.Module]:
    """The modules of a model, also those that lists and other objects hold."""
    found = {id(m): m for m in model.modules()}
    for _, container, _ in containers:
        items = container.values() if isinstance(container, dict) else container
        found |= {id(item): item for item in items if isinstance(item, nn.Module)}
    return list(found.values())


def _containers(model: nn.Module) -> Iterator[tuple[str, _Container, _Container]]:
    """All containers that hang on a model, by name, with shallow copies."""
    return _walk([(name, m, True) for name, m in model.named_modules()])


def _walk(stack: list[tuple[str, object, bool]]) -> Iterator[tuple[str, _Container, _Container]]:
    """Containers among these values and in them; the last of three tells what is an attribute of a module."""
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        name, value, inside = stack.pop()
        if isinstance(value, tuple) and id(value) not in seen:
            seen.add(id(value))
            stack += [(f"{name}.{i}", item, False) for i, item in enumerate(value)]
            continue
        container = _container(value, inside)
        if container is None or id(container) in seen:
            continue
        seen.add(id(container))
        yield name, container, container.copy()
        of_module = isinstance(value, nn.Module)
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            if not isinstance(item, _PLAIN) and not (of_module and key in _SKIPPED):
                stack.append((f"{name}.{key}" if name else str(key), item, of_module))


def _container(value: Any, inside: bool) -> _Container | None:
    """What of a value can be changed; of other objects the attributes, if a module has them."""
    if type(value) in (dict, list, set, deque):
        return value
    if isinstance(value, nn.Module):
        return value.__dict__
    if isinstance(value, (dict, list, set)):
        return value if hasattr(value, "copy") and type(value).__module__ == "collections" else None
    if not inside or isinstance(value, (torch.Tensor, type)) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _difference(container: _Container, copy: _Container) -> str | None:
    """What differs first, a key or nothing but the length; none if nothing does."""
    if isinstance(container, set):
        return None if container == copy else ""
    if not isinstance(container, dict):
        same = len(container) == len(copy) and all(map(_is_same, container, copy))
        return None if same else ""
    assert isinstance(copy, dict)
    missing = object()
    keys = (*copy, *(k for k in container if k not in copy))
    wrong = (k for k in keys if not _is_same(container.get(k, missing), copy.get(k, missing)))
    return next(map(str, wrong), None)


def _restore(container: _Container, copy: _Container) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(copy)
    else:
        container.extend(copy)


def _put_back(container: _Container, copy: _Container) -> None:
    """The same objects where equal ones are: torch.export leaves copies of containers."""
    if isinstance(container, (dict, list)):
        for key, value in copy.items() if isinstance(copy, dict) else enumerate(copy):
            if container[key] is not value:
                container[key] = value


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values are one, or equal numbers and texts, or containers of such."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list, deque)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if type(a) in (dict, OrderedDict):
        return list(a) == list(b) and all(map(_is_same, a.values(), b.values()))
    return isinstance(a, (*_PLAIN, set, frozenset)) and bool(a == b)


@contextlib.contextmanager
def untouched(model: Callable[..., object], device: torch.device) -> Iterator[None]:
    """Puts back the random number generators and the buffers."""
    others = table.of(device).random_devices(device)
    with torch.random.fork_rng(devices=others), buffers_kept(model):
        yield


@contextlib.contextmanager
def buffers_kept(model: Callable[..., object]) -> Iterator[None]:
    """Puts back the buffers: the same tensors under the same names, with the values they had."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    held = [(m, dict(m._buffers)) for m in modules]
    values = [(b, b.clone()) for _, buffers in held for b in buffers.values() if b is not None]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
