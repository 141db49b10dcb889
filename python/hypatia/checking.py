"""Whether a compiled graph computes what the original does: float64 is the yardstick, eager's own
error the measure.

A result passes when it is eager's bit for bit, or when its error to float64 is at most twice
eager's plus a few roundings and, in fp32, it is within 1e-5 of eager's, scaled by its magnitude.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import starmap
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .capture import value_of
from .yardstick import RandomState, Script, Stream

FACTOR = 2.0
"""How many times eager's own error a result may have."""

ULPS = 4.0
"""Roundings of the largest value, and of the inputs, that are forgiven on top."""

SHORT_ULPS = 1.0
"""The same for results of 16 bits: four of their roundings are more than eager's own error."""

SHORT_SHIFTS = 2.0
"""How many times the movement of a result of 16 bits is forgiven when its inputs are nudged."""

SHORT_FLIPS = 2.0
"""Roundings of 16 bits that may decide about a whole number, such as the place of a maximum."""

NUDGES = 4
"""How many times inputs and results of ops are nudged."""

MOST_SHIFT = 64.0
"""Roundings of the largest value, or of one, that a gradient may move by when results of ops are nudged."""

UNREFERENCED_ULPS = 64.0
"""The same where there is nothing wider to judge by: results in float64, or no memory for it."""

TO_EAGER = 1e-5
"""How far from eager an fp32 result may be, as a share of the largest value, or of one."""

FLIPS = 1e-4
"""Share of the elements of an integer or boolean result that rounding may flip."""

_CHOICE_NAMES = """
    argmax argmin argsort max min median mode kthvalue sort topk cummax cummin eq ne lt le gt ge
    round floor ceil trunc sign fmod remainder
"""
_CHOICES = frozenset(_CHOICE_NAMES.split())
"""Ops of which a rounding can make another result altogether."""

_CHUNK = 1 << 17
"""Elements compared at a time: in float64 they stay in a cache."""

_HELD = 1 / 16
"""Share of the memory allowed in which eager's results may wait for float64's."""


_KEPT = 1 << 28
"""Bytes of results that are kept for the next comparison."""


@dataclasses.dataclass
class Result:
    """One result that is not eager's bit for bit."""

    name: str
    type: str
    error: float
    eager_error: float
    to_eager: float
    scale: float
    allowed: float
    ok: bool

    def __str__(self) -> str:
        return (
            f"{self.name} {self.type}: error {self.error:.2g} to float64, eager's {self.eager_error:.2g}, "
            f"allowed {self.allowed:.2g}; {self.to_eager:.2g} to eager"
        )


