"""Poolings with channels last on a GPU: beside float64, with what follows, and what is left to torch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from forms import winning
from test_depthwise import DTYPES, IMAGES, _assert_all_right, _steps, _with_odd_numbers
from test_plans import _assert_right, _compiled
from torch import nn
from torch.nn import functional as F

import hypatia

MAX = (
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (2, 2, 0, 1, False),
    (2, 2, 0, 1, True),
    (3, 1, 1, 1, False),
    (3, 1, 1, 2, False),
    ((3, 2), (2, 3), (1, 0), 1, True),
    (5, 1, 2, 1, False),
    (1, 2, 0, 1, False),
    (2, 3, 1, 1, True),
    (3, 3, 1, 3, True),
    (13, 1, 6, 1, False),
)
"""Window, stride, padding, dilation, whether the number of places is rounded up."""
MEAN = (
    (3, 1, 1, False, False),
    (3, 1, 1, False, True),
    (3, 2, 1, True, False),
    (3, 2, 1, True, True),
    (2, 2, 0, False, True),
    (2, 2, 0, True, True),
    (2, 2, 0, True, False),
    ((2, 5), (1, 2), (1, 2), False, False),
    ((4, 3), (3, 2), (2, 1), True, True),
    (7, 7, 0, False, True),
    (8, 3, 3, True, False),
    (9, 1, 4, False, True),
)
"""Window, stride, padding, whether the number of places is rounded up, whether padding counts."""


def _is_max(pool: nn.Module) -> bool:
    return isinstance(pool, nn.MaxPool2d)


def _fits(pool: nn.Module, height: int, width: int) -> bool:
    try:
        pool(torch.empty(1, 1, height, width))
    except RuntimeError:
        return False
    return True


def _alone(channels: int) -> nn.Conv2d:
    """A convolution that changes nothing: after it, images lie with channels last."""
    conv = nn.Conv2d(channels, channels, 1, groups=channels, bias=False)
    nn.init.ones_(conv.weight)
    return conv


class Pools(nn.Module):
    """All poolings that fit, of the same images."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        pools: list[nn.Module] = []
        for window, stride, padding, dilation, up in MAX:
            pools.append(nn.MaxPool2d(window, stride, padding, dilation, ceil_mode=up))
        for window, stride, padding, up, counts in MEAN:
            pools.append(nn.AvgPool2d(window, stride, padding, up, counts))
        self.before = _alone(channels)
        self.all = nn.ModuleList(p for p in pools if _fits(p, height, width))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.before(x)
        return [pool(x) for pool in self.all]


