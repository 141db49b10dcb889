"""A model's gradients as results, so that whatever compares results compares them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .._torch import pytree


def cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward pass starts from: the same each time, and exact in every floating-point dtype."""
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(-4, 5, y.shape, generator=dice).to(y.device, y.dtype) / 4 for y in outputs]


def differentiable(results: object) -> list[torch.Tensor]:
    """The results that a backward pass can start from."""
    leaves = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [t for t in leaves if t.requires_grad]


class WithGradients(nn.Module):
    """Calls a model (or its compiled form) and returns its results and the gradients of its parameters."""

    def __init__(self, model: nn.Module, call: Callable[..., object] | None = None) -> None:
        super().__init__()
        self.model = model
        self.call = model if call is None else call

    def forward(self, *args: object, **kwargs: object) -> tuple[object, list[torch.Tensor]]:
        """Results, then one gradient for every parameter that has one."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with torch.enable_grad():
            results = self.call(*args, **kwargs)
            outputs = differentiable(results)
            found = torch.autograd.grad(outputs, parameters, cotangents(outputs), allow_unused=True)
        detached = pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, results)
        return detached, [g for g in found if g is not None]
