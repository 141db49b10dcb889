"""Strides and memory of values in a rebuilt graph: eager's, where somebody can see them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._torch import OpOverload
from ..capture.layout import (
    has_aligned_rows,
    layout_of,
    padding_of,
    same_order,
    same_strides,
    storage_of,
)
from ..capture.records import value_of
from ..errors import UnsupportedError

aten = torch.ops.aten


class Builder(Protocol):
    """Whoever makes the graph."""

    graph: fx.Graph
    old: list[fx.Node]

    def helper(self, target: OpOverload, *args: object, **kwargs: object) -> fx.Node:
        """A new node that no captured one stands for."""

    def size(self, value: int | torch.SymInt) -> fx.Node | int:
        """A size as an argument."""


def like_eager(build: Builder, node: fx.Node, want: object) -> fx.Node:
    """The node, or a copy of it with the strides that eager's value has."""
    have = value_of(node)
    if not isinstance(want, torch.Tensor) or same_strides(have, want):
        return node
    repeated = [d for d in range(want.dim()) if _is_repeated(want, d)]
    if repeated:
        # What is seen several times is there once.
        once = want
        for d in repeated:
            node, once = build.helper(aten.slice.Tensor, node, d, 0, 1), once.narrow(d, 0, 1)
        node = like_eager(build, node, once)
        return build.helper(aten.expand.default, node, [build.size(n) for n in want.shape])
    memory_format, order = layout_of(want)
    if memory_format is not None:
        return build.helper(aten.clone.default, node, memory_format=memory_format)
    if order is None:
        return _spread(build, node, want)
    dense = build.helper(aten.permute.default, node, order)
    dense = build.helper(aten.clone.default, dense, memory_format=torch.contiguous_format)
    return build.helper(aten.permute.default, dense, [order.index(i) for i in range(len(order))])


def _is_repeated(value: torch.Tensor, dim: int) -> bool:
    return statically_known_true(value.stride(dim) == 0) and not statically_known_true(value.shape[dim] == 1)


def _spread(build: Builder, node: fx.Node, want: torch.Tensor) -> fx.Node:
    """A copy with gaps: dimensions in the order of memory are filled up, and seen without what fills them."""
    found = padding_of(want)
    if found is None:
        have = value_of(node)
        raise UnsupportedError(f"{node.name} would have strides {have.stride()} instead of {want.stride()}")
    order, padding = found
    rank = want.dim()
    node = build.helper(aten.permute.default, node, order)
    if not value_of(node).is_contiguous():
        # What fills it up would follow its memory format.
        node = build.helper(aten.clone.default, node, memory_format=torch.contiguous_format)
    node = build.helper(aten.unsqueeze.default, node, rank)
    filled = [n for pad in reversed(padding) for n in (0, pad)]
    whole = build.helper(aten.constant_pad_nd.default, node, filled)
    for d, pad in enumerate(padding[:rank]):
        if pad:
            whole = build.helper(aten.slice.Tensor, whole, d, 0, want.shape[order[d]])
    whole = build.helper(aten.select.int, whole, rank, 0)
    return build.helper(aten.permute.default, whole, [order.index(i) for i in range(rank)])


def rows_like_eager(
    build: Builder, target: OpOverload, values: list[object], old: fx.Node | None
) -> list[object]:
    """Operands of a call whose kernel torch chose by how eager's lay: in that order of dimensions; where
    that is not known, with rows without gaps."""

    def alike(position: int, node: object) -> object:
        if not isinstance(node, fx.Node):
            return node
        have = value_of(node)
        if not isinstance(have, torch.Tensor):
            return node
        name = target._schema.arguments[position].name
        read = None
        if old is not None:
            read = old.args[position] if position < len(old.args) else old.kwargs.get(name)
        if not has_aligned_rows(have):
            node = build.helper(aten.clone.default, node, memory_format=torch.contiguous_format)
            have = value_of(node)
        if isinstance(read, fx.Node):
            want = value_of(read)
            return node if same_order(have, want) else like_eager(build, node, want)
        if not have.dim() or statically_known_true(have.shape[-1] == 1) or have.stride(-1) == 1:
            return node
        return build.helper(aten.clone.default, node, memory_format=torch.contiguous_format)

    return [alike(position, node) for position, node in enumerate(values)]


