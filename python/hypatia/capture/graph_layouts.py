"""How the tensors of a captured graph lie in memory, at given sizes: what a plan has to keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import sympy
import torch
from torch import fx

from .. import _native
from .layout import storage_of
from .records import Captured, value_of

Sizes = Mapping[str, int]


class Layouts(TypedDict):
    """Strides by the names of nodes, of what they are and of what they read; how results lie."""

    results: dict[str, list[list[int] | None]]
    reads: dict[str, list[list[int] | None]]
    outputs: list[dict[str, object]]


class UnknownSizeError(_native.HypatiaError):
    """A size or a stride that the sizes of the inputs do not tell."""


def layouts(captured: Captured, plain: int | None, sizes: Sizes) -> Layouts:
    """How results lie, and by node: what it is and what it reads, where elements do not follow each other.

    In a graph of a training step so many first results are ``plain``; the others are kept for a backward
    pass, which has views of them, or are gradients, for which it is all the same.
    """
    found: Layouts = {"results": {}, "reads": {}, "outputs": []}
    for node in captured.nodes:
        value = value_of(node)
        items = value if isinstance(value, (list, tuple)) else [value]
        results = [_unusual(v, sizes) for v in items]
        reads = [_unusual(value_of(n), sizes) for n in node.all_input_nodes]
        for part, listed in ((found["results"], results), (found["reads"], reads)):
            if any(s is not None for s in listed):
                part[node.name] = listed
    owners: dict[int | None, int] = {}
    for place, node in enumerate(captured.results):
        if isinstance(value_of(node), (int, torch.SymInt)):
            found["outputs"].append({})
            continue
        if not isinstance(value_of(node), torch.Tensor):
            raise UnknownSizeError(f"{node.name} is no tensor")
        if plain is None or place < plain:
            found["outputs"].append(_wanted(node, owners, sizes))
        else:
            strides = numbers(value_of(node).stride(), sizes) if plain else None
            found["outputs"].append({"strides": strides, "memory": "any"})
    return found


def _wanted(node: fx.Node, owners: dict[int | None, int], sizes: Sizes) -> dict[str, object]:
    value, root = value_of(node), _root(node)
    strides, (offset,) = numbers(value.stride(), sizes), numbers([value.storage_offset()], sizes)
    if root.op in ("placeholder", "get_attr"):
        (first,) = numbers([value_of(root).storage_offset()], sizes)
        return {"strides": strides, "offset": offset - first, "memory": {"input": root.name}}
    held, count = numbers([value.untyped_storage().nbytes(), value.numel()], sizes)
    return {
        "strides": strides,
        "offset": offset,
        "whole": held == count * value.element_size(),
        "memory": {"own": owners.setdefault(storage_of(node), len(owners))},
    }


def _root(node: fx.Node) -> fx.Node:
    """Whose memory a value is in: what it is a view of, or itself."""
    memory = storage_of(node)
    while memory is not None:
        views = [n for n in node.all_input_nodes if _shares(n, memory)]
        if not views:
            break
        node = views[0]
    return node


def _shares(node: fx.Node, memory: int) -> bool:
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == memory for v in value)
    return storage_of(node) == memory


def _unusual(value: Any, sizes: Sizes) -> list[int] | None:
    """Strides of a tensor whose elements do not lie one after the other."""
    if not is_plain(value):
        return None
    shape, strides = numbers(value.shape, sizes), numbers(value.stride(), sizes)
    return None if follows(shape, strides) else strides


def follows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after the other."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def is_plain(value: object) -> bool:
    """Whether a value is a tensor whose elements are in memory as they are."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def numbers(values: Sequence[int | torch.SymInt], sizes: Sizes) -> list[int]:
    """Sizes or strides with values for their symbols."""
    return [v if isinstance(v, int) else _number(v, sizes) for v in values]


def _number(value: torch.SymInt, sizes: Sizes) -> int:
    expression = value.node.expr
    known = {s: sympy.Integer(sizes[str(s)]) for s in expression.free_symbols if str(s) in sizes}
    found = expression.xreplace(known)
    if not found.is_Integer:
        raise UnknownSizeError(f"no native plan: the size {expression} is not known")
    return int(found)
