"""Strides that meta kernels of torch get wrong are put right, before anything relies on them.

On a CPU a batch norm and its gradient return a contiguous tensor, or one with channels last where their input
has that; the fake tensors of torch keep whatever strides the input has. ``roll`` of an image with channels
last keeps them there, since it is a ``cat`` of two parts; a fake one is contiguous. ``zero`` keeps the
strides of its input; with open sizes torch 2.11 foretells contiguous ones. In a graph that torch captured,
what is computed from there on gets fake tensors anew, and a view that is there because of the wrong strides
is a reshape instead.
"""

from __future__ import annotations

from collections.abc import Sequence
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
                gm.recompile()
                value = _called(node, anew)
            if value is None:
                # Torch's own graph does not fit what its ops return: the check of the first call decides.
                return
        args = fx.node.map_arg(node.args, lambda n: anew.get(n, value_of(n)))
        right = as_it_lies(node.target, args, value)
        if read_anew or right is not value:
            anew[node] = right
    for node, value in anew.items():
        node.meta["val" if "val" in node.meta else "example_value"] = value


def as_it_lies(op: object, args: tuple[Any, ...], predicted: Any) -> Any:
    """What a call returns, with the strides of a run: the same object if the meta kernel is right.

    Raises:
        UnsupportedError: they cannot be told, since sizes are open.
    """
    if op in _BATCH_NORMS:
        several = isinstance(predicted, (tuple, list))
        first, *others = predicted if several else (predicted,)
        if not _may_be_wrong(first, first) or _has_channels_last(first):
            return predicted
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
        return (first, *others) if several else first
    if op is _aten.zero.default:
        _refuse_open(args[0], predicted)
    if op is _aten.roll.default and args[0].dim() in _LAST and _may_be_wrong(predicted, args[0]):
        return _rolled(*args)
    return predicted


def _refuse_open(given: torch.Tensor, predicted: torch.Tensor) -> None:
    """Refuses an op that keeps strides where these were not foretold, since sizes are open."""
    is_open = any(type(n) is not int for n in predicted.shape)
    if is_open and predicted.is_contiguous() and not given.is_contiguous():
        raise UnsupportedError("the strides of zeros are not known: sizes are open")


def _may_be_wrong(predicted: object, lies: object) -> bool:
    """Whether an op on a CPU may return other strides: by the tensor that decides about it."""
    if not isinstance(predicted, torch.Tensor) or not isinstance(lies, torch.Tensor):
        return False
    if predicted.device.type != "cpu" or lies.is_contiguous():
        return False
    if any(type(n) is not int for n in lies.shape):
        raise UnsupportedError("the strides of a batch norm or of roll are not known: sizes are open")
    return True


def _has_channels_last(value: torch.Tensor) -> bool:
    last = _LAST.get(value.dim())
    return bool(last and value.is_contiguous(memory_format=last))


@torch.no_grad()
def _rolled(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """What ``roll`` returns on a CPU, in the words of torch's own kernel."""
    if not dims:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    for shift, dim in zip(shifts, dims, strict=True):
        first = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, first, x.shape[dim] - first), x.narrow(dim, 0, first)], dim)
    return x


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
