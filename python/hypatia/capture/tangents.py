"""Backward graphs without the gradients of results that nobody differentiates.

A model that returns a loss beside its logits is trained by the loss. Torch's graph adds the gradient of the
logits all the same, which is a tensor of zeros then: as large as the logits, filled, read and added at every
step. Eager does nothing of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .constant_values import copied
from .records import value_of

aten = torch.ops.aten

_KEEPS_ZERO = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.neg.default,
    aten.slice_backward.default,
    aten.select_backward.default,
}
"""What these make of zeros is zeros."""


def rarely_given(gm: fx.GraphModule) -> list[int]:
    """The tangents of a backward graph that are rarely given: where some are single numbers, all others."""
    dims = [value_of(n).dim() for n in _tangents(gm.graph)]
    return [i for i, d in enumerate(dims) if d] if 0 in dims else []


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    """They are the last inputs of a backward graph, and named so."""
    return [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents_")]


def without(gm: fx.GraphModule, tangents: Sequence[int]) -> fx.GraphModule | None:
    """A copy of a backward graph in which these of its tangents are zero and not read; none if something
    else than a sum reads what is made of them."""
    copy = copied(gm)
    given = _tangents(copy.graph)
    zeros = {given[i] for i in tangents}
    last = list(zeros)
    for node in list(copy.graph.nodes):
        read = zeros.intersection(node.all_input_nodes)
        if not read:
            continue
        if node.target in _KEEPS_ZERO:
            zeros.add(node)
            last.append(node)
        elif node.target is aten.add.Tensor and _other(node, zeros) is not None:
            node.replace_all_uses_with(_other(node, zeros))
            copy.graph.erase_node(node)
        else:
            return None
    for node in reversed(last):
        if node.op != "placeholder":
            copy.graph.erase_node(node)
    copy.recompile()
    return copy


def _other(node: fx.Node, zeros: set[fx.Node]) -> fx.Node | None:
    """What a sum is, if one of its operands is zero."""
    if len(node.args) != 2 or node.kwargs:
        return None
    others = [a for a in node.args if a not in zeros]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    ours, whole = value_of(others[0]), value_of(node)
    alike = ours.shape == whole.shape and ours.dtype == whole.dtype and ours.stride() == whole.stride()
    return others[0] if alike else None
