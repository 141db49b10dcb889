"""Whether a result is right: float64 is the yardstick, eager and what roundings do to it are the measure.

A value is right when it is eager's bit for bit, or as close to float64 as eager is. Where that fails, eager
is run again with every inexact op moved by a rounding or two, several times: what these runs spread over
cannot be asked for, and values that stay where they are in all of them must be eager's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR = 2.0
"""How many times the error of eager, and of eager with roundings moved, a value may have."""

ULPS = 4.0
"""Roundings of a value that are always forgiven."""

ORDINARY = 1e6
"""Roundings are those of the largest value of a result that is below this, or a value's own if it is not."""

STEADY = (64.0, 1e-3)
"""Roundings and share of the largest value by which a value may differ from eager's although eager stands
still and float64 agrees: more than digits that a kernel of torch's loses inside."""


TF32 = 2.0**-10
"""A unit of the last digit in TF32, of one or of the smallest normal number."""

UNSEEN = 1e-2
"""Share of a rounding of one by which any number may differ."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXACT = _words(
    """relu relu_ neg neg_ abs abs_ sign floor ceil round trunc max min amax amin maximum minimum fmax fmin
    clamp clamp_ clamp_min clamp_max hardtanh where cat stack index gather embedding clone _to_copy copy_
    copy fill_ fill zero_ zeros ones full zeros_like ones_like full_like empty empty_like empty_strided
    new_empty new_empty_strided new_zeros new_ones new_full constant_pad_nd flip roll repeat masked_fill
    masked_fill_ scatter slice_scatter select_scatter as_strided_scatter diagonal_scatter sort topk
    threshold_backward threshold index_select tril triu index_put index_put_ _unsafe_index lift_fresh_copy
    scalar_tensor nan_to_num median max_pool2d_with_indices cummax select_backward slice_backward
    value_selecting_reduction_backward copysign index_fill_ index_fill arange tensor lift_fresh isnan sgn
    signbit embedding_dense_backward unfold_backward _local_scalar_dense resize_ set_ ne eq lt le gt ge take
    narrow_copy"""
)

_VANISHING = _words("gelu silu sigmoid exp exp2 softplus erfc mish")
"""Functions that are zero only where they underflow: with fewer roundings there is a small number."""

_AT_TIES = {"sort": 1, "topk": 2}
"""Ops that say where numbers were, of which some may be equal, and where they take their dimension."""

HEADROOM = 8.0
"""A number that is closer to the largest one of its dtype than this may overflow in another order."""

_SUMS = _words(
    """sum mean mm bmm addmm baddbmm convolution var std var_mean cumsum cumprod prod linalg_vector_norm norm
    logsumexp _softmax _log_softmax native_layer_norm native_group_norm mv dot addmv _fused_rms_norm
    native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit avg_pool2d
    _adaptive_avg_pool2d _scaled_dot_product_flash_attention_for_cpu"""
)


class Noise(TorchDispatchMode):
    """Moves what inexact ops read and return by up to so many roundings."""

    def __init__(self, seed: int, roundings: float, *, loose: bool = False, attends: bool = False) -> None:
        """With ``loose``, sums need not keep their order: NaN and infinities stand for each other.
        ``attends``: an attention written by hand may be one call."""
        super().__init__()
        self.attends = attends
        self._products: list[tuple[torch.Tensor, torch.Tensor]] = []
        """With the sizes of what they are sums of."""
        self.seed = seed
        self.loose = loose
        self.roundings = roundings
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one op."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _AT_TIES and not kwargs.get("stable"):
            return self._any_of_equals(func, args, kwargs, _AT_TIES[name])
        if func.is_view or name in _EXACT or not name.strip("_"):
            return func(*args, **kwargs)
        if name in _SUMS:
            args = [self._moved(a) if isinstance(a, torch.Tensor) else a for a in args]
        result = func(*args, **kwargs)
        if name in _SUMS and not func._schema.is_mutable:
            if isinstance(result, torch.Tensor):
                result = self._exchanged(self._signed(result))
            elif isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
                # A norm adds its bias, which may be none, or a zero.
                result = (self._signed(result[0]), *result[1:])
        if name in _VANISHING and isinstance(args[0], torch.Tensor):
            result = self._underflowed(name, result, args[0])
        if func._schema.is_mutable:
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
                result.copy_(self._moved(result))
            return result
        if name == "_softmax_backward_data" and self.attends:
            result = self._summed_elsewhere(result, args)
        if name == "native_layer_norm" and math.prod(args[1]) == 1 and self.seed % 2:
            result = (self._of_one_number(result[0], args), *result[1:])
        if isinstance(result, (tuple, list)):
            return type(result)(self._moved(r) if isinstance(r, torch.Tensor) else r for r in result)
        result = self._moved(result) if isinstance(result, torch.Tensor) else result
        if name in ("mm", "bmm") and self.attends:
            self._products.append((result, args[0].abs() @ args[1].abs()))
        return result

    def _signed(self, value: torch.Tensor) -> torch.Tensor:
        """Zeros of either sign: a sum of zeros starts at zero or at its first one, as the kernel likes.
        Eager's product of one column has a sign for several rows, and none for one row or in a batch."""
        if not value.is_floating_point() or value.all():
            return value
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        negative = torch.rand(value.shape, generator=dice).to(value.device) < 0.5
        return torch.where((value == 0) & negative, -value, value)

    def _any_of_equals(self, func: Any, args: Any, kwargs: Any, place: int) -> Any:
        """The same numbers; which of equal ones comes first is drawn, as a sort that is not stable may."""
        x = args[0]
        if not x.dim() or not x.numel():
            return func(*args, **kwargs)
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        shuffled = torch.rand(x.shape, generator=dice).argsort(dim).to(x.device)
        values, indices = func(x.gather(dim, shuffled), *args[1:], **kwargs)
        return values, shuffled.gather(dim, indices)

    def _exchanged(self, value: torch.Tensor) -> torch.Tensor:
        """NaN or an infinity where there is one of them: which one, the order of a sum decides."""
        if not self.loose or not value.is_floating_point() or bool(value.isfinite().all()):
            return value
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        which = torch.randint(0, 4, value.shape, generator=dice).to(value.device)
        others = value.new_tensor([math.nan, math.inf, -math.inf, math.nan])
        return torch.where(value.isfinite() | (which == 3), value, others[which])

    def _summed_elsewhere(self, value: torch.Tensor, args: Any) -> torch.Tensor:
        """A gradient of a softmax takes a sum off each row. Attention sums up its own result instead, with
        roundings of its own: of a row where one weight is one, nothing is left without them. They are those
        of the products that the tangents are."""
        tangent, weights, dim = args[:3]
        size = tangent.double().abs()
        for product, terms in self._products:
            if product.data_ptr() == tangent.data_ptr() and product.numel() == tangent.numel():
                size = terms.double().reshape(tangent.shape)
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        size = (size * weights.double().abs()).sum(dim, keepdim=True)
        share = 2 * torch.rand(size.shape, generator=dice, dtype=torch.float64).to(value.device) - 1
        apart = weights.double() * size * share * torch.finfo(value.dtype).eps * self.roundings
        moved = (value.double() + apart).to(value.dtype)
        return torch.where(moved.isfinite(), moved, value)

    def _of_one_number(self, value: torch.Tensor, args: Any) -> torch.Tensor:
        """What a norm of rows of one number is without roundings: each is its own mean, and nothing is left.
        Eager subtracts products of both, and has the digits that these lose."""
        shift = torch.zeros_like(value) if args[3] is None else args[3].expand_as(value).to(value)
        return torch.where(args[0].isfinite() & value.isfinite(), shift, value)

    def _underflowed(self, name: str, value: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        """Some of the zeros of a function that has none there, as the smallest numbers of their sign."""
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        if name == "gelu":
            # One plus an error function near -1: what is left has the roundings of one.
            share = 2 * torch.rand(value.shape, generator=dice, dtype=torch.float64).to(value.device) - 1
            digits = (
                torch.finfo(value.dtype).eps * self.roundings * share * operand.double().abs().clamp(max=1e6)
            )
            value = torch.where(operand < 0, value.double() + digits, value.double()).to(value.dtype)
        some = torch.rand(value.shape, generator=dice).to(value.device) < 0.5
        least = torch.full_like(value, _least(torch.finfo(value.dtype))).copysign(value)
        return torch.where((value == 0) & (operand != 0) & operand.isfinite() & some, least, value)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        self.count += 1
        dice = torch.Generator().manual_seed((self.seed * 100_003 + self.count) % (1 << 62))
        share = 2 * torch.rand(value.shape, generator=dice, dtype=torch.float64).to(value.device) - 1
        about = torch.finfo(value.dtype)
        wide = value.double()
        moved = wide * (1 + about.eps * self.roundings * share)
        small = wide.abs() < about.smallest_normal
        moved = torch.where(small & (wide != 0), wide + _least(about) * (2 * share).round(), moved)
        moved = torch.where(wide.isfinite(), moved, wide).to(value.dtype)
        # A rounding must not make an infinity by itself, or hide one.
        moved = torch.where(moved.isfinite() | ~value.isfinite(), moved, value)
        if value.is_contiguous() or _overlaps(value):
            return moved
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
            moved
        )


