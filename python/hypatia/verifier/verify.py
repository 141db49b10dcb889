"""Two callables compared: the second may be as far from float64 as the first, and a little more."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from .._torch import pytree
from ..capture.model_state import buffers_kept
from ..devices import table
from ..timeline import CALL, EAGER, WIDE, stage
from .judge import FACTOR, ULPS
from .reference import cloned


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far a result is from float64."""

    max_abs: float
    mean_abs: float
    max_relative: float
    cosine: float
    ulps: float

    @classmethod
    def of(cls, result: torch.Tensor, exact: torch.Tensor) -> Errors:
        """Errors of a result; equal infinities and NaNs count as equal."""
        wide, exact = result.detach().double().flatten(), exact.detach().double().flatten()
        if wide.numel() == 0:
            return cls(0.0, 0.0, 0.0, 1.0, 0.0)
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        difference = torch.where(same, 0.0, (wide - exact).abs())
        finite = exact[exact.isfinite()].abs()
        scale = finite.max().item() if finite.numel() else 0.0
        eps = torch.finfo(result.dtype).eps if result.is_floating_point() else 1.0
        worst = difference.max().item()
        norm = wide.norm() * exact.norm()
        return cls(
            max_abs=worst,
            mean_abs=difference.mean().item(),
            max_relative=worst / scale if scale else worst,
            cosine=(wide @ exact / norm).item() if norm else 1.0,
            ulps=worst / (eps * scale) if scale else worst,
        )

    def passes(self, reference: Errors) -> bool:
        """The rule: at most twice the error of the reference, plus a few roundings."""
        return self.ulps <= FACTOR * reference.ulps + ULPS


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a comparison showed; true when the candidate is as good as the reference."""

    ok: bool
    reason: str
    candidate: list[Errors]
    reference: list[Errors]

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{'result':<18}{'max abs':>10}{'mean abs':>10}{'max rel':>10}{'cosine':>12}{'ulps':>8}"
        lines = [
            f"verification: {'passed' if self.ok else 'FAILED'}{self.reason and ': ' + self.reason}",
            head,
        ]
        for i, pair in enumerate(zip(self.candidate, self.reference, strict=True)):
            for name, e in zip(("candidate", "reference"), pair, strict=True):
                lines.append(
                    f"{f'{i} {name}':<18}{e.max_abs:>10.2e}{e.mean_abs:>10.2e}{e.max_relative:>10.2e}"
                    f"{e.cosine:>12.8f}{e.ulps:>8.1f}"
                )
        return "\n".join(lines)


def verify(
    reference: Callable[..., object],
    candidate: Callable[..., object],
    *inputs: object,
    kwargs: Mapping[str, object] | None = None,
) -> Verification:
    """Runs both on the same inputs and random numbers and compares them with float64.

    The candidate passes when its error is at most twice the reference's own, plus a few roundings.
    Inputs, buffers and the state of the random number generators are left as they were.
    """
    arguments = (inputs, dict(kwargs or {}))
    with stage(EAGER):
        theirs = _run(reference, arguments)
    with stage(CALL):
        ours = _run(candidate, arguments)
    with stage(WIDE):
        exact = _run(_double(reference), pytree.tree_map(_widened, arguments))
    return compared(ours, theirs, exact)


def compared(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> Verification:
    """Results of a candidate and of a reference, judged by those in float64."""
    if len(ours) != len(theirs):
        return Verification(False, f"{len(ours)} results instead of {len(theirs)}", [], [])
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}" for t in (a, b)]
            return Verification(False, f"result {i} is {kinds[0]} instead of {kinds[1]}", [], [])
    mine = [Errors.of(a, e) for a, e in zip(ours, exact, strict=True)]
    own = [Errors.of(b, e) for b, e in zip(theirs, exact, strict=True)]
    for i, (m, o) in enumerate(zip(mine, own, strict=True)):
        if not m.passes(o):
            reason = f"result {i} is {m.ulps:.3g} roundings from float64, the reference {o.ulps:.3g}"
            return Verification(False, reason, mine, own)
    return Verification(True, "", mine, own)


def _run(function: Callable[..., object], arguments: tuple[object, dict[str, object]]) -> list[torch.Tensor]:
    """The tensors that a call returns; everything it could change is put back."""
    args, kwargs = pytree.tree_map(cloned, arguments)
    devices = table.random_devices(pytree.tree_leaves(arguments))
    with torch.no_grad(), torch.random.fork_rng(devices=devices), buffers_kept(function):
        results = function(*args, **kwargs)
    return [t.clone() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def _widened(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _double(function: Callable[..., object]) -> Callable[..., object]:
    return copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
