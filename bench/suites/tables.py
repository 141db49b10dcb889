"""What a run showed: a table, geometric means, what was right, why there was no plan."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .forms import LABELS, OURS
from .run import Line

INDUCTOR_MODES = ("inductor", "ro")
AGAINST = {
    "eager": ("eager",),
    "eager under a graph": ("graph",),
    "the better Inductor mode": INDUCTOR_MODES,
    "Inductor under a graph by hand": ("ind+g",),
}
"""What ours is divided by: the least of these forms."""
WORST = 10


def time_of(line: Line, forms: Sequence[str]) -> float | None:
    """The least microseconds of these forms; none if none of them has a time."""
    times = [line["cells"][f]["us"] for f in forms if line["cells"].get(f, {}).get("us")]
    return min(times, default=None)


def ratios(lines: Sequence[Line], ours: str, forms: Sequence[str]) -> dict[str, float]:
    """By model: how many times as fast as the best of these forms ours is."""
    found = {line["name"]: (time_of(line, forms), time_of(line, [ours])) for line in lines}
    return {name: theirs / mine for name, (theirs, mine) in found.items() if theirs and mine}


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios; NaN of none."""
    return statistics.geometric_mean(values) if values else float("nan")


def means(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Each of our forms over each of `AGAINST`: geometric mean, least, most, how many are slower."""
    found = []
    for ours in OURS:
        for name, forms in AGAINST.items():
            over = ratios(lines, ours, forms)
            if over:
                worst = min(over, key=lambda model: over[model])
                found.append(
                    {
                        "form": ours,
                        "over": name,
                        "mean": geometric_mean(list(over.values())),
                        "least": over[worst],
                        "least_model": worst,
                        "most": max(over.values()),
                        "models": len(over),
                        "slower": sum(r < 1 for r in over.values()),
                    }
                )
    return found


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of text with columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def table(lines: Sequence[Line]) -> Iterator[str]:
    """A line for each model: microseconds of every form, what ours kept, whether results are right."""
    forms = [form for form in LABELS if any(form in line["cells"] for line in lines)]
    timed = any(time_of(line, forms) for line in lines)
    ours = [form for form in OURS if form in forms]
    head = ["model", *(LABELS[f] for f in forms if timed)]
    head += [f"{LABELS[f]} keeps" for f in ours] + [f"{LABELS[f]} right" for f in ours]
    rows = [head]
    for line in lines:
        cells = line["cells"]
        times = [_time(cells.get(form, {})) for form in forms if timed]
        kept = [cells.get(form, {}).get("kept", "-") for form in ours]
        rows.append([line["name"], *times, *kept, *(verdict(line, form) for form in ours)])
    yield from aligned(rows)


def _time(cell: dict[str, Any]) -> str:
    return f"{cell['us']:.0f}" if "us" in cell else "-"


def verdict(line: Line, form: str) -> str:
    """right, WRONG, or why there is no result."""
    cell = line["cells"].get(form, {})
    if cell.get("reason"):
        return f"failed: {cell['reason'][:80]}"
    if "right" not in cell:
        return f"not run: {line.get('error', '')[:80]}"
    if cell["right"] and cell.get("kinks"):
        return f"right but for a ReLU at zero: {cell['error']:.1e}"
    return "right" if cell["right"] else f"WRONG: {cell['error']:.1e}, eager {_eager_error(line):.1e}"


def _eager_error(line: Line) -> float:
    return line["cells"].get("eager", {}).get("error", float("nan"))


def counted(lines: Sequence[Line], form: str) -> dict[str, int]:
    """How many results are right, wrong, failed or not run."""
    return dict(Counter(verdict(line, form).split(":")[0] for line in lines).most_common())


def kept(lines: Sequence[Line], form: str) -> dict[str, int]:
    """How often which form is kept."""
    return dict(Counter(line["cells"].get(form, {}).get("kept", "nothing") for line in lines).most_common())


def why(lines: Sequence[Line], form: str) -> dict[str, list[str]]:
    """The models without a plan by reason, the most frequent reason first."""
    found: dict[str, list[str]] = {}
    for line in lines:
        cell = line["cells"].get(form, {})
        for text in dict.fromkeys(map(kind_of, cell.get("no_plan", []))):
            found.setdefault(text, []).append(line["name"])
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def kind_of(text: str) -> str:
    """A reason without the names and numbers of one model."""
    return re.sub(r"\d+", "N", text)[:160]


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """Counts, reasons and means."""
    for form in [f for f in OURS if any(f in line["cells"] for line in lines)]:
        yield ""
        yield f"{LABELS[form]}: {_pairs(counted(lines, form))}; kept: {_pairs(kept(lines, form))}"
        for text, names in why(lines, form).items():
            yield f"  no plan, {len(names)}: {text}"
            yield f"      {', '.join(names)}"
        for line in lines:
            if verdict(line, form) != "right":
                yield f"  {line['name']}: {verdict(line, form)}"
    yield ""
    for mean in means(lines):
        yield (
            f"{LABELS[mean['form']]} over {mean['over']}: {mean['mean']:.2f}x ({mean['models']} models, "
            f"{mean['least']:.2f} ({mean['least_model']}) to {mean['most']:.2f}, {mean['slower']} slower)"
        )
    if any(cell.get("earlier") for line in lines for cell in line["cells"].values()):
        yield "Peers' times are of an earlier run: ratios to them hold if both machines are alike."


def _pairs(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def profiles(lines: Sequence[Line]) -> Iterator[str]:
    """The longest kernels of ours and of the best peer, for the models where ours is furthest behind."""
    peers = [form for form in LABELS if form not in OURS]
    behind = ratios(lines, "hypatia", peers) or ratios(lines, "torch", peers)
    by_name = {line["name"]: line for line in lines}
    for name in sorted(behind, key=lambda model: behind[model])[:WORST]:
        cells = by_name[name]["cells"]
        best = min((f for f in peers if cells.get(f, {}).get("us")), key=lambda f: cells[f]["us"])
        ours = next(f for f in OURS if cells.get(f, {}).get("us"))
        for form in (ours, best):
            cell = cells[form]
            kernels = f", {cell['kernels']:.0f} kernels" if "kernels" in cell else ""
            yield f"\n{name}, {LABELS[form]}: {cell['us']:.0f} us{kernels}"
            yield from (f"  {t:9.1f} us  {n:5.0f}x  {key}" for key, n, t in cell.get("top", []))
