"""Attention that a model writes as two products and a softmax becomes one call of torch's attention.

A row of scores that is hidden as a whole is NaN or uniform where a model writes it, and zero in torch's
attention. So a mask is taken only if its values are known and every row sees something. Hidden are minus
infinity and what is below -1e30: beside a score that is not as low, such a one has no share, whatever it was.
Where a condition that is not known replaces scores by a finite number, rows may be hidden as a whole: numbers
are added then, in the order that the model's have. A score that is no finite number makes its row NaN, unless
torch's kernel hides it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch import detect_fake_mode, disable_current_modes
from .attention_factors import (
    SAME,
    factor_of,
    keeps_rows,
    key_of,
    narrow,
    only_user,
    unscaled,
    unswapped,
    whole,
)
from .constant_masks import attention_form
from .constant_values import computed, constants_of, copied, drop_unread, is_number
from .records import value_of

aten = torch.ops.aten

PASS = "written attention"
"""The name under which a compilation can do without."""

_HIDDEN = -1e30
_PRODUCTS = (aten.matmul.default, aten.bmm.default)

_FEW_ROWS = 16
_MANY_HEADS = 2048
"""Torch's kernels for a GPU take a block for each head, however few its rows are. Of many heads with so few
rows, products are faster: by 1.3 to 5 times on an H200, with 12544 heads of 16 rows."""


class _Scores(NamedTuple):
    """What a softmax is of: a product, times a number, with entries hidden."""

    product: fx.Node
    scale: float
    masks: list[tuple[fx.Node, Callable[[torch.Tensor], torch.Tensor]]]
    """Constant nodes, and which entries they let be seen."""
    condition: tuple[fx.Node, float] | None = None
    """A node that is no constant, inside of the masks: where it is false, the score is this number."""


class _Written(NamedTuple):
    """Attention as it is written."""

    result: fx.Node
    query: fx.Node
    key: fx.Node
    turned: bool
    """The key has its rows and columns in each other's place."""
    value: fx.Node
    scores: _Scores


def as_calls(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[str], list[str]]:
    """A copy of a graph that calls attention, names of the masks that it has as attributes, what was done."""
    softmaxes = (aten.softmax.int, aten._softmax.default)
    if not any(n.target in softmaxes for n in gm.graph.nodes):
        return gm, [], []
    copy = copied(gm)
    constants = constants_of(copy.graph)
    found = [w for n in copy.graph.nodes if n.target in softmaxes and (w := _written(n, constants))]
    values = computed({mask: None for w in found for mask, _ in w.scores.masks})
    held: dict[tuple[object, ...], fx.Node] = {}
    done = 0
    for written in found:
        seen = _seen(written, values)
        levels = None if seen is None else _levels(written, values, seen)
        if seen is not None and levels is not None:
            done += 1
            _call(copy, written, seen, levels, held)
    if not done:
        return gm, [], []
    drop_unread(copy.graph, [w.result for w in found])
    return (
        copy,
        [n.name for n in held.values()],
        [f"attention written as products: {done} calls of torch's attention"],
    )


def _written(softmax: fx.Node, constants: set[fx.Node]) -> _Written | None:
    """The attention around a softmax of the last dimension."""
    value = value_of(softmax)
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    if rank not in (3, 4) or softmax.args[1] not in (-1, rank - 1) or value.dtype == torch.float64:
        return None
    scores = _scores(softmax.args[0], constants)
    product = _after(softmax)
    if scores is None or product is None:
        return None
    first, scale = unscaled(scores.product.args[0])
    scores = scores._replace(scale=scores.scale * scale)
    second, swapped = unswapped(scores.product.args[1])
    found = [whole(n) for n in (first, second, product.args[1])]
    operands = [n for n in found if n is not None]
    result = product if value_of(product).dim() == 4 else only_user(product)
    apart = result is product or (result is not None and result.target in SAME and keeps_rows(result))
    if result is None or not apart or value_of(result).dim() != 4 or len(operands) != 3:
        return None
    query, key, value = operands
    dtype = value_of(value).dtype
    query, (key, turned) = narrow(query, dtype), key_of(key, dtype, swapped=swapped)
    shapes = [value_of(n).shape for n in (query, key, value)]
    keys = shapes[1][:2] + ((shapes[1][3], shapes[1][2]) if turned else shapes[1][2:])
    alike = all(value_of(n).dtype == dtype for n in (query, key, result)) and dtype.is_floating_point
    fits = shapes[0][:2] == shapes[1][:2] and shapes[0][3] == keys[3] and tuple(keys) == tuple(shapes[2])
    if not alike or not fits or value_of(result).shape != shapes[0] or 0 in shapes[0] or 0 in keys:
        return None
    if value_of(query).is_cuda and _are_small(shapes[0], keys):
        return None
    return _Written(result, query, key, turned, value, scores)


