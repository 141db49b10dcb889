"""Sets of weights that a graph is called with: equal layers of a model may share it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..devices.bound import Plan
from .folding import watch
from .outputs import PlanResults

Bound = tuple[Plan, PlanResults]
"""A bound plan, and what makes results of what it returns."""


class Weights:
    """One set of weights that a graph is called with, and the plans that are bound to it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.bound: dict[tuple[int, ...], Bound] = {}
        """Plans by sizes."""
        self.only: Bound | None = None
        """The plan, where there is one for all calls, which takes their arguments as they are."""
        self.gone: set[tuple[int, ...]] = set()
        """Sizes whose plans gave way to others."""
        self.constants: dict[object, torch.Tensor] = {}
        """What was made of the weights, for graphs that are bound at several sizes: plans share packed
        weights by their addresses, at which nothing else may come to lie."""
        self._memory: list[torch.Tensor] = []
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def hold(self, ids: list[int], weights: Sequence[torch.Tensor]) -> None:
        """Plans are bound to these. A plan knows whether the objects with these numbers are still the same.
        Their memory is kept until they are gone or others are in their place: so long no other memory can
        lie at the same address."""
        self.ids = ids
        self._memory = [w.detach() for w in weights]
        self._alive = watch(self, weights)

    def forget(self) -> None:
        """Drops the plans: a weight is gone, or a setting is another one."""
        self.bound.clear()
        self.only = None
        self.gone.clear()
        self.constants.clear()
        self._memory.clear()

    def leave(self) -> None:
        """Stops watching the weights: somebody else takes the plans, or they go."""
        self._alive = []
