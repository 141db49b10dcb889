"""Convolutional nets are trained with their channels last.

Kernels for tensor cores read images that way. Of others, cuDNN makes such copies before every convolution and
back behind it, in both passes, and torch's batch norms are slow. Where the images of a graph have their
channels last from the first convolution on, torch's ops keep them so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..devices import table
from .graph_writer import Writer
from .records import value_of

aten = torch.ops.aten

_CONVOLUTIONS = (torch.conv2d, torch.nn.functional.conv2d, aten.conv2d.default, aten.convolution.default)
LEAST = 8
"""A net with fewer convolutions is something else: patches of a transformer are made by one."""
_DTYPES = (torch.bfloat16, torch.float16)


def turned(gm: fx.GraphModule) -> int:
    """Gives the convolutions of a graph their inputs with channels last, in place; says how many.

    None is turned where a result is an image: it would lie in memory otherwise than the model's own.
    """
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _CONVOLUTIONS]
    if len(found) < LEAST or not all(map(_can_turn, found)) or any(map(_is_image, _results(gm))):
        return 0
    if any(_is_image(n) and value_of(n).requires_grad for n in _inputs(gm)):
        return 0
    for node in found:
        for read in (_argument(node, 0, "input"), _argument(node, 1, "weight")):
            # Each time anew: what is read may be changed in place in between.
            with gm.graph.inserting_before(node):
                turn = gm.graph.call_method("contiguous", (read,), {"memory_format": torch.channels_last})
            turn.meta = dict(read.meta)
            node.replace_input_with(read, turn)
    gm.recompile()
    return len(found)


def turn_gradients_back(joint: fx.GraphModule) -> None:
    """Gradients of weights lie as the weights do: else autograd copies them one by one."""
    primals = [n for n in joint.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents_")]
    (output,) = joint.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    places = range(len(results) - len(primals), len(results))
    if len(results) < len(primals):
        return
    for place, primal in zip(places, primals, strict=True):
        gradient = results[place]
        if not isinstance(gradient, fx.Node) or gradient in primals or not _is_image(gradient):
            continue
        given, value = value_of(primal), value_of(gradient)
        if value.shape == given.shape and given.is_contiguous() and not value.is_contiguous():
            write = Writer(joint.graph, output)
            results[place] = write(aten.clone.default, gradient, memory_format=torch.contiguous_format)
            results[place].meta["partitioner_tag"] = "is_backward"
    output.args = (type(output.args[0])(results),)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _can_turn(node: fx.Node) -> bool:
    """Whether a convolution is one of images on a GPU in 16 bits, also where autocast makes it one."""
    read = [_argument(node, 0, "input"), _argument(node, 1, "weight")]
    if not all(isinstance(n, fx.Node) and _is_image(n) for n in read):
        return False
    result = value_of(node)
    return table.of(result.device).rewrites_training() and result.dtype in _DTYPES


def _is_image(node: object) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """What is no weight of a convolution."""
    weights = {_argument(n, 1, "weight") for n in gm.graph.nodes if n.target in _CONVOLUTIONS}
    return [n for n in gm.graph.find_nodes(op="placeholder") if n not in weights]


def _results(gm: fx.GraphModule) -> list[object]:
    (output,) = gm.graph.find_nodes(op="output")
    found: list[object] = []
    fx.node.map_arg(output.args, found.append)
    return found
