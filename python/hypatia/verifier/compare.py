"""Whether a compiled graph computes what the original does, on one set of inputs: results and gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from .._torch import pytree
from ..capture.op_facts import is_idle_seed, name_of
from ..capture.records import value_of
from ..compiler.comparison import Comparison, Result
from ..devices import table
from ..execute.changes import RandomState
from .gradients import gradients_of
from .judge import ULPS, eps_of, is_float, is_short, judge, limit_of, same, same_kind, wrong_kind
from .memory import wide_bytes
from .reference import Script, Stream, narrower
from .steadiness import MovedGradients, Steadiness
from .zero_signs import without

SHORT_SHIFTS = 2.0
"""How many times the movement of a result of 16 bits is forgiven when its inputs are nudged."""

SHORT_FLIPS = 2.0
"""Roundings of 16 bits that may decide about a whole number, such as the place of a maximum."""

NUDGES, HALF = 4, 0.5
"""How many times inputs and results of ops are nudged, and by how many roundings."""

MOST_SHIFT = 64.0
"""Roundings of the largest value, or of one, that a gradient may move by when results of ops are nudged."""

MOST_SHIFT_OF_WIDE = 2.0**16
"""The same in graphs of float64: about 1e-11 of the largest value. A gradient that jumps moves by more."""

_CHOICE_NAMES = """
    argmax argmin argsort max min median mode kthvalue sort topk cummax cummin eq ne lt le gt ge
    round floor ceil trunc sign fmod remainder