@dataclasses.dataclass
class Comparison:
    """What comparing one run with eager showed."""

    equal: int = 0
    results: list[Result] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every result passes."""
        return all(r.ok for r in self.results)

    @property
    def worst(self) -> Result | None:
        """The result that is furthest beyond what is allowed."""
        wrong = [r for r in self.results if not r.ok]
        return max(wrong, key=lambda r: r.error / (r.allowed or 1e-300), default=None)


class References:
    """Results of the original on one set of inputs: what one form was compared with serves the next."""

    def __init__(self) -> None:
        self._kept: dict[bool, dict[fx.Node, Any]] = {}
        self._narrowed: set[str] = set()

    def stream(
        self, script: Script, inputs: dict[fx.Node, Any], random: RandomState, *, wide: bool = False
    ) -> Iterator[tuple[fx.Node, Any]]:
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


class Comparer:
    """Compares runs of compiled forms of one graph, on one set of inputs, with the original."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: dict[fx.Node, Any],
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
        flags = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        self.tf32 = flags and any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs.values())
        self.narrow = narrower(gm.graph, torch.float64)

    @functools.cached_property
    def memory(self) -> float:
        """Bytes that comparing may take."""
        return self._memory()

    def compare(self, values: dict[fx.Node, Any]) -> Comparison:
        """Compares results, given by the nodes of the original that they stand for."""
        comparison = Comparison()
        differing: dict[fx.Node, Any] = {}
        held = 0
        for node, eager in self.references.stream(self.whole, self.inputs, self.random):
            if isinstance(eager, torch.Tensor) and not _same_kind(eager, values[node]):
                comparison.results.append(_wrong_kind(node.name, eager, values[node]))
            elif same(eager, values[node]):
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
        self, differing: dict[fx.Node, Any], values: dict[fx.Node, Any], comparison: Comparison
    ) -> None:
        """Leaves out whole numbers that eager itself returns differently each time: attention kernels
        return memory that they never wrote. Found early, they cost no run in float64."""
        whole = {n for n in differing if not _is_float(values[n])}
        if not whole:
            return
        script = Script(self.gm, whole)
        runs = (Stream(script, self.inputs, self.random) for _ in range(2))
        for (node, once), (_, again) in zip(*runs, strict=True):
            if not same(once, again):
                del differing[node]
                comparison.notes.append(f"{node.name}: eager differs from itself, not judged")

    def _measure(
        self, values: dict[fx.Node, Any], differing: dict[fx.Node, Any], comparison: Comparison, *, held: bool
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
        doubtful: dict[fx.Node, tuple[Result, Any, Any]] = {}
        for (node, theirs), (_, exact) in zip(eager, wide, strict=True):
            result = judge(
                node.name,
                values[node],
                theirs,
                exact,
                coarse=node in self.coarse,
                narrow=node in self.narrow,
                tf32=self.tf32,
            )
            comparison.results.append(result)
            if not result.ok:
                doubtful[node] = (result, theirs, exact)
        if script.narrowed:
            comparison.notes.append("not in float64: " + ", ".join(sorted(script.narrowed)))
        if doubtful:
            self._second_look(values, doubtful, comparison)

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
        wrong = {n: (r, e) for n, (r, _, e) in doubtful.items() if not r.ok and r.error < float("inf")}
        if not wrong:
            return
        before = {n: r.allowed for n, (r, _) in wrong.items()}
        for seed in range(NUDGES):
            # One run may move a single number hardly at all.
            wrong = {n: found for n, found in wrong.items() if not found[0].ok}
            script = Script(self.gm, set(wrong))
            stream = Stream(script, self.inputs, self.random, wide=True, nudge=True, seed=seed)
            for node, moved in stream if wrong else ():
                self._nudged(node, values[node], *wrong[node], moved, before[node])
        # Which of two numbers of 16 bits is larger, several roundings decide, and all that depends on it.
        chosen = self._chosen
        coarse = {n: f for n, f in wrong.items() if not f[0].ok and n in self.coarse and n in chosen}
        for seed in range(NUDGES) if coarse else ():
            script = Script(self.gm, set(coarse))
            stream = Stream(
                script, self.inputs, self.random, wide=True, nudge=True, roundings=SHORT_FLIPS, seed=seed
            )
            for node, moved in stream:
                self._nudged(node, values[node], *coarse[node], moved, before[node])

    def _nudged(
        self, node: fx.Node, mine: torch.Tensor, result: Result, exact: Any, moved: Any, before: float
    ) -> None:
        if not isinstance(moved, torch.Tensor):
            return
        if not _is_float(moved):
            result.allowed = max(result.allowed, before + float((moved != exact).sum()))
            result.ok = result.error <= result.allowed
            return
        shift = max((d[0] for d in _distances(moved, exact, exact)), default=0.0)
        result.allowed = max(result.allowed, before + (SHORT_SHIFTS if _is_short(mine) else ULPS) * shift)
        limit = _limit(mine, result.scale)
        coarse = node in self.coarse or (self.tf32 and result.eager_error > limit)
        result.ok = result.error <= result.allowed and (coarse or result.to_eager <= limit)

    @functools.cached_property
    def _chosen(self) -> set[fx.Node]:
        """Values that depend on which of two numbers is larger."""
        found: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
            if name.removeprefix("aten::") in _CHOICES or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    @functools.cached_property
    def leaves(self) -> dict[fx.Node, torch.Tensor]:
        """Inputs and parameters that have gradients."""
        values = ((n, v) for n, v in self.inputs.items() if isinstance(v, torch.Tensor))
        return {n: v for n, v in values if v.is_leaf and v.requires_grad}

    def compare_gradients(self, mine: list[torch.Tensor | None], comparison: Comparison) -> None:
        """Compares gradients of the leaves, as `gradients` gives them."""
        leaves = self.leaves
        with torch.enable_grad():
            theirs, exact = (
                gradients(dict(Stream(self.whole, self.inputs, self.random, wide=wide)), leaves.values())
                for wide in (False, True)
            )
        for place, (node, ours, eager, truth) in enumerate(zip(leaves, mine, theirs, exact, strict=True)):
            name = f"gradient of {node.name}"
            if (ours is None) != (eager is None):
                comparison.results.append(_wrong_kind(name, eager, ours))
            elif ours is None or same(eager, ours):
                comparison.equal += 1
            else:
                result = judge(name, ours, eager, truth, narrow=bool(self.narrow), tf32=self.tf32)
                comparison.results.append(result)
                if not result.ok and result.error < float("inf"):
                    self._second_look_at(result, ours, truth, place)

    def _second_look_at(self, result: Result, mine: torch.Tensor, exact: torch.Tensor, place: int) -> None:
        """The same for a gradient."""
        moved = self._moved_gradients[place]
        if moved is None:
            return
        shift = max((d[0] for d in _distances(moved, exact, exact)), default=0.0)
        # More than that is a gradient that jumps.
        coarsest = max((_eps(v) for v in self._floats), default=0.0)
        most = MOST_SHIFT * coarsest * max(1.0, result.scale)
        result.allowed += (SHORT_SHIFTS if _is_short(mine) or self.coarse else ULPS) * min(shift, most)
        limit = _limit(mine, result.scale)
        coarse = self.coarse or (self.tf32 and result.eager_error > limit)
        result.ok = bool(result.error <= result.allowed and (coarse or result.to_eager <= limit))

    @functools.cached_property
    def _floats(self) -> list[torch.Tensor]:
        return [v for n in self.gm.graph.nodes if _is_float(v := value_of(n))]

    @functools.cached_property
    def _moved_gradients(self) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            # Inputs stay: at a tie, where a gradient jumps, it must be eager's.
            stream = Stream(self.whole, self.inputs, self.random, wide=True, nudge=True, nudge_inputs=False)
            return gradients(dict(stream), self.leaves.values())


def gradients(results: Mapping[fx.Node, Any], leaves: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of results; the weights are the same in every precision and order."""
    total: Any = 0.0
    for node, result in sorted(results.items(), key=lambda item: item[0].name):
        dice = torch.Generator().manual_seed(zlib.crc32(node.name.encode()))
        if isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point():
            weights = torch.randint(1, 17, result.shape, generator=dice).to(result) / 16
            total = total + (result * weights).sum().double()
    wanted = list(leaves)
    if not isinstance(total, torch.Tensor) or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, but for the signs of zeros and the kinds of NaN."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    plain = left.layout is torch.strided and right.layout is torch.strided
    if plain and left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    if left.is_floating_point() or left.is_complex():
        return all(starmap(_is_same, zip(_chunks(left), _chunks(right), strict=True)))
    return torch.equal(left, right)


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_cuda and left.numel():
        # By kernels that measuring needs anyway: torch takes milliseconds to load each.
        apart = _largest(left.double() - right.double())
        if apart < float("inf"):
            return apart == 0
    return torch.equal(left, right) or bool(_equal(left, right).all())


def wide_bytes(script: Script) -> float:
    """Bytes that the live values of a script take in float64, at most, beside eager's own."""
    live: dict[fx.Node, float] = {}
    peak = 0.0
    for step in script.steps:
        for node in (step.node, *step.node.all_input_nodes):
            live.setdefault(node, _bytes(node))
        peak = max(peak, sum(live.values()))
        for node in step.drops:
            live.pop(node, None)
    return peak


def _bytes(node: fx.Node) -> float:
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    total = 0.0
    for value in values:
        if isinstance(value, torch.Tensor) and not value._is_view():
            size = 1.0
            for n in value.shape:
                size *= n if isinstance(n, int) else (n.node.hint or 1)
            wide = value.is_floating_point() or value.is_complex()
            total += size * (value.element_size() + (8 if wide else 0))
    return total


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _same_kind(eager: torch.Tensor, mine: Any) -> bool:
    return (
        isinstance(mine, torch.Tensor)
        and (mine.shape, mine.dtype, mine.device) == (eager.shape, eager.dtype, eager.device)
        and mine.layout == eager.layout
    )


def type_text(value: Any) -> str:
    """Dtype and shape of a value: float32[64, 10]."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


def _wrong_kind(name: str, eager: Any, mine: Any) -> Result:
    inf = float("inf")
    kind = f"{type_text(mine)} instead of {type_text(eager)}"
    return Result(name, kind, inf, 0.0, inf, 0.0, 0.0, False)


def narrower(graph: fx.Graph, than: torch.dtype) -> set[fx.Node]:
    """Nodes that have fewer digits than a dtype, or depend on one that has."""
    limit = torch.finfo(than).eps
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = value_of(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(_is_float(v) and _eps(v) > limit for v in values) or not found.isdisjoint(
            node.all_input_nodes
        ):
            found.add(node)
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                found.update(node.all_input_nodes[:1])
    return found


def judge(
    name: str,
    mine: Any,
    eager: Any,
    exact: Any,
    *,
    coarse: bool = False,
    narrow: bool = False,
    tf32: bool = False,
) -> Result:
    """How good a result is beside eager's; without a float64 value, eager's is the reference.

    It may be ``narrow``, with values of fewer digits than float64 on its way, or ``coarse``, with some of
    16 bits; with ``tf32`` eager itself may have rounded what it multiplies to eleven.
    """
    if not isinstance(mine, torch.Tensor):
        return _wrong_kind(name, eager, mine)
    kind = type_text(eager)
    if not _is_float(mine):
        return _judge_whole(name, kind, mine, eager, exact)
    wide = eager.dtype in (torch.float64, torch.complex128)
    eps = torch.finfo(torch.float32).eps if wide and narrow else _eps(mine)
    if exact is None or (wide and not narrow):
        exact, ulps = eager, UNREFERENCED_ULPS
    else:
        ulps = SHORT_ULPS if _is_short(mine) else ULPS
    error = own = direct = scale = 0.0
    for e, o, d, m in _distances(mine, eager, exact):
        error, own, direct, scale = max(error, e), max(own, o), max(direct, d), max(scale, m)
    own_finite = own if own < float("inf") else 0.0
    allowed = FACTOR * own_finite + ulps * eps * scale + _floor(mine)
    limit = _limit(mine, scale)
    # Where eager is further from float64 than a result may be from eager, its last digits are chance.
    coarse = coarse or (tf32 and own_finite > limit)
    ok = error <= allowed and (coarse or direct <= limit)
    if not ok and own == float("inf"):
        # Eager overflowed where float64 does not; its infinities are no measure, but its finite values are.
        ok = all(
            (_equal(a, b) | ((a - c).abs() <= allowed)).all()
            for a, b, c in zip(_chunks(mine), _chunks(eager), _chunks(exact), strict=True)
        )
    return Result(name, kind, error, own, direct, scale, allowed, bool(ok))


def _judge_whole(name: str, kind: str, mine: torch.Tensor, eager: torch.Tensor, exact: Any) -> Result:
    """Integers and booleans: a comparison of floats may flip where rounding decides."""
    reference = exact if isinstance(exact, torch.Tensor) and exact.shape == eager.shape else eager
    wrong = float((mine != reference).sum())
    own = float((eager != reference).sum())
    direct = float((mine != eager).sum())
    allowed = FACTOR * own + float(int(FLIPS * mine.numel()))
    return Result(name, kind, wrong, own, direct, float(mine.numel()), allowed, wrong <= allowed)


def _limit(mine: torch.Tensor, scale: float) -> float:
    return TO_EAGER * max(1.0, scale) if mine.dtype is torch.float32 else float("inf")


def _floor(value: torch.Tensor) -> float:
    """What is forgiven in any case: a kernel may take subnormal numbers for zeros. Not in fp16."""
    about = torch.finfo(value.dtype)
    return (
        about.smallest_normal if value.dtype is not torch.float16 else 4 * about.smallest_normal * about.eps
    )


def _is_short(value: torch.Tensor) -> bool:
    return value.dtype in (torch.bfloat16, torch.float16)


def _eps(value: torch.Tensor) -> float:
    return torch.finfo(value.dtype).eps


def _chunks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    plain = value.detach()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return iter(plain.reshape(-1).split(_CHUNK))


def _distances(
    mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> Iterator[tuple[float, float, float, float]]:
    """Chunk by chunk: largest error, eager's, largest distance to eager, largest finite exact value."""
    infinite = float("inf")
    for a, b, c in zip(_chunks(mine), _chunks(eager), _chunks(exact), strict=True):
        if not a.numel():
            yield 0.0, 0.0, 0.0, 0.0
            continue
        c = c.double()
        scale = _largest(c)
        found = tuple(_largest(x) for x in (a - c, b - c, a.double() - b))
        if not (scale < infinite and all(f < infinite for f in found)):
            scale = _largest(c.nan_to_num(0.0, 0.0, 0.0))
            found = tuple(_largest_unequal(x, y) for x, y in ((a, c), (b, c), (a, b)))
        yield (*found, scale)


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    low, high = values.aminmax()
    return max(abs(float(low)), abs(float(high)))


def _largest_unequal(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs do not differ, other NaNs differ infinitely."""
    difference = (left.double() - right).abs().masked_fill(_equal(left, right), 0.0)
    return _largest(difference.nan_to_num(nan=float("inf"), posinf=float("inf")))


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | ((left != left) & (right != right))


def memory_allowed(values: Iterable[Any], share: float = 0.5) -> float:
    """Bytes that a check may take: a share of what is free where the values are."""
    device = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return share * (free + held)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return share * 1024 * float(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 8 * 2.0**30
