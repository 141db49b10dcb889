"""Models that count: integers that a call adds to, and that say where it writes next, as caches do.

A call that is only tried, to be timed or recorded, must not count.
"""

from __future__ import annotations

from .builder import Builder
from .program import Weight
from .tensors import T

ROOMS = (1, 2, 3, 5, 8)
"""Places of a cache."""

WRITES = (
    "{0}.index_copy_(0, {1}, {2})",
    "{0}.index_copy_(0, {1}.clone(), {2})",
    "{0}.index_put_(({1},), {2})",
    "{0}.index_add_(0, {1}, {2})",
)
READS = (
    "{1} + {0}.sum(0)",
    "{0}.index_select(0, {2} % {0}.shape[0]) * {1}",
    "torch.softmax({1} @ {0}.t(), -1) @ {0}",
    "torch.where(torch.arange({0}.shape[0], device={0}.device)[:, None] <= {2}, {0}, 0.0) + {1}",
    "{1} / ({2} + 1)",
    "{1} + {0}[{2} % {0}.shape[0]]",
)


def cache(b: Builder) -> str | None:
    """A cache, the place where it ends, a write there, and what is read of it."""
    x = b.pick(lambda v: v.is_floating_point() and v.dim() >= 1 and min(v.shape) > 0)
    if x is None:
        return None
    room, width = b.one(*ROOMS), b.shape(x)[-1]
    row = b.emit(b.one("{0}.detach().reshape(-1, {0}.shape[-1])[:1]", "{0}.detach().flatten(0, -2)[-1:]"), x)
    row = row or b.emit("{0}.detach().reshape(-1, {0}.shape[-1])[:1]", x)
    if row is None:
        return None
    # Of inputs, a case has new ones at each call; buffers go on from call to call.
    inputs = b.chance(0.4)
    place = _whole(b, inputs, min(room, 3))
    kept = b.input((room, width), b.of(row)) if inputs else _buffer(b, T((room, width), b.of(row)))
    # Past the end, a ring begins anew; without one, later calls are refused by eager, and none may be tried.
    written = b.emit(b.dice.choice(WRITES), kept, place, row, changes=True)
    if written is None:
        return None
    if b.chance(0.3):
        _read(b, kept, row, place)
    b.emit(b.one("{0}.add_(1)", f"{{0}}.add_(1).remainder_({room})", "{0}.add_(1)"), place, changes=True)
    return _read(b, kept, row, place)


def count(b: Builder) -> str | None:
    """A number of calls, which a mean is made of, or that only counts."""
    x = b.floats()
    number = _whole(b, inputs=b.chance(0.3), below=3, shape=b.one((), (1,)))
    b.emit(b.one("{0}.add_(1)", "{0}.add_(2)", "{0}.mul_(2).add_(1)"), number, changes=True)
    return b.emit(b.one("{0} / ({1} + 1)", "{0} + {1}", "{0} * ({1} > 2)"), x, number)


def _read(b: Builder, kept: str, row: str, place: str) -> str | None:
    return b.emit(b.dice.choice(READS), kept, row, place)


def _whole(b: Builder, inputs: bool, below: int, shape: tuple[int, ...] = (1,)) -> str:
    """An integer from zero up to a bound, which an index may be."""
    spec = T(shape, b.one("int64", "int64", "int32"), f"below {below}", seed=b.dice.randrange(10_000))
    if not inputs:
        return _buffer(b, spec)
    name = f"x{len(b.inputs)}"
    b.inputs.append((name, spec))
    b.values[name] = spec.make()
    return name


def _buffer(b: Builder, spec: T) -> str:
    name = f"b{len(b.weights)}"
    b.weights.append(Weight(name, spec, "buffer"))
    b.values[name] = spec.make()
    return name
