"""What an optimized graph was made for: it says so when it is called with something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..capture.op_facts import changed_inputs
from ..capture.records import value_of
from ..capture.size_ranges import Ranges
from ..errors import InputError

_MOST = 2**62
"""A size without a bound."""


def check_inputs(
    names: Sequence[str],
    kinds: Sequence[object],
    *inputs: Any,
    changed: Sequence[str] = (),
    lying: Sequence[object] = (),
) -> None:
    """Compares the inputs of a call with those that a graph was made for.

    The kind of a tensor is its dtype and sizes, of which open ones are pairs of bounds; that of anything
    else is a value, or none if it does not matter. Tensors that are changed have no element twice. Where
    it matters how tensors lie, that is their strides, or whether they are contiguous.

    Raises:
        InputError: a size or a dtype is another one, or a number is, or strides are.
    """
    traced = next((v for v in inputs if isinstance(v, fx.Proxy)), None)
    if traced is not None:
        # Graphs are read from a file by tracing their code.
        more = {"changed": tuple(changed), "lying": tuple(lying)}
        traced.tracer.create_proxy("call_function", check_inputs, (tuple(names), tuple(kinds), *inputs), more)
        return
    for name, kind, value, lies in zip(names, kinds, inputs, lying or [None] * len(names), strict=True):
        if kind is not None and not _is_of(kind, value):
            raise InputError(
                f"this graph was made for {name} = {_text(kind)}, not {_text(_kind(value))}; "
                "optimize the model for that too, or leave sizes open with dynamic_shapes"
            )
        if name in changed and any(
            n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True)
        ):
            raise InputError(f"this graph changes {name}, of which elements share memory; give it a copy")
        if lies is not None and not _lies_so(lies, value):
            wanted = f"strides {lies}" if isinstance(lies, tuple) else f"is_contiguous() = {lies}"
            raise InputError(
                f"this graph was made for {name} with {wanted}, not strides {value.stride()}, which decide "
                "what the model changes in place; optimize the model for that too"
            )


def _lies_so(lies: object, tensor: torch.Tensor) -> bool:
    if not isinstance(lies, tuple):
        return tensor.is_contiguous() == lies
    wanted = zip(tensor.shape, tensor.stride(), lies, strict=True)
    return all(size < 2 or stride == want for size, stride, want in wanted) or not tensor.numel()


def with_checked_inputs(
    gm: fx.GraphModule, examples: Sequence[object], ranges: Ranges, *, strides_decide: bool
) -> None:
    """Makes a graph check its inputs, and their strides where these decide what is changed."""
    nodes = gm.graph.find_nodes(op="placeholder")
    if not nodes or len(nodes) != len(examples):
        return
    kinds = [_wanted(n, e, i, ranges) for i, (n, e) in enumerate(zip(nodes, examples, strict=True))]
    names = tuple(str(n.target) for n in nodes)
    more: dict[str, fx.node.Argument] = {}
    if changed := tuple(str(n.target) for n in changed_inputs(gm) if n.op == "placeholder"):
        more["changed"] = changed
    if strides_decide:
        more["lying"] = tuple(_lying(e, kind) for e, kind in zip(examples, kinds, strict=True))
    with gm.graph.inserting_after(nodes[-1]):
        gm.graph.call_function(check_inputs, (names, tuple(kinds), *nodes), more)
    gm.recompile()


def _wanted(node: fx.Node, example: object, place: int, ranges: Ranges) -> Any:
    if not isinstance(example, torch.Tensor):
        # Open numbers are symbols of the graph.
        return None if isinstance(value_of(node), torch.SymInt) and ranges else _kind(example)
    shape = getattr(value_of(node), "shape", example.shape)
    # A size that was asked to be open may have turned out to be fixed.
    known = [n if isinstance(n, int) else n.node.maybe_as_int() for n in shape]
    # Where it is not known which values a graph holds for, it holds for those of the example.
    wanted = [
        n if n is not None else ranges[place, d][:2] if (place, d) in ranges else example.shape[d]
        for d, n in enumerate(known)
    ]
    return (example.dtype, *wanted)


def _lying(example: object, kind: object) -> tuple[int, ...] | bool | None:
    """Strides where sizes are fixed, else whether a tensor is contiguous; none of anything else."""
    if not isinstance(example, torch.Tensor) or not isinstance(kind, tuple):
        return None
    if example.layout is not torch.strided:
        return None
    fixed = all(isinstance(n, int) for n in kind[1:])
    return tuple(example.stride()) if fixed else example.is_contiguous()


def _kind(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, *value.shape)
    return value if isinstance(value, (int, float, str, bool)) else None


def _is_of(kind: object, value: object) -> bool:
    if not isinstance(kind, tuple):
        return type(kind) is type(value) and (kind == value or kind != kind)
    if not isinstance(value, torch.Tensor) or value.dtype != kind[0] or value.dim() != len(kind) - 1:
        return False
    return all(
        n == k if isinstance(k, int) else k[0] <= n <= k[1]
        for n, k in zip(value.shape, kind[1:], strict=True)
    )


def _text(kind: object) -> str:
    if not isinstance(kind, tuple):
        return repr(kind)
    sizes = [str(k) if isinstance(k, int) else f"{k[0]}..{'' if k[1] >= _MOST else k[1]}" for k in kind[1:]]
    return f"{str(kind[0]).removeprefix('torch.')}[{', '.join(sizes)}]"
