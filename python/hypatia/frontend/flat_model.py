"""A model as captures want it: tensors come in, tensors go out."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import pytree
from ..errors import UnsupportedError
from .call_key import Signature
from .structure import Flat, Node, content
from .structure_code import Outline, builder


class FlatModel(nn.Module):
    """Calls a model with arguments of one structure, of which it takes the tensors and open numbers.

    Parameters, buffers and modules are the model's own, under their names. Lists, dictionaries and objects
    among the arguments are copies; what a call changes in them is part of its outline. Its attributes have
    names that no model has.
    """

    hypatia_model: nn.Module
    forward: Callable[..., tuple[object, ...]]
    hypatia_outline: Callable[[], Outline]
    """What the last call returned beside tensors."""

    def __init__(self, model: nn.Module, signature: Signature, opened: Sequence[int] = ()) -> None:
        super().__init__()
        own = vars(self)
        for name in ("_parameters", "_buffers", "_modules"):
            own[name] = vars(model)[name]
        own["training"] = model.training
        own["hypatia_model"] = model
        build = builder(signature.spec, signature.kinds, opened)
        outlines: list[Outline] = []

        def forward(*inputs: object) -> tuple[object, ...]:
            args, kwargs = build(inputs)
            outline, results = _outlined(model, args, kwargs, inputs)
            if outlines and outlines[0] != outline:
                # Numbers that are results of a captured run are constants of this one.
                alike = aligned(outlines[0], outline, results, inputs)
                if alike is not None:
                    return tuple(alike)
            outlines[:] = [outline]
            return tuple(results)

        names = _names(model, signature.spec)
        taken = [name for i, name in enumerate(names) if signature.is_tensor(i) or i in opened]
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in _distinct(taken)]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        own["forward"] = forward
        # Functions: what they hold is not the state of a module.
        own["hypatia_outline"] = lambda: outlines[0]
        own["hypatia_build"] = build

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's, of which this is none."""
        return self.hypatia_model.named_modules(memo, prefix, remove_duplicate)

    def as_called(self, inputs: Sequence[object]) -> object:
        """What the model returns for flat inputs."""
        args, kwargs = vars(self)["hypatia_build"](inputs)
        return self.hypatia_model(*args, **kwargs)


def _outlined(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], inputs: Sequence[object]
) -> tuple[Outline, list[torch.Tensor]]:
    before = Flat((args, kwargs))
    copies = [content(c).copy() for c in before.owned]
    value = model(*args, **kwargs)
    for container, parts in before.registered:
        now = list(pytree.SUPPORTED_NODES[type(container)].flatten_fn(container)[0])
        if len(now) != len(parts) or any(a is not b for a, b in zip(now, parts, strict=True)):
            raise UnsupportedError(f"the model changes an argument, a {type(container).__name__}")
    given = {id(c): Node("given", i) for i, c in enumerate(before.owned)}
    given |= {id(t): Node("input", i) for i, t in enumerate(inputs)}
    leaves: list[Any] = []
    try:
        node = Flat(value, given, leaves).node
        changed = [
            (i, Flat(_contained(c), given, leaves).node)
            for i, (c, copy) in enumerate(zip(before.owned, copies, strict=True))
            if _is_changed(content(c), copy)
        ]
    except TypeError as error:
        raise UnsupportedError(f"a result cannot be taken apart: {error}") from error
    return Outline(node, tuple(changed)), leaves


def aligned(
    captured: Outline, now: Outline, results: Sequence[object], inputs: Sequence[object]
) -> list[object] | None:
    """Results in the order that a captured run had, whose open numbers are results or inputs; none if more
    differs than that."""
    found: dict[int, object] = {}

    def walk(a: Node, b: Node) -> bool:
        if a.kind == "result":
            value = results[b.about] if b.kind == "result" else _number(b, inputs)
            return value is not None and found.setdefault(a.about, value) is value
        if a.kind == "input" and a != b:
            return type(inputs[a.about]) is int and _number(b, inputs) == inputs[a.about]
        if (a.kind, a.about, len(a.parts)) != (b.kind, b.about, len(b.parts)):
            return _number(a, inputs) is not None and _number(a, inputs) == _number(b, inputs)
        return all(map(walk, a.parts, b.parts))

    if [i for i, _ in captured.effects] != [i for i, _ in now.effects]:
        return None
    nodes = ((o.node, *(node for _, node in o.effects)) for o in (captured, now))
    if not all(map(walk, *nodes)) or sorted(found) != list(range(len(found))):
        return None
    return [found[i] for i in range(len(found))]


def _number(node: Node, inputs: Sequence[object]) -> int | None:
    """The integer that a node stands for."""
    value = node.about[1] if node.kind == "constant" else None
    if node.kind == "input":
        value = inputs[node.about]
    return value if type(value) is int else None


def _contained(container: object) -> object:
    """What is in a container, in one that is not known."""
    return content(container).copy()


def _is_changed(now: Any, copy: Any) -> bool:
    if len(now) != len(copy):
        return True
    if isinstance(now, list):
        return any(a is not b for a, b in zip(now, copy, strict=True))
    return list(now) != list(copy) or any(now[key] is not value for key, value in copy.items())


def _names(model: nn.Module, spec: Node) -> Iterator[str]:
    """What the model calls tensors and numbers of its arguments."""
    positional, named = spec.parts
    places = inspect.signature(model.forward).bind_partial(*range(len(positional.parts))).arguments
    called: dict[int, str] = {}
    for name, place in places.items():
        if isinstance(place, tuple):
            called |= {p: f"{name}_{i}" for i, p in enumerate(place)}
        else:
            called[place] = name
    for i, part in enumerate(positional.parts):
        yield from _named(part, called[i])
    for (name, _), part in zip(named.about, named.parts, strict=True):
        yield from _named(part, name)


def _named(node: Node, name: str) -> Iterator[str]:
    if node.kind in ("tensor", "number"):
        yield name
        return
    keys: Sequence[object] = range(len(node.parts))
    if node.kind in ("dict", "object"):
        keys = [key for key, _ in (node.about if node.kind == "dict" else node.about[1])]
    elif node.kind == "named tuple":
        keys = node.about._fields
    for key, part in zip(keys, node.parts, strict=True):
        yield from _named(part, f"{name}_{key}")


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """Names that Python takes for parameters, each once."""
    seen: set[str] = set()
    for name in names:
        name = re.sub(r"\W", "_", name)
        if keyword.iskeyword(name) or not name.isidentifier():
            name = f"_{name}"
        while name in seen:
            name += "_"
        seen.add(name)
        yield name
