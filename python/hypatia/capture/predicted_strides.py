"""Strides that torch foretells wrongly are put right in a captured graph, before anything relies on them.

On a CPU a batch norm and its gradient return a contiguous tensor, or one with channels last where their input
has that; the fake tensors of torch keep whatever strides the input has. What is computed from there on is
foretold anew, and a view that was captured because of the wrong strides is a reshape instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._torch import detect_fake_mode, pytree
from ..errors import UnsupportedError
from .records import value_of

_aten = torch.ops.aten
_BATCH_NORMS = frozenset(
    {
        _aten.batch_norm.default,
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten._native_batch_norm_legit_no_training.default,
        _aten._batch_norm_no_update.default,
        _aten._batch_norm_with_update.default,
        _aten._batch_norm_with_update_functional.default,
        _aten.native_batch_norm_backward.default,
    }
)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def put_right(gm: fx.GraphModule) -> None:
    """Gives the values of a graph the strides that a run has, in place.

    Raises:
        UnsupportedError: they cannot be told, since sizes are open.
    """
    anew: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        value = value_of(node)
        read_anew = any(n in anew for n in node.all_input_nodes)
        if read_anew:
            value = _called(node, anew)
            if value is None and node.target is _aten.view.default:
                node.target = _aten.reshape.default
                value = _called(node, anew)
            if value is None:
                # Torch's own graph does not fit what its ops return: the check of the first call decides.
                return
        if node.target in _BATCH_NORMS:
            several = isinstance(value, (tuple, list))
            first, *others = value if several else (value,)
            if _is_wrong(first):
                first = torch.empty_like(first, memory_format=torch.contiguous_format)
                anew[node] = (first, *others) if several else first
                continue
        if read_anew:
            anew[node] = value
    for node, value in anew.items():
        node.meta["val" if "val" in node.meta else "example_value"] = value


def _is_wrong(foretold: object) -> bool:
    """Whether a batch norm on a CPU never returns a tensor that lies like this."""
    if not isinstance(foretold, torch.Tensor) or foretold.device.type != "cpu" or foretold.is_contiguous():
        return False
    if any(type(n) is not int for n in foretold.shape):
        raise UnsupportedError("the strides of a batch norm are not known: sizes are open")
    last = _LAST.get(foretold.dim())
    return not (last and foretold.is_contiguous(memory_format=last))


def _called(node: fx.Node, anew: dict[fx.Node, Any]) -> object:
    """What a call returns of the values that are known by now; none if it cannot be made."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: anew.get(n, value_of(n)))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    if mode is None:
        return None
    try:
        with torch.no_grad(), mode:
            value: object = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None
    return value
