"""Forms of the passes of a training step, which compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch
from ..execute.agreement import agree
from ..execute.changes import State, note_changes
from ..execute.native import NativeGraph
from ..execute.train_step import Backward, Forward, GivenTangents, Gradients, Tensors

log = logging.getLogger(__name__)

PLANS = "plans, recorded"
"""The form of a step whose plans run as CUDA graphs although torch's ops were faster without one."""

Run = Callable[[list[Any]], Any]
"""Runs a graph on a list of arguments that it empties."""


class Passes(NamedTuple):
    """What runs the forward and the backward pass."""

    forward: Forward
    backward: Backward


def native_form(run: Run) -> NativeGraph | None:
    """A graph that runs by its plan."""
    return run if isinstance(run, NativeGraph) and run.native else None


def lost(run: Run) -> NativeGraph | None:
    """A graph whose plan is right, and was slower than torch's ops."""
    return run if isinstance(run, NativeGraph) and run.lost else None


def let_go(runs: Iterable[Run]) -> None:
    """Frees what plans of these graphs hold, which do not run any more. One that runs is bound again."""
    for run in runs:
        if isinstance(run, NativeGraph):
            run.binding.forget()


def by_plan(run: Run) -> Run:
    """The same by its plan, where that lost."""
    graph = lost(run)
    if graph is None:
        return run

    def planned(args: list[object]) -> object:
        results = graph.run(args)
        return graph.fallback(args) if results is None else results

    return planned


def by_torch(forward: Run) -> Run:
    """The same by torch's ops."""
    return forward.graph if isinstance(forward, NativeGraph) else forward


def right_ones(
    forms: dict[str, Passes],
    primals: Sequence[torch.Tensor],
    tangents: GivenTangents,
    before: State,
) -> dict[str, Passes]:
    """The forms whose results, gradients and changes are those of the first, with the same random numbers."""
    expected: list[object] | None = None
    right: dict[str, Passes] = {}
    for name, passes in forms.items():
        before.restore()
        results, saved, besides = passes.forward(list(primals))
        changes = [t.clone() for t in before.tensors]
        got: list[object] = [*results, *passes.backward(saved, besides, list(tangents)), *changes]
        expected = got if expected is None else expected
        pairs = [(a, b) for a, b in zip(got, expected, strict=True) if isinstance(b, torch.Tensor)]
        if all(isinstance(a, torch.Tensor) and agree(a, b) for a, b in pairs):
            right[name] = passes
        else:
            # Where an input of a ReLU is nearly zero, another order of sums decides otherwise.
            log.info("a %s training step has other gradients than the plain one; it is not used", name)
    before.restore()
    return right


def masked(
    forward: NativeGraph,
    backward: NativeGraph,
    count: int,
    whole: Callable[[GivenTangents], Run | None] = lambda _: None,
) -> Passes | None:
    """Both passes by plans that hand masks of ReLUs over as bits; none if there are no such masks.

    ``whole`` is what runs the backward pass instead for some tangents."""
    ours, theirs = forward.binding, backward.binding
    keeps = {place - count: output for place, output in ours.keeps.items()}
    pairs = [(keeps[place], taken) for place, taken in theirs.masks.items() if place in keeps]
    if not pairs:
        return None
    kept, taken = zip(*pairs, strict=True)
    first = ours.bound_to(forward.planner.with_masks(keep=kept), more=len(pairs))
    second = theirs.bound_to(backward.planner.with_masks(masked=taken))

    def run(args: list[torch.Tensor]) -> tuple[Tensors, Tensors, int]:
        outputs = None
        if not _torch.dispatch_mode_count():
            given = ours.given(args)
            outputs = first(ours.lead(), *given)
        if outputs is None:
            returned = forward(args)
            return returned[:count], returned[count:], 0
        note_changes([given[i] for i in ours.changes])
        returned = forward.finished(outputs)
        return returned[:count], returned[count:], len(pairs)

    def back(saved: Tensors, bits: int, tangents: GivenTangents) -> Gradients:
        args = [*saved[: len(saved) - bits], *tangents]
        instead = whole(tangents)
        if instead is not None:
            return instead(args)
        outputs = None
        if bits and not _torch.dispatch_mode_count():
            given = theirs.given(args)
            outputs = second(theirs.lead(), *given, *saved[len(saved) - bits :])
        return backward(args) if outputs is None else backward.finished(outputs)

    return Passes(run, back)
