"""A zoo of architectures with random weights and small configurations; nothing is downloaded.

Each entry builds a model and its example inputs; the suites and the benchmarks take them from `ZOO` by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hypatia.tools.workloads import NINE_MLPS, MLPShape

Inputs = dict[str, Any] | tuple[Any, ...]

SETTLING = 16
"""Calls whose mean gives the statistics of batch norms."""


@dataclass(frozen=True)
class Entry:
    """One architecture: how to build it and what to call it with."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    slow: bool = False

    def model(self) -> nn.Module:
        """The model, with the same random weights each time, in eval mode."""
        torch.manual_seed(0)
        model = self.build()
        _live_in(model)
        settle_statistics(model, self.inputs)
        return model.eval()

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments, the same each time."""
        torch.manual_seed(1)
        return called_with(self.inputs)


def called_with(inputs: Callable[[], Inputs]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments."""
    given = inputs()
    return ((), given) if isinstance(given, dict) else (given, {})


@torch.no_grad()
def _live_in(model: nn.Module) -> None:
    """Move biases and norm weights off zero and one, where folding them wrongly would not show."""
    for parameter in model.parameters():
        if parameter.ndim <= 1:
            parameter.add_(0.1 * torch.randn_like(parameter))


@torch.no_grad()
def settle_statistics(model: nn.Module, inputs: Callable[[], Inputs]) -> None:
    """Give batch norms the statistics of inputs like those to come: those of an unused one shrink or blow up
    what passes. So do those of few values, as the last layers see of a small picture: then every rounding is
    blown up, eager's too, and compiled nets are rolled back."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # The mean over all calls.
    torch.manual_seed(2)
    for _ in range(SETTLING):
        positional, named = called_with(inputs)
        model.train()(*positional, **named)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


ZOO: dict[str, Entry] = {}


def register(name: str, inputs: Callable[[], Inputs], *, slow: bool = False) -> Callable[..., Any]:
    """Enter a factory of models into the zoo."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in ZOO, f"two entries are called {name}"
        ZOO[name] = Entry(name, build, inputs, slow)
        return build

    return enter


def image(size: int, *, batch: int = 4, channels: int = 3) -> Callable[[], Inputs]:
    return lambda: (torch.randn(batch, channels, size, size),)


def tokens(length: int = 12, *, batch: int = 2, vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(2, vocabulary, (batch, length))


def _enter_mlps() -> None:
    for layers in (2, 3, 6):
        shape = MLPShape(f"mlp_{layers}", 20, 32, layers - 1, 5, 7)
        register(shape.name, shape.inputs)(shape.build)
    for shape in NINE_MLPS:
        big = shape.name.startswith(("large", "xlarge"))
        register(shape.name, shape.inputs, slow=big)(shape.build)


_enter_mlps()


class LSTMClassifier(nn.Module):
    """Embedding, two LSTM layers in both directions, a head on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.lstm = nn.LSTM(24, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embed(words))
        return self.head(states[:, -1])


@register("lstm", lambda: (tokens(10, batch=3),))
def _lstm() -> nn.Module:
    return LSTMClassifier()


def _double_conv(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """The segmentation network: two steps down, two up, skips by concatenation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = _double_conv(3, width)
        self.down2 = _double_conv(width, 2 * width)
        self.bottom = _double_conv(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = _double_conv(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = _double_conv(2 * width, width)
        self.head = nn.Conv2d(width, 4, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        first = self.down1(picture)
        second = self.down2(self.pool(first))
        deep = self.bottom(self.pool(second))
        second = self.up2(torch.cat([self.rise2(deep), second], dim=1))
        first = self.up1(torch.cat([self.rise1(second), first], dim=1))
        return self.head(first)


@register("unet", image(24))
def _unet() -> nn.Module:
    return UNet()


import zoo_language  # noqa: E402, F401
import zoo_vision  # noqa: E402, F401
