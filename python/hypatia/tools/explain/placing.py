"""Places from left to right for the vertices of a graph in layers: near their neighbours, chains straight."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

SPACE, LANE = 16, 12
"""Room between two nodes, and of an edge that passes a layer."""

SWEEPS = 12
"""Passes over the layers."""

GRAVITY = 0.3
"""Pull of the middle: without it the layers of a deep model drift sideways."""


Beside = tuple[int | None, float, int | None, float]
"""The vertex to the left and its least distance, and the same to the right."""


@dataclasses.dataclass
class Vertex:
    """A node of the graph, or a place where a long edge passes a layer."""

    layer: int
    width: float
    lane: bool = False
    above: list[int] = dataclasses.field(default_factory=list)
    below: list[int] = dataclasses.field(default_factory=list)
    x: float = 0.0


def placed(vertices: list[Vertex], order: list[list[int]]) -> None:
    """Gives every vertex its x; ``order`` has the vertices of each layer from left to right."""
    rooms = [_rooms(vertices, layer) for layer in order]
    for layer, room in zip(order, rooms, strict=True):
        _put(vertices, layer, straighten([0.0] * len(layer), room))
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        pairs = list(zip(order, rooms, strict=True))
        for layer, room in pairs if downwards else reversed(pairs):
            wishes = []
            for v in layer:
                near = (vertices[v].above if downwards else vertices[v].below) or [v]
                pull = 0.0 if vertices[v].lane else GRAVITY
                wishes.append(sum(vertices[u].x for u in near) / (len(near) + pull))
            _put(vertices, layer, straighten(wishes, room))
    _align(vertices, order, rooms)


def straighten(wishes: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Positions nearest to the wishes, ``rooms[i]`` or more right of position ``i - 1``.

    Without the distances this is isotonic regression; neighbours that would overlap move as one block.
    """
    offsets, total = [], 0.0
    for room in rooms:
        total += room
        offsets.append(total)
    blocks: list[tuple[float, int]] = []
    for wish, offset in zip(wishes, offsets, strict=True):
        blocks.append((wish - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = (blocks[-1][0] + last[0], blocks[-1][1] + last[1])
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _align(vertices: list[Vertex], order: list[list[int]], rooms: list[list[float]]) -> None:
    """Moves chains of vertices as one, so that they are drawn as straight lines."""
    beside: dict[int, Beside] = {}
    for layer, room in zip(order, rooms, strict=True):
        for at, v in enumerate(layer):
            left = layer[at - 1] if at else None
            right, gap = (layer[at + 1], room[at + 1]) if at + 1 < len(layer) else (None, 0.0)
            beside[v] = (left, room[at], right, gap)
    chains = _chains(vertices, order)
    for sweep in range(2 * SWEEPS):
        for chain in chains if sweep % 2 == 0 else reversed(chains):
            for piece, low, high in _pieces(vertices, chain, beside):
                inside = set(piece)
                near = [u for v in piece for u in vertices[v].above + vertices[v].below if u not in inside]
                # First in line, then near the neighbours.
                if sweep < 2 or not near:
                    wish = sum(vertices[v].x for v in piece) / len(piece)
                else:
                    pull = 0.0 if vertices[piece[0]].lane else GRAVITY
                    wish = sum(vertices[u].x for u in near) / (len(near) + pull)
                for v in piece:
                    vertices[v].x = min(high, max(low, wish))


def _pieces(
    vertices: list[Vertex], chain: list[int], beside: Mapping[int, Beside]
) -> Iterator[tuple[list[int], float, float]]:
    """A chain in as few pieces as have room to be straight, each with the room it has."""
    piece: list[int] = []
    low, high = -math.inf, math.inf
    for v in chain:
        left, before, right, after = beside[v]
        own_low = -math.inf if left is None else vertices[left].x + before
        own_high = math.inf if right is None else vertices[right].x - after
        if piece and max(low, own_low) > min(high, own_high) + 1e-6:
            yield piece, low, high
            piece, low, high = [], -math.inf, math.inf
        piece.append(v)
        low, high = max(low, own_low), min(high, own_high)
    yield piece, low, high


def _chains(vertices: list[Vertex], order: list[list[int]]) -> list[list[int]]:
    """Vertices one below the other that should be in line: long edges first, then the middle of each fork."""
    rank = {v: at for layer in order for at, v in enumerate(layer)}
    follows: dict[int, int] = {}
    taken: set[int] = set()
    for lanes in (True, False):
        for layer in order:
            for v in layer:
                above = sorted((u for u in vertices[v].above), key=rank.__getitem__)
                if lanes:
                    above = [u for u in above if vertices[u].lane and vertices[v].lane]
                free = [u for u in above if u not in follows and vertices[u].lane == vertices[v].lane]
                if v not in taken and free:
                    upper = free[len(free) // 2] if len(free) % 2 else free[len(free) // 2 - 1]
                    children = sorted(vertices[upper].below, key=rank.__getitem__)
                    # Of several users the middle one is in line.
                    same = [c for c in children if vertices[c].lane == vertices[upper].lane]
                    if same[(len(same) - 1) // 2] == v:
                        follows[upper] = v
                        taken.add(v)
    chains = []
    for layer in order:
        for v in layer:
            if v not in taken:
                chain = [v]
                while chain[-1] in follows:
                    chain.append(follows[chain[-1]])
                chains.append(chain)
    return chains


def _rooms(vertices: list[Vertex], layer: list[int]) -> list[float]:
    """The least distance of each vertex from the one to its left."""
    rooms = [0.0]
    for a, b in itertools.pairwise(layer):
        lanes = vertices[a].lane and vertices[b].lane
        rooms.append((vertices[a].width + vertices[b].width) / 2 + (0 if lanes else SPACE))
    return rooms[: len(layer)]


def _put(vertices: list[Vertex], layer: list[int], xs: Sequence[float]) -> None:
    for v, x in zip(layer, xs, strict=True):
        vertices[v].x = x
