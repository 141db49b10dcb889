"""Results of graphs: plans return outputs and inputs, graphs return views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .._torch import pytree
from .described import Described

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides, and elements before the first."""


class PlanResults:
    """The results of a graph, from inputs and outputs of its plan."""

    def __init__(self, gm: fx.GraphModule, described: Described, plain: int | None) -> None:
        """``plain`` is the planner's: so many first results of a training step are not kept for later."""
        (output,) = gm.graph.find_nodes(op="output")
        gradients = any(n.name.startswith("tangents") for n in gm.graph.find_nodes(op="placeholder"))
        known: dict[tuple[int, View], int] = {}
        sources: list[int] = []
        self._plain = plain or 0
        self._views: dict[int, tuple[View, bool]] = {}
        """Results that are seen otherwise than they are returned: how, and whether as a copy."""
        results = iter(described["results"])
        leaves = pytree.arg_tree_leaves(*output.args)
        self.returns: list[int | None] = [None] * len(leaves)
        """What a plan returns for each result: an output from zero on, an input from -1 on downwards."""
        self._besides = {i: v for i, v in enumerate(leaves) if not isinstance(v, fx.Node) and v is not None}
        """Results that are no values of the graph, and what they are."""
        self._same: dict[int, int] = {}
        """Results that are views like an earlier one."""
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, fx.Node):
                continue
            result = next(results)
            if result["number"] is not None:
                self._besides[place] = result["number"]
                continue
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
        self._as_returned = not self._views and not self._same and not self._besides
        self.plain = self._as_returned and self.returns == list(range(len(self.returns)))
        """The outputs are the results."""

    def arranged(self, outputs: Sequence[object], inputs: Sequence[object]) -> list[object]:
        """What results are made of, in their order."""
        return [None if i is None else outputs[i] if i >= 0 else inputs[~i] for i in self.returns]

    def places(self, output: int) -> list[int]:
        """Which results an output of the plan is."""
        return [p for p, source in enumerate(self.returns) if source == output and p not in self._views]

    def results(self, outputs: Sequence[object], inputs: Sequence[object]) -> Sequence[object]:
        """Results in the order of the graph."""
        return outputs if self.plain else self.seen(self.arranged(outputs, inputs))

    def seen(self, returned: Sequence[Any]) -> Sequence[object]:
        """Results of what was arranged."""
        if self._as_returned:
            return returned
        found = list(returned)
        for place, ((shape, strides, offset), copied) in self._views.items():
            tensor = found[place]
            offset += tensor.storage_offset()
            if place < self._plain:
                # For autograd it is a result, not a view of something that was made without it.
                memory = tensor.untyped_storage()
                found[place] = tensor.new_empty(0).set_(memory, offset, shape, strides)
                continue
            tensor = tensor.as_strided(shape, strides, offset)
            found[place] = tensor.clone() if copied else tensor
        for place, other in self._same.items():
            found[place] = found[other]
        for place, value in self._besides.items():
            found[place] = value
        return found