"""

_CHOICES = frozenset(_CHOICE_NAMES.split())
"""Ops of which a rounding can make another result altogether."""

_HELD = 1 / 16
"""Share of the memory allowed in which eager's results may wait for float64's."""

_KEPT = 1 << 28
"""Bytes of results that are kept for the next comparison."""


class References:
    """Results of the original on one set of inputs: what one form was compared with serves the next."""

    def __init__(self) -> None:
        self._kept: dict[bool, dict[fx.Node, object]] = {}
        self._narrowed: set[str] = set()

    def stream(
        self, script: Script, inputs: dict[fx.Node, object], random: RandomState, *, wide: bool = False
    ) -> Iterator[tuple[fx.Node, object]]:
        """Results by node, in the order in which a run gives them."""
        wanted = {*script.results, *script.changed_wanted}
        kept = self._kept.get(wide, {})
        if wanted <= kept.keys():
            script.narrowed |= self._narrowed if wide else set()
            yield from ((n, v) for n, v in kept.items() if n in wanted)
            return
        kept = {}
        size = 0
        for node, value in Stream(script, inputs, random, wide=wide):
            size += value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
            if size <= _KEPT:
                kept[node] = value
            yield node, value
        self._kept[wide] = kept if size <= _KEPT else {}
        self._narrowed |= script.narrowed

    def results(self, gm: fx.GraphModule) -> list[object] | None:
        """What the original returned in its own precision, flat; none where that is not kept."""
        (output,) = gm.graph.find_nodes(op="output")
        kept = self._kept.get(False, {})
        nodes = pytree.tree_leaves(output.args[0])
        if not all(n in kept for n in nodes if isinstance(n, fx.Node)):
            return None
        return [kept[n] if isinstance(n, fx.Node) else n for n in nodes]


class Comparer:
    """Compares runs of compiled forms of one graph, on one set of inputs, with the original."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: dict[fx.Node, object],
        random: RandomState,
        memory: Callable[[], float],
        references: References | None = None,
    ) -> None:
        self.gm = gm
        self.references = references or References()
        self.inputs = inputs
        self.random = random
        self._memory = memory
        self.whole = Script(gm)
        self.coarse = narrower(gm.graph, torch.float32)
        """Results that depend on values of 16 bits: eager's digits beyond those are chance."""
        devices = {v.device for v in inputs.values() if isinstance(v, torch.Tensor)}
        self.tf32 = any(table.of(d).may_round_to_tf32() for d in devices)
        self.narrow = narrower(gm.graph, torch.float64)
        self._steadiness = Steadiness(gm, inputs, random)

    @functools.cached_property
    def memory(self) -> float:
        """Bytes that comparing may take."""
        return self._memory()

    def compare(self, values: dict[fx.Node, object]) -> Comparison:
        """Compares results, given by the nodes of the original that they stand for."""
        comparison = Comparison()
        differing: dict[fx.Node, object] = {}
        held = 0
        for node, eager in self.references.stream(self.whole, self.inputs, self.random):
            if isinstance(eager, torch.Tensor) and not same_kind(eager, values[node]):
                comparison.results.append(wrong_kind(node.name, eager, values[node]))
            elif same(eager, values[node]) or is_idle_seed(node):
                comparison.equal += 1
            else:
                differing[node] = eager
                held += eager.nbytes if isinstance(eager, torch.Tensor) else 0
                if held > _HELD * self.memory:
                    differing = dict.fromkeys(differing)
        self._drop_undefined(differing, values, comparison)
        if differing:
            self._measure(values, differing, comparison, held=held <= _HELD * self.memory)
        return comparison

    def _drop_undefined(
        self, differing: dict[fx.Node, object], values: dict[fx.Node, object], comparison: Comparison
    ) -> None:
        """Leaves out whole numbers that eager itself returns differently each time: attention kernels
        return memory that they never wrote. Found early, they cost no run in float64."""
        whole = {n for n in differing if not is_float(values[n])}
        if not whole:
            return
        script = Script(self.gm, whole)
        runs = (Stream(script, self.inputs, self.random) for _ in range(2))
        for (node, once), (_, again) in zip(*runs, strict=True):
            if not same(once, again):
                del differing[node]
                comparison.notes.append(f"{node.name}: eager differs from itself, not judged")

    def _measure(
        self,
        values: dict[fx.Node, object],
        differing: dict[fx.Node, object],
        comparison: Comparison,
        *,
        held: bool,
    ) -> None:
        script = Script(self.gm, set(differing))
        # Eager's results were kept if there was room; else they are computed again, one at a time.
        eager = differing.items() if held else Stream(script, self.inputs, self.random)
        needs = wide_bytes(script)
        if needs > self.memory:
            comparison.notes.append(
                f"compared with eager alone: float64 would take {needs / 2**30:.1f} GiB "
                f"of the {self.memory / 2**30:.1f} GiB allowed"
            )
            for node, theirs in eager:
                comparison.results.append(
                    judge(node.name, values[node], theirs, None, coarse=node in self.coarse)
                )
            return
        wide = self.references.stream(script, self.inputs, self.random, wide=True)
        doubtful: dict[fx.Node, tuple[Result, object, object]] = {}
        for (node, theirs), (_, exact) in zip(eager, wide, strict=True):
            result = self._judge(node, values[node], theirs, exact)
            comparison.results.append(result)
            if not result.ok:
                doubtful[node] = (result, theirs, exact)
        if script.narrowed:
            comparison.notes.append("not in float64: " + ", ".join(sorted(script.narrowed)))
        if doubtful:
            self._second_look(values, doubtful, comparison)

    def _judge(self, node: fx.Node, mine: object, theirs: object, exact: object) -> Result:
        coarse, narrow = node in self.coarse, node in self.narrow
        return judge(node.name, mine, theirs, exact, coarse=coarse, narrow=narrow, tf32=self.tf32)

    def _second_look(
        self,
        values: dict[fx.Node, Any],
        doubtful: dict[fx.Node, tuple[Result, Any, Any]],
        comparison: Comparison,
    ) -> None:
        """A result whose float64 value moves as much when inputs and results of ops are moved by half a
        rounding is not wrong, and eager that disagrees with itself says nothing."""
        script = Script(self.gm, set(doubtful))
        for node, again in Stream(script, self.inputs, self.random):
            result, once, _ = doubtful[node]
            if not same(once, again):
                result.ok = True
                comparison.notes.append(f"{node.name}: eager differs from itself, not judged")
        open_ones = {n: e for n, (r, _, e) in doubtful.items() if not r.ok}
        for node, free in self._steadiness.signs(open_ones).items():
            result, theirs, exact = doubtful[node]
            mine, eager, wide = (without(v, free) for v in (values[node], theirs, exact))
            vars(result).update(vars(self._judge(node, mine, eager, wide)))
            comparison.notes.append(f"{node.name}: what depends on the sign of a zero is not judged")
        wrong = {n: (r, e) for n, (r, _, e) in doubtful.items() if not r.ok and r.error < float("inf")}
        if not wrong:
            return
        before = {n: r.allowed for n, (r, _) in wrong.items()}
        self._nudge(values, wrong, {n: (a, math.inf) for n, a in before.items()})
        # At its least value a variance moves by the square of roundings: four of them do more than four times
        # what one does, sixteen times at most. More than that is a jump.
        squares = {n: (a, a + ULPS * (wrong[n][0].allowed - a)) for n, a in before.items()}
        longer = {n: f for n, f in wrong.items() if is_float(values[n]) and not is_short(values[n])}
        self._nudge(values, longer, squares, roundings=ULPS * HALF, times=1.0)
        # Which of two numbers of 16 bits is larger, several roundings decide, and all that depends on it.
        coarse = {n: f for n, f in wrong.items() if n in self.coarse and n in self._chosen}
        self._nudge(values, coarse, {n: (a, math.inf) for n, a in before.items()}, roundings=SHORT_FLIPS)

    def _nudge(
        self,
        values: dict[fx.Node, Any],
        wrong: dict[fx.Node, tuple[Result, object]],
        bounds: Mapping[fx.Node, tuple[float, float]],
        *,
        roundings: float = HALF,
        times: float | None = None,
    ) -> None:
        """Allows results to be so many times as far from float64's as those move, on top of what was allowed
        before, up to a bound."""
        for seed in range(NUDGES):
            # One run may move a single number hardly at all.
            wrong = {n: found for n, found in wrong.items() if not found[0].ok}
            if not wrong:
                return
            shifts = self._steadiness.shifts({n: exact for n, (_, exact) in wrong.items()}, roundings, seed)
            for node, shift in shifts.items():
                self._allow(node, values[node], wrong[node][0], shift, bounds[node], times)

    def _allow(
        self,
        node: fx.Node,
        mine: torch.Tensor,
        result: Result,
        shift: float,
        bounds: tuple[float, float],
        times: float | None,
    ) -> None:
        before, most = bounds
        if not is_float(mine):
            result.allowed = max(result.allowed, before + shift)
            result.ok = result.error <= result.allowed
            return
        times = times or (SHORT_SHIFTS if is_short(mine) else ULPS)
        result.allowed = max(result.allowed, min(before + times * shift, most))
        limit = limit_of(mine, result.scale)
        coarse = node in self.coarse or (self.tf32 and result.eager_error > limit)
        result.ok = result.error <= result.allowed and (coarse or result.to_eager <= limit)

    @functools.cached_property
    def _chosen(self) -> set[fx.Node]:
        """Values that depend on which of two numbers is larger."""
        found: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            if name_of(node.target) in _CHOICES or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    @functools.cached_property
    def leaves(self) -> dict[fx.Node, torch.Tensor]:
        """Inputs and parameters that have gradients."""
        values = ((n, v) for n, v in self.inputs.items() if isinstance(v, torch.Tensor))
        return {n: v for n, v in values if v.is_leaf and v.requires_grad}

    def compare_gradients(self, mine: list[torch.Tensor | None], comparison: Comparison) -> None:
        """Compares gradients of the leaves, as `gradients_of` gives them."""
        leaves = self.leaves
        with torch.enable_grad():
            theirs, exact = (
                gradients_of(dict(Stream(self.whole, self.inputs, self.random, wide=wide)), leaves.values())
                for wide in (False, True)
            )
        for place, (node, ours, eager, truth) in enumerate(zip(leaves, mine, theirs, exact, strict=True)):
            name = f"gradient of {node.name}"
            if (ours is None) != (eager is None):
                comparison.results.append(wrong_kind(name, eager, ours))
            elif ours is None or same(eager, ours):
                comparison.equal += 1
            else:
                result = judge(name, ours, eager, truth, narrow=bool(self.narrow), tf32=self.tf32)
                comparison.results.append(result)
                if truth is not None and not result.ok and result.error < float("inf"):
                    self._second_look_at(result, ours, truth, place)

    def _second_look_at(self, result: Result, mine: torch.Tensor, exact: torch.Tensor, place: int) -> None:
        """The same for a gradient."""
        before, own = result.allowed, result.eager_error
        limit = limit_of(mine, result.scale)
        # More than that is a gradient that jumps, unless eager's own is as far away.
        coarsest = max((eps_of(v) for v in self._floats), default=0.0)
        # Of a float64 graph nothing is wider, so that eager's own error is not known.
        roundings = MOST_SHIFT if exact.dtype != mine.dtype or self.narrow else MOST_SHIFT_OF_WIDE
        most = max(roundings * coarsest * max(1.0, result.scale), own if own < math.inf else 0.0)
        times = SHORT_SHIFTS if is_short(mine) or self.coarse else ULPS
        for seed in range(NUDGES):
            shift = self._moved.shift(exact, place, seed)
            if shift is None or result.ok:
                return
            result.allowed = max(result.allowed, before + times * min(shift, most))
            # Where half a rounding moves float64 further than a result may be from eager, eager is chance.
            chance = own > limit and (self.tf32 or shift > limit)
            result.ok = bool(
                result.error <= result.allowed and (self.coarse or chance or result.to_eager <= limit)
            )

    @functools.cached_property
    def _moved(self) -> MovedGradients:
        return MovedGradients(self.whole, self.inputs, self.random, list(self.leaves.values()))

    @functools.cached_property
    def _floats(self) -> list[torch.Tensor]:
        return [v for n in self.gm.graph.nodes if is_float(v := value_of(n))]
