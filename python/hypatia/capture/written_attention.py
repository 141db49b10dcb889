"""Attention that a model writes as two products and a softmax becomes one call of torch's attention.

Products are known by the axes that they sum over, so it does not matter in which order dimensions stand,
which of them are one, and by which op they are multiplied. A score that is no finite number makes its row
NaN, unless torch's kernel hides it.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from .attention_factors import FLOATS, PRODUCTS, Factor, Numbers, is_cast, only_user, size_of, source_of
from .attention_scores import Scores, scores_of
from .axes import VIEWS, Axis, Layout, Size, after, fresh, parts_of, read_along, same_size
from .records import value_of

aten = torch.ops.aten

_FEW_ROWS = 16
_MANY_HEADS = 2048
"""Torch's kernels for a GPU take a block for each head, however few its rows are. Of many heads with so few
rows, products are faster: by 1.3 to 5 times on an H200, with 12544 heads of 16 rows."""

_SHARES = (aten.softmax.int, aten._softmax.default)
_LOGARITHMS = (aten.log_softmax.int, aten._log_softmax.default)


class Attention(NamedTuple):
    """Attention as it is written."""

    result: fx.Node
    layout: Layout
    """Of the result."""
    query: Factor
    key: Factor
    value: Factor
    scores: Scores
    groups: tuple[list[Axis], list[Axis], list[Axis], list[Axis], list[Axis], list[Axis]]
    """Axes of batches, heads, rows, keys, and of columns of the query and of the result."""

    @property
    def scale(self) -> float:
        """What the product of query and key is multiplied by."""
        return self.query.scale * self.key.scale * self.scores.scale

    @property
    def sizes(self) -> list[Size]:
        """How many there are of each group of axes."""
        return [size_of(group) for group in self.groups]


def may_have_some(graph: fx.Graph) -> bool:
    """Whether a graph has what attention is made with."""
    return any(n.target in (*_SHARES, aten.exp.default) for n in graph.nodes)


def found_in(graph: fx.Graph, constants: set[fx.Node]) -> list[Attention]:
    """All attention that is written in a graph."""
    numbers = Numbers(constants)
    found: list[Attention] = []
    for node in graph.nodes:
        start = _softmax(node)
        if start is not None and (written := _around(node, *start, numbers)) is not None:
            found.append(written)
    return found


def _softmax(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Of what and along which dimension a node is a softmax."""
    args = node.args
    if node.target in _SHARES:
        return _along(args[0], args[1])
    if node.target is aten.exp.default:
        inner = args[0]
        if isinstance(inner, fx.Node) and inner.target in _LOGARITHMS and only_user(inner) is node:
            return _along(inner.args[0], inner.args[1])
    if node.target is aten.div.Tensor and isinstance(args[0], fx.Node) and args[0].target is aten.exp.default:
        return _by_hand(args[0], args[1])
    return None


def _along(node: object, dim: object) -> tuple[fx.Node, int] | None:
    if not isinstance(node, fx.Node) or type(dim) is not int or only_user(node) is None:
        return None
    return node, dim % max(value_of(node).dim(), 1)


def _by_hand(powers: fx.Node, total: object) -> tuple[fx.Node, int] | None:
    """Exponentials of scores without their maximum, over their sum."""
    less, dim = powers.args[0], _reduced(total, aten.sum.dim_IntList, powers)
    if not isinstance(less, fx.Node) or less.target is not aten.sub.Tensor or dim is None:
        return None
    scores, most = less.args
    if (
        isinstance(most, fx.Node)
        and most.target is operator.getitem
        and most.args[1] == 0
        and len(most.users) == 1
    ):
        most, op = most.args[0], aten.max.dim
    else:
        op = aten.amax.default
    if not isinstance(scores, fx.Node) or _reduced(most, op, scores) != dim or less.kwargs:
        return None
    read_once = only_user(less) is powers and len(powers.users) == 2 and len(scores.users) == 2
    return (scores, dim) if read_once else None


def _reduced(node: object, op: object, of: fx.Node) -> int | None:
    """The dimension that a node reduces another along, keeping it."""
    if not isinstance(node, fx.Node) or node.target is not op or node.args[0] is not of or node.kwargs:
        return None
    dims, *keeps = node.args[1:]
    # The places of a maximum are not read.
    read = [user for user in node.users if user.users]
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    if len(dims) != 1 or keeps != [True] or type(dims[0]) is not int or len(read) != 1:
        return None
    return dims[0] % value_of(of).dim()


