"""Convolutions of each channel by itself on a GPU: beside float64, and after changes of weights."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import torch
from test_plans import _assert_right, _compiled
from torch import nn
from torch.nn import functional as F

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WINDOWS = (1, 3, 5, 7, 9, (3, 5))
IMAGES = {8: (1, 1, 1), 24: (3, 13, 21), 17: (1, 9, 33), 96: (16, 28, 56), 1152: (1, 7, 7)}
"""Channels; batch, height and width."""
INF, NAN = float("inf"), float("nan")


def _depthwise(channels: int, window: Any, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, window, groups=channels, **options)


def _steps(compiled: Any) -> list[str]:
    """What the steps of the plan are called."""
    planner = compiled._last.native.__self__.planner
    steps: list[str] = json.loads(planner.at(planner.hints).describe())["steps"]
    return steps


class Windows(nn.Module):
    """Windows of all sizes over the same images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.all = nn.ModuleList()
        for window, stride, dilation in itertools.product(WINDOWS, (1, 2), (1, 2)):
            size = window if isinstance(window, tuple) else (window, window)
            padding = tuple(dilation * (k - 1) // 2 for k in size)
            bias = (sum(size) + stride + dilation) % 2 == 0
            conv = _depthwise(channels, size, stride=stride, dilation=dilation, padding=padding, bias=bias)
            self.all.append(conv)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [conv(x) for conv in self.all]


def _assert_all_right(results: list[torch.Tensor], model: nn.Module, x: torch.Tensor) -> None:
    """At most twice eager's error, plus four roundings; NaN and infinities where eager or float64 has some:
    eager's sums of 16 bits may overflow, or lose what is NaN, where float64's do not."""
    with torch.no_grad():
        eager, wide = model(x), copy.deepcopy(model).double()(x.double())
    for i, (a, e, w) in enumerate(zip(results, eager, wide, strict=True)):
        what = f"result {i}, {tuple(a.shape)} of {tuple(x.shape)} in {x.dtype}"
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride()), (
            f"{what}: {a.dtype}, strides {a.stride()}, but eager has {e.dtype}, {e.shape}, {e.stride()}"
        )
        _assert_odd_alike(what, a, e, w)
        fine = a.isfinite() & w.isfinite() & e.isfinite()
        a, e, w = a.double()[fine], e.double()[fine], w[fine]
        if not w.numel():
            continue
        scale, eps = w.abs().max().item(), torch.finfo(x.dtype).eps
        own = (e - w).abs().max().item()
        allowed = 2 * own + 4 * eps * scale
        error = (a - w).abs().max().item()
        assert error <= allowed, f"{what}: error {error:.2e}, eager's {own:.2e}, allowed {allowed:.2e}"


def _assert_odd_alike(what: str, ours: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor) -> None:
    """Each element is finite where eager's or float64's is."""
    odd = ours.isfinite() != wide.isfinite()
    odd &= ours.isfinite() != eager.isfinite()
    if not odd.any():
        return
    values = [t[odd][:4].tolist() for t in (ours, eager, wide)]
    first = [f"ours {o:.3g}, eager's {e:.3g}, float64's {w:.3g}" for o, e, w in zip(*values, strict=True)]
    counts = ", ".join(
        f"{name} {int(t.isnan().sum())} NaN and {int(t.isinf().sum())} infinite"
        for name, t in (("ours", ours), ("eager", eager), ("float64", wide))
    )
    raise AssertionError(
        f"{what}: NaN or infinity elsewhere in {int(odd.sum())} of {odd.numel()} elements "
        f"({counts}); {'; '.join(first)}"
    )


