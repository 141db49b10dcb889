"""Convolutional nets in plans: images with channels last, what follows, and torch's settings of cuDNN."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from test_plans import _assert_calls_right, _assert_right, _compiled
from torch import nn
from torch.nn import functional as F

import hypatia

Function = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A convolution, something between, and a convolution with a window of one."""

    def __init__(self, between: Function | nn.Module, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.between = between
        self.second = nn.Conv2d(channels, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x))).mean((2, 3))


class Dense(nn.Module):
    """A layer of a DenseNet: a norm of images put together, which no convolution takes over."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(64, affine=affine)
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(torch.cat([x, x.tanh()], 1)))


class Excited(nn.Module):
    """Squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squeezed = F.hardswish(x).mean((2, 3), keepdim=True)
        return x * F.hardsigmoid(self.up(F.relu(self.down(squeezed))))


class Turned(nn.Module):
    """A block of a ConvNeXt, which has channels last itself for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(y))) * self.scale).permute(0, 3, 1, 2)


def _crossed(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, 1)
    return torch.cat([left, F.leaky_relu(right, 0.1) + left], 1)


BETWEEN: dict[str, tuple[Callable[[], Function | nn.Module], int]] = {
    "hardswish": (lambda: F.hardswish, 32),
    "leaky_relu": (lambda: lambda x: F.leaky_relu(x, 0.1), 32),
    "elu": (lambda: F.elu, 32),
    "softplus": (lambda: F.softplus, 32),
    "mish": (lambda: F.mish, 32),
    "norm of images put together": (Dense, 64),
    "norm without parameters": (lambda: Dense(affine=False), 64),
    "squeeze and excite": (Excited, 32),
    "channels last": (Turned, 32),
    "parts of channels": (lambda: _crossed, 32),
    "pools": (lambda: lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 3, 1, 1).relu(), 32),
    "one place": (lambda: lambda x: F.adaptive_avg_pool2d(x, 1), 32),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_nets() -> str:
    """Nets in three dtypes; images as torch lays them, and with channels last from the first."""
    for name, (between, channels) in BETWEEN.items():
        for dtype in DTYPES:
            for form in (torch.contiguous_format, torch.channels_last):
                torch.manual_seed(0)
                model = Net(between(), channels).cuda().to(dtype).eval()
                x = torch.randn(4, 3, 18, 14, device="cuda").to(dtype).to(memory_format=form)
                _assert_calls_right(f"{name} in {dtype}, {form}", model, x)
    return f"{2 * len(DTYPES) * len(BETWEEN)} cases"


def check_tf32_as_torch_allows_it() -> str:
    """Convolutions of fp32 are as exact as eager's, before and after the setting is changed."""
    torch.manual_seed(0)
    model = Net(nn.Conv2d(32, 32, 3, padding=1)).cuda().eval()
    x = torch.randn(8, 3, 32, 32, device="cuda")
    errors = {}
    with torch.no_grad():
        compiled = _compiled(model, x)
        for allowed in (True, False, True):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
                for _ in range(4):
                    _assert_right(compiled(x), model, x)
                errors[allowed] = (compiled(x) - model(x)).abs().max().item()
    return f"difference to eager with TF32 {errors[True]:.1e}, without {errors[False]:.1e}"


class Up(nn.Module):
    """Transposed convolutions among others, as in a U-Net."""

    def __init__(self, groups: int, **options: Any) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2, groups=groups, **options)
        self.last = nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x).relu()
        return self.last(self.up(x).relu()).mean((2, 3))


def check_transposed_convolutions() -> str:
    """Of all dtypes, with what torch's op can be told."""
    count = 0
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"bias": False},
        {"output_padding": 1},
        {"padding": 1, "dilation": 2},
    )
    for dtype, groups, options in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64), (1, 2), ways
    ):
        torch.manual_seed(0)
        model = Up(groups, **options).cuda().to(dtype).eval()
        x = torch.randn(2, 3, 18, 26, device="cuda", dtype=dtype)
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            for value in (x, x.to(memory_format=torch.channels_last)):
                compiled = _compiled(model, value)
                _assert_right(compiled(value), model, value)
                count += 1
    return f"{count} calls"


def check_transposed_convolutions_as_exact_as_eagers() -> str:
    """In fp32 where torch's settings allow TF32 and eager's kernels do not use it: the plan stays."""
    torch.manual_seed(0)
    for form in (torch.contiguous_format, torch.channels_last):
        model = Up(1).cuda().eval()
        x = torch.randn(2, 3, 24, 24, device="cuda").to(memory_format=form)
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=True), warnings.catch_warnings():
            warnings.simplefilter("error", hypatia.VerificationWarning)
            compiled = _compiled(model, x)
            _assert_right(compiled(x), model, x)
    return "2 nets"


def check_patches() -> str:
    """Convolutions of patches are products: windows, odd sizes, both dtypes, with what follows."""
    torch.manual_seed(0)
    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        for channels, out, window, image in (
            (3, 768, (16, 16), (224, 224)),
            (3, 96, (4, 4), (56, 60)),
            (1, 33, (8, 2), (32, 10)),
            (4, 128, (12, 12), (240, 240)),
        ):
            conv = nn.Conv2d(channels, out, window, stride=window)
            model = nn.Sequential(conv, nn.GELU(), nn.Flatten(2)).cuda().to(dtype)
            x = torch.randn(2, channels, *image, device="cuda", dtype=dtype)
            for given in (x, x.contiguous(memory_format=torch.channels_last)):
                compiled = _compiled(model, given)
                with torch.no_grad():
                    _assert_right(compiled(given), model, given)
                count += 1
    return f"{count} calls"


def check_convolutions_of_one_channel_or_place() -> str:
    """Where one layout looks like the other, cuDNN was wrong when it was told where to write."""
    torch.manual_seed(0)
    count = 0
    for dtype, (channels, out, window, padding, image) in itertools.product(
        (torch.float32, torch.bfloat16),
        (
            (1, 12, (3, 3), (1, 1), (5, 7)),
            (1, 12, (2, 2), (2, 2), (1, 1)),
            (1, 1, (3, 3), (1, 1), (28, 28)),
            (1, 6, (1, 1), (1, 1), (4, 4)),
            (4, 1, (1, 1), (1, 0), (8, 6)),
            (4, 1, (3, 3), (1, 1), (8, 6)),
            (6, 8, (1, 1), (2, 1), (3, 5)),
            (12, 12, (3, 3), (1, 1), (1, 1)),
            (12, 12, (3, 3), (2, 2), (1, 1)),
            (12, 5, (1, 1), (1, 1), (1, 1)),
            (6, 4, (3, 1), (1, 1), (5, 1)),
        ),
    ):
        first = nn.Conv2d(channels, out, window, padding=padding)
        model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(out, 3, 3, padding=1)).cuda().to(dtype).eval()
        x = torch.randn(2, channels, *image, device="cuda", dtype=dtype)
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            for given in (x, x.contiguous(memory_format=torch.channels_last)):
                compiled = _compiled(model, given, verify="off")
                for scale in (1.0, 3.0):
                    _assert_right(compiled(scale * given), model, scale * given)
                    count += 1
    return f"{count} calls"
