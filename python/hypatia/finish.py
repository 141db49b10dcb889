"""Results of training passes: plans return outputs and inputs, graphs return views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Finish:
    """The results of a graph of a training step, from inputs and outputs of its plan."""

    def __init__(self, gm: fx.GraphModule, described: dict[str, Any]) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        gradients = any(n.name.startswith("tangents") for n in gm.graph.find_nodes(op="placeholder"))
        known: dict[tuple[Any, ...], int] = {}
        sources: list[int] = []
        self._views: dict[int, tuple[tuple[Any, ...], bool]] = {}
        """Results that are seen otherwise than they are returned: how, and whether as a copy."""
        results = iter(described["results"])
        leaves = pytree.arg_tree_leaves(*output.args)
        self.returns: list[int | None] = [None] * len(leaves)
        """What a plan returns for each result: an output from zero on, an input from -1 on downwards."""
        self._same: dict[int, int] = {}
        """Results that are views like an earlier one."""
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, fx.Node):
                continue
            result = next(results)
            source = ~result["at"] if result["given"] else result["at"]
            view = (tuple(result["shape"]), tuple(result["strides"]), result["offset"])
            # Gradients that share memory would be added to each other in place.
            copied = gradients and source in sources
            if (source, view) in known:
                self._same[place] = known[source, view]
            elif copied or not result["whole"]:
                self._views[place] = (view, copied)
            known.setdefault((source, view), place)
            sources.append(source)
            self.returns[place] = source
        self.plain = not self._views and not self._same

    def arranged(self, bound: Any) -> Callable[..., Any]:
        """A plan that returns its outputs, as one that returns results."""

        def run(lead: int, *inputs: torch.Tensor) -> list[Any] | None:
            outputs = bound(lead, *inputs)
            if outputs is None:
                return None
            return [None if i is None else outputs[i] if i >= 0 else inputs[~i] for i in self.returns]

        return run

    def places(self, output: int) -> list[int]:
        """Which results an output of the plan is."""
        return [p for p, source in enumerate(self.returns) if source == output and p not in self._views]

    def __call__(self, returned: Sequence[Any]) -> Sequence[Any]:
        """Results in the order of the graph; what is no tensor is none."""
        if self.plain:
            return returned
        found = list(returned)
        for place, ((shape, strides, offset), copied) in self._views.items():
            tensor = found[place]
            tensor = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
            found[place] = tensor.clone() if copied else tensor
        for place, other in self._same.items():
            found[place] = found[other]
        return found
