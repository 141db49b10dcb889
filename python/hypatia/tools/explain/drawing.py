"""Where the nodes of a graph are drawn: in layers from top to bottom, so that a page need not compute it."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

from ...capture.source_names import DrawnNode
from .placing import LANE, SWEEPS, Vertex, placed
from .repetition import repetitions

HEIGHT, GAP = 34, 26
"""Height of a node, and of the room between layers in which edges bend."""

LONGEST_LABEL = 24
"""Characters of a label; longer ones are cut."""


class Drawing(TypedDict):
    """Where a graph is drawn."""

    width: int
    height: int
    nodes: list[list[int]]
    edges: list[list[int]]
    bands: list[list[int]]


def drawn(nodes: Sequence[DrawnNode], *, weights: bool) -> Drawing:
    """Places of nodes ``[id, x, y, width]``, edges ``[from, to, x, y, x, y, ...]`` and repeated layers.

    Without ``weights``, nodes that are made of frozen weights alone are left out.
    """
    shown = [n for n in nodes if weights or not is_weight(n)]
    if not shown:
        return {"width": 0, "height": 0, "nodes": [], "edges": [], "bands": []}
    vertices, place, passing = _vertices(shown)
    order = _ordered(vertices)
    placed(vertices, order)
    left = min(v.x - v.width / 2 for v in vertices)
    for v in vertices:
        v.x -= left
    layers = len(order)
    return {
        "width": round(max(v.x + v.width / 2 for v in vertices)),
        "height": layers * HEIGHT + (layers - 1) * GAP,
        "nodes": [
            [n["id"], round(v.x), _top(v), round(v.width)] for n in shown for v in [vertices[place[n["id"]]]]
        ],
        "edges": _edges(shown, vertices, place, passing),
        "bands": _bands(shown, vertices, place),
    }


def is_weight(node: DrawnNode) -> bool:
    """Whether a node is a frozen weight or computed from such alone."""
    return node["kind"] == "weight" or node["folded"]


def label(node: DrawnNode) -> str:
    """What stands in a node: its op, or what the model calls an input."""
    if node["kind"] in ("input", "weight"):
        # Of a path, the end says more.
        text = node["called"]
        return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]
    text = "result" if node["kind"] == "result" else node["op"]
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def shape(node: DrawnNode) -> str:
    """The second line of a node: its type; of a node with several results the first."""
    text = node["type"]
    if text.startswith("("):
        parts = text[1:-1].split("], ")
        text = parts[0] + ("], …" if len(parts) > 1 else "")
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _width(node: DrawnNode) -> float:
    return max(64, 7.3 * len(label(node)) + 22, 6.1 * len(shape(node)) + 22)


def _top(vertex: Vertex) -> int:
    return vertex.layer * (HEIGHT + GAP)


def _vertices(
    nodes: Sequence[DrawnNode],
) -> tuple[list[Vertex], dict[int, int], dict[tuple[int, int], int]]:
    """The graph in layers; edges of one node that pass the same layer pass it at one place."""
    layer = _layers(nodes)
    vertices: list[Vertex] = []
    place: dict[int, int] = {}
    for n in nodes:
        place[n["id"]] = len(vertices)
        vertices.append(Vertex(layer[n["id"]], _width(n)))
    passing: dict[tuple[int, int], int] = {}
    for n in nodes:
        for source in dict.fromkeys(i for i in n["inputs"] if i in place):
            last = place[source]
            for between in range(layer[source] + 1, layer[n["id"]]):
                if (source, between) not in passing:
                    passing[source, between] = len(vertices)
                    vertices.append(Vertex(between, LANE, lane=True))
                    _connect(vertices, last, passing[source, between])
                last = passing[source, between]
            _connect(vertices, last, place[n["id"]])
    return vertices, place, passing


def _connect(vertices: list[Vertex], upper: int, lower: int) -> None:
    if lower not in vertices[upper].below:
        vertices[upper].below.append(lower)
        vertices[lower].above.append(upper)


def _layers(nodes: Sequence[DrawnNode]) -> dict[int, int]:
    """Each node below its operands; inputs, weights and what is made of them alone right above its user."""
    layer: dict[int, int] = {}
    users: dict[int, list[int]] = defaultdict(list)
    for n in nodes:
        operands = [i for i in n["inputs"] if i in layer]
        for i in dict.fromkeys(operands):
            users[i].append(n["id"])
        layer[n["id"]] = 1 + max((layer[i] for i in operands), default=-1)
    movable: set[int] = set()
    for n in nodes:
        operands = [i for i in n["inputs"] if i in layer]
        if is_weight(n) or all(i in movable and len(users[i]) == 1 for i in operands):
            movable.add(n["id"])
    for n in reversed(nodes):
        if n["id"] in movable and users[n["id"]]:
            layer[n["id"]] = min(layer[u] for u in users[n["id"]]) - 1
    first = min(layer.values())
    return {i: at - first for i, at in layer.items()}


def _ordered(vertices: list[Vertex]) -> list[list[int]]:
    """The layers from left to right, with few crossings: each vertex between its neighbours."""
    order: list[list[int]] = [[] for _ in range(1 + max(v.layer for v in vertices))]
    seen: set[int] = set()
    # Depth first from the results, operands in their order, is a good start.
    for end in reversed(range(len(vertices))):
        stack = [end]
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                order[vertices[at].layer].append(at)
                stack.extend(reversed(vertices[at].above))
    best, fewest = [list(layer) for layer in order], _crossings(vertices, order)
    for sweep in range(SWEEPS):
        if fewest == 0:
            break
        downwards = sweep % 2 == 0
        rank = [0.0] * len(vertices)
        for layer in order if downwards else reversed(order):
            for at, v in enumerate(layer):
                near = vertices[v].above if downwards else vertices[v].below
                # A vertex without neighbours keeps its place.
                rank[v] = sum(rank[u] for u in near) / len(near) if near else float(at)
            layer.sort(key=rank.__getitem__)
            for at, v in enumerate(layer):
                rank[v] = float(at)
        crossings = _crossings(vertices, order)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in order], crossings
    return best


def _crossings(vertices: list[Vertex], order: list[list[int]]) -> int:
    total = 0
    for layer, under in itertools.pairwise(order):
        rank = {v: at for at, v in enumerate(under)}
        passed: list[int] = []
        for end in (e for v in layer for e in sorted(rank[b] for b in vertices[v].below)):
            total += len(passed) - bisect.bisect_right(passed, end)
            bisect.insort(passed, end)
    return total


def _edges(
    nodes: Sequence[DrawnNode],
    vertices: list[Vertex],
    place: dict[int, int],
    passing: dict[tuple[int, int], int],
) -> list[list[int]]:
    """Every edge as the points where it leaves, bends and arrives; it bends between layers only."""
    edges = []
    for n in nodes:
        target = vertices[place[n["id"]]]
        sources = list(dict.fromkeys(i for i in n["inputs"] if i in place))
        ways = []
        for source in sources:
            start = vertices[place[source]]
            lanes = [vertices[passing[source, between]] for between in range(start.layer + 1, target.layer)]
            ways.append((source, start, lanes))
        # Edges arrive side by side, in the order they come from.
        ways.sort(key=lambda way: (way[2] or [way[1]])[-1].x)
        port = min(14.0, (target.width - 20) / max(1, len(ways)))
        for at, (source, start, lanes) in enumerate(ways):
            arrival = round(target.x + (at - (len(ways) - 1) / 2) * port)
            points = [(round(start.x), _top(start) + HEIGHT)]
            for lane in lanes:
                points += [(round(lane.x), _top(lane)), (round(lane.x), _top(lane) + HEIGHT)]
            points.append((arrival, _top(target)))
            edges.append([source, n["id"], *(c for point in _bends(points) for c in point)])
    return edges


def _bends(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Points without those inside a straight vertical line."""
    kept = [points[0]]
    for before, point, after in zip(points, points[1:], points[2:], strict=False):
        if not before[0] == point[0] == after[0]:
            kept.append(point)
    return [*kept, points[-1]]


def _bands(nodes: Sequence[DrawnNode], vertices: list[Vertex], place: dict[int, int]) -> list[list[int]]:
    """Top and bottom of every repetition of the same layer of a model."""
    flow = [n for n in nodes if n["kind"] in ("op", "fused", "opaque") and not n["folded"]]
    runs = repetitions([n["op"] for n in flow])
    tops = [min(_top(vertices[place[n["id"]]]) for n in flow[run.start : run.stop]) for run in runs]
    if len(tops) < 2 or any(a >= b for a, b in itertools.pairwise(tops)):
        return []
    end = max(_top(vertices[place[n["id"]]]) for n in flow[runs[-1].start : runs[-1].stop])
    return [[a, b] for a, b in zip(tops, [*tops[1:], end + HEIGHT + GAP], strict=True)]
