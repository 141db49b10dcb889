"""What every Python suite shares: the backend under test, copies of arguments, and the one comparison rule.

The rule: a compiled result is right when it is bit for bit what eager computes, or when it is as close to the
float64 result as eager's own is. `assert_as_close_as_eager` states it once, for outputs and for gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import hypatia
from hypatia.compiler.report import GraphReport
from hypatia.frontend.dynamo import collecting

BACKEND = os.environ.get("HYPATIA_TEST_BACKEND", "hypatia")
"""The backend under test; the suites are developed against torch's own backends by setting the variable."""

PEER = "aot_eager"
"""The backend that does nothing: what it gets wrong is PyTorch's to mend, not ours."""

FACTOR = 2.0
"""How many times eager's own error a compiled result may have."""

ULPS = 4.0
"""Roundings of the largest value that are always allowed: eager may be right by luck."""

DIRECT_ULPS = 64.0
"""The same, when there is no float64 result to judge by and eager is the only reference."""

CLEARLY = 0.01
"""Where eager and float64 part company, a result this much closer to float64 than eager is right."""

TRUSTED = 1e-2
"""A float64 result further from eager than this share drew other random numbers or took another branch."""


CANCELLED = 64.0
"""So many roundings of the largest of all results are all that eager has of one whose terms cancel, such as
the gradient of the bias of attention's keys."""

ZERO = 1e-6
"""Such a result is zero: in float64 it is at most this share of what rounding makes of it in eager."""


class MismatchError(AssertionError):
    """A compiled result that is not as good as eager's."""


def compile_count() -> int:
    """How many graphs the backend under test has compiled in this process."""
    if BACKEND == "hypatia":
        from hypatia.frontend.dynamo import compile_count as count

        return count()
    return captured_count()


def captured_count() -> int:
    """How many graphs Dynamo has captured since its last reset."""
    return counters["stats"]["unique_graphs"]


