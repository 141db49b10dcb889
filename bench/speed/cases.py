"""What is measured: models by section, name and dtype, the same in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hypatia.tools.workloads import (
    NINE_MLPS,
    WORKLOADS,
    LlamaLayer,
    LoRALinear,
    MLPShape,
    Workload,
)

DTYPES = ("fp32", "bf16")
SAME_NETWORK = ("tiny_b256", "large4_b1024")
"""MLPs that differ from the one before in their batch only: with one row they would be measured twice."""

LINEARS = (
    *((64, 784, 256), (256, 784, 256), (128, 512, 512), (256, 1024, 512), (512, 2048, 2048)),
    *((512, 4096, 4096), (1, 2048, 2048), (16, 2048, 2048), (1, 64, 64)),
)
"""Rows, and the widths of a linear layer."""

WIDE = (4096, 1024)
"""Four million floats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a section at one dtype."""

    section: str
    name: str
    workload: Workload
    dtype: str = "fp32"
    quick: bool = False
    """Part of the short form."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name for all sections and dtypes."""
        return f"{self.section}/{self.name}/{self.dtype}"


class Function(nn.Module):
    """A function of tensors as a model without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        """What the function returns."""
        return self.function(*args)


class Projections(nn.Module):
    """Query, key and value of unequal widths, as with grouped heads."""

    def __init__(self, width: int = 1024, narrow: int = 256) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, narrow), nn.Linear(width, narrow)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All three."""
        return self.query(x), self.key(x), self.value(x)


class TwoSums(nn.Module):
    """``x A + x B``."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both products."""
        return x @ self.a + x @ self.b


def _mlps() -> list[Case]:
    found = []
    for dtype in DTYPES:
        for shape in NINE_MLPS:
            quick = shape.name in ("tiny_b64", "small3", "medium3")
            found.append(_mlp(shape, shape.name, dtype, quick))
        for shape in NINE_MLPS:
            if shape.name not in SAME_NETWORK:
                one = dataclasses.replace(shape, batch=1)
                found.append(
                    _mlp(one, f"{shape.name.partition('_b')[0]} b1", dtype, shape.name == "tiny_b64")
                )
    return found


def _mlp(shape: MLPShape, name: str, dtype: str, quick: bool) -> Case:
    facts = {"batch": shape.batch, "small": shape.name.startswith(("tiny", "small", "medium"))}
    return Case("mlp", name, dataclasses.replace(shape.workload(), name=name), dtype, quick, facts)


def _linears() -> list[Case]:
    def make(m: int, k: int, n: int, dtype: str) -> Case:
        workload = Workload(f"{m}x{k}→{n}", lambda: nn.Linear(k, n), ((m, k),), "one linear layer")
        return Case("linear", workload.name, workload, dtype, (m, k, n) in LINEARS[:2], {"rows": m})

    return [make(*shape, dtype) for dtype in DTYPES for shape in LINEARS]


def _ten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.tanh(x * 0.5 + y)
    z = torch.sigmoid(z - 0.25) * x
    z = torch.relu(z) + y * y
    return z * 1.5


def _rms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x + y, WIDE[1:])


POINTWISE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "10 ops": (lambda: Function(_ten), 2),
    "gelu + add": (lambda: Function(lambda x, y: F.gelu(x) + y), 2),
    "layer_norm": (lambda: nn.LayerNorm(WIDE[1]), 1),
    "softmax": (lambda: nn.Softmax(-1), 1),
    "residual + rms_norm": (lambda: Function(_rms), 2),
}
"""Models of 4096x1024 floats, and how many inputs they have."""


def _pointwise() -> list[Case]:
    return [
        Case("pointwise", name, Workload(name, make, (WIDE,) * inputs, ""), quick=name == "gelu + add")
        for name, (make, inputs) in POINTWISE.items()
    ]


def _models() -> list[Case]:
    block = Workload("Llama block b1 s1", LlamaLayer, ((1, 1, 2048),), "one layer, width 2048, one token")
    bert = dataclasses.replace(WORKLOADS["bert-base"], name="BERT-base b1 s128")
    return [
        Case("models", bert.name, bert),
        *(Case("models", block.name, block, dtype, quick=dtype == "bf16") for dtype in DTYPES),
    ]


def _rewrites() -> list[Case]:
    rows = 256

    def make(
        name: str, model: Callable[[], nn.Module], shapes: Sequence[tuple[int, ...]], after: int, note: str
    ) -> Case:
        workload = Workload(name, model, tuple(shapes), note)
        return Case("rewrites", name, workload, quick=name == "linear ∘ linear", facts={"flops_after": after})

    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 512))

    def conv() -> nn.Module:
        norm = nn.BatchNorm2d(64)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.running_mean)
        return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), norm)

    x = [(rows, 1024)]
    chain = [(1024, 256), (256, 1024), (1024, 64)]
    return [
        make("LoRA", lambda: LoRALinear(1024, 64), x, 2 * rows * 1024**2, "1024 → 1024, rank 64"),
        make("QKV of unequal widths", Projections, x, 2 * rows * 1024 * 1536, "1024 → 1024, 256, 256"),
        make("linear ∘ linear", two, x, 2 * rows * 1024 * 512, "1024 → 2048 → 512"),
        make("xA + xB", TwoSums, x, 2 * rows * 1024**2, "1024 → 1024, twice"),
        make(
            "matrix chain",
            lambda: Function(lambda a, b, c: a @ b @ c),
            chain,
            2 * 2 * 256 * 1024 * 64,
            "1024x256 · 256x1024 · 1024x64",
        ),
        make("conv + bn", conv, [(1, 64, 56, 56)], 2 * 56 * 56 * 64 * 64 * 9, "64 → 64, 3x3, 56x56"),
    ]


CASES = [*_mlps(), *_linears(), *_pointwise(), *_models(), *_rewrites()]
BY_KEY = {case.key: case for case in CASES}


def of(section: str, quick: bool) -> list[Case]:
    """The cases of a section, or those of its short form."""
    return [c for c in CASES if c.section == section and (c.quick or not quick)]
