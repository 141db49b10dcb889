"""A small and a large call of each kind of torch's ops, and what each has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import _torch

Call = Callable[[], object]

_SOFTMAX = 8.0
"""Vector operations of an element, as the op table counts them."""


class Probe(NamedTuple):
    """A call, and what it has to do."""

    call: Call
    moved: float
    multiplications: float = 0.0
    vector: float = 0.0


def pairs(device: torch.device) -> dict[str, tuple[Probe, Probe]]:
    """Those of each kind; a GPU's large ones are larger."""
    big = 1 if device.type == "cpu" else 8
    side, many = 16 * big, big * big
    make = _Maker(device)
    return {
        "convolution": (make.convolution(8, 4), make.convolution(32, side)),
        "packed convolution": (make.packed_convolution(8, 4), make.packed_convolution(32, side)),
        "attention": (make.attention(8, 8), make.attention(128 * big, 32)),
        "product": (make.product(8), make.product(64 * big)),
        "reduction": (make.mean(4, 2, 2, 16), make.mean(4, 2 * side, 2 * side, 64)),
        "norm": (make.norm(2, 16, 2, 2), make.norm(2, 64, 2 * side, 2 * side)),
        "pool": (make.pool(2, 8, 4, 4), make.pool(2, 32, side, side)),
        "lookup": (make.lookup(4), make.lookup(1024 * many)),
        "index": (make.index(4), make.index(1024 * many)),
        "copy": (make.roll(4, 16), make.roll(1024, 64 * many)),
        "other": (make.cumulative(4, 16), make.cumulative(1024, 64 * many)),
    }


class _Maker:
    """Makes calls on tensors of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def _images(self, *shape: int) -> torch.Tensor:
        return self._tensor(*shape).contiguous(memory_format=torch.channels_last)

    def convolution(self, channels: int, side: int) -> Probe:
        """Of images with channels last."""
        x, w, b = self._images(4, channels, side, side), self._tensor(channels, channels, 3, 3), None
        moved = 4.0 * (2 * x.numel() + w.numel())
        return Probe(lambda: torch.conv2d(x, w, b, padding=1), moved, 9.0 * channels * x.numel())

    def packed_convolution(self, channels: int, side: int) -> Probe:
        """The same with a weight in oneDNN's own form, where there is oneDNN: so plans call it."""
        onednn = _torch.onednn
        if self.device.type != "cpu" or not hasattr(onednn, "_convolution_pointwise"):
            return self.convolution(channels, side)
        x, w, b = self._images(4, channels, side, side), self._tensor(channels, channels, 3, 3), None
        how = ([1, 1], [1, 1], [1, 1], 1)
        packed, call = onednn._reorder_convolution_weight(w, *how), onednn._convolution_pointwise.default
        moved = 4.0 * (2 * x.numel() + w.numel())
        terms = 9.0 * channels * x.numel()
        return Probe(lambda: call(x, packed, b, *how, "none", [], ""), moved, terms)

    def attention(self, length: int, width: int) -> Probe:
        """Of eight heads in all."""
        q, scores = self._tensor(2, 4, length, width), 8.0 * length * length
        moved, terms = 16.0 * q.numel(), 2 * scores * width
        return Probe(lambda: F.scaled_dot_product_attention(q, q, q), moved, terms, _SOFTMAX * scores)

    def product(self, rows: int) -> Probe:
        """Of a batch of matrices."""
        a = self._tensor(4, rows, rows)
        return Probe(lambda: torch.bmm(a, a), 12.0 * a.numel(), 4.0 * rows**3)

    def mean(self, *shape: int) -> Probe:
        """Over the middle of four dimensions."""
        x = self._tensor(*shape)
        return Probe(lambda: x.mean((1, 2)), 4.0 * x.numel())

    def norm(self, *shape: int) -> Probe:
        """Of groups of channels."""
        x = self._tensor(*shape)
        return Probe(lambda: torch.group_norm(x, 4), 8.0 * x.numel())

    def pool(self, *shape: int) -> Probe:
        """Of windows of four pixels."""
        x = self._images(*shape)
        return Probe(lambda: torch.max_pool2d(x, 2), 5.0 * x.numel())

    def lookup(self, rows: int) -> Probe:
        """Of rows of a table."""
        table, at = self._tensor(1024, 64), torch.arange(rows, device=self.device) % 1024
        return Probe(lambda: torch.embedding(table, at), 8.0 * 64 * rows)

    def index(self, rows: int) -> Probe:
        """The same by an index."""
        table, at = self._tensor(1024, 64), torch.arange(rows, device=self.device) % 1024
        return Probe(lambda: table[at], 8.0 * 64 * rows)

    def roll(self, *shape: int) -> Probe:
        """Some copies."""
        x = self._tensor(*shape)
        return Probe(lambda: x.roll(1, 1), 8.0 * x.numel())

    def cumulative(self, *shape: int) -> Probe:
        """Sums that no plan has a kernel for."""
        x = self._tensor(*shape)
        return Probe(lambda: x.cumsum(1), 8.0 * x.numel())
