"""Cross-entropy in the joint graph of a training step, written so that the logits are not kept a second time.

Torch computes the logarithms of all probabilities, keeps them for the backward pass, and makes a gradient of
them that is zero but for one place in each row: with a large vocabulary that is most of the memory of a
step, and much of its time. What the backward pass needs is two numbers of each row. These are computed here,
and the gradient is one pointwise expression of them and of the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..devices import table
from .graph_writer import Writer
from .records import value_of

aten = torch.ops.aten

LEAST = 2**18
"""Logits that are fewer than this take no time worth mentioning."""
_MEAN, _SUM = 1, 2
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class _Loss(NamedTuple):
    """A call of cross-entropy and its gradient."""

    log: fx.Node
    """The logarithms of the probabilities."""
    forward: fx.Node
    backward: fx.Node | None
    gradient: fx.Node | None
    target: fx.Node
    reduction: int
    ignored: int


def take_apart(joint: fx.GraphModule) -> int:
    """Rewrites the cross-entropies of a joint graph on a GPU, in place; says how many."""
    found = [loss for n in joint.graph.nodes if (loss := _loss(n)) is not None]
    for loss in found:
        _rewrite(joint.graph, loss)
    if found:
        joint.graph.lint()
        joint.recompile()
    return len(found)


def _loss(node: fx.Node) -> _Loss | None:
    if node.target is not aten._log_softmax.default:
        return None
    value = value_of(node)
    same = _with_detached(node)
    readers = [u for n in same for u in n.users if u not in same]
    users = {u.target: u for u in readers}
    if len(users) < len(readers) or not isinstance(value, torch.Tensor):
        return None
    forward = users.pop(aten.nll_loss_forward.default, None)
    backward = users.pop(aten.nll_loss_backward.default, None)
    gradient = users.pop(aten._log_softmax_backward_data.default, None)
    fits = (
        table.of(value.device).rewrites_training()
        and value.dim() == 2
        and all(type(n) is int for n in value.shape)
        and value.numel() >= LEAST
        and value.dtype in _FLOATS
        and value_of(_first(node)).dtype == value.dtype
        and node.args[1] in (1, -1)
    )
    if forward is None or users or (backward is None) != (gradient is None) or not fits:
        return None
    given: Any = forward.args
    _, target, weight, reduction, ignored = given
    if weight is not None or reduction not in (_MEAN, _SUM) or not isinstance(target, fx.Node):
        return None
    if value_of(target).dtype != torch.int64 or value_of(target).dim() != 1:
        return None
    if backward is not None and gradient is not None:
        # The gradient of this very call.
        its_own = backward.args[1] in same and backward.args[2:6] == (target, None, reduction, ignored)
        if not its_own or gradient.args[0] is not backward or set(backward.users) != {gradient}:
            return None
        if gradient.args[3] != value.dtype:
            return None
    return _Loss(node, forward, backward, gradient, target, reduction, ignored)


def _first(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _with_detached(node: fx.Node) -> list[fx.Node]:
    """The node, and what autograd made of it without gradients."""
    found = [node]
    for known in found:
        found += [u for u in known.users if u.target is aten.detach.default]
    return found


def _rewrite(graph: fx.Graph, loss: _Loss) -> None:
    """Puts the same in other words into the graph."""
    row = _rows(graph, loss)
    write = Writer(graph, loss.forward)
    at = _cast(write, write(aten.gather.default, row.logits, 1, row.place), torch.float32)
    log = write(aten.sub.Tensor, write(aten.sub.Tensor, at, row.most), row.total)
    each = write(aten.neg.default, write(aten.squeeze.dim, log, 1))
    result = write(aten.sum.dim_IntList, write(aten.masked_fill.Scalar, each, row.hidden, 0.0), [0])
    if loss.reduction == _MEAN:
        result = write(aten.div.Tensor, result, row.number)
    dtype = value_of(loss.log).dtype
    results = [_cast(write, n, dtype) for n in (result, row.number)]
    for user in list(loss.forward.users):
        place: Any = user.args[1]
        user.replace_all_uses_with(results[place])
        graph.erase_node(user)
    if loss.gradient is not None and loss.backward is not None:
        _write_gradient(graph, loss, row, loss.backward, loss.gradient)
        graph.erase_node(loss.gradient)
        graph.erase_node(loss.backward)
    graph.erase_node(loss.forward)
    for node in reversed(_with_detached(loss.log)):
        graph.erase_node(node)


class _Rows(NamedTuple):
    """What is known of each row of the logits."""

    logits: fx.Node
    most: fx.Node
    """The largest one."""
    total: fx.Node
    """The logarithm of the sum of all exponentials, less the largest one."""
    hidden: fx.Node
    """Whether the row does not count."""
    place: fx.Node
    """The column of its target, and any other if it does not count."""
    number: fx.Node
    """How many rows count."""


def _rows(graph: fx.Graph, loss: _Loss) -> _Rows:
    write = Writer(graph, loss.forward)
    logits = _narrow(write, loss.log.args[0])
    x = _cast(write, logits, torch.float32)
    most = write(aten.amax.default, x, [1], True)
    powers = write(aten.exp.default, write(aten.sub.Tensor, x, most))
    total = write(aten.log.default, write(aten.sum.dim_IntList, powers, [1], True))
    hidden = write(aten.eq.Scalar, loss.target, loss.ignored)
    place = write(aten.unsqueeze.default, write(aten.masked_fill.Scalar, loss.target, hidden, 0), 1)
    counted = _cast(write, write(aten.logical_not.default, hidden), torch.float32)
    return _Rows(logits, most, total, hidden, place, write(aten.sum.dim_IntList, counted, [0]))


def _write_gradient(graph: fx.Graph, loss: _Loss, row: _Rows, backward: fx.Node, gradient: fx.Node) -> None:
    """The gradient of the logits: probabilities, less one at the target."""
    write = Writer(graph, gradient)
    value = value_of(gradient)
    scale = _cast(write, backward.args[0], torch.float32)
    if loss.reduction == _MEAN:
        scale = write(aten.div.Tensor, scale, row.number)
    scale = write(aten.expand.default, scale, [value.shape[0]])
    scale = write(aten.unsqueeze.default, write(aten.masked_fill.Scalar, scale, row.hidden, 0.0), 1)
    # Every element reads its column: the fewer bytes that has, the better.
    columns = write(aten.arange.default, value.shape[1], dtype=torch.int32, device=value.device)
    place = _cast(write, row.place, torch.int32)
    hit = _cast(write, write(aten.eq.Tensor, columns, place), torch.float32)
    logits = _cast(write, row.logits, torch.float32)
    shifted = write(aten.sub.Tensor, write(aten.sub.Tensor, logits, row.most), row.total)
    found = write(aten.sub.Tensor, write(aten.exp.default, shifted), hit)
    found = write(aten.mul.Tensor, found, scale)
    narrow = _narrowed(gradient)
    if narrow is None:
        gradient.replace_all_uses_with(_cast(write, found, value.dtype))
        return
    found = _cast(write, found, value_of(narrow).dtype)
    narrow.replace_all_uses_with(write(aten.view.default, found, list(value_of(narrow).shape)))
    while narrow is not gradient:
        above = narrow.all_input_nodes[0]
        graph.erase_node(narrow)
        narrow = above


def _cast(write: Writer, node: Any, dtype: torch.dtype) -> fx.Node:
    return node if value_of(node).dtype == dtype else write(aten._to_copy.default, node, dtype=dtype)


def _narrow(write: Writer, logits: Any) -> fx.Node:
    """The logits before they were turned into float32, in the same shape."""
    source = logits
    while source.target in (*_VIEWS, aten._to_copy.default):
        above = source.args[0]
        if source.target is aten._to_copy.default and not _is_cast(source, to=torch.float32):
            break
        source = above
    if value_of(source).dtype == value_of(logits).dtype or not value_of(source).is_contiguous():
        return logits
    return write(aten.view.default, source, list(value_of(logits).shape))


def _narrowed(gradient: fx.Node) -> fx.Node | None:
    """What casts the gradient to the dtype of the logits, if nobody reads anything else of it."""
    node = gradient
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten._to_copy.default:
            return node if _is_cast(node, to=None) else None
        if node.target not in _VIEWS:
            return None
    return None


def _is_cast(node: fx.Node, to: torch.dtype | None) -> bool:
    """Whether a copy turns 16 bits into float32, or float32 into 16 bits, and nothing else."""
    before, after = value_of(_first(node)), value_of(node)
    wide, short = (after, before) if to is not None else (before, after)
    only = set(node.kwargs) <= {"dtype"} and before.stride() == after.stride()
    return only and wide.dtype == torch.float32 and short.dtype in _FLOATS[1:]
