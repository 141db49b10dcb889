"""What a call changes beside its results: tensors in place, and the state of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .agreement import agree
from .cuda_graph import SHARE


def note_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Says to autograd, and to everybody who keeps something of a tensor, that a plan wrote to it."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def fits(tensors: Sequence[torch.Tensor], index: int) -> bool:
    """Whether a GPU has memory for two copies of these tensors, which a recording needs once."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    return not size or 2 * size <= SHARE * torch.cuda.mem_get_info(index)[0]


class State:
    """Tensors and random numbers as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = list(tensors)
        self.values = [t.detach().clone() for t in tensors]
        self._random = torch.get_rng_state()
        self.device = device
        if device.type == "cuda":
            self._on_device = torch.cuda.get_rng_state(device)

    def restore(self) -> None:
        """Makes everything as it was."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
        torch.set_rng_state(self._random)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self._on_device, self.device)

    def is_now(self) -> bool:
        """Whether the tensors are as they were, but for roundings."""
        return all(agree(a, b) for a, b in zip(self.tensors, self.values, strict=True))

    def agrees(self, other: State) -> bool:
        """Whether two states of the same tensors are apart by roundings alone."""
        return all(agree(a, b) for a, b in zip(self.values, other.values, strict=True))
