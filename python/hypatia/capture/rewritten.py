"""Ops that graphs have in other words: by functional ops, and by views."""

from __future__ import annotations

import torch

from .layout import layout_of


def copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What a tensor is after another was copied into it: autograd has no derivative of the op for that."""
    source = source.to(into.device, into.dtype, non_blocking=non_blocking).expand(into.shape)
    _, order = layout_of(into)
    if order is None:
        return source.clone(memory_format=torch.contiguous_format)
    back = [order.index(d) for d in range(into.dim())]
    return source.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def copied_for_autograd(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The same where there may be gradients: what was there before has zeros, as in eager, and not none.

    It takes part as a piece without elements, which costs nothing.
    """
    if not into.dtype.is_floating_point and not into.dtype.is_complex:
        return copied(into, source, non_blocking)
    if into.dim() == 0:
        return copied_for_autograd(into.unsqueeze(0), source, non_blocking).squeeze(0)
    source = source.to(into.device, into.dtype, non_blocking=non_blocking).expand(into.shape)
    order = layout_of(into)[1] or list(range(into.dim()))
    back = [order.index(d) for d in range(into.dim())]
    return torch.cat([source.permute(order), into.permute(order).narrow(0, 0, 0)]).permute(back)


def windows(
    x: torch.Tensor, size: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> torch.Tensor:
    """The columns of ``nn.Unfold`` as views of the padded images: whoever reads them copies them once."""
    x = torch.ops.aten.constant_pad_nd.default(x, [padding[1], padding[1], padding[0], padding[0]], 0.0)
    for dim, (n, d, s) in enumerate(zip(size, dilation, stride, strict=True), start=-2):
        # The new dimensions come last.
        x = x.unfold(dim if dim == -2 else -2, d * (n - 1) + 1, s)[..., ::d]
    *batch, channels, rows, columns, height, width = x.shape
    order = [*range(len(batch)), *(len(batch) + i for i in (0, 3, 4, 1, 2))]
    return x.permute(order).reshape(*batch, channels * height * width, rows * columns)
