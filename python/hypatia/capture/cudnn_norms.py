"""Batch norms that a captured graph calls by cuDNN's own name.

``batch_norm`` makes its operand dense before it asks cuDNN, which refuses others. In a graph that was
captured on a GPU only the second call is left where the example was dense, and an input that lies otherwise
is an error.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .records import value_of

_aten = torch.ops.aten


def for_any_strides(gm: fx.GraphModule) -> None:
    """Makes such norms by given statistics ``batch_norm`` again, in place: the same kernel runs."""
    found = gm.graph.find_nodes(op="call_function", target=_aten.cudnn_batch_norm.default)
    for norm in found:
        x, weight, bias, mean, variance, training, momentum, eps = norm.args
        items = list(norm.users)
        if training or any(n.target is not operator.getitem or n.args[1] != 0 for n in items):
            continue
        with gm.graph.inserting_before(norm):
            args = (x, weight, bias, mean, variance, False, momentum, eps, True)
            whole = gm.graph.call_function(_aten.batch_norm.default, args)
        whole.meta = {**norm.meta, "val": value_of(norm)[0]}
        for item in items:
            item.replace_all_uses_with(whole)
            gm.graph.erase_node(item)
        gm.graph.erase_node(norm)
    if found:
        gm.recompile()