class Overflows(TorchDispatchMode):
    """Sees whether a number of a run overflows, or might if its sums were taken in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.ordered = True
        """No sum may overflow in another order."""
        self.made = False
        """An op made an infinity or a NaN of finite numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one op."""
        name = func._schema.name.removeprefix("aten::")
        if name == "_to_copy" and _has_numbers(args[0]):
            self._cast(args[0].detach(), (kwargs or {}).get("dtype"))
        if func.is_view or name in _EXACT or not name.strip("_"):
            return func(*args, **(kwargs or {}))
        operands = [a for a in args if _has_numbers(a)]
        if name in _SUMS and self._sums(operands, name):
            self.seen, self.ordered = True, False
        if self.made:
            return func(*args, **(kwargs or {}))
        finite = all(bool(a.detach().isfinite().all()) for a in operands)
        if not finite and not func._schema.is_mutable:
            # Other rows may overflow beside one that has an infinity already.
            without = [a.nan_to_num(1.0, 1.0, 1.0) if _has_numbers(a) else a for a in args]
            self._look(func(*without, **(kwargs or {})), made=True)
        result = func(*args, **(kwargs or {}))
        self._look(result, made=finite)
        return result

    def _look(self, result: Any, *, made: bool) -> None:
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if _has_numbers(value):
                limit = torch.finfo(value.dtype).max / HEADROOM
                self.seen |= not bool((value.detach().abs() < limit).all())
                self.made |= made and not bool(value.detach().isfinite().all())

    def _cast(self, value: torch.Tensor, dtype: torch.dtype | None) -> None:
        """What an integer type has no place for becomes one or another number."""
        if dtype is not None and not dtype.is_floating_point and dtype is not torch.bool:
            about = torch.iinfo(dtype)
            fits = (value.double() >= about.min) & (value.double() < float(about.max) + 1)
            if not bool(fits.all()):
                self.seen = self.made = True

    def _sums(self, operands: list[torch.Tensor], name: str) -> bool:
        """Whether a sum of products of two operands, or of squares of one, may overflow on its way."""
        if not operands:
            return False
        tops = sorted(float(t.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in operands)
        squares = "norm" in name or name.startswith(("var", "std"))
        other = tops[-1] if squares else max(tops[-2] if len(tops) > 1 else 1.0, 1.0)
        # Kernels sum numbers of 16 bits in float32.
        limit = max(torch.finfo(operands[0].dtype).max, torch.finfo(torch.float32).max) / HEADROOM
        return tops[-1] * other * max(t.numel() for t in operands) > limit


def _has_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


@dataclasses.dataclass
class Reference:
    """What eager returns, what float64 does, and, on demand, what eager with moved roundings does."""

    eager: list[torch.Tensor]
    wide: list[torch.Tensor] | None
    noisy: Callable[[int, float], list[torch.Tensor]]
    odd: bool = False
    """There are numbers among the inputs that are infinite, or that overflow when they are multiplied."""
    ordered: bool = False
    """Sums are to keep their order. Else, with odd inputs, NaN and infinities stand for each other, and
    where eager has NaN nothing can be said."""
    exact: bool = False
    """Every rounding is to stay."""
    reordered: bool = False
    """A sum may overflow in another order."""
    made: bool = False
    """An infinity or a NaN came of finite numbers on the way."""
    overflows: bool = False
    """A number overflows on the way, or nearly: what is finite in one order need not be in another, so only
    numbers that are finite here and there are compared, unless rounding or order are to stay."""
    members: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)

    equal: Callable[[int, float], list[torch.Tensor]] | None = None
    """What the optimized graph returns, by torch's ops, with moved roundings."""
    equal_overflows: Callable[[], bool] | None = None
    """Whether the optimized graph makes an infinity or a NaN of finite numbers, by torch's ops."""
    splits: Callable[[], bool] | None = None
    """Whether the optimized graph calls torch's attention on a GPU, which splits fp32 into pieces of TF32."""

    def more(self, count: int, roundings: float) -> None:
        """Runs eager so many more times."""
        self.members += self._run(self.noisy, count, roundings)

    def equals(self, count: int, roundings: float) -> list[list[torch.Tensor]]:
        """Runs of the optimized graph."""
        return [] if self.equal is None or self.ordered else self._run(self.equal, count, roundings)

    def _run(self, run: Callable[[int, float], list[torch.Tensor]], count: int, roundings: float) -> Any:
        made = [run(len(self.members) + i, roundings) for i in range(count)]
        return [m for m in made if len(m) == len(self.eager)]


