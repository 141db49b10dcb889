"""What a row of a suite is, and what every suite has in common."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 0
NO_DROPOUT = 1e-30
"""The ops of dropout stay, but drop nothing: forms can be compared. PyTorch's benchmarks do the same."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run asks of all its models."""

    device: str = "cpu"
    dtype: str = "own"
    """One of `DTYPES`, or ``own``: the row's."""
    small: bool = False
    """Two layers, batch 1, sequence 64: what a CPU can run."""
    layers: int = 0
    """Of models of transformers; 0: four, and two in a small run."""
    training: bool = False
    samples: str = ""
    """The folder of GraphNet's samples."""
    gib: float = 4.0
    """Samples with larger weights are left out."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by keyword."""


@dataclasses.dataclass
class Case:
    """A model with weights, and inputs by seed."""

    model: nn.Module
    arguments: Callable[[int], Arguments]
    dtype: torch.dtype | None
    """What weights and inputs were turned into; none: they are as the sample has them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of a suite: one line of its table."""

    name: str
    make: Callable[[Setting], tuple[nn.Module, Callable[[torch.Generator], Arguments]]]
    """Builds the model on the CPU, and what draws its inputs."""
    batch: int = 1
    sequence: int = 0
    dtype: str = ""
    """Where the row has a dtype of its own."""
    channels_last: bool = False

    def build(self, setting: Setting) -> Case:
        """The model with random weights from a fixed seed, in the dtype and on the device asked for."""
        torch.manual_seed(SEED)
        model, draw = self.make(setting)
        name = self.dtype if setting.dtype == "own" else setting.dtype
        dtype = DTYPES[name] if name else None
        if setting.training:
            without_dropout(model)
        model = model.train(setting.training)
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        model = model.to(device=setting.device, dtype=dtype, memory_format=layout)

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            wanted = dtype if dtype and value.is_floating_point() else value.dtype
            value = value.to(device=setting.device, dtype=wanted)
            return (
                value.contiguous(memory_format=layout) if self.channels_last and value.dim() == 4 else value
            )

        def arguments(seed: int) -> Arguments:
            made: Arguments = pytree.tree_map(placed, draw(torch.Generator().manual_seed(seed)))
            return made

        return Case(model, arguments, dtype)


def without_dropout(model: nn.Module) -> None:
    """Dropout of modules drops nothing from here on."""
    for module in model.modules():
        if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, NO_DROPOUT)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result: of tuples, of ModelOutputs, and of the caches of transformers."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [t for value in result.values() for t in tensors_of(value)]
    if isinstance(result, (tuple, list)):
        return [t for value in result for t in tensors_of(value)]
    if hasattr(result, "self_attention_cache"):
        return tensors_of([result.self_attention_cache, result.cross_attention_cache])
    if hasattr(result, "layers"):
        return [t for layer in result.layers for t in (layer.keys, layer.values) if t is not None]
    return []


def loss_of(result: Any) -> torch.Tensor:
    """The loss that the model returns, else the mean square of its first result."""
    loss = getattr(result, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else tensors_of(result)[0].float().square().mean()


class _Widened(TorchFunctionMode):
    """What a model asks to be computed in float32 or less is computed in float64."""

    NARROW = (torch.float32, torch.bfloat16, torch.float16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in self.NARROW else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Models in float64 stay in it, also where they ask for float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
