"""Where a graph became cheaper: groups of nodes before, and the nodes that replace them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypedDict

from ...capture.source_names import DrawnNode
from .drawing import is_weight

Group = dict[str, list[DrawnNode]]
Value = tuple[str, int | str]
"""A node of one side by its number, or a value of both by its name."""


class Saving(TypedDict):
    """Ops that were replaced by others, and what that changed."""

    before: str
    after: str
    times: int
    cost_before: float
    cost_after: float


def replaced(before: Sequence[DrawnNode], after: Sequence[DrawnNode]) -> list[Group]:
    """Groups of nodes before, each with the nodes after that compute the same values.

    A node after has the name of the node before that computes the same value. Values that are computed
    on one side only belong to the group of what is computed from them.
    """
    sets = _Sets()
    sides = (("before", before, after), ("after", after, before))
    for side, nodes, others in sides:
        other = {n["name"] for n in others if not is_weight(n)}
        flow = {n["id"]: n for n in nodes if not is_weight(n)}
        for n in flow.values():
            sets.join(_place(side, n, other), (side, n["id"]))
            for operand in (flow[i] for i in n["inputs"] if i in flow):
                if operand["name"] not in other:
                    sets.join((side, operand["id"]), (side, n["id"]))
    groups: dict[Value, Group] = defaultdict(lambda: {"before": [], "after": []})
    for side, nodes, _ in sides:
        for n in nodes:
            if not is_weight(n) and n["kind"] in ("op", "fused", "opaque"):
                groups[sets.of((side, n["id"]))][side].append(n)
    return list(groups.values())


def savings(groups: Sequence[Group]) -> list[Saving]:
    """What was replaced by what, equal replacements together, the largest saving first."""
    found: dict[tuple[str, str], Saving] = {}
    for group in groups:
        key = (_ops(group["before"]), _ops(group["after"]))
        entry = found.setdefault(
            key, {"before": key[0], "after": key[1], "times": 0, "cost_before": 0.0, "cost_after": 0.0}
        )
        entry["times"] += 1
        entry["cost_before"] += sum(n["cost"] for n in group["before"])
        entry["cost_after"] += sum(n["cost"] for n in group["after"])
    return sorted(found.values(), key=lambda e: e["cost_after"] - e["cost_before"])


def _place(side: str, node: DrawnNode, other: set[str]) -> Value:
    """The same for a value that is computed on both sides."""
    return ("both", node["name"]) if node["name"] in other else (side, node["id"])


def _ops(nodes: Sequence[DrawnNode]) -> str:
    """Ops with their numbers, the dearest first."""
    cost: dict[str, float] = defaultdict(float)
    for n in nodes:
        cost[n["op"]] += n["cost"]
    times = Counter(n["op"] for n in nodes)
    ranked = sorted(times, key=lambda op: (-cost[op], op))
    return ", ".join(f"{times[op]} {op}" if times[op] > 1 else op for op in ranked)


class _Sets:
    """Sets that only grow together."""

    def __init__(self) -> None:
        self._above: dict[Value, Value] = {}

    def of(self, item: Value) -> Value:
        while (above := self._above.get(item, item)) != item:
            self._above[item] = self._above.get(above, above)
            item = above
        return item

    def join(self, a: Value, b: Value) -> None:
        self._above[self.of(a)] = self.of(b)
