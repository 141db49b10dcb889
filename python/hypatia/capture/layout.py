"""How values lie in memory: strides, density, sharing."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._torch import OpOverload
from ..errors import UnsupportedError
from .op_facts import changed_inputs, makes_a_view, name_of
from .records import value_of


def storage_of(node: fx.Node) -> int | None:
    """What identifies the memory of a node's value; none if it has no plain memory.

    A view has that of its operand, though tracing may have made its value of another one.
    """
    while isinstance(node.target, OpOverload) and makes_a_view(node.target):
        node = node.args[0]  # type: ignore[assignment]
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def same_strides(have: object, want: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie alike in memory; what is not known is not alike."""
    if (
        not isinstance(have, torch.Tensor)
        or have.layout is not torch.strided
        or want.layout is not torch.strided
    ):
        return True
    if any(statically_known_true(n == 0) for n in want.shape):
        return True
    return all(
        statically_known_true(n == 1) or statically_known_true(a == b)
        for n, a, b in zip(want.shape, have.stride(), want.stride(), strict=True)
    )


def has_aligned_rows(value: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, which attention on a GPU reads at a time, or cannot."""
    if value.device.type != "cuda" or not value.dim():
        return True

    def whole(elements: int | torch.SymInt) -> bool:
        return _example(elements) * value.element_size() % 16 == 0

    steps = zip(value.shape, value.stride(), strict=True)
    return not whole(value.shape[-1]) or (
        whole(value.storage_offset()) and all(_example(n) <= 1 or s == 1 or whole(s) for n, s in steps)
    )


def reshape_views(gm: fx.GraphModule, *, of_images: bool = False) -> None:
    """Makes views reshapes, in place: torch.export writes a reshape as a view where the example allows one.

    With ``of_images`` only those of images behind a convolution: it lays its results as the kernel likes it.
    Fake tensors do not always know, so that the real ones may have no such view. What the graph changes keeps
    its views, since a copy would be changed instead.
    """
    aten = torch.ops.aten
    views, convolved = [], not of_images
    for node in gm.graph.nodes:
        convolved |= "conv" in name_of(node.target)
        if node.target is aten.view.default and convolved:
            views += [node] if not of_images or value_of(node.args[0]).dim() >= 4 else []
    if not views:
        return
    changed = {storage_of(n) for n in changed_inputs(gm)}
    for node in views:
        if storage_of(node) not in changed:
            node.target = aten.reshape.default
    gm.recompile()


def overlaps(value: torch.Tensor) -> bool:
    """Whether several elements of a tensor may be in one place."""
    if value.layout is not torch.strided:
        return False
    reach = 0
    for stride, size in sorted(
        (_example(value.stride(d)), _example(value.shape[d])) for d in range(value.dim())
    ):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def same_order(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the dimensions of two tensors of one shape follow each other in memory in the same order.

    The same ones are repeated and adjoin; between others there may be gaps. Open sizes count as their hints.
    """

    def order(value: torch.Tensor) -> list[tuple[int, int]]:
        dims = [(_example(value.stride(i)), i) for i in range(value.dim()) if _example(value.shape[i]) > 1]
        return [(i, min(stride, 2)) for stride, i in sorted(dims)]

    return order(have) == order(want)


def layout_of(want: torch.Tensor) -> tuple[torch.memory_format | None, list[int] | None]:
    """How to copy into eager's layout: a memory format, or the order of dense dimensions."""
    dims = range(want.dim())
    expected: int | torch.SymInt = 1
    for i in reversed(dims):
        if not (
            statically_known_true(want.shape[i] == 1) or statically_known_true(want.stride(i) == expected)
        ):
            break
        expected = expected * want.shape[i]
    else:
        return torch.contiguous_format, None
    # Example sizes only propose an order; that it is dense is then proved.
    strides = want.stride()
    order = sorted(dims, key=lambda i: (-_example(strides[i]), -_example(want.shape[i])))
    expected = 1
    for i in reversed(order):
        if not (
            statically_known_true(want.shape[i] == 1) or statically_known_true(want.stride(i) == expected)
        ):
            return None, None
        expected = expected * want.shape[i]
    return None, order


def padding_of(want: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """How to copy into a layout with gaps: the order of dimensions in memory, and what follows each of them
    and each element. None if sizes are open, or elements lie in each other's place."""
    if not all(isinstance(n, int) for n in (*want.shape, *want.stride())) or 0 in want.shape:
        return None
    strides = want.stride()
    order = sorted(range(want.dim()), key=lambda i: (-strides[i], -want.shape[i]))
    padding: list[int] = []
    outer = None
    for i in order:
        if want.shape[i] == 1:
            padding.append(0)
            continue
        if outer is not None:
            fits, rest = divmod(outer, want.stride(i)) if want.stride(i) else (0, 1)
            if rest or fits < want.shape[i]:
                return None
            padding.append(fits - want.shape[i])
        else:
            padding.append(0)
        outer = want.stride(i)
    return order, [*padding, (outer or 1) - 1]


def _example(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def check_same_type(name: str, have: object, want: object) -> None:
    """Refuses a value whose shape, dtype or device is not provably the captured one."""
    if isinstance(want, torch.Tensor):
        alike = (
            isinstance(have, torch.Tensor)
            and have.dtype == want.dtype
            and have.device == want.device
            and have.dim() == want.dim()
            and all(statically_known_true(a == b) for a, b in zip(have.shape, want.shape, strict=True))
        )
        if not alike:
            raise UnsupportedError(f"{name} would be {have} instead of {want}")
