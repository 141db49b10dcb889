"""The joint graph of a training step, before it is parted into a forward and a backward graph."""

from __future__ import annotations

import torch
from torch import fx

from . import channels_last, cross_entropy
from .graph_writer import Writer
from .records import value_of

aten = torch.ops.aten


def prepare(joint: fx.GraphModule) -> None:
    """Writes ops in words that regions of a plan understand, in place."""
    cross_entropy.take_apart(joint)
    _take_dropout_apart(joint)
    channels_last.turn_gradients_back(joint)


def _take_dropout_apart(joint: fx.GraphModule) -> None:
    """The gradient of dropout is a product with the mask and a number, rounded as torch rounds it."""
    found = joint.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default)
    for node in found:
        gradient, mask, scale = node.args
        value = value_of(node)
        # Products lie in memory as the gradient does, and so does what torch returns.
        if value.device.type not in cross_entropy.DEVICES or value_of(gradient).stride() != value.stride():
            continue
        write = Writer(joint.graph, node)
        kept = write(aten._to_copy.default, mask, dtype=value.dtype)
        node.replace_all_uses_with(write(aten.mul.Tensor, write(aten.mul.Tensor, gradient, kept), scale))
        joint.graph.erase_node(node)
    if found:
        joint.recompile()
