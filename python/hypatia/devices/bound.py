"""What is asked of a device's bound plans, and what a plan is bound with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from .. import _native

Tensors = tuple[torch.Tensor, ...]


class Plan(Protocol):
    """A plan that is bound to weights."""

    def __call__(self, lead: int, /, *inputs: torch.Tensor) -> Tensors | None:
        """The outputs; none if the plan is not for these inputs."""

    def current(self) -> bool:
        """Whether the weights are as they were."""

    def refusal(self, *inputs: torch.Tensor) -> str:
        """Why the plan does not run on these inputs."""

    def bytes(self) -> tuple[int, int]:
        """Bytes of the values in between, and of packed weights."""

    def kinds(self) -> list[str]:
        """How each linear layer is computed."""


class Rest(Protocol):
    """The last steps of a plan, which write outputs that are large."""

    @property
    def early(self) -> list[torch.Tensor | None]:
        """The outputs that are there; none for those to come."""

    def __call__(self, lead: int, /) -> Tensors:
        """The others."""


class Recordable(Plan, Protocol):
    """A plan whose steps can be recorded once and done again."""

    def begin(self, lead: int, /, *inputs: torch.Tensor) -> Rest | None:
        """Runs all steps but the last ones."""


class Request(NamedTuple):
    """What a plan is bound with."""

    plan: _native.NativePlan
    constants: list[torch.Tensor]
    watched: list[torch.Tensor]
    """Weights: the plan is for them as they are now."""
    calls: list[str | Callable[..., object]]
    """Its calls into torch."""
    libtorch: str
    device: torch.device
    lead: int
    """What it is given first at each call."""
    returns: list[int] | None
    """The outputs that it returns, in their order, where the device can choose; all of them otherwise."""
    split: bool
    """Whether weights are kept in parts, for products in higher precision."""
    most: int | None
    """Bytes that may be taken for packed weights."""
    without: list[str]
    """Kinds of linear layers that are not used."""
    like: Plan | None
    """A plan of the same graph and weights, at other sizes."""