def _are_small(query: torch.Size, key: torch.Size) -> bool:
    """Whether products are faster."""
    sizes = [*query, key[2]]
    known = all(type(n) is int for n in sizes)
    return known and max(query[2], key[2]) <= _FEW_ROWS and query[0] * query[1] >= _MANY_HEADS


def _scores(node: Any, constants: set[fx.Node]) -> _Scores | None:
    # Numbers outside of a mask scale what hides, too.
    scale, masks = 1.0, list[tuple[fx.Node, Callable[[torch.Tensor], torch.Tensor]]]()
    condition: tuple[fx.Node, float] | None = None
    while isinstance(node, fx.Node) and only_user(node) is not None:
        args: tuple[Any, ...] = node.args
        if node.target in _PRODUCTS:
            return _Scores(node, scale, masks, condition)
        if (factor := factor_of(node)) is not None:
            scale, node = scale * factor, args[0]
        elif condition is None and (mask := _mask(node, constants, scale)) is not None:
            masks.append(mask[1:])
            node = mask[0]
        elif condition is None and scale == 1.0 and (number := _replaced(node)) is not None:
            condition, node = (args[0], number), args[1]
        elif keeps_rows(node):
            node = args[0]
        else:
            return None
    return None


def _mask(
    node: fx.Node, constants: set[fx.Node], scale: float
) -> tuple[fx.Node, fx.Node, Callable[[torch.Tensor], torch.Tensor]] | None:
    """What a constant mask hides entries of, the mask, and how to tell what it lets be seen."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.add.Tensor and args[1] in constants and not node.kwargs and scale >= 1.0:
        return args[0], args[1], _added
    if node.target is aten.masked_fill.Scalar and args[1] in constants and scale * args[2] <= _HIDDEN:
        return args[0], args[1], torch.logical_not
    if node.target in (aten.where.self, aten.where.ScalarOther) and args[0] in constants:
        number = args[2]
        if isinstance(number, fx.Node) and number.target is aten.scalar_tensor.default:
            number = number.args[0]
        if type(number) in (int, float) and scale * number <= _HIDDEN:
            return args[1], args[0], torch.clone
    return None


def _replaced(node: fx.Node) -> float | None:
    """The finite number that a condition puts into the place of scores, if it hides them."""
    if node.target not in (aten.where.self, aten.where.ScalarOther):
        return None
    number: Any = node.args[2]
    copies = (aten.clone.default, aten.lift_fresh_copy.default)
    while isinstance(number, fx.Node) and number.target in copies:
        number = number.args[0]
    if isinstance(number, fx.Node) and number.target is aten.scalar_tensor.default:
        number = number.args[0]
    elif isinstance(number, fx.Node) and is_number(number):
        with disable_current_modes():
            number = float(operator.attrgetter(str(number.target))(node.graph.owning_module))
    if type(number) not in (int, float):
        return None
    with disable_current_modes():
        rounded = float(torch.tensor(number, dtype=value_of(node).dtype))
    return rounded if -math.inf < rounded <= _HIDDEN else None


def _added(mask: torch.Tensor) -> torch.Tensor:
    """What a mask that is added lets be seen; nothing if it does more than hide."""
    seen = mask == 0
    return seen & bool((seen | (mask <= _HIDDEN)).all())


def _after(node: fx.Node) -> fx.Node | None:
    """The product that reads a softmax first, and nothing else does."""
    user = only_user(node)
    while user is not None and keeps_rows(user):
        node, user = user, only_user(user)
    return user if user is not None and user.target in _PRODUCTS and user.args[0] is node else None


def _seen(written: _Written, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Which keys each query sees, if it sees some in every row; without dimensions: all."""
    query, rows = value_of(written.query), value_of(written.value).shape[-2]
    sizes = (*query.shape[:-1], rows)
    limited = written.scores.masks or written.scores.condition
    if limited and any(type(n) is not int for n in sizes):
        # Masks are known at one size only.
        return None
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        seen = torch.ones((), dtype=torch.bool, device=query.device)
        for mask, lets in written.scores.masks:
            if mask not in values or values[mask].device != query.device:
                return None
            part = lets(values[mask])
            for d, stride in enumerate(part.stride()):
                part = part.narrow(d, 0, 1) if stride == 0 else part
            seen = seen & part
        if not limited:
            return seen
        if seen.dim() > 4 or torch.broadcast_shapes(seen.shape, sizes) != sizes:
            return None
        condition = written.scores.condition
        if condition is not None and torch.broadcast_shapes(value_of(condition[0]).shape, sizes) != sizes:
            return None
        if seen.dim() == 4 and bool((seen == seen[:1]).all()):
            seen = seen[:1]
        return seen if bool(seen.expand(sizes).any(-1).all()) else None


