"""What ``hypatia bench --profile`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import safe, table

if TYPE_CHECKING:
    from rich.console import Console

    from hypatia.tools.profile import Profile

STEP = 14
"""Columns that the names of steps have at least: sizes fold first."""

STEPS = 20
"""Steps that are shown; JSON has all."""
KERNELS = 6


def show(out: Console, profile: Profile) -> None:
    """The steps of a plan, work by its kind beside peers, and the longest kernels of peers."""
    out.print(f"\n[bold]{safe(profile.workload)[0]}[/]: steps of the plan, microseconds of a call")
    for note in profile.notes:
        out.print(safe(note)[0], style="dim")
    if profile.steps:
        out.print(_steps(profile))
        if len(profile.steps) > STEPS:
            out.print(f"and {len(profile.steps) - STEPS} kinds of steps more (--json has all)", style="dim")
    out.print(_kinds(profile))
    for peer, kernels in profile.top.items():
        rows = table(f"{peer}: longest kernels", ">times", ">us")
        for name, count, taken in kernels[:KERNELS]:
            rows.add_row(safe(name[:90])[0], str(count), f"{taken:,.1f}")
        out.print(rows)


def _steps(profile: Profile) -> object:
    total = sum(line.microseconds for line in profile.steps)
    names = (">times", ">us", ">share", ">predicted", ">limit", ">over", "by")
    rows = table("step", "reads and writes", *names)
    rows.columns[0].min_width = STEP
    for line in profile.steps[:STEPS]:
        rows.add_row(
            safe(line.name)[0],
            safe(line.sizes)[0],
            str(line.count),
            f"{line.microseconds:,.1f}",
            f"{line.microseconds / total:.0%}" if total else "-",
            f"{line.predicted:,.1f}",
            f"{line.limit:,.1f}",
            f"{line.microseconds / line.limit:.1f}x" if line.limit else "-",
            line.bound_by,
        )
    return rows


def _kinds(profile: Profile) -> object:
    names: list[str] = [name for name in ("hypatia", "predicted", "limit") if name in profile.kinds]
    names += [name for name in profile.kinds if name not in names]
    rows = table("kind of work", *(f">{name}, us" for name in names))
    for kind in next(iter(profile.kinds.values()), {}):
        if any(profile.kinds[name][kind] for name in names):
            rows.add_row(kind, *(f"{profile.kinds[name][kind]:,.1f}" for name in names))
    rows.add_section()
    rows.add_row("all", *(f"{sum(profile.kinds[name].values()):,.1f}" for name in names))
    return rows
