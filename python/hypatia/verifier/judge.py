"""How good one result is: float64 is the reference, eager's own error the measure.

A result passes when it is eager's bit for bit, or when its error to float64 is at most twice eager's plus a
few roundings and, in fp32, it is within 1e-5 of eager's, scaled by its magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from typing import Any

import torch

from ..compiler.comparison import Result
from ..devices import table

FACTOR = 2.0
"""How many times eager's own error a result may have."""

ULPS = 4.0
"""Roundings of the largest value, and of the inputs, that are forgiven on top."""

SHORT_ULPS = 1.0
"""The same for results of 16 bits: four of their roundings are more than eager's own error."""

UNREFERENCED_ULPS = 64.0
"""The same where there is nothing wider to judge by: results in float64, or no memory for it."""

TO_EAGER = 1e-5
"""How far from eager an fp32 result may be, as a share of the largest value, or of one."""

FLIPS = 1e-4
"""Share of the elements of an integer or boolean result that rounding may flip."""


def same(left: object, right: object) -> bool:
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
    return torch.equal(left, right) or bool(equal(left, right).all())


def is_float(value: object) -> bool:
    """Whether a value is a tensor of real or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def same_kind(eager: torch.Tensor, mine: object) -> bool:
    """Whether shape, dtype, device and layout are eager's."""
    return (
        isinstance(mine, torch.Tensor)
        and (mine.shape, mine.dtype, mine.device) == (eager.shape, eager.dtype, eager.device)
        and mine.layout == eager.layout
    )


def type_text(value: object) -> str:
    """Dtype and shape of a value: float32[64, 10]."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


def wrong_kind(name: str, eager: object, mine: object) -> Result:
    """The verdict on a result of another kind than eager's."""
    inf = float("inf")
    kind = f"{type_text(mine)} instead of {type_text(eager)}"
    return Result(name, kind, inf, 0.0, inf, 0.0, 0.0, False)


def judge(
    name: str,
    mine: object,
    eager: object,
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
    if not isinstance(mine, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return wrong_kind(name, eager, mine)
    kind = type_text(eager)
    if not is_float(mine):
        return _judge_whole(name, kind, mine, eager, exact)
    wide = eager.dtype in (torch.float64, torch.complex128)
    eps = torch.finfo(torch.float32).eps if wide and narrow else eps_of(mine)
    if exact is None or (wide and not narrow):
        exact, ulps = eager, UNREFERENCED_ULPS
    else:
        ulps = SHORT_ULPS if is_short(mine) else ULPS
    error = own = direct = scale = 0.0
    for e, o, d, m in distances(mine, eager, exact):
        error, own, direct, scale = max(error, e), max(own, o), max(direct, d), max(scale, m)
    own_finite = own if own < float("inf") else 0.0
    allowed = FACTOR * own_finite + ulps * eps * scale + _floor(mine)
    limit = limit_of(mine, scale)
    # Where eager is further from float64 than a result may be from eager, its last digits are chance.
    coarse = coarse or (tf32 and own_finite > limit)
    ok = error <= allowed and (coarse or direct <= limit)
    if not ok and own == float("inf"):
        # Eager overflowed where float64 does not; its infinities are no measure, but its finite values are.
        ok = all(
            (equal(a, b) | ((a - c).abs() <= allowed)).all()
            for a, b, c in zip(_chunks(mine), _chunks(eager), _chunks(exact), strict=True)
        )
    return Result(name, kind, error, own, direct, scale, allowed, bool(ok))


def _judge_whole(name: str, kind: str, mine: torch.Tensor, eager: torch.Tensor, exact: object) -> Result:
    """Integers and booleans: a comparison of floats may flip where rounding decides."""
    reference = exact if isinstance(exact, torch.Tensor) and exact.shape == eager.shape else eager
    wrong = float((mine != reference).sum())
    own = float((eager != reference).sum())
    direct = float((mine != eager).sum())
    allowed = FACTOR * own + float(int(FLIPS * mine.numel()))
    return Result(name, kind, wrong, own, direct, float(mine.numel()), allowed, wrong <= allowed)


def limit_of(mine: torch.Tensor, scale: float) -> float:
    """How far from eager a result may be, whatever float64 says."""
    return TO_EAGER * max(1.0, scale) if mine.dtype is torch.float32 else float("inf")


def _floor(value: torch.Tensor) -> float:
    """What is forgiven in any case: a kernel may take subnormal numbers for zeros. Not in fp16."""
    about = torch.finfo(value.dtype)
    return (
        about.smallest_normal if value.dtype is not torch.float16 else 4 * about.smallest_normal * about.eps
    )


def is_short(value: torch.Tensor) -> bool:
    """Whether elements have 16 bits."""
    return value.dtype in (torch.bfloat16, torch.float16)


def eps_of(value: torch.Tensor) -> float:
    """One rounding, as a share of a value."""
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
    return iter(plain.reshape(-1).split(table.of(plain.device).elements_at_once))


def distances(
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
        found = [_largest(x) for x in (a - c, b - c, a.double() - b)]
        if not (scale < infinite and all(f < infinite for f in found)):
            scale = _largest(c.nan_to_num(0.0, 0.0, 0.0))
            found = [_largest_unequal(x, y) for x, y in ((a, c), (b, c), (a, b))]
        own, theirs, apart = found
        yield own, theirs, apart, scale


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    # One number for the host to wait for.
    return float(torch.stack(values.aminmax()).abs().amax())


def _largest_unequal(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs do not differ, other NaNs differ infinitely."""
    difference = (left.double() - right).abs().masked_fill(equal(left, right), 0.0)
    return _largest(difference.nan_to_num(nan=float("inf"), posinf=float("inf")))


def equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Flags of the elements that are equal; NaN is NaN's equal."""
    return (left == right) | ((left != left) & (right != right))