def _levels(
    written: _Written, values: dict[fx.Node, torch.Tensor], seen: torch.Tensor
) -> list[torch.Tensor] | None:
    """What is added to scores where the condition holds and where it does not; empty without a condition.

    Each is far below the one before: seen by both, hidden by one, hidden by both. Which of two hides more is
    as in the model.
    """
    scores, dtype = written.scores, value_of(written.query).dtype
    if scores.condition is None:
        return []
    _, number = scores.condition
    if dtype == torch.float16 or len(scores.masks) > 1 or any(lets is not _added for _, lets in scores.masks):
        return None
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        wide = value_of(scores.product).dtype
        by_mask = torch.tensor([-math.inf], dtype=wide, device=seen.device)
        for mask, _ in scores.masks:
            by_mask = torch.unique(values[mask][values[mask] != 0])
        if by_mask.numel() != 1:
            return None
        added, both = float(by_mask), float(by_mask + torch.tensor(number, dtype=wide, device=seen.device))
        below = -1e29 if added > number else -1e30 if added == number else -1e31
        below = -math.inf if added == -math.inf else below
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        # A sum may be rounded to one of its parts.
        lowest = -1e30 if both == number else -math.inf
        return [torch.where(seen, zero, below), torch.where(seen, zero - 1e30, lowest)]


def _call(
    gm: fx.GraphModule,
    written: _Written,
    seen: torch.Tensor,
    levels: list[torch.Tensor],
    held: dict[tuple[object, ...], fx.Node],
) -> None:
    """Puts a call of attention into the place of the last product."""
    graph, result, scores = gm.graph, written.result, written.scores
    query, key = value_of(written.query), value_of(written.key)
    key = key.transpose(-1, -2) if written.turned else key
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        form = None if levels else attention_form(seen, query, key)

    def attribute(value: torch.Tensor, *what: object) -> fx.Node:
        known = (*scores.masks, *what)
        if known not in held:
            target = f"seen_{result.name}_{len(held)}"
            gm.register_buffer(target, value, persistent=False)
            with graph.inserting_before(next(iter(graph.nodes))):
                held[known] = graph.create_node("get_attr", target)
            mode = detect_fake_mode([query])
            held[known].meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
        return held[known]

    def added(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), value_of)
        with detect_fake_mode([query]) or contextlib.nullcontext():
            node.meta["val"] = target(*values, **named)
        return node

    with graph.inserting_before(result):
        rows = added(aten.transpose.int, written.key, -1, -2) if written.turned else written.key
        mask = None
        if scores.condition is not None:
            condition, number = scores.condition
            sides = [attribute(v, number, i, v.dtype) for i, v in enumerate(levels)]
            mask = added(aten.where.self, condition, *sides)
        elif form is None:
            mask = attribute(seen)
        call = graph.call_function(
            aten.scaled_dot_product_attention.default,
            (written.query, rows, written.value, mask, 0.0, bool(form)),
            {"scale": scores.scale},
        )
    call.meta = dict(result.meta)
    result.replace_all_uses_with(call)
