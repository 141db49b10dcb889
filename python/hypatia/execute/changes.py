"""What a call changes beside its results: tensors in place, and the state of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices import table
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


class RandomState:
    """The state of the random number generators that a graph can draw from."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.save()

    def save(self) -> None:
        """Remembers the current state."""
        self._cpu = torch.get_rng_state()
        self._others = [torch.get_device_module(d).get_rng_state(d) for d in self.devices]

    def restore(self) -> None:
        """Goes back to the state remembered."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self.devices, self._others, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def copy(self) -> RandomState:
        """The same state, to go on from separately."""
        twin = RandomState.__new__(RandomState)
        twin.devices, twin._cpu, twin._others = self.devices, self._cpu, list(self._others)
        return twin


class State:
    """Tensors and random numbers as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = list(tensors)
        self.values = [t.detach().clone() for t in tensors]
        self._random = RandomState(table.of(device).random_devices(device))
        self.device = device

    def restore(self) -> None:
        """Makes everything as it was."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
        self._random.restore()

    def is_now(self) -> bool:
        """Whether the tensors are as they were, but for roundings."""
        return all(agree(a, b) for a, b in zip(self.tensors, self.values, strict=True))

    def agrees(self, other: State) -> bool:
        """Whether two states of the same tensors are apart by roundings alone."""
        return all(agree(a, b) for a, b in zip(self.values, other.values, strict=True))
