"""Random numbers for values that are moved, drawn by the device that has them."""

from __future__ import annotations

import torch

from ..devices import table


class Dice:
    """The same numbers in every run with a seed. The host takes seconds for those of a large model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 to 1, in a tensor's shape and dtype."""
        (device,) = table.of(value.device).random_devices(value.device) or [torch.device("cpu")]
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.rand(value.shape, generator=self._generators[device], device=device).to(value)
