"""Linear layers over places on a GPU, and pointwise ops of parts: as exact as eager, without copies."""

from __future__ import annotations

import itertools

import torch
from test_depthwise import _steps
from test_plans import _assert_calls_right, _assert_right
from torch import nn
from torch.nn import functional as F

HALVES = (torch.bfloat16, torch.float16)


class Mixed(nn.Module):
    """Two layers over places with an activation between them, as mixers have them."""

    def __init__(self, places: int, hidden: int, channels: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.first, self.second = nn.Linear(places, hidden, bias), nn.Linear(hidden, places, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(self.norm(x).transpose(1, 2)))
        return x + self.second(hidden).transpose(1, 2)


class Gated(nn.Module):
    """A gate over places of one half of the channels, as gMLPs have it."""

    def __init__(self, places: int, channels: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(channels, 2 * channels), nn.LayerNorm(channels)
        self.gate, self.outer = nn.Linear(places, places), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = F.gelu(self.inner(x)).chunk(2, -1)
        return x + self.outer(left * self.gate(self.norm(right).transpose(1, 2)).transpose(1, 2))


class Parts(nn.Module):
    """Layers over places whose result is taken apart, as gated mixers have them."""

    def __init__(self, places: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(places, 2 * hidden), nn.Linear(hidden, places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x.transpose(1, 2)).chunk(2, -1)
        return x + self.second(left * F.silu(right)).transpose(1, 2)


def _assert_over_places(what: str, model: nn.Module, x: torch.Tensor) -> None:
    compiled = _assert_calls_right(what, model, x)
    assert any("products of" in step for step in _steps(compiled)), (what, _steps(compiled))


def check_layers_over_places() -> str:
    """Sizes with and without remainders: rows of weights at multiples of 16 bytes and elsewhere."""
    torch.manual_seed(0)
    count = 0
    for dtype, places, batch in itertools.product(HALVES, (7, 49, 64, 196, 201), (1, 3, 16)):
        x = torch.randn(batch, places, 128, device="cuda", dtype=dtype)
        mixed = (Mixed(places, 96, 128), Mixed(places, 30, 128, bias=False))
        for model in (*mixed, Gated(places, 128), Parts(places, 48)):
            what = f"{type(model).__name__} of {places} places, {batch} times, {dtype}"
            _assert_over_places(what, model.to("cuda", dtype).eval(), x)
            count += 1
    return f"{count} models"


def check_weights_over_places_that_change() -> str:
    """A weight whose rows were moved apart is moved again when it changes."""
    torch.manual_seed(0)
    model = Gated(196, 128).to("cuda", torch.bfloat16).eval()
    x = torch.randn(4, 196, 128, device="cuda", dtype=torch.bfloat16)
    compiled = _assert_calls_right("before", model, x)
    with torch.no_grad():
        for _ in range(3):
            model.gate.weight.mul_(-2.0)
            model.gate.bias.add_(1.0)
            _assert_right(compiled(x), model, x)
    return "3 changes"


class Filled(nn.Module):
    """Halves of what is filled, one as the gate of the other."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gate, up = x.masked_fill(mask, 0.0).chunk(2, -1)
        return F.silu(gate) * up


def check_parts_of_pointwise_ops() -> str:
    """What is computed in parts is computed in the kernel of what follows."""
    torch.manual_seed(0)
    for dtype, width in itertools.product((torch.float32, *HALVES), (6, 64, 130)):
        x, mask = torch.randn(33, width, device="cuda", dtype=dtype), torch.rand(33, 1, device="cuda") < 0.3
        compiled = _assert_calls_right(f"{width} {dtype}", Filled(), x, mask)
        assert len(_steps(compiled)) == 1, _steps(compiled)
    return "9 calls"