def check_all_poolings() -> str:
    """Every setting, as one model for each number of channels. The greatest is eager's, bit for bit."""
    count = means = 0
    for dtype, (channels, (batch, height, width)) in itertools.product(DTYPES, IMAGES.items()):
        torch.manual_seed(channels)
        model = Pools(channels, height, width).cuda().to(dtype).eval()
        x = torch.randn(batch, channels, height, width, device="cuda").to(dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for given in (x, _with_odd_numbers(x)):
                results = compiled(given)
                _assert_all_right(results, model, given)
                for pool, result in zip(model.all, results, strict=True):
                    eager = pool(given.contiguous(memory_format=torch.channels_last))
                    same = torch.equal(result.nan_to_num(nan=12345.0), eager.nan_to_num(nan=12345.0))
                    assert same or not _is_max(pool), f"{pool} of {tuple(x.shape)} in {dtype}"
                    means += same and not _is_max(pool)
        steps = sum("_pool " in s for s in _steps(compiled))
        # Windows that hang over an image of one pixel are left to torch.
        assert steps == len(model.all) or height == 1, (steps, len(model.all))
        count += steps
    return f"{count} kernels; {means} results of means are eager's in every bit"


class Mixer(nn.Module):
    """A block of PoolFormer, and the stem of a residual net before it."""

    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3)
        self.norm = nn.BatchNorm2d(channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = self.last(x)
        x = x + self.scale * (F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x)
        return self.last(F.gelu(x))


def check_what_follows_poolings() -> None:
    """The pointwise work after a pooling is part of its kernel."""
    for dtype, layout in itertools.product(DTYPES, (torch.contiguous_format, torch.channels_last)):
        torch.manual_seed(1)
        model = Mixer().cuda().to(dtype).eval()
        for batch, height, width in ((1, 32, 32), (3, 45, 37), (32, 112, 112)):
            x = torch.randn(batch, 3, height, width, device="cuda").to(dtype).to(memory_format=layout)
            with torch.no_grad():
                compiled = _compiled(model, x)
                _assert_right(compiled(x), model, x)
            steps = _steps(compiled)
            assert any("avg_pool 3x3 + pointwise" in s for s in steps), steps
            assert any("max_pool 3x3" in s for s in steps), steps


class Parts(nn.Module):
    """Parts of the channels of an image, some of which are not aligned, and some of its rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(16, 47, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        first, _, second = x.split([24, 3, 20], 1)
        pools = [F.max_pool2d(first, 3, 1, 1), F.avg_pool2d(second, 3, 1, 1)]
        return torch.cat(pools, 1)[..., 1:-1, :-2] + F.max_pool2d(x[:, :44, 1:-1, :-2], (1, 3), 1, (0, 1))


def check_parts_of_images_are_pooled() -> None:
    """Images as they come, and parts of them where they lie."""
    torch.manual_seed(2)
    for dtype, layout in itertools.product(DTYPES, (torch.contiguous_format, torch.channels_last)):
        model = Parts().cuda().to(dtype).eval()
        x = torch.randn(2, 16, 11, 10, device="cuda").to(dtype).to(memory_format=layout)
        with torch.no_grad():
            _assert_right(_compiled(model, x)(x), model, x)


class Others(nn.Module):
    """Poolings that have no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(8, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.before(x)
        values, places = F.max_pool2d(y, 2, return_indices=True)
        assert isinstance(places, torch.Tensor)
        return [
            values * (places % 2),
            F.avg_pool2d(y, 3, 1, 1, divisor_override=4),
            F.avg_pool2d(y, (1, 33), 1, (0, 16)),
            F.adaptive_avg_pool2d(y, (3, 5)),
            F.max_pool2d(x, 3, 2, 1),
            F.max_pool2d(y.mean(1, keepdim=True), 3, 2, 1),
        ]


def check_other_poolings_are_torchs() -> None:
    """What no kernel serves."""
    torch.manual_seed(3)
    for dtype in DTYPES:
        model = Others().cuda().to(dtype).eval()
        x = torch.randn(2, 8, 14, 12, device="cuda").to(dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            results, eager = compiled(x), model(x)
            wide = copy.deepcopy(model).double()(x.double())
        # Which of nearly equal numbers is the greatest depends on how the convolution rounds.
        for a, e, w in list(zip(results, eager, wide, strict=True))[1:]:
            assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
            allowed = 2 * (e - w).abs().max() + 8 * torch.finfo(dtype).eps * w.abs().max()
            assert (a - w).abs().max() <= allowed
        assert not any("_pool " in s for s in _steps(compiled)), _steps(compiled)


def check_pools_of_batches_of_other_sizes() -> None:
    """From few threads to many: other shares for each of them, the same results."""
    torch.manual_seed(4)
    pools: tuple[Any, ...] = (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(2, 2))
    for pool, batch in itertools.product(pools, (1, 2, 8, 64)):
        model = nn.Sequential(_alone(64), pool, nn.SiLU()).cuda().bfloat16().eval()
        with torch.no_grad():
            x = torch.randn(batch, 64, 57, 56, device="cuda").bfloat16()
            _assert_right(_compiled(model, x)(x), model, x)


def check_pools_of_more_than_two_gib() -> None:
    """Positions that 32 bits do not hold."""
    model = nn.Sequential(_alone(128), nn.MaxPool2d(3, 1, 1)).cuda().bfloat16().eval()
    x = torch.randn(1, 128, 3000, 3000, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        result = _compiled(model, x)(x)
    for corner in (slice(None, 64), slice(-64, None)):
        part = F.max_pool2d(x[..., corner, :].float(), 3, 1, 1)
        # The cut of the part is no edge of the image.
        inner = slice(None, -1) if corner.start is None else slice(1, None)
        assert torch.equal(result[..., corner, :].float()[..., inner, :], part[..., inner, :])


class _Rows(nn.Module):
    """Pools what a norm of rows has written: images with channels last, which nobody has put so."""

    def __init__(self, pool: nn.Module, order: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.pool, self.order = nn.LayerNorm(8), pool, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.pool(self.norm(x).permute(self.order))


def check_poolings_of_training_steps() -> str:
    """Torch pools images as they lie, and writes them so wherever it is told to write."""
    pools = (
        nn.MaxPool2d(3, 1, 1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveAvgPool2d((5, 7)),
    )
    count = wrong = 0
    for pool, order in itertools.product(pools, ((0, 3, 1, 2), (0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1))):
        for shape in ((2, 6, 4, 8), (3, 5, 1, 8), (1, 4, 4, 8)):
            model = _Rows(pool, order).cuda()
            x = torch.randn(shape, device="cuda")
            try:
                expected = _pooled(model, model, x)
            except RuntimeError:
                continue
            wide = copy.deepcopy(model).cpu().double()
            exact = _pooled(wide, wide, x.cpu().double())
            pairs = zip(expected, exact, strict=True)
            if not all(torch.allclose(a.cpu().double(), b, 1e-4, 1e-5) for a, b in pairs):
                # Of one channel, torch's own kernels seem to take its stride for the image's.
                wrong += 1
                continue
            with winning("plain"):
                call = hypatia.compile(model, verify="off")
                for _ in range(3):
                    found = _pooled(model, call, x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert found[0].stride() == expected[0].stride()
            count += 1
    return f"{count} cases, and {wrong} that torch computes wrongly"


def _pooled(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and gradients of the parameters and the input."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in (*model.parameters(), x))]
