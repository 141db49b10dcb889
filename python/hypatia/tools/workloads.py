"""The named workloads of the benchmarks, the diagnostics and the tests: random weights, no downloads."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "NINE_MLPS",
    "WORKLOADS",
    "BertLayer",
    "GPTLayer",
    "LlamaLayer",
    "LoRALinear",
    "MLPShape",
    "Workload",
]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and what to call it with."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    note: str

    def build(
        self, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The model in eval mode and its inputs, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make().eval()
            inputs = tuple(torch.randn(shape) for shape in self.shapes)
        return model.to(device, dtype), tuple(x.to(device, dtype) for x in inputs)

    @property
    def flops(self) -> int:
        """Operations of the linear layers in one call; a measure of size, attention is left out."""
        with torch.device("meta"):
            model = self.make()
        rows = math.prod(self.shapes[0][:-1])
        return 2 * rows * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


@dataclasses.dataclass(frozen=True)
class MLPShape:
    """Linear, ReLU, then `depth - 1` times Linear, ReLU at the hidden width, then a last Linear."""

    name: str
    features: int
    hidden: int
    depth: int
    classes: int
    batch: int

    def build(self) -> nn.Sequential:
        """The model with random weights."""
        widths = [self.features] + [self.hidden] * self.depth
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.hidden, self.classes))

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """A batch of random rows."""
        return (torch.randn(self.batch, self.features),)

    def workload(self) -> Workload:
        """The shape as a named workload."""
        hidden = f"{self.hidden}x{self.depth}"
        note = f"MLP {self.features} -> {hidden} -> {self.classes}, batch {self.batch}"
        return Workload(self.name, self.build, ((self.batch, self.features),), note)


NINE_MLPS = [
    MLPShape("tiny_b64", 784, 256, 2, 10, 64),
    MLPShape("tiny_b256", 784, 256, 2, 10, 256),
    MLPShape("small3", 512, 512, 3, 128, 128),
    MLPShape("medium3", 784, 512, 3, 128, 256),
    MLPShape("medium4", 1024, 512, 4, 256, 256),
    MLPShape("large4", 784, 2048, 4, 1000, 512),
    MLPShape("large4_b1024", 784, 2048, 4, 1000, 1024),
    MLPShape("xlarge4", 2048, 2048, 4, 1000, 1024),
    MLPShape("xlarge6", 1024, 4096, 6, 1000, 512),
]
"""The configurations that every benchmark of this project reports."""


def _by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Batch, heads, sequence, features of a head."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class BertLayer(nn.Module):
    """A post-norm layer: separate query, key and value, GELU by erf."""

    def __init__(
        self, width: int = 768, heads: int = 12, inner: int = 3072, written_out: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.written_out = written_out
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP, each added and normalized."""
        q, k, v = (_by_heads(p(x), self.heads) for p in (self.query, self.key, self.value))
        mixed = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention by torch's op, or written out as matmul, softmax, matmul."""
        if not self.written_out:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


class GPTLayer(nn.Module):
    """A pre-norm causal layer: one projection for query, key and value, GELU by tanh."""

    def __init__(self, width: int = 768, heads: int = 12, inner: int = 3072) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP, each on the normalized input."""
        q, k, v = (_by_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaLayer(nn.Module):
    """A causal layer without biases: RMSNorm, rotary positions, SwiGLU."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int = 2048, heads: int = 16, inner: int = 5632, length: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        half = width // heads // 2
        speeds = 10000.0 ** (-torch.arange(half) / half)
        angles = (torch.arange(length)[:, None] * speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turns pairs of features by an angle that grows with the position."""
        length = x.shape[-2]
        left, right = x.chunk(2, -1)
        return x * self.cos[:length] + torch.cat([-right, left], -1) * self.sin[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the gated MLP, each on the normalized input."""
        y = self.norm1(x)
        q, k, v = (_by_heads(p(y), self.heads) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LoRALinear(nn.Module):
    """A linear layer and a low-rank correction of it."""

    def __init__(self, width: int = 4096, rank: int = 16, scale: float = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.shrink, self.grow = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer plus its scaled correction."""
        return self.base(x) + self.scale * self.grow(self.shrink(x))


def _linear_relu(size: str, batch: int, wide: int, narrow: int) -> Workload:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(wide, narrow), nn.ReLU())

    note = f"Linear+ReLU, {batch} x {wide} -> {narrow}"
    return Workload(f"linear_relu_{size}", make, ((batch, wide),), note)


def _stack(
    name: str, layer: Callable[[], nn.Module], layers: int, last: Callable[[], nn.Module] | None, *shape: int
) -> Workload:
    def make() -> nn.Module:
        return nn.Sequential(*(layer() for _ in range(layers)), *([last()] if last else []))

    note = f"{layers} layers, batch {shape[0]}, {shape[1]} token{'s' if shape[1] > 1 else ''}"
    return Workload(name, make, (shape,), note)


KERNELS = [
    _linear_relu("small", 256, 256, 512),
    _linear_relu("medium", 1024, 784, 2048),
    _linear_relu("large", 8192, 4096, 4096),
]
"""Linear+ReLU by itself, at three sizes."""

BLOCKS = [
    _stack("bert-base", BertLayer, 12, None, 1, 128, 768),
    _stack("bert-base-b16", BertLayer, 12, None, 16, 128, 768),
    _stack("gpt2", GPTLayer, 12, lambda: nn.LayerNorm(768), 1, 128, 768),
    _stack("llama", LlamaLayer, 4, lambda: nn.RMSNorm(2048), 1, 128, 2048),
    _stack("llama-decode", LlamaLayer, 4, lambda: nn.RMSNorm(2048), 1, 1, 2048),
    _stack("llama-b8", LlamaLayer, 4, lambda: nn.RMSNorm(2048), 8, 512, 2048),
    Workload("lora", LoRALinear, ((2048, 4096),), "Linear 4096 -> 4096 with rank 16, batch 2048"),
]
"""Transformers at the sizes people use, and a LoRA layer."""

WORKLOADS: dict[str, Workload] = {
    w.name: w for w in [*(shape.workload() for shape in NINE_MLPS), *KERNELS, *BLOCKS]
}
"""All of them by name."""


def find(name: str) -> Workload:
    """The workload of that name, ``-`` and ``_`` being the same; a LookupError lists what there is."""
    plain = {known.replace("-", "_"): w for known, w in WORKLOADS.items()}
    key = name.lower().replace("-", "_")
    if key in plain:
        return plain[key]
    close = [plain[k].name for k in difflib.get_close_matches(key, plain, 1)]
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(WORKLOADS)}"
    raise LookupError(f"there is no workload {name!r}; {hint}")