def _around(shares: fx.Node, start: fx.Node, dim: int, numbers: Numbers) -> Attention | None:
    """The attention that a softmax is part of."""
    scores = scores_of(start, numbers) if value_of(shares).dtype in FLOATS else None
    end = None if scores is None else _end(shares, scores.layout, scores.layout[dim])
    if scores is None or end is None:
        return None
    result, layout, last = end
    dtype, keys = value_of(last.node).dtype, parts_of(scores.layout[dim])
    if dtype not in FLOATS or value_of(result).dtype != dtype:
        return None
    rows, columns = scores.product.layout[-2:]
    if keys not in (parts_of(columns), parts_of(rows)):
        return None
    query, key = scores.product.factors[:: 1 if keys == parts_of(columns) else -1]
    between = scores.product.factors[0].layout[-1]
    sources = [source_of(f, dtype, numbers) for f in (query, key)] + [source_of(last, dtype, None)]
    factors = [source for source in sources if source is not None]
    if len(factors) < 3:
        return None
    query, key, value = factors
    axes = [axis for axes in scores.layout for axis in parts_of(axes)]
    keys, between = parts_of(keys), parts_of(between)
    others = [axis for axis in axes if axis not in keys]
    ends = [axis for dim in layout for axis in parts_of(dim) if axis not in others]
    known = (query, [*others, *between]), (key, [*others, *keys, *between]), (value, [*others, *keys, *ends])
    if any(axis not in may for factor, may in known for axis in factor.axes):
        return None
    needed = (query, between), (key, [*keys, *between]), (value, [*keys, *ends])
    if any(axis not in factor.axes for factor, all_of in needed for axis in all_of):
        return None
    rows, batches = _parted(others, query, [key, value], scores)
    groups = batches[:1], batches[1:], rows, keys, between, ends
    found = Attention(result, layout, query, key, value, scores, groups)
    return found if _fits(found) else None


def _end(shares: fx.Node, layout: Layout, keys: list[Axis]) -> tuple[fx.Node, Layout, Factor] | None:
    """The product that reads a softmax first, and nothing else does: with its axes, and its other factor."""
    node, user = shares, only_user(shares)
    while user is not None and (user.target in VIEWS or is_cast(user)):
        known = after(user, layout) if user.target in VIEWS else layout
        if known is None:
            return None
        layout, node, user = known, user, only_user(user)
    if user is None or user.target not in PRODUCTS:
        return None
    at = user.args.index(node)
    other = user.args[1 - at]
    shape, old = value_of(user).shape, value_of(node).shape
    if not isinstance(other, fx.Node) or len(shape) != len(old) or value_of(other).dim() < 2:
        return None
    if not all(map(same_size, shape[:-2], old[:-2])) or parts_of(layout[-1 - at]) != parts_of(keys):
        return None
    (new,) = fresh(shape[-2:][1 - at :][:1])
    beside = [*layout[:-2], *([layout[-1], new] if at == 0 else [new, layout[-2]])]
    whole = [*layout[:-2], *([layout[-2], new] if at == 0 else [new, layout[-1]])]
    read = read_along(value_of(other).shape, beside)
    return None if read is None else (user, whole, Factor(other, read))


def _parted(
    axes: list[Axis], query: Factor, others: list[Factor], scores: Scores
) -> tuple[list[Axis], list[Axis]]:
    """Axes of rows, which keys and values do not have, and of batches and heads. Of several axes of rows all
    but the last are heads, if something is added for some of them only."""
    rows = [axis for axis in axes if axis in query.axes and not any(axis in f.axes for f in others)]
    for change in scores.limits:
        read = [axis for dim in change.layout for axis in parts_of(dim)]
        if 0 < sum(axis in read for axis in rows) < len(rows):
            rows = rows[-1:]
    return rows, [axis for axis in axes if axis not in rows]


def _fits(written: Attention) -> bool:
    """Whether torch's attention takes such sizes, and is faster than products."""
    batches, heads, rows, keys, inner, outer = written.sizes
    if not same_size(inner, outer) or any(isinstance(n, int) and n == 0 for n in written.sizes):
        return False
    known = all(isinstance(n, int) for n in (batches, heads, rows, keys))
    small = known and max(rows, keys) <= _FEW_ROWS and batches * heads >= _MANY_HEADS
    return not (small and value_of(written.query.node).is_cuda)
