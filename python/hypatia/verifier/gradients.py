"""A model's gradients as results, so that whatever compares results compares them too."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from .._torch import pytree


def cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward pass starts from: the same each time, and exact in every floating-point dtype."""
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(-4, 5, y.shape, generator=dice).to(y.device, y.dtype) / 4 for y in outputs]


def differentiable(results: object) -> list[torch.Tensor]:
    """The results that a backward pass can start from."""
    leaves = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [t for t in leaves if t.requires_grad]


def gradients_of(
    results: Mapping[fx.Node, object], leaves: Iterable[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of results; the weights are the same in every precision and order."""
    total: torch.Tensor | float = 0.0
    for node, result in sorted(results.items(), key=lambda item: item[0].name):
        dice = torch.Generator().manual_seed(zlib.crc32(node.name.encode()))
        if isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point():
            weights = torch.randint(1, 17, result.shape, generator=dice).to(result) / 16
            total = total + (result * weights).sum().double()
    wanted = list(leaves)
    if not isinstance(total, torch.Tensor) or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


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
