"""The order of a graph's calls.

Autograd goes through calls from the last one to the first, and adds the gradients of a tensor as it comes by
them. Such a sum depends on their order where they cancel or overflow, so that graphs that autograd
differentiates are computed in the order in which they were captured, as far as there is one.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from torch import fx

from ..capture.op_facts import changes_inputs


def as_captured(graph: fx.Graph, origins: Mapping[fx.Node, int]) -> None:
    """Puts calls in the order of the captured ones that they stand for, in place; others come when they are
    first read. A graph that changes its inputs stays as it is."""
    nodes = [n for n in graph.nodes if n.op.startswith("call_")]
    if any(map(changes_inputs, nodes)):
        return
    places: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        read = [places[user] for user in node.users if user in places]
        places[node] = origins.get(node, min(read, default=len(origins)))
    numbers = {node: i for i, node in enumerate(nodes)}
    waits = {node: sum(n in numbers for n in node.all_input_nodes) for node in nodes}
    ready = [(places[n], numbers[n]) for n in nodes if not waits[n]]
    heapq.heapify(ready)
    (out,) = graph.find_nodes(op="output")
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        out.prepend(node)
        for user in node.users:
            if user in waits:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (places[user], numbers[user]))