def judged(mine: torch.Tensor, reference: Reference, index: int) -> str:
    """What is wrong with a result; nothing if it is right."""
    eager = reference.eager[index]
    if _same(mine, eager).all():
        return ""
    exact = reference.wide[index] if reference.wide is not None else None
    if exact is None or exact.shape != eager.shape:
        exact = eager
    floating = mine.is_floating_point()
    # Kernels may sum in any order, whatever rules may do.
    if reference.overflows and (not reference.exact or reference.reordered):
        # What was chosen by comparing an infinity that another order does not have cannot be told.
        if not floating or reference.made:
            return ""
        # With fewer roundings there may be a number where eager has none, and in another order the reverse.
        unlike = mine.isfinite() & ~eager.isfinite()
        unlike |= ~mine.isfinite() & ~eager.isfinite()
        if not reference.ordered or reference.reordered:
            unlike |= ~mine.isfinite() & eager.isfinite()
        mine = torch.where(unlike, eager, mine)
    coarse = 0.0
    if mine.dtype is torch.float32 and reference.splits is not None and reference.splits():
        coarse = ULPS * TF32
    doubtful = functools.partial(_doubtful, mine, eager, exact, ordered=reference.ordered, coarse=coarse)
    if floating and not doubtful([], odd=reference.odd).any():
        return ""
    said = ""
    odd = reference.odd or reference.overflows
    for count, roundings in ((6, 1.0), (10, 2.0), (32, 3.0)):
        reference.more(count, roundings)
        members = [m[index] for m in reference.members if m[index].shape == eager.shape]
        wrong = doubtful(members, odd=odd) if floating else _flipped(mine, eager, members)
        if not wrong.any():
            return ""
        said = _described(mine, eager, exact, wrong)
    if floating:
        others = [m[index] for m in reference.equals(8, 2.0) if m[index].shape == eager.shape]
        if others and not (wrong & ~_rounded_apart(mine, exact, others)).any():
            return ""
    if reference.overflows and not reference.ordered and reference.equal_overflows is not None:
        # Numbers that nearly overflow may do so elsewhere, and what is made of that is finite again.
        return "" if reference.equal_overflows() else said
    return said


