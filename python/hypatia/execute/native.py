"""Graphs that run as one call into Rust: steps over planned buffers, weights packed once.

What a plan cannot do, or inputs that it was not made for, run on the FX graph instead.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .. import _native, _torch
from .._torch import pytree
from ..capture.size_ranges import Ranges
from ..errors import VerificationWarning
from ..timeline import BINDING, stage
from .agreement import agree_at_new_sizes, roundings_of
from .binding import Binding, Bound
from .changes import State, note_changes
from .plans import Planner
from .timing import once

log = logging.getLogger(__name__)

# Asked at every call, of which a small plan has few: names of modules take as long to look up.
_dispatch_modes = _torch.dispatch_mode_count
_any_autocast = _torch.any_autocast

SLOWER = 1.2
"""A plan for other sizes that takes so many times as long as torch's ops is not used."""
CHECKED = 8
"""So many sets of sizes are compared with torch's ops, and later ones that are of another kind."""


class NativeGraph:
    """Runs a graph by its native plan, on arguments in the order of the placeholders."""

    def __init__(
        self,
        gm: fx.GraphModule,
        planner: Planner,
        graph: Callable[[list[object]], object],
        without: Sequence[str] = (),
    ) -> None:
        self.gm = gm
        self.planner = planner
        self.binding = Binding(gm, planner, without)
        self.graph = graph
        """The same by torch's ops."""
        self.fallback = graph
        """What runs where the plan does not."""
        self.ranges: Ranges = {}
        """What sizes can be, where the graph holds for some only."""
        self.native = True
        self.lost = False
        """The plan is right, and was slower than what is kept."""
        self.settled = False
        """The first call is checked under modes of AOTAutograd's own; after it, modes are a user's."""
        self._takes_all = self.binding.takes_all
        self._slower: set[tuple[int, ...]] = set()
        self._kinds: set[tuple[tuple[int, int], ...]] = set()
        """Of sizes that were checked."""
        self._checks = 0
        self._bound = 0
        """How many plans were bound, and how many calls had one."""
        self._again = 0
        self._gain = 0.0
        """The seconds that a plan saved last, and those that it took to bind one."""
        self._cost = 0.0

    def __call__(self, args: list[Any]) -> Any:
        """The results, as the graph returns them. A dispatch mode that counts or logs ops sees torch's."""
        if self.native and not (self.settled and _dispatch_modes()):
            results = self.run(args)
            if results is not None:
                args.clear()
                return results
        return self.fallback(args)

    def direct(self, args: Sequence[object]) -> Sequence[object] | None:
        """The results of the plan, for a caller outside of any capture; none if torch's ops are to run."""
        if not self.native or _dispatch_modes() or _any_autocast():
            return None
        return self.run(args)

    def run(self, args: Sequence[Any]) -> Sequence[object] | None:
        """The results of the plan; none if it is not for these arguments."""
        binding = self.binding
        try:
            known = binding.now.only
            if known is not None and binding.is_current():
                bound, plan_results = known
                outputs = bound(binding.lead(), *args)
                if outputs is not None:
                    return plan_results.results(outputs, args)
            if len(args) != binding.arity:
                return None
            inputs = args if self._takes_all else binding.given(args)
            if binding.only is not None and binding.is_current():
                return self._only(inputs)
            sizes: tuple[int, ...] = ()
            if self.planner.symbols:
                found = self.sizes(args)
                if found is None:
                    return None
                sizes = found
            if not binding.is_current():
                binding.forget()
            known = binding.known(args, sizes)
            if known is not None:
                bound, plan_results = known
                outputs = bound(binding.lead(), *inputs)
                if outputs is not None:
                    self._again += 1
                    if binding.changes:
                        note_changes([inputs[i] for i in binding.changes])
                    return plan_results.results(outputs, inputs)
                if bound.current():
                    return None
                binding.bound.clear()
            return self._first_run(args, sizes, inputs)
        except _native.HypatiaError as error:
            return self._failed(error, args)

    def _first_run(
        self, args: Sequence[object], sizes: tuple[int, ...], inputs: Sequence[Any]
    ) -> Sequence[object] | None:
        """The results of a plan that is bound only now."""
        binding = self.binding
        if sizes in self._slower or not self._within(sizes):
            return None
        others = bool(binding.bound)
        if sizes and others and not self._pays():
            return None
        start = time.perf_counter()
        known = self._bind(args, sizes)
        if known is None:
            return None
        self._cost = time.perf_counter() - start
        self._bound += 1
        if binding.only is not None:
            return self._only(inputs)
        bound, plan_results = known
        changed = [inputs[i] for i in binding.changes]
        checked = sizes and others and (self._checks < CHECKED or _kind(sizes) not in self._kinds)
        before = State(changed, binding.device) if checked else None
        outputs = bound(binding.lead(), *inputs)
        if outputs is None:
            binding.refusal = binding.why_not(inputs)
            return None
        note_changes(changed)
        results = plan_results.results(outputs, inputs)
        return results if before is None else self._settle_sizes(args, sizes, results, before)

    def _pays(self) -> bool:
        """Whether a plan for other sizes is worth its binding: sizes come back, or it is faster at once.

        The lengths of a cache that grows with every call do not come back.
        """
        return self._checks < CHECKED or self._bound <= self._again or self._cost < self._gain

    def _only(self, inputs: Sequence[Any]) -> Sequence[object] | None:
        """The results of a training step."""
        binding = self.binding
        assert binding.only is not None
        returned = binding.only(binding.lead(), *inputs)
        if returned is None:
            binding.refusal = binding.why_not(inputs)
        elif binding.changes:
            note_changes([inputs[i] for i in binding.changes])
        return self.finished(returned)

    def finished(self, returned: Any) -> Any:
        """The results of a training step, of what its plan returned."""
        return None if returned is None else self.binding.plan_results.seen(returned)

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...] | None:
        """The values of the symbols; none if the arguments are of another form."""
        try:
            return tuple([args[p] if d is None else args[p].shape[d] for _, p, d in self.planner.symbols])
        except (AttributeError, IndexError):
            return None

    def _within(self, sizes: tuple[int, ...]) -> bool:
        values: dict[str, int] = {}
        for (_, position, dim), size in zip(self.planner.symbols, sizes, strict=True):
            known = self.ranges.get((position, dim))
            if known is None:
                continue
            if not known.least <= size <= known.greatest:
                return False
            if values.setdefault(known.symbol, size - known.offset) != size - known.offset:
                return False
        return True

    @stage(BINDING)
    def _bind(self, args: Sequence[object], sizes: tuple[int, ...]) -> Bound | None:
        try:
            return self.binding.bind(args, sizes)
        except (_native.HypatiaError, ValueError) as e:
            if isinstance(e, ValueError):
                log.warning("the native plan cannot be bound after an internal error", exc_info=True)
            else:
                log.info("the native plan is not used: %s", e)
            self.binding.refusal = str(e)
            self.native = False
            return None

    def _settle_sizes(
        self, args: Sequence[object], sizes: tuple[int, ...], results: Sequence[object], before: State
    ) -> Sequence[object] | None:
        """The first call at other sizes than those that were verified: torch's ops are asked too, ``before``
        the plan changed anything."""
        after = State(before.tensors, self.binding.device)
        before.restore()
        expected = pytree.tree_leaves(self.fallback(list(args)))
        theirs = State(before.tensors, self.binding.device)

        def again(moved: Callable[[object], object]) -> object:
            # With the inputs and the random numbers of the first time, or all would be far apart.
            before.restore()
            found = self.fallback([moved(a) for a in args])
            theirs.restore()
            return found

        roundings = roundings_of(self.gm.graph)
        right = agree_at_new_sizes(results, expected, args, again, roundings) and after.agrees(theirs)
        if not right:
            theirs.restore()
            self.native = False
            text = f"hypatia: the native plan is wrong at the sizes {sizes} and is not used any more"
            warnings.warn(VerificationWarning(text), stacklevel=2)
            return tuple(expected)
        forms = {"plan": lambda: self.run(args), "graph": lambda: self.fallback(list(args))}
        taken = once({name: before.counts.before(form) for name, form in forms.items()}, self.binding.device)
        after.restore()
        self._checks += 1
        self._kinds.add(_kind(sizes))
        self._gain = taken["graph"] - taken["plan"]
        if taken["plan"] > SLOWER * taken["graph"]:
            self._slower.add(sizes)
            self.binding.bound.pop(sizes, None)
        return results

    def _failed(self, error: Exception, args: Sequence[object]) -> Sequence[object]:
        """A step failed: torch's ops do the same and say why, or do better. The plan is for these arguments,
        or no step would have run, and so is the fallback."""
        if self.planner.changes_by(str(error)):
            # The last steps change inputs; done again, some would be changed twice.
            raise RuntimeError(f"hypatia: {error}; inputs are changed in part") from error
        try:
            results = pytree.tree_leaves(self.fallback(list(args)))
        except Exception as reason:
            if hasattr(reason, "add_note"):
                reason.add_note(f"hypatia: {error}")
            raise
        # Before the first call is over, that is no surprise.
        level = logging.WARNING if self.settled else logging.INFO
        log.log(level, "the native plan is not used any more: %s", error)
        self.native = False
        return results


def _kind(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """What kernels are chosen by: the binary digits of each size, and the power of two that divides it."""
    return tuple([(n.bit_length(), min(n & -n, 64)) for n in sizes])
