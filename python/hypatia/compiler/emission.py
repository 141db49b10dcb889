"""Programs as the search emits them: which nodes read which, and bodies of fused ops as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import fx

from .._torch import OpOverload
from ..capture.arguments import Arg
from ..capture.fake_tensors import Fakes
from ..capture.op_facts import makes_new_memory, makes_views
from ..capture.records import by_schema, resolve, value_of


class Emitted(TypedDict):
    """A node of a program, as a call into torch."""

    kind: str
    """input, copy, call or fused"""
    id: int
    op: str
    target: str
    args: list[Arg]
    origin: int | None
    """The captured record that has the same value, or the place of an input of a body."""
    folded: bool
    keeps_layout: bool
    body: Emission | None
    """What a fused op computes."""


class Emission(TypedDict):
    """A program: its nodes, operands first, and which of them are results."""

    nodes: list[Emitted]
    outputs: list[int]


def faked(fakes: Fakes, function: Callable[..., object], args: Any, kwargs: Any) -> object:
    """What a call returns, as fake tensors."""
    if isinstance(function, OpOverload) and makes_views(function):
        return fakes.view(function, args, kwargs)
    if isinstance(function, fx.GraphModule) or (
        isinstance(function, OpOverload) and makes_new_memory(function)
    ):
        return fakes.call(function, function, args, kwargs)
    return function(*args, **kwargs)


def has_open_sizes(args: object) -> bool:
    """Whether there is a size among the arguments of a body that is not a number."""
    if isinstance(args, dict):
        return isinstance(args.get("int"), list) or any(map(has_open_sizes, args.values()))
    return isinstance(args, list) and any(map(has_open_sizes, args))


def open_sizes(gm: fx.GraphModule) -> set[str]:
    """Names of the symbols in the sizes of a graph's inputs and values."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        value = value_of(node)
        for v in value if isinstance(value, (list, tuple)) else [value]:
            sizes = v.shape if isinstance(v, torch.Tensor) else [v]
            found.update(
                str(s) for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols
            )
    return found


def body_of(emission: Emission, name: str, constant: Callable[[Arg], object]) -> fx.GraphModule:
    """The definition of a fused op as a module of its own."""
    graph = fx.Graph()
    inputs = [n for n in emission["nodes"] if n["kind"] == "input"]
    places = [graph.placeholder(f"p{i}") for i in range(len(inputs))]
    env: dict[int, fx.Node] = {}

    def argument(arg: Arg) -> object:
        if isinstance(arg, dict) and "node" in arg:
            return env[arg["node"]]
        if isinstance(arg, dict) and "list" in arg:
            return [argument(a) for a in arg["list"]]
        return constant(arg)

    for number, item in enumerate(emission["nodes"]):
        if item["kind"] == "input":
            assert item["origin"] is not None
            env[number] = places[item["origin"]]
            continue
        target = resolve(item["target"])
        args, kwargs = by_schema(target, [argument(a) for a in item["args"]])
        env[number] = graph.call_function(target, args, kwargs)
    graph.output(env[emission["outputs"][0]])
    return fx.GraphModule(torch.nn.Module(), graph, name)


def reads_of(args: list[Arg]) -> set[int]:
    """The nodes that arguments name."""
    found: set[int] = set()
    for a in args:
        if isinstance(a, dict) and "node" in a:
            found.add(a["node"])
        elif isinstance(a, dict) and "list" in a:
            found |= reads_of(a["list"])
    return found


def operands_of(item: Emitted) -> list[int]:
    """The nodes that a copied call or a fused op reads: it has no other arguments."""
    found: list[int] = []
    for a in item["args"]:
        assert isinstance(a, dict)
        found.append(a["node"])
    return found


def closure(nodes: list[Emitted], roots: list[int]) -> set[int]:
    """The roots and all that they read."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            stack.extend(reads_of(nodes[i]["args"]))
    return seen


def needed_by(nodes: list[Emitted], outputs: list[int]) -> set[int]:
    """Folded nodes that are results themselves, with what they need: these run at every call."""
    direct = [o for o in outputs if nodes[o]["folded"]]
    return closure(nodes, direct)


def kernels_choose(nodes: list[Emitted], folded: set[int]) -> set[int]:
    """Folded nodes that calls read for which torch chooses the kernel by how their operands lie."""
    live = [item for i, item in enumerate(nodes) if i not in folded and item["keeps_layout"]]
    return {read for item in live for read in reads_of(item["args"])} & folded
