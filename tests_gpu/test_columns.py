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


class Rows(nn.Module):
    """What is reduced lies side by side: rows, parts of rows, images with channels first."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.exp(x * 0.25)
        apart = y.reshape(x.shape[0], 2, -1, x.shape[2], x.shape[3])
        return [
            y.var((1, 2, 3)),
            y.var(-1, unbiased=False, keepdim=True),
            torch.linalg.vector_norm(y, dim=(1, 3)),
            torch.linalg.vector_norm(y, dim=-1),
            apart.var((2, 4)),
            y.mean((1, 3), keepdim=True),
            y.sum((0, 3)),
        ]


def check_reductions_of_rows() -> str:
    """Of every size and dtype, far from zero, and of odd numbers."""
    count = 0
    shapes = [
        (2, 2, 1, 3),
        (3, 6, 7, 5),
        (16, 64, 56, 56),
        (1, 8, 3, 4097),
        (40, 32, 3, 64),
        (2, 2, 1, 70001),
    ]
    layouts = (torch.contiguous_format, torch.channels_last)
    for dtype, shape, layout in itertools.product(DTYPES, shapes, layouts):
        torch.manual_seed(0)
        model = Rows()
        x = torch.randn(shape, device="cuda", dtype=dtype)
        with torch.no_grad():
            compiled = _compiled(model, x.to(memory_format=layout))
            for value in (x, 8 + x, _with_odd_numbers(x)):
                value = value.to(memory_format=layout)
                _assert_all_right(compiled(value), model, value)
                count += 1
        steps = _steps(compiled)
        assert not any("var" in s or "norm" in s for s in steps if s.startswith("aten")), steps
    return f"{count} calls"


class Grouped(nn.Module):
    """Norms of groups of channels, of images with channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 1)
        self.norms = nn.ModuleList(
            [nn.GroupNorm(groups, channels, affine=groups != 2) for groups in (1, 2, channels // 2, channels)]
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.layer(x)
        return [norm(y).relu() for norm in self.norms]


def check_norms_of_groups() -> str:
    """Of every size and dtype, far from zero."""
    count = 0
    for dtype, (channels, shape) in itertools.product(DTYPES, IMAGES.items()):
        if channels % 2 or shape == (1, 1, 1):
            # Eager has no norm of one number.
            continue
        torch.manual_seed(channels)
        model = Grouped(channels).cuda().to(dtype).eval()
        for norm in model.norms:
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
        x = torch.randn(shape[0], channels, *shape[1:], device="cuda", dtype=dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            steps = _steps(compiled)
            assert not any("group_norm" in s for s in steps), steps
            # The last one is compiled by itself, by whatever is faster.
            for value in (x, 4 - x, x.to(memory_format=torch.channels_last)):
                _assert_all_right(compiled(value), model, value)
                count += 1
    return f"{count} calls"
