"""How steady results in float64 are: what signs of zeros and roundings on the way do to them.

That is the same for all programs that are tried at a first call, so each question is asked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..execute.changes import RandomState
from .gradients import gradients_of
from .judge import distances, is_float
from .reference import Script, Stream
from .zero_signs import depend_on_signs


class Steadiness:
    """Of the results of a graph on some inputs. ``exact`` are those in float64 that it is asked about."""

    def __init__(self, gm: fx.GraphModule, inputs: dict[fx.Node, object], random: RandomState) -> None:
        self._gm, self._inputs, self._random = gm, inputs, random
        self._signs: dict[fx.Node, torch.Tensor | None] = {}
        self._shifts: dict[tuple[fx.Node, float, int], float | None] = {}

    def signs(self, exact: Mapping[fx.Node, object]) -> dict[fx.Node, torch.Tensor]:
        """Flags of the elements that depend on the sign of a zero, of results that have such elements."""
        missing = {node: value for node, value in exact.items() if node not in self._signs}
        if missing:
            found = depend_on_signs(self._gm, self._inputs, self._random, missing)
            self._signs |= {node: found.get(node) for node in missing}
        known = ((node, self._signs[node]) for node in exact)
        return {node: flags for node, flags in known if flags is not None}

    def shifts(self, exact: Mapping[fx.Node, object], roundings: float, seed: int) -> dict[fx.Node, float]:
        """How far results move where inputs and results of ops are moved by so many roundings: the greatest
        distance, and of whole numbers how many change."""
        missing = {node for node in exact if (node, roundings, seed) not in self._shifts}
        if missing:
            self._shifts |= dict.fromkeys((node, roundings, seed) for node in missing)
            stream = Stream(
                Script(self._gm, missing),
                self._inputs,
                self._random,
                wide=True,
                nudge=True,
                roundings=roundings,
                seed=seed,
            )
            for node, moved in stream:
                self._shifts[node, roundings, seed] = _shift(moved, exact[node])
        known = ((node, self._shifts[node, roundings, seed]) for node in exact)
        return {node: shift for node, shift in known if shift is not None}


def _shift(moved: object, exact: object) -> float | None:
    if not isinstance(moved, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return None
    if not is_float(moved):
        return float((moved != exact).sum())
    return max((d[0] for d in distances(moved, exact, exact)), default=0.0)


class MovedGradients:
    """Gradients in float64 where results of ops are moved by half a rounding, for several seeds."""

    def __init__(
        self,
        script: Script,
        inputs: dict[fx.Node, object],
        random: RandomState,
        leaves: Sequence[torch.Tensor],
    ) -> None:
        self._script, self._inputs, self._random, self._leaves = script, inputs, random, leaves
        self._known: dict[int, list[torch.Tensor | None]] = {}

    def shift(self, exact: torch.Tensor, place: int, seed: int) -> float | None:
        """How far one of them moves; none if it does not exist."""
        moved = self._moved(seed)[place]
        return None if moved is None else max((d[0] for d in distances(moved, exact, exact)), default=0.0)

    def _moved(self, seed: int) -> list[torch.Tensor | None]:
        if seed not in self._known:
            # Inputs stay: at a tie, where a gradient jumps, it must be eager's.
            how = {"wide": True, "nudge": True, "nudge_inputs": False}
            with torch.enable_grad():
                stream = Stream(self._script, self._inputs, self._random, seed=seed, **how)
                self._known[seed] = gradients_of(dict(stream), self._leaves)
        return self._known[seed]
