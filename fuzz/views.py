"""Calls that move values or name them anew: views with steps, joins, copies."""

from __future__ import annotations

import math

import torch

from .builder import Builder

COPIES = ("{0}.contiguous()", "{0}.clone()", "{0}.detach()", "{0}.clone(memory_format=torch.preserve_format)")


def view(b: Builder) -> str | None:
    """A view of a tensor."""
    x = b.pick()
    if x is None:
        return None
    shape = b.shape(x)
    rank = len(shape)
    d, e = b.dim(x), b.dim(x)
    kinds = [_reshaped, _sliced] if rank else []
    texts = [f"{{0}}.unsqueeze({b.dice.randrange(-rank - 1, rank + 1)})", "{0}.squeeze()", "{0}.reshape(-1)"]
    texts += ["{0}.view_as({0})", "{0}[None]", "{0}[..., None]", "{0}.expand_as({0})"]
    if rank:
        order = list(range(rank))
        b.dice.shuffle(order)
        texts += [
            f"{{0}}.transpose({d}, {e})",
            f"{{0}}.permute({tuple(order)})",
            "{0}.flatten()",
            f"{{0}}.squeeze({d})",
        ]
        texts += [
            f"{{0}}.select({d}, {b.one(0, -1)})",
            f"{{0}}.movedim({d}, {e})",
            f"{{0}}.unbind({d})[0]",
            "{0}[0]",
        ]
        texts += [
            f"{{0}}.narrow({d}, 0, {max(1, shape[d] // 2)})",
            "{0}.mT",
            f"{{0}}.flatten({min(d % rank, e % rank)})",
        ]
        texts += [
            f"{{0}}.unfold({d}, {max(1, shape[d] // 2)}, 1)",
            "{0}.diagonal()",
            f"{{0}}.chunk(2, {d})[-1]",
        ]
        texts += [
            f"{{0}}.split({max(1, shape[d] // 2)}, {d})[0]",
            "{0}[-1]",
            f"{{0}}.unsqueeze({d}).expand({_grown(b, x, d)})",
        ]
    if kinds and b.chance(0.45):
        return b.dice.choice(kinds)(b, x)
    return b.emit(b.dice.choice(texts), x)


def _grown(b: Builder, x: str, d: int) -> str:
    rank = len(b.shape(x)) + 1
    sizes = ["-1"] * rank
    sizes[d] = str(b.one(1, 2, 3))
    return ", ".join(sizes)


def _reshaped(b: Builder, x: str) -> str | None:
    """Other sizes; the first stays open if it was."""
    shape = b.shape(x)
    if b.chance(0.5) and len(shape) >= 2:
        rest = _factors(b, math.prod(shape[1:]))
        sizes = ["{0}.shape[0]" if b.chance(0.5) else "-1", *map(str, rest)]
    else:
        sizes = list(map(str, _factors(b, math.prod(shape))))
        if sizes and b.chance(0.7):
            sizes[0] = "-1"
    method = b.one("view", "reshape", "reshape", "unflatten")
    if method == "unflatten":
        last = _factors(b, shape[-1]) if shape[-1] else []
        return b.emit(f"{{0}}.unflatten(-1, {tuple(last)})", x) if len(last) > 1 else None
    return b.emit(f"{{0}}.{method}({', '.join(sizes)})", x)


def _factors(b: Builder, size: int) -> list[int]:
    found = []
    rest = max(size, 1)
    for _ in range(b.one(1, 2, 2, 3)):
        divisors = [n for n in range(1, rest + 1) if rest % n == 0]
        found.append(b.dice.choice(divisors))
        rest //= found[-1]
    found.append(rest)
    b.dice.shuffle(found)
    return found if size else [0]


def _sliced(b: Builder, x: str) -> str | None:
    shape = b.shape(x)
    parts = []
    for size in shape:
        start, end = (
            b.one("", "0", "1", str(size // 2)),
            b.one("", str(max(1, size - 1)), "-1", str(size), "9999"),
        )
        parts.append(
            b.one(":", f"{start}:{end}", f"{start}::{b.one(2, 3)}", b.one("0", "-1") if size else ":")
        )
    return b.emit(f"{{0}}[{', '.join(parts)}]", x)


def joined(b: Builder) -> str | None:
    """Tensors put together, or taken apart and put together again."""
    x = b.pick(lambda v: v.dim() >= 1)
    if x is None:
        return None
    d = b.dim(x)
    shape, dtype = b.shape(x), b.values[x].dtype
    rank = len(shape)

    def fits(v: torch.Tensor) -> bool:
        same = [v.shape[i] == shape[i] for i in range(rank) if i != d % rank] if v.dim() == rank else [False]
        return v.dtype == dtype and all(same)

    y = b.pick(fits)
    half = max(1, shape[d] // 2)
    texts = [
        f"torch.cat([{{0}}, {{1}}], {d})",
        f"torch.stack([{{0}}, {{0}}], {d})",
        f"torch.cat([{{1}}, {{0}}, {{1}}], {d})",
    ]
    texts += [f"torch.cat([{{0}}.narrow({d}, 0, {half}), {{0}}.narrow({d}, {half}, {shape[d] - half})], {d})"]
    texts += [
        f"torch.cat([{{0}}, {{1}}], {d}).narrow({d}, 0, {max(1, shape[d])})",
        f"{{0}}.repeat_interleave(2, {d})",
    ]
    texts += [
        f"{{0}}.repeat({', '.join(['1'] * (rank - 1) + ['2'])})",
        f"{{0}}.flip({d})",
        f"{{0}}.roll(1, {d})",
    ]
    texts += [
        "F.pad({0}, (1, 1))",
        "F.pad({0}, (0, 2), value=1.0)",
        "F.pad({0}, (-1, 1))",
        "{0}.tril()",
        "{0}.triu(1)",
    ]
    texts += [
        f"torch.cat({{0}}.chunk(2, {d})[::-1], {d})",
        f"torch.stack({{0}}.unbind({d}), {d})",
        "{0}.tile(2)",
    ]
    return b.emit(b.dice.choice(texts), x, y)


def copied(b: Builder) -> str | None:
    """A copy, or a tensor that gradients stop at."""
    return b.emit(b.dice.choice(COPIES), b.pick())
