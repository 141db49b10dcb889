"""The graphs of the compile-time benchmark: TENSAT's, and BERT-base at any depth.

TENSAT built its graphs by hand or read them from ONNX, with batch norms folded away before. Here they are
the aten graphs that `torch.compile` gives a backend and so larger: batch norms, biases and views are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hypatia.tools.workloads import BertLayer


@dataclass(frozen=True)
class Workload:
    """A model and the shapes of its inputs."""

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    note: str = ""

    def model(self) -> nn.Module:
        """The model in eval mode; the optimizer never reads a weight, so they are left uninitialised."""
        with torch.device("meta"):
            model = self.build()
        return model.eval().to_empty(device="cpu")

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Inputs of the right shapes."""
        return tuple(torch.zeros(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Published:
    """What TENSAT's paper reports: seconds of optimization, and the speed-up measured on a GPU."""

    seconds: float
    speedup: float


class NasRNN(nn.Module):
    """The recurrent cell of TASO's and TENSAT's benchmark: eight pairs of matmuls a step."""

    def __init__(self, hidden: int = 512, length: int = 5) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.empty(1, hidden))
        self.of_input = nn.ParameterList(torch.empty(hidden, hidden) for _ in range(8 * length))
        self.of_state = nn.ParameterList(torch.empty(hidden, hidden) for _ in range(8 * length))

    def forward(self, *steps: torch.Tensor) -> torch.Tensor:
        state = self.start
        for i, x in enumerate(steps):
            state = self.cell(x, state, slice(8 * i, 8 * i + 8))
        return state

    def cell(self, x: torch.Tensor, state: torch.Tensor, step: slice) -> torch.Tensor:
        pairs = zip(self.of_input[step], self.of_state[step], strict=True)
        a, b, c, d, e, f, g, h = (x @ wide + state @ tall for wide, tall in pairs)
        first = torch.relu(a) + torch.sigmoid(d)
        second = torch.sigmoid(b) + torch.tanh(c)
        third = torch.sigmoid(e) * torch.tanh(f)
        fourth = torch.sigmoid(g) * torch.relu(h)
        left = torch.tanh(torch.sigmoid(second) + torch.tanh(third))
        right = torch.tanh(torch.tanh(first) * torch.tanh(fourth))
        return torch.tanh(left * right)


class AttentionStack(nn.Module):
    """TENSAT's BERT: attention without softmax, four projections of one input in each of eight layers."""

    def __init__(self, layers: int = 8, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.relu(x)
        results = []
        for query, key, value, onward in self.projections:
            q, k, v = (self.split(p(x)) for p in (query, key, value))
            results.append((q @ k @ v).transpose(0, 1).reshape(x.shape))
            x = onward(x)
        return (*results, x)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """By heads; the sequence is as long as a head is wide, and TENSAT leaves the keys untransposed."""
        return x.reshape(x.shape[0], self.heads, -1).transpose(0, 1)


def bert(
    layers: int,
    *,
    width: int = 768,
    heads: int = 12,
    inner: int = 3072,
    length: int = 128,
    written_out: bool = False,
    name: str = "",
) -> Workload:
    """An encoder; BERT-base unless told otherwise. `written_out`: attention by matmuls and softmax."""
    return Workload(
        name or f"bert-{layers}{'-softmax' if written_out else ''}",
        lambda: nn.Sequential(*(BertLayer(width, heads, inner, written_out) for _ in range(layers))),
        ((1, length, width),),
        "attention written out as matmul, softmax, matmul" if written_out else "",
    )


class Separable(nn.Sequential):
    """A depthwise convolution and a pointwise one."""

    def __init__(self, width: int, size: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(width, width, size, stride, size // 2, groups=width, bias=False),
            nn.Conv2d(width, width, 1, bias=False),
        )


class NasNetCell(nn.Module):
    """A cell of NasNet-A over the results of the last two cells; `reduce` halves the picture."""

    def __init__(self, before: int, last: int, width: int, *, reduce: bool) -> None:
        super().__init__()
        self.reduce = reduce
        self.squeeze = nn.Conv2d(last, width, 1, bias=False)
        self.fit = nn.Conv2d(before, width, 1, bias=False)
        sizes = [(7, 2), (5, 2), (7, 2), (5, 2), (3, 1)] if reduce else [(3, 1)] * 5
        self.branches = nn.ModuleList(Separable(width, size, stride) for size, stride in sizes)

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.squeeze(last))
        y = torch.relu(self.fit(before))
        a, b, c, d, e = self.branches
        if not self.reduce:
            parts = [a(x) + x, b(y) + c(x), _mean(x) + y, _mean(y) + _mean(y), d(y) + e(y)]
            return torch.cat(parts, 1)
        first = a(y) + b(x)
        second = _largest(x) + c(y)
        parts = [first, second, _mean(x, 2) + d(y), _largest(x) + e(first), _mean(first) + second]
        return torch.cat(parts, 1)


def _mean(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    return F.avg_pool2d(x, 3, stride, 1)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, 2, 1)


class NasNetA(nn.Module):
    """TENSAT's NasNet-A: a stem, then three times five normal cells and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.stages = nn.ModuleList()
        entry, width = 64, 128
        for _ in range(3):
            stage, before, last = nn.ModuleList(), entry, entry
            for _ in range(5):
                stage.append(NasNetCell(before, last, width, reduce=False))
                before, last = last, 5 * width
            width *= 2
            stage.append(NasNetCell(before, last, width, reduce=True))
            entry = 5 * width
            self.stages.append(stage)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = _largest(torch.relu(self.stem(picture)))
        for stage in self.stages:
            before = last = x
            for cell in stage:
                before, last = last, cell(before, last)
            x = last
        return x


def _torchvision(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **arguments)

    return build


PICTURE = ((1, 3, 224, 224),)

TENSAT: list[tuple[Workload, Published]] = [
    (Workload("nasrnn", NasRNN, ((1, 512),) * 5, "hidden 512, 5 steps"), Published(0.5, 68.9)),
    (
        Workload(
            "bert-tensat", AttentionStack, ((64, 1024),), "TENSAT's own graph: 8 x attention, no softmax"
        ),
        Published(1.4, 9.2),
    ),
    (
        bert(8, width=1024, heads=16, inner=4096, length=64, name="bert-8x1024"),
        Published(1.4, 9.2),
    ),
    (
        Workload(
            "resnext50", _torchvision("resnext50_32x4d"), PICTURE, "torchvision's 32x4d, batch norms in"
        ),
        Published(0.7, 8.8),
    ),
    (
        Workload("squeezenet", _torchvision("squeezenet1_1"), PICTURE, "torchvision's 1.1"),
        Published(0.3, 24.5),
    ),
    (Workload("vgg19", _torchvision("vgg19"), PICTURE, "torchvision's"), Published(0.4, 8.9)),
    (
        Workload(
            "inception_v3",
            _torchvision("inception_v3", aux_logits=False, init_weights=False),
            ((1, 3, 299, 299),),
            "torchvision's, batch norms in",
        ),
        Published(5.1, 10.0),
    ),
    (Workload("nasnet_a", NasNetA, PICTURE, "TENSAT's own graph"), Published(10.6, 7.3)),
]
"""The models of TENSAT's paper with what it reports of them; BERT twice, as TENSAT had it and whole."""