def _with_odd_numbers(x: torch.Tensor) -> torch.Tensor:
    """NaN and infinities here and there."""
    odd = x.clone()
    for at, number in zip(range(0, x.numel(), x.numel() // 4 + 1), (NAN, INF, -INF, NAN), strict=False):
        odd.view(-1)[at] = number
    return odd


def check_all_windows() -> str:
    """Every window at every stride and dilation, as one model for each number of channels."""
    count = 0
    for dtype, (channels, shape) in itertools.product(DTYPES, IMAGES.items()):
        torch.manual_seed(channels)
        model = Windows(channels).cuda().to(dtype).eval()
        x = torch.randn(shape[0], channels, *shape[1:], device="cuda").to(dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for given in (x, _with_odd_numbers(x)):
                _assert_all_right(compiled(given), model, given)
        steps = sum("depthwise" in s for s in _steps(compiled))
        assert steps == len(model.all), steps
        count += steps
    return f"{count} kernels"


class Block(nn.Module):
    """What surrounds such a convolution in most nets."""

    def __init__(self, after: Any, channels: int = 96) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, 2 * channels, 1)
        self.conv = _depthwise(2 * channels, 5, padding=2)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.project = nn.Conv2d(2 * channels, channels, 1)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.expand(x))
        hidden = hidden + self.after(self.norm(self.conv(hidden)))
        scale = hidden.mean((2, 3), keepdim=True).sigmoid()
        return x + self.project(hidden * scale)


AFTER = (nn.Identity, nn.ReLU, nn.SiLU, nn.GELU, nn.ReLU6, nn.Hardswish)


def check_what_follows() -> None:
    """Batch norm, an activation and a sum are part of the kernel."""
    for dtype, after in itertools.product(DTYPES, AFTER):
        torch.manual_seed(1)
        model = Block(after()).cuda().to(dtype).eval()
        for size in ((4, 96, 14, 14), (4, 96, 15, 9)):
            x = torch.randn(size, device="cuda").to(dtype)
            with torch.no_grad():
                compiled = _compiled(model, x)
                _assert_right(compiled(x), model, x)
        assert any("depthwise 5x5 + pointwise" in s for s in _steps(compiled))


class Parts(nn.Module):
    """Parts of the channels of an image, some of which are not aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _depthwise(24, 3, padding=1), _depthwise(20, (1, 7), padding=(0, 3))
        self.before = nn.Conv2d(16, 47, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, second = self.before(x).split([24, 3, 20], 1)
        return torch.cat([self.first(first), self.second(second)], 1)


def check_layouts_and_parts() -> None:
    """Images as they come, and parts of them where they lie."""
    torch.manual_seed(2)
    for dtype, layout in itertools.product(DTYPES, (torch.contiguous_format, torch.channels_last)):
        model = Parts().cuda().to(dtype).eval()
        x = torch.randn(2, 16, 11, 10, device="cuda").to(dtype).to(memory_format=layout)
        with torch.no_grad():
            _assert_right(_compiled(model, x)(x), model, x)


def check_weights_that_change() -> None:
    """In place, and another tensor."""
    torch.manual_seed(3)
    model = Block(nn.SiLU()).cuda().to(torch.bfloat16).eval()
    x = torch.randn(2, 96, 14, 14, device="cuda").bfloat16()
    with torch.no_grad():
        compiled = _compiled(model, x)
        _assert_right(compiled(x), model, x)
        model.conv.weight.mul_(-1.5)
        model.conv.bias.add_(1)
        _assert_right(compiled(x), model, x)
        model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))
        _assert_right(compiled(x), model, x)


def check_batches_of_other_sizes() -> None:
    """From few threads to many: other shares for each of them, the same results."""
    torch.manual_seed(4)
    model = nn.Sequential(_depthwise(192, 7, padding=3), nn.GELU()).cuda().bfloat16().eval()
    with torch.no_grad():
        for batch in (1, 2, 8, 64):
            x = torch.randn(batch, 192, 28, 28, device="cuda").bfloat16()
            _assert_right(_compiled(model, x)(x), model, x)


def check_images_of_more_than_two_gib() -> None:
    """Positions that 32 bits do not hold."""
    model = _depthwise(128, 3, padding=1, bias=False).cuda().bfloat16().eval()
    x = torch.randn(1, 128, 3000, 3000, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = _compiled(model, x)
        result, eager = compiled(x), model(x)
    for corner in (slice(None, 64), slice(-64, None)):
        assert torch.allclose(result[..., corner, :].float(), eager[..., corner, :].float(), atol=0.05)
