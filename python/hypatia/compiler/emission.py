"""Programs as the search emits them: which nodes read which, and bodies of fused ops as graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..capture.fake_tensors import Fakes, makes_new_memory, makes_views
from ..capture.records import by_schema, resolve


def faked(fakes: Fakes, function: Any, args: Any, kwargs: Any) -> Any:
    """What a call returns, as fake tensors."""
    if isinstance(function, OpOverload) and makes_views(function):
        return fakes.view(function, args, kwargs)
    if isinstance(function, fx.GraphModule) or (
        isinstance(function, OpOverload) and makes_new_memory(function)
    ):
        return fakes.call(function, function, args, kwargs)
    return function(*args, **kwargs)


def has_open_sizes(args: Any) -> bool:
    """Whether there is a size among the arguments of a body that is not a number."""
    if isinstance(args, dict):
        return isinstance(args.get("int"), list) or any(map(has_open_sizes, args.values()))
    return isinstance(args, list) and any(map(has_open_sizes, args))


def body_of(emission: dict[str, Any], name: str, constant: Any) -> fx.GraphModule:
    """The definition of a fused op as a module of its own."""
    graph = fx.Graph()
    inputs = [n for n in emission["nodes"] if n["kind"] == "input"]
    places = [graph.placeholder(f"p{i}") for i in range(len(inputs))]
    env: dict[int, fx.Node] = {}

    def argument(arg: Any) -> Any:
        if isinstance(arg, dict) and "node" in arg:
            return env[arg["node"]]
        if isinstance(arg, dict) and "list" in arg:
            return [argument(a) for a in arg["list"]]
        return constant(arg)

    for number, item in enumerate(emission["nodes"]):
        if item["kind"] == "input":
            env[number] = places[item["origin"]]
            continue
        target = resolve(item["target"])
        args, kwargs = by_schema(target, [argument(a) for a in item["args"]])
        env[number] = graph.call_function(target, args, kwargs)
    graph.output(env[emission["outputs"][0]])
    return fx.GraphModule(torch.nn.Module(), graph, name)


def reads_of(args: list[Any]) -> set[int]:
    """The nodes that arguments name."""
    found: set[int] = set()
    for a in args:
        if isinstance(a, dict) and "node" in a:
            found.add(a["node"])
        elif isinstance(a, dict) and "list" in a:
            found |= reads_of(a["list"])
    return found


def closure(nodes: list[dict[str, Any]], roots: list[int]) -> set[int]:
    """The roots and all that they read."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            stack.extend(reads_of(nodes[i]["args"]))
    return seen


def needed_by(nodes: list[dict[str, Any]], outputs: list[int]) -> set[int]:
    """Folded nodes that are results themselves, with what they need: these run at every call."""
    direct = [o for o in outputs if nodes[o]["folded"]]
    return closure(nodes, direct)
