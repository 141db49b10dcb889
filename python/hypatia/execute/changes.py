"""What a call changes beside its results: tensors in place, and the state of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .. import _torch
from ..devices import table
from .agreement import agree
from .cuda_graph import SHARE

T = TypeVar("T")


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


class Counts:
    """The integers and flags among the tensors that a call changes: where a cache ends, how many calls there
    were. A call that is only tried must find them as the caller left them: by the second or third one they
    would point past the end of the cache."""

    def __init__(self, tensors: Sequence[object] = (), values: Sequence[object] = ()) -> None:
        self._groups: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, value in zip(tensors, values, strict=True):
            if not (isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor)):
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                now, then = self._groups.setdefault(tensor.is_inference(), ([], []))
                now.append(tensor)
                then.append(value)

    def restore(self) -> None:
        """Makes them as they were."""
        for inference, (now, then) in self._groups.items():
            with torch.inference_mode(inference), torch.no_grad():
                _torch.foreach_copy(now, then)

    def before(self, call: Callable[[], T]) -> Callable[[], T]:
        """The same call, with the counts as they were. It can be made any number of times."""
        if not self._groups:
            return call

        def again() -> T:
            self.restore()
            return call()

        return again


def _is_as_it_was(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor has these values; of others than plain ones that is not known."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


class State:
    """Tensors and random numbers as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = list(tensors)
        self.values = [t.detach().clone() for t in tensors]
        self._random = RandomState(table.of(device).random_devices(device))
        self.device = device

    @property
    def counts(self) -> Counts:
        """Those of the tensors that are counts."""
        return Counts(self.tensors, self.values)

    def restore(self) -> None:
        """Makes everything as it was."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
        self._random.restore()

    def restore_changed(self) -> None:
        """The same, but tensors that are as they were are not touched: somebody may keep them for a backward
        pass, or they may be expanded. Version counters do not say it: a batch norm leaves them alone."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if not _is_as_it_was(tensor, value):
                    tensor.copy_(value)
        self._random.restore()

    def is_now(self) -> bool:
        """Whether the tensors are as they were, but for roundings."""
        return all(agree(a, b) for a, b in zip(self.tensors, self.values, strict=True))

    def agrees(self, other: State) -> bool:
        """Whether two states of the same tensors are apart by roundings alone."""
        return all(agree(a, b) for a, b in zip(self.values, other.values, strict=True))