def fresh_dynamo() -> None:
    """Forget every compiled function and the counts of captured graphs."""
    torch._dynamo.reset()
    counters.clear()


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _widen(dtype: torch.dtype) -> torch.dtype:
    return {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(dtype, dtype)


def copied(tree: Any, *, double: bool = False, nudge: bool = False) -> Any:
    """A deep copy of arguments that keeps strides, storage gaps and `requires_grad`.

    `double` widens single-precision tensors and dtype arguments to double precision. `nudge` moves every
    floating-point value by up to one single-precision rounding, which shows how stable a computation is.
    A tensor that stands in two places is copied once.
    """
    made: dict[int, torch.Tensor] = {}

    def copy(leaf: object) -> object:
        if isinstance(leaf, torch.dtype) and double:
            return _widen(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _copy_tensor(leaf, double=double, nudge=nudge)
        return made[id(leaf)]

    return pytree.tree_map(copy, tree)


def _copy_tensor(tensor: torch.Tensor, *, double: bool, nudge: bool) -> torch.Tensor:
    dtype = _widen(tensor.dtype) if double else tensor.dtype
    with torch.no_grad():
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            twin = tensor.detach().clone().to(dtype)
        else:
            # The whole storage, gaps included: ops like as_strided read what the tensor itself does not show.
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            storage = whole.clone().to(dtype).untyped_storage()
            twin = torch.empty(0, dtype=dtype).set_(
                storage, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        if nudge and twin.is_floating_point():
            dice = torch.Generator().manual_seed(0)
            share = 2 * torch.rand(twin.shape, generator=dice, dtype=torch.float64) - 1
            moved = twin * (1 + torch.finfo(torch.float32).eps * share.to(twin))
            twin = torch.where(moved.isfinite(), moved, twin)
    return twin.requires_grad_(tensor.requires_grad)


def other_values(tree: Any, kind: str) -> Any:
    """Arguments like these with other values, for a later call: ``moved``, ``ties`` (multiples of a half,
    many of them zero), ``nan`` (one of them) or the same values with other ``strides``.

    Whole numbers change places: they may be indices.
    """

    def other(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or not leaf.numel():
            return leaf
        given = leaf.detach()
        if kind == "strides":
            # Every other element of memory, the last dimension first.
            memory = torch.zeros(*reversed(given.shape), 2, dtype=given.dtype)
            made = memory.select(-1, 0).permute(tuple(reversed(range(given.dim())))).copy_(given)
        elif not (given.is_floating_point() or given.is_complex()):
            made = given.flip(0) if given.dim() else given.clone()
        elif kind == "moved":
            made = (given.flip(0) if given.dim() else given) * 0.75
        elif kind == "ties":
            made = torch.view_as_real(given).mul(2).round().div(2) if given.is_complex() else None
            made = (given * 2).round() / 2 if made is None else torch.view_as_complex(made)
        else:
            made = given.clone()
            made.view(-1)[0] = float("nan")
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(other, tree)


@dataclass
class Reference:
    """The float64 results and, on demand, those of nudged arguments: the conditioning of the computation."""

    values: list[torch.Tensor]
    nudged: Callable[[], list[torch.Tensor]] | None = None
    _nudged: list[torch.Tensor] | None = field(default=None, repr=False)

    def shift(self, index: int) -> float:
        """How far a rounding of the arguments moves the result: no program can be asked to be closer."""
        if self.nudged is None:
            return 0.0
        if self._nudged is None:
            self._nudged = self.nudged()
        moved, still = _real(self._nudged[index]), _real(self.values[index])
        if moved.shape != still.shape:
            return 0.0
        return _largest((moved - still).abs())


def assert_as_close_as_eager(
    compiled: object,
    eager: object,
    ref64: Reference | object | None = None,
    *,
    values: bool = True,
    strides: bool = True,
    label: str = "output",
) -> None:
    """Raise `MismatchError` unless every compiled leaf is as good as eager's.

    Shape, dtype, device, `requires_grad` and (for dense results) strides must be eager's. Values must be
    eager's bit for bit, or have at most `FACTOR` times eager's own error to `ref64` plus `ULPS` roundings, by
    the largest error and by the root of the mean square; where the computation is ill-conditioned, by as much
    more as a rounding of its arguments moves it. `values=False` is for results whose contents are undefined.
    """
    ours, theirs = pytree.tree_leaves(compiled), pytree.tree_leaves(eager)
    if len(ours) != len(theirs):
        raise MismatchError(f"{label}: {len(ours)} results, eager has {len(theirs)}")
    reference = ref64 if isinstance(ref64, Reference) or ref64 is None else Reference(tensors(ref64))
    if reference is not None and len(reference.values) != len(tensors(eager)):
        reference = None
    index = 0
    for position, (mine, theirs_) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{label} {position}"
        if not isinstance(theirs_, torch.Tensor):
            _assert_same_object(mine, theirs_, where, values=values)
            continue
        _assert_same_kind(mine, theirs_, where, strides=strides)
        if values:
            _assert_close_values(mine.detach(), theirs_.detach(), reference, index, where)
        index += 1


def _assert_same_object(mine: object, theirs: object, where: str, *, values: bool) -> None:
    if type(mine) is not type(theirs):
        raise MismatchError(f"{where}: a {type(mine).__name__}, eager gives a {type(theirs).__name__}")
    if values and mine != theirs and not (mine != mine and theirs != theirs):
        raise MismatchError(f"{where}: {mine!r}, eager gives {theirs!r}")


def _assert_same_kind(mine: object, theirs: torch.Tensor, where: str, *, strides: bool) -> None:
    if not isinstance(mine, torch.Tensor):
        raise MismatchError(f"{where}: a {type(mine).__name__}, eager gives a tensor")
    for attribute in ("shape", "dtype", "device", "layout", "requires_grad"):
        if getattr(mine, attribute) != getattr(theirs, attribute):
            raise MismatchError(
                f"{where}: {attribute} {getattr(mine, attribute)}, eager gives {getattr(theirs, attribute)}"
            )
    if strides and theirs.layout == torch.strided and _dense(theirs) and _steps(mine) != _steps(theirs):
        raise MismatchError(
            f"{where}: strides {mine.stride()}, eager gives {theirs.stride()} for {tuple(mine.shape)}"
        )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, each once, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides that matter: those of dimensions with more than one element."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Values as dense real float64 numbers."""
    plain = tensor.detach()
    plain = plain.to_dense() if plain.layout != torch.strided else plain
    plain = plain.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.to(torch.float64)


def _largest(errors: torch.Tensor) -> float:
    finite = errors[errors.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def _mean_square_root(errors: torch.Tensor) -> float:
    finite = errors[errors.isfinite()]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())


def _assert_close_values(
    mine: torch.Tensor, theirs: torch.Tensor, reference: Reference | None, index: int, where: str
) -> None:
    ours, eager = _real(mine), _real(theirs)
    differing = ~_same(ours, eager)
    if not differing.any():
        return
    exact = _real(reference.values[index]) if reference is not None else None
    if exact is not None and exact.shape != eager.shape:
        exact = None
    if not (mine.is_floating_point() or mine.is_complex()):
        wrong, peer_wrong = differing, 0
        if exact is not None:
            wrong, peer_wrong = ~_same(ours, exact), int((~_same(eager, exact)).sum())
        if int(wrong.sum()) > peer_wrong:
            raise MismatchError(f"{where}: {int(wrong.sum())} of {wrong.numel()} whole numbers differ")
        return

    eps = torch.finfo(mine.dtype).eps
    scale = _largest(eager.abs() if exact is None else torch.maximum(eager.abs(), exact.abs()))
    if exact is None or _largest((eager - exact).abs()) > TRUSTED * scale:
        if exact is not None and reference is not None:
            apart, noise = (ours - exact).abs(), _largest((eager - exact).abs())
            whole = max(map(_largest, (_real(t).abs() for t in reference.values)), default=0.0)
            # Of few numbers the largest is chance.
            near = _mean_square_root(apart) <= FACTOR * _mean_square_root(eager - exact)
            cancelled = noise <= CANCELLED * eps * whole and _largest(exact.abs()) <= ZERO * noise
            if cancelled and near and (apart <= 2 * FACTOR * noise).all():
                return
            # Compared as a whole: an error that is not finite must not count as small.
            if (apart < CLEARLY * noise).all():
                return
        _assert_within(
            ours, eager, differing, DIRECT_ULPS * eps * scale, mine.dtype, f"{where} (against eager)"
        )
        return

    own = (eager - exact).abs()
    bound = FACTOR * _largest(own) + ULPS * eps * scale
    mean_bound = FACTOR * _mean_square_root(own) + ULPS * eps * _mean_square_root(exact)
    mean_error = _mean_square_root(ours - exact)
    try:
        _assert_within(ours, exact, differing, bound, mine.dtype, where)
        if mean_error > mean_bound:
            raise MismatchError(f"{where}: mean error {mean_error:.3g} to float64, allowed {mean_bound:.3g}")
    except MismatchError:
        shift = 2 * reference.shift(index) if reference is not None else 0.0
        if shift == 0.0 or shift > TRUSTED * scale:
            raise
        _assert_within(ours, exact, differing, bound + shift, mine.dtype, where)


def _assert_within(
    ours: torch.Tensor,
    target: torch.Tensor,
    where_differing: torch.Tensor,
    bound: float,
    dtype: torch.dtype,
    where: str,
) -> None:
    error = (ours - target).abs()[where_differing]
    mine, aim = ours[where_differing], target[where_differing]
    base = dtype.to_real() if dtype.is_complex else dtype
    agreed = _same(mine, aim.to(base).to(torch.float64))
    within = agreed | (error <= bound)
    if not within.all():
        worst = error[~within]
        raise MismatchError(
            f"{where}: {int((~within).sum())} of {ours.numel()} values off by up to {_largest(worst):.3g} "
            f"({int((~worst.isfinite()).sum())} not finite), allowed {bound:.3g}"
        )


def run_by(entry: str, model: nn.Module, x: torch.Tensor) -> tuple[Any, list[GraphReport]]:
    """What a model returns by ``hypatia.compile`` or by the backend, and the reports."""
    if entry == "compile":
        compiled = hypatia.compile(model, x)
        return compiled(x), compiled.reports
    with collecting() as reports:
        return torch.compile(model, backend="hypatia")(x), reports
