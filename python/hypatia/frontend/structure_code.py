"""Code that takes the arguments of one structure apart, and puts results together.

It is written once for each structure, as Python, so that a call looks at every part a single time.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._torch import pytree
from .structure import Context, Node, content

Taken = tuple[tuple[object, ...], tuple[object, ...]]
"""Flat arguments, and containers of the call."""
Take = Callable[[tuple[object, ...], dict[str, object]], Taken | None]
BuildResult = Callable[[Sequence[object], Sequence[object], Sequence[object]], object]


class _Source:
    """Python code that is being written, and the objects that it names."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {
            "made": _made,
            "output": _output,
            "Context": Context,
            "replace": _replace,
        }
        self.lines: list[str] = []
        self._count = 0

    def name(self, value: object) -> str:
        """A name for an object."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def fresh(self) -> str:
        """A name for a local variable."""
        self._count += 1
        return f"v{self._count}"

    def function(self, head: str) -> Any:
        """The function with these lines."""
        text = "\n".join([f"def function({head}):", *(f"    {line}" for line in self.lines)])
        exec(compile(text, "<the structure of a call>", "exec"), self.names)
        return self.names["function"]

    def expression(self, node: Node, leaf: Callable[[Node], str]) -> str:
        """Code that makes a value."""
        kind, about, parts = node
        if kind in ("tensor", "number", "result", "input", "given"):
            return leaf(node)
        if kind == "constant":
            cls, constant = about
            return self.name(cls(constant) if cls in (float, complex) else constant)
        inner = [self.expression(part, leaf) for part in parts]
        listed = ", ".join(inner)
        if kind == "tuple":
            return f"({listed}{',' * bool(inner)})"
        if kind == "list":
            return f"[{listed}]"
        if kind == "named tuple":
            return f"{self.name(about)}({listed})"
        if kind == "output":
            return f"output({', '.join(map(self.name, about))}, [{listed}])"
        if kind == "registered":
            unflatten = self.name(pytree.SUPPORTED_NODES[about[0]].unflatten_fn)
            return f"{unflatten}([{listed}], {self.name(about[1].raw)})"
        keys = about if kind == "dict" else about[1]
        items = ", ".join(f"{key!r}: {value}" for (key, _), value in zip(keys, inner, strict=True))
        return f"{{{items}}}" if kind == "dict" else f"made({self.name(about[0])}, {{{items}}})"


def _made(kind: type, attributes: dict[str, object]) -> object:
    value: object = object.__new__(kind)
    value.__dict__.update(attributes)
    return value


def _output(
    kind: Any, keys: Sequence[object], attributes: Sequence[tuple[str, int | None]], values: Sequence[object]
) -> object:
    """A dataclass that is an ordered dictionary too."""
    made = OrderedDict.__new__(kind)
    for key, value in zip(keys, values, strict=True):
        OrderedDict.__setitem__(made, key, value)
    vars(made).update({name: None if i is None else values[i] for name, i in attributes})
    return made


def _replace(container: object, new: Any) -> None:
    inside = content(container)
    inside.clear()
    if isinstance(inside, list):
        inside.extend(new)
    else:
        inside.update(new)


class _Taker(_Source):
    """Code that looks at arguments: none where they are others than those that it is written for."""

    def __init__(self, kinds: Sequence[Any], opened: Sequence[int]) -> None:
        super().__init__()
        self.flat: list[str] = []
        self.containers: list[str] = []
        self._kinds = enumerate(kinds)
        self._opened = opened

    def visit(self, node: Node, value: str) -> None:
        """Looks at a value."""
        kind, about, parts = node
        if kind in ("list", "dict", "object"):
            self.containers.append(value)
        if kind == "tensor":
            next(self._kinds)
            self.flat.append(value)
        elif kind == "number":
            self._number(about, value)
        elif kind == "constant":
            self._constant(about[0], about[1], value)
        elif kind in ("list", "tuple"):
            self._refuse(f"type({value}) is not {kind} or len({value}) != {about}")
            self._unpack(parts, value)
        elif kind == "named tuple":
            self._refuse(f"type({value}) is not {self.name(about)}")
            self._unpack(parts, value)
        elif kind == "dict":
            self._refuse(f"type({value}) is not dict")
            self._keyed(about, parts, value)
        elif kind == "object":
            self._refuse(f"type({value}) is not {self.name(about[0])}")
            attributes = self.fresh()
            self.lines.append(f"{attributes} = {value}.__dict__")
            self._keyed(about[1], parts, attributes)
        else:
            self._registered(about[0], about[1], parts, value)

    def _refuse(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def _unpack(self, parts: Sequence[Node], values: str) -> None:
        names = [self.fresh() for _ in parts]
        if names:
            self.lines.append(f"{', '.join(names)}, = {values}")
        for name, part in zip(names, parts, strict=True):
            self.visit(part, name)

    def _keyed(self, keys: Sequence[tuple[object, type]], parts: Sequence[Node], value: str) -> None:
        self._refuse(f"tuple({value}) != {self.name(tuple(key for key, _ in keys))}")
        if any(kind is not str for _, kind in keys):
            # True is equal to 1.
            self._refuse(f"[*map(type, {value})] != {self.name([kind for _, kind in keys])}")
        self._unpack(parts, f"{value}.values()")

    def _number(self, kind: type, value: str) -> None:
        at, known = next(self._kinds)
        self._refuse(f"type({value}) is not {kind.__name__}")
        if at in self._opened:
            self.flat.append(value)
        else:
            compared = f"repr({value})" if kind is float else value
            self._refuse(f"{compared} != {self.name(known[1])}")

    def _constant(self, kind: type, constant: object, value: str) -> None:
        if constant is None or kind is bool or isinstance(constant, (torch.dtype, type, enum.Enum)):
            self._refuse(f"{value} is not {self.name(constant)}")
        else:
            compared = f"repr({value})" if kind in (float, complex) else value
            self._refuse(f"type({value}) is not {self.name(kind)} or {compared} != {self.name(constant)}")

    def _registered(self, kind: type, context: Context, parts: Sequence[Node], value: str) -> None:
        self._refuse(f"type({value}) is not {self.name(kind)}")
        values, seen = self.fresh(), self.fresh()
        flatten = self.name(pytree.SUPPORTED_NODES[kind].flatten_fn)
        self.lines.append(f"{values}, {seen} = {flatten}({value})")
        self._refuse(f"len({values}) != {len(parts)} or Context({seen}) != {self.name(context)}")
        self._unpack(parts, values)


def taker(node: Node, kinds: Sequence[object], opened: Sequence[int], owned: Sequence[int]) -> Take:
    """Takes arguments of one structure apart: tensors and open numbers, and the containers asked for.

    The function returns none for arguments of another structure, or with other numbers. What tensors are is
    not looked at.
    """
    source = _Taker(kinds, opened)
    for part, value in zip(node.parts, ("args", "kwargs"), strict=True):
        source.visit(part, value)
    flat = "".join(f"{value}, " for value in source.flat)
    wanted = "".join(f"{source.containers[i]}, " for i in owned)
    source.lines.append(f"return ({flat}), ({wanted})")
    take: Take = source.function("args, kwargs")
    return take


def builder(
    node: Node, kinds: Sequence[Any], opened: Sequence[int]
) -> Callable[[Sequence[object]], tuple[tuple[object, ...], dict[str, object]]]:
    """Puts arguments together again, of tensors and open numbers. Containers are new ones."""
    source = _Source()
    count, place = iter(range(len(kinds))), iter(range(len(kinds)))

    def leaf(part: Node) -> str:
        at = next(count)
        if part.kind == "tensor" or at in opened:
            return f"x[{next(place)}]"
        value = kinds[at][1]
        return source.name(float(value) if part.about is float else value)

    source.lines.append(f"return {source.expression(node, leaf)}")
    build: Callable[[Sequence[object]], tuple[tuple[object, ...], dict[str, object]]] = source.function("x")
    return build


class Outline(NamedTuple):
    """What a call returns beside its tensors, and what it changes in lists, dictionaries and objects."""

    node: Node
    effects: tuple[tuple[int, Node], ...] = ()
    """Containers of the arguments that are changed, and what is in them afterwards."""

    @property
    def single(self) -> bool:
        """Whether the model returns its only result as it is."""
        return self.node == Node("result", 0) and not self.effects

    def owned(self) -> list[int]:
        """The containers of the arguments that are changed or returned."""
        found = {i for i, _ in self.effects}
        stack = [self.node, *(node for _, node in self.effects)]
        while stack:
            node = stack.pop()
            stack += node.parts
            if node.kind == "given":
                found.add(node.about)
        return sorted(found)

    def result_builder(self) -> BuildResult:
        """Makes what the model returns of flat arguments, flat results and the containers in `owned`, and
        changes these."""
        source = _Source()
        place = {container: f"g[{i}]" for i, container in enumerate(self.owned())}

        def leaf(part: Node) -> str:
            if part.kind == "given":
                return place[part.about]
            return f"{'r' if part.kind == 'result' else 'x'}[{part.about}]"

        source.lines.append(f"value = {source.expression(self.node, leaf)}")
        for i, (_, node) in enumerate(self.effects):
            source.lines.append(f"after{i} = {source.expression(node, leaf)}")
        source.lines += [f"replace({place[c]}, after{i})" for i, (c, _) in enumerate(self.effects)]
        source.lines.append("return value")
        build_result: BuildResult = source.function("x, r, g")
        return build_result