def _rounded_apart(mine: torch.Tensor, exact: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """Numbers that roundings of the optimized graph spread over, and float64's too: what eager computes once
    may be computed twice there, and rounded apart. A wrong graph lies elsewhere."""
    spread = torch.stack([m.double() for m in others])
    low, high = spread.amin(0), spread.amax(0)
    slack = high - low

    def inside(value: torch.Tensor) -> torch.Tensor:
        return (value.double() >= low - slack) & (value.double() <= high + slack)

    return inside(mine) & inside(exact)


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not left.is_floating_point():
        return left == right
    return (left == right) | (left.isnan() & right.isnan())


def _flipped(mine: torch.Tensor, eager: torch.Tensor, members: list[torch.Tensor]) -> torch.Tensor:
    """Whole numbers that are not eager's although roundings do not matter to them."""
    steady = torch.ones_like(eager, dtype=torch.bool)
    for member in members:
        steady &= member == eager
    return (mine != eager) & steady


def _doubtful(
    mine: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    members: list[torch.Tensor],
    *,
    odd: bool,
    ordered: bool,
    coarse: float,
) -> torch.Tensor:
    """Numbers that are further from float64 than eager and its roundings explain, or, where eager is further
    from float64 itself and no rounding moves it, further from eager. Subnormal ones may be off by the share
    ``coarse`` of the smallest normal number.
    """
    about = torch.finfo(mine.dtype)
    a, e, x = mine.double(), eager.double(), exact.double()
    size = x.abs().nan_to_num(0.0, 0.0, 0.0)
    size = torch.maximum(size, size[size < ORDINARY].amax()) if (size < ORDINARY).any() else size
    bound = ULPS * (about.eps * size + _least(about))
    if mine.dtype is torch.bfloat16:
        # Units for products of bf16 make zeros of subnormal numbers, in eager, too, where it uses them.
        bound = bound + about.smallest_normal
    bound = bound + coarse * about.smallest_normal * (e.abs() < about.smallest_normal)
    own = (e - x).abs().nan_to_num(0.0, 0.0, 0.0)
    # Eager overflowed, or made a NaN of an overflow: what float64 says is right too.
    agreed = _same(mine, eager) | (~(e.isfinite() & a.isfinite()) & _same(mine, exact.to(mine.dtype)))
    if odd and not ordered:
        agreed |= (~e.isfinite() & ~mine.isfinite()) | e.isnan()
        # The same, when nan_to_num made numbers of them.
        made = (0.0, about.max)
        agreed |= _is_one_of(e.abs(), made) & _is_one_of(a.abs(), made)
    steady, moved = e.isfinite(), torch.zeros_like(own)
    for member in members:
        m = member.double()
        agreed |= _same(mine, member) & ~(mine.isfinite() & e.isfinite())
        own = torch.fmax(own, (m - x).abs().nan_to_num(0.0, 0.0, 0.0))
        # Where a rounding decides whether eager overflows, only float64 is left to judge by.
        agreed |= (m.isfinite() != e.isfinite()) & ~mine.isfinite()
        steady &= m.isfinite()
        moved = torch.fmax(moved, (m - e).abs())
    if members:
        spread = torch.stack([e, *[m.double() for m in members]])
        low, high = spread.amin(0), spread.amax(0)
        slack = (ULPS * about.eps * (high - low)).nan_to_num(0.0, 0.0, 0.0)
        agreed |= (a >= low - slack) & (a <= high + slack)
        if odd:
            # Any rounding at all makes this number overflow: nothing can be said of it.
            agreed |= e.isfinite() & ~torch.stack([m.isfinite() for m in members]).any(0)
    near = (a - x).abs() <= bound + FACTOR * own
    # What underflows in one order need not in another.
    finite = e[e.isfinite()].abs()
    share = max(STEADY[0] * about.eps, STEADY[1])
    limit = share * finite.amax() if finite.numel() else torch.zeros(())
    limit = limit.to(e) + about.eps * UNSEEN + FACTOR * moved
    # A number that roundings move by more than itself does not stand still.
    unlike = steady & (moved <= e.abs()) & ((a - e).abs() > limit)
    # With odd inputs, eager may have overflowed to something finite.
    return ~(agreed | (near if odd else near & ~unlike))


def _is_one_of(values: torch.Tensor, known: tuple[float, ...]) -> torch.Tensor:
    return torch.isin(values, values.new_tensor(known))


def _described(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, wrong: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    values = [v[at].item() for v in (mine, eager, exact)]
    digits = 17 if mine.dtype is torch.float64 else 9
    texts = [f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in values]
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values are wrong, at {list(at)}: {texts[0]}, "
        f"eager {texts[1]}, float64 {texts[2]}"
    )


def _least(about: torch.finfo) -> float:
    """The smallest number that is not zero."""
    return about.smallest_normal * about.eps


def _overlaps(value: torch.Tensor) -> bool:
    """Whether elements may share memory."""
    reach = 0
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False