class Aliases:
    """Keeps the sharing of memory among results and inputs as it is in eager."""

    def __init__(self, build: Builder, pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        self.build = build
        self.pairs = pairs
        """Results as they were captured and as they are now."""
        self.inputs = {storage_of(n) for n in build.old if n.op in ("placeholder", "get_attr")} - {None}
        self.seen: dict[int | None, int | None] = {}
        self.returned: dict[fx.Node, fx.Node] = {}

    def results(self) -> list[fx.Node]:
        """The nodes to return."""
        found: dict[int, fx.Node] = {}
        for place in range(len(self.pairs)):
            first = self._first(place)
            if first not in found:
                found[first] = self._result(*self.pairs[first])
            if place not in found:
                found[place] = self._beside(place, first, found[first])
        return [
            self._detached(self._apart(found[place], old), old) for place, (old, _) in enumerate(self.pairs)
        ]

    def _apart(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """Results that were two tensors stay two, in the same memory: autograd may want a gradient of one."""
        if self.returned.setdefault(new, old) is old:
            return new
        return self.build.helper(aten.alias.default, new)

    def _detached(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """A result that was detached from another one in its memory still is: as a view of that it would have
        its gradients."""
        memory = storage_of(old)
        shared = memory is not None and sum(storage_of(other) == memory for other, _ in self.pairs) > 1
        is_view = getattr(new.target, "is_view", False) and new.target is not aten.alias.default
        return self.build.helper(aten.detach.default, new) if shared and is_view and _detaches(old) else new

    def _first(self, place: int) -> int:
        """Of the results in one memory, the one that has all of it, or the first."""
        memory = storage_of(self.pairs[place][0])
        if memory is None or memory in self.inputs:
            return place
        same = [i for i, (old, _) in enumerate(self.pairs) if storage_of(old) == memory]
        return next((i for i in same if _is_whole(value_of(self.pairs[i][0]))), same[0])

    def _result(self, old: fx.Node, new: fx.Node) -> fx.Node:
        new = like_eager(self.build, new, value_of(old))
        theirs, ours = storage_of(old), storage_of(new)
        if ours is None:
            return new
        shared_before = theirs in self.inputs
        shares_now = ours in self.inputs or new.meta.get("folded", False) or ours in self._folded()
        if shared_before and ours != theirs:
            raise UnsupportedError(f"{old.name} would no longer share memory with an input")
        strangers = self.seen.setdefault(ours, theirs) != theirs
        if not shared_before and (shares_now or strangers):
            new = like_eager(self.build, self.build.helper(aten.clone.default, new), value_of(old))
            self.seen.setdefault(storage_of(new), theirs)
        return new

    def _beside(self, place: int, first: int, base: fx.Node) -> fx.Node:
        """A result in the memory of another."""
        old, new = self.pairs[place]
        have, want, whole = value_of(new), value_of(old), value_of(self.pairs[first][0])
        offset = value_of(base).storage_offset() + want.storage_offset() - whole.storage_offset()
        there = storage_of(new) == storage_of(base) and same_strides(have, want)
        if there and statically_known_true(have.storage_offset() == offset):
            return new
        if not _is_whole(whole):
            raise UnsupportedError(f"{old.name} would no longer share memory with another result")
        sizes = [[self.build.size(n) for n in part] for part in (want.shape, want.stride())]
        return self.build.helper(aten.as_strided.default, base, *sizes, self.build.size(offset))

    def _folded(self) -> set[int | None]:
        return {storage_of(n) for n in self.build.graph.nodes if n.meta.get("folded")} - {None}


def _detaches(node: fx.Node) -> bool:
    """Whether a view was detached from the memory that it shows."""
    while getattr(node.target, "is_view", False) and node.all_input_nodes:
        if node.target is aten.detach.default:
            return True
        node = node.all_input_nodes[0]
    return False


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a tensor has all elements of its memory, each once."""
    memory_format, order = layout_of(value)
    held = value.untyped_storage().nbytes()
    gapless = memory_format is not None or order is not None
    return gapless and statically_known_true(held == value.numel() * value.element_size())
