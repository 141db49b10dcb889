"""Sums, means and norms of columns, and sums that are matrix products, on a GPU: beside float64."""

from __future__ import annotations

import itertools

import torch
from test_depthwise import _assert_all_right, _steps, _with_odd_numbers
from test_plans import _compiled
from torch import nn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMAGES = {8: (1, 1, 1), 24: (3, 13, 21), 17: (1, 9, 33), 96: (16, 28, 56), 1152: (1, 7, 7), 64: (2, 112, 112)}
"""Channels; batch, height and width."""


class Reduced(nn.Module):
    """All that is made of columns, of what a layer returns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.layer(x).relu()
        means = y.mean((2, 3), keepdim=True)
        norms = torch.linalg.vector_norm(y, dim=(2, 3), keepdim=True)
        return [
            means,
            norms,
            y.mean((2, 3)),
            y.mean(2),
            y.sum(3, keepdim=True),
            (y * y).mean((0, 2, 3)),
            torch.addcmul(y, means, norms),
        ]


def check_all_reductions() -> str:
    """Of every size and dtype; NaN and infinities, too."""
    count = 0
    for dtype, (channels, shape) in itertools.product(DTYPES, IMAGES.items()):
        torch.manual_seed(channels)
        model = Reduced(channels).cuda().to(dtype).eval()
        x = torch.randn(shape[0], channels, *shape[1:], device="cuda", dtype=dtype)
        odd = _with_odd_numbers(x).to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for value in (x, -2 * x, odd):
                _assert_all_right(compiled(value), model, value)
                count += 1
        steps = _steps(compiled)
        if shape[1] > 1:
            sums = [s.split(" of ")[0].split(" and ") for s in steps if s.startswith("column")]
            assert sum(map(len, sums)) >= 5, steps
    return f"{count} calls"


class Contracted(nn.Module):
    """Sums of products, written by broadcasts as state space models do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 3 * size)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        a, b, c = self.layer(x).chunk(3, -1)
        return [
            (a[:, :, None] * b[:, None]).sum(-1),
            (a[..., None] * b[:, :, None]).sum(1),
            (a[:, :, None] * c[:, None] * b[:, None].tanh()).sum(-1, keepdim=True),
        ]


def check_sums_of_products() -> str:
    """They are matrix products."""
    count = 0
    for dtype, size, rows in itertools.product(DTYPES, (8, 33, 128), (5, 64)):
        torch.manual_seed(size)
        model = Contracted(size).cuda().to(dtype).eval()
        x = torch.randn(2, rows, size, device="cuda", dtype=dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for value in (x, x + 1):
                _assert_all_right(compiled(value), model, value)
                count += 1
        assert any("mm" in s or "matmul" in s for s in _steps(compiled)), _steps(compiled)
    return f"{count} calls"
