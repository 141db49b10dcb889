"""A program as plain data: rows of torch calls that print as a module and can be changed one by one."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .tensors import T

_counter = itertools.count()

_NARROW = re.compile(r"torch\.(float32|float16|bfloat16)\b")

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: its text has {0}, {1} where the values stand that it uses."""

    name: str
    text: str
    uses: Names = ()
    changes: bool = False
    """The call writes into the first value that it uses."""

    def code(self, expressions: dict[str, str]) -> str:
        """The call as an expression of Python."""
        return self.text.format(*[expressions.get(u, u) for u in self.uses])


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the module; ``tied`` names another one that it is."""

    name: str
    spec: T
    kind: str = "parameter"
    tied: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """Inputs, weights, calls and what is returned."""

    inputs: tuple[tuple[str, Any], ...]
    """Names with a description of a tensor, a number or None."""
    weights: tuple[Weight, ...]
    rows: tuple[Row, ...]
    results: Names
    shape: str = "tuple"
    """How results are returned: one, tuple, list, dict or nested."""
    doors: str = "flat"
    """How inputs come in: flat, dict, tree, groups or optional."""

    def source(self) -> str:
        """The module that computes it."""
        expressions = {w.name: f"self.{w.name}" for w in self.weights}
        lines = ["class Model(nn.Module):"]
        if self.weights:
            lines += ["    def __init__(self):", "        super().__init__()"]
            lines += [f"        {_declared(w)}" for w in self.weights]
            lines.append("")
        header, opening = _doors(self.doors, [n for n, _ in self.inputs])
        lines.append(f"    def forward({', '.join(['self', *header])}):")
        lines += [f"        {line}" for line in opening]
        lines += [f"        {row.name} = {row.code(expressions)}" for row in self.rows]
        lines.append(f"        return {_returned(self.shape, [expressions.get(r, r) for r in self.results])}")
        return "\n".join(lines) + "\n"

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """Adds what each row computes to the values of inputs and weights."""
        for row in self.rows:
            values[row.name] = evaluated(row, values)
        return values

    def without_dead_rows(self) -> Program:
        """Without calls that nothing depends on; those that write somewhere stay."""
        needed = set(self.results)
        kept: list[Row] = []
        for row in reversed(self.rows):
            if row.name in needed or row.changes:
                kept.append(row)
                needed.update(row.uses)
        needed |= {w.tied for w in self.weights if w.name in needed}
        weights = tuple(w for w in self.weights if w.name in needed)
        return dataclasses.replace(self, rows=tuple(reversed(kept)), weights=weights)


def evaluated(row: Row, values: dict[str, Any]) -> Any:
    """What a row computes from these values."""
    scope = {f"_{i}": values[u] for i, u in enumerate(row.uses)}
    text = row.text.format(*scope)
    return eval(text, {"torch": torch, "F": F, "nn": nn, **scope})


def widened(source: str) -> str:
    """The same source in float64."""
    return _NARROW.sub("torch.float64", source)


def module_of(source: str) -> type[nn.Module]:
    """The class that a source defines; tracers can read the source."""
    name = f"<fuzz {next(_counter)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "T": T, "__name__": "fuzz.generated"}
    exec(compile(source, name, "exec"), scope)
    return scope["Model"]


def _declared(weight: Weight) -> str:
    if weight.tied and weight.kind == "buffer":
        return f'self.register_buffer("{weight.name}", self.{weight.tied})'
    if weight.tied:
        return f"self.{weight.name} = self.{weight.tied}"
    if weight.kind == "buffer":
        return f'self.register_buffer("{weight.name}", {weight.spec!r}.make())'
    floating = weight.spec.dtype in ("float32", "float16", "bfloat16", "float64")
    return f"self.{weight.name} = nn.Parameter({weight.spec!r}.make(){'' if floating else ', False'})"


def _doors(doors: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of the forward pass, and the lines that take the inputs out of them."""
    if doors == "dict":
        return ["batch"], [f'{n} = batch["{n}"]' for n in names]
    if doors == "tree":
        first, *rest = names
        taken = f"{first}, {_nested(rest)}" if rest else f"{first},"
        return ["tree"], [f"{taken} = tree"]
    if doors == "groups":
        joined = ", ".join([*names, ""])
        listed = [f"*({g} if isinstance({g}, (list, tuple)) else [{g}])" for g in ("a", "b")]
        return ["a", "b=()"], [f"{joined.strip()} = [{', '.join(listed)}]"]
    if doors == "optional":
        *names, last = names
        lines = [f"{last} = {last} if other is None else other * 0.5"]
        return [*names, f"{last}=None", "other=None"], lines
    return names, []


def _nested(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({names[0]}, {_nested(names[1:])})"


def _returned(shape: str, results: list[str]) -> str:
    if shape == "one":
        return results[0]
    if shape == "list":
        return f"[{', '.join(results)}]"
    if shape == "dict":
        return "{" + ", ".join(f'"r{i}": {r}' for i, r in enumerate(results)) + "}"
    if shape == "nested":
        return f"[{results[0]}, ({''.join(r + ', ' for r in results[1:])}None), {{'n': 3}}]"
    return f"({', '.join(results)},)"


def arranged(
    doors: str, inputs: Iterable[tuple[str, Any]], choice: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that hands these inputs in; ``choice`` picks one of the ways to do so."""
    named = dict(inputs)
    values = list(named.values())
    if doors == "dict":
        order = list(named)
        if choice % 2:
            order.reverse()
        return ({n: named[n] for n in order},), {}
    if doors == "tree":
        return (_tree(values),), {}
    if doors == "groups":
        at = 1 + choice % len(values)
        rest = values[at:]
        return ((values[:at] if at > 1 else values[0]), rest), {}
    if doors == "optional":
        *first, last = values
        name = list(named)[-1]
        ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            (tuple(values), {}),
            (tuple(first), {name: last}),
            (tuple(first), {"other": last}),
            ((*first, None, last), {}),
        ]
        return ways[choice % 4]
    if choice % 3 == 0:
        return tuple(values), {}
    at = choice % (len(values) + 1)
    rest = list(named.items())[at:]
    if choice % 2:
        rest.reverse()
    return tuple(values[:at]), dict(rest)


def _tree(values: list[Any]) -> Any:
    def nested(rest: list[Any]) -> Any:
        return rest[0] if len(rest) == 1 else (rest[0], nested(rest[1:]))

    return [values[0], nested(values[1:])] if len(values) > 1 else [values[0]]
