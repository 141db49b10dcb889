"""The joint graph of a training step, before it is parted into a forward and a backward graph."""

from __future__ import annotations

import torch
from torch import fx

from ..devices import table
from . import channels_last, cross_entropy
from .graph_writer import Writer
from .records import value_of

aten = torch.ops.aten


def prepare(joint: fx.GraphModule) -> None:
    """Writes ops in words that regions of a plan understand, in place."""
    _name_no_layouts(joint)
    cross_entropy.take_apart(joint)
    _take_dropout_apart(joint)
    _forget_running_statistics(joint)
    _permute_before_stacking(joint)
    channels_last.turn_gradients_back(joint)


def _name_no_layouts(joint: fx.GraphModule) -> None:
    """Copies that name the layout that tensors have anyway are casts."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if node.kwargs.get("layout") is value_of(node.all_input_nodes[0]).layout:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "layout"}
    joint.recompile()


def _permute_before_stacking(joint: fx.GraphModule) -> None:
    """Gradients of query, key and value are stacked and permuted for one product: they are put together
    in the order that it reads, by one kernel instead of two."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.stack.default):
        (user,) = node.users if len(node.users) == 1 else (None,)
        if user is None or user.target is not aten.permute.default:
            continue
        if not table.of(value_of(node).device).rewrites_training():
            continue
        parts, at = node.args[0], node.args[1] if len(node.args) > 1 else 0
        rank = value_of(node).dim()
        order = [d % rank for d in user.args[1]]
        place = order.index(at % rank)
        # Dimensions of a part, which has one less.
        turned = [d - (d > at % rank) for d in order if d != at % rank]
        write = Writer(joint.graph, user)
        views = [
            write(aten.unsqueeze.default, write(aten.permute.default, part, turned), place) for part in parts
        ]
        joined = write(aten.cat.default, views, place)
        user.replace_all_uses_with(joined)
        joint.graph.erase_node(user)
        joint.graph.erase_node(node)
    joint.recompile()


def _forget_running_statistics(joint: fx.GraphModule) -> None:
    """The gradient of a batch norm by the statistics of its batch does not depend on others: they need not be
    kept for the backward pass."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] is True and table.of(value_of(node.args[1]).device).rewrites_training():
            node.args = (*node.args[:3], None, None, *node.args[5:])
    joint.recompile()


def _take_dropout_apart(joint: fx.GraphModule) -> None:
    """The gradient of dropout is a product with the mask and a number, rounded as torch rounds it."""
    found = joint.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default)
    for node in found:
        gradient, mask, scale = node.args
        value = value_of(node)
        # Products lie in memory as the gradient does, and so does what torch returns.
        alike = value_of(gradient).stride() == value.stride()
        if not alike or not table.of(value.device).rewrites_training():
            continue
        write = Writer(joint.graph, node)
        kept = write(aten._to_copy.default, mask, dtype=value.dtype)
        node.replace_all_uses_with(write(aten.mul.Tensor, write(aten.mul.Tensor, gradient, kept), scale))
        joint.graph.erase_node(node)
    if found:
        joint.recompile()
