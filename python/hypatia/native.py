"""Graphs that run as one call into Rust: steps over planned buffers, weights packed once.

What a plan cannot do, or inputs that it was not made for, run on the FX graph instead.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import _native
from .capture import value_of
from .kernels import FusedCall

KERNEL = "native plan"
"""The name under which a plan can be left out of a compilation."""

VALUES = "hypatia_values"
"""Key of a graph's metadata: names of its nodes by their number in the program."""

PLAN = "hypatia_plan"
"""Key of a graph's metadata: its native plan."""


def attach(gm: fx.GraphModule, optimization: Any) -> str:
    """Gives a graph its native plan; the reason if it has none."""
    if any(isinstance(m, FusedCall) for m in gm.children()):
        return "no native plan: a fused op has a kernel of its own"
    (output,) = gm.graph.find_nodes(op="output")
    if not all(_is_dense(value_of(n)) for n in output.all_input_nodes):
        return "no native plan: a result is not dense in eager"
    try:
        plan = optimization.plan()
    except _native.HypatiaError as e:
        return str(e)
    given = {n.name for n in gm.graph.find_nodes(op="placeholder")}
    if not given.issuperset(gm.meta[VALUES][i] for i in json.loads(plan.describe())["inputs"]):
        return "no native plan: a tensor that is part of the graph"
    gm.meta[PLAN] = plan
    return ""


class NativeGraph:
    """Runs a graph by its native plan, on arguments in the order of the placeholders."""

    def __init__(self, gm: fx.GraphModule, fallback: Callable[[list[Any]], Any]) -> None:
        self.gm = gm
        self.fallback = fallback
        self.plan: _native.NativePlan = gm.meta[PLAN]
        described = json.loads(self.plan.describe())
        names = gm.meta[VALUES]
        nodes = {n.name: n for n in gm.graph.nodes}
        position = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.steps: list[str] = described["steps"]
        self.inputs = [position[nodes[names[i]]] for i in described["inputs"]]
        self.constants = [nodes[names[i]] for i in described["constants"]]
        sources = {n for c in self.constants for n in _sources(c)}
        self.weights = sorted(position[n] for n in sources if n in position)
        self.takes_all = self.inputs == list(range(len(position)))
        self.attributes = sorted({n.target for n in sources if n.op == "get_attr"})
        self._weights: list[torch.Tensor] = []
        self._bound: _native.BoundPlan | None = None
        self.native = True
        self.settled = False
        """The first call is checked under modes of AOTAutograd's own; after it, modes are a user's."""

    def __call__(self, args: list[Any]) -> Any:
        """The results, as the graph returns them. A dispatch mode that counts or logs ops sees torch's."""
        if self.native and not (self.settled and torch._C._len_torch_dispatch_stack()):
            results = self.run(args)
            if results is not None:
                args.clear()
                return results
        return self.fallback(args)

    def run(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """The results of the plan; none if it is not for these arguments."""
        if self._bound is not None and all(
            map(operator.is_, map(args.__getitem__, self.weights), self._weights)
        ):
            inputs = args if self.takes_all else [args[i] for i in self.inputs]
            results = self._bound(torch.get_num_threads(), *inputs)
            if results is not None or self._bound.current():
                return results
        if not self._bind(args):
            return None
        return self._bound(torch.get_num_threads(), *[args[i] for i in self.inputs])

    def _bind(self, args: Sequence[Any]) -> bool:
        """Binds the plan to the weights as they are now; false if changes could go unnoticed."""
        weights = [args[i] for i in self.weights]
        attributes = [operator.attrgetter(name)(self.gm) for name in self.attributes]
        if any(w.is_inference() for w in (*weights, *attributes)):
            # They have no version counter.
            return False
        values = dict(zip(self.gm.graph.find_nodes(op="placeholder"), args, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            constants = [
                _value(self.gm, c, values).detach().resolve_neg().contiguous() for c in self.constants
            ]
            self._bound = self.plan.bind(constants, [*weights, *attributes])
        self._weights = weights
        return True

    def choose(self, args: Sequence[Any], seconds: float = 0.05) -> tuple[float, float]:
        """Times the plan and the graph in turn, keeps the faster; seconds of both."""
        times: tuple[list[float], list[float]] = ([], [])
        start = time.perf_counter()
        while len(times[0]) < 50 and (
            not times[0]
            or (spent := time.perf_counter() - start) < seconds
            or (len(times[0]) < 3 and spent < 1.0)
        ):
            for native, taken in zip((True, False), times, strict=True):
                self.native = native
                before = time.perf_counter()
                self(list(args))
                taken.append(time.perf_counter() - before)
        # The fastest of each: what disturbs a call only makes it longer.
        plan, graph = (min(t) for t in times)
        self.native = plan <= graph
        return plan, graph


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_contiguous()


def _sources(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack.extend(at.all_input_nodes)
    return found


def _value(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node that is made of weights only."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(gm)
        else:
            for operand in node.all_input_nodes:
                _value(gm, operand, values)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            function = gm.get_submodule(node.target) if node.op == "call_module" else node.target
            values[node] = function(*args, **kwargs)
    return values[node]
