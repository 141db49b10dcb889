"""Speed on a CPU beside all peers, section by section: times, errors, compile times, memory.

    make bench-cpu                      or
    .venv/bin/python bench/cpu.py [--quick] [--only mlp pointwise ...] [--match tiny ...] [--json FILE]
    .venv/bin/python bench/cpu.py --write-docs

Every backend of a case is measured in one run, in short blocks by turns; every result is compared with
float64 beside eager's own error. Sections that are not run keep what the file has of them. The targets are
listed at the end: a missed one is not an error, a wrong result is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Its profiler, which measures memory, writes a line for each start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from common import ROOT, machine
from rich.console import Console
from rich.markup import escape
from speed import chart, page, timed
from speed.gates import gates
from speed.memory import memory
from speed.overhead import overhead
from speed.run import Run, disturbed
from speed.tables import Table, tables

SECTIONS = {
    "mlp": timed.mlp,
    "linear": timed.linear,
    "pointwise": timed.pointwise,
    "models": timed.models,
    "rewrites": timed.rewrites,
    "overhead": overhead,
    "memory": memory,
}
OUT = ROOT / "bench" / "out"
PAGE = ROOT / "docs" / "cpu.md"
CHART = ROOT / "docs" / "images" / "cpu.svg"
CHART_TEXT = "a dot for each backend and model: how many times as fast as eager"


def main(given: list[str] | None = None) -> int:
    """What was asked for; the exit code."""
    arguments = _arguments(given)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    path = arguments.json or OUT / ("cpu-quick.json" if arguments.quick else "cpu.json")
    if arguments.write_docs:
        return _write_docs(path, console)
    console.print(
        ", ".join(f"{k} {v}" for k, v in machine().items()) + f", {torch.get_num_threads()} threads"
    )
    run = Run(arguments, console)
    known = len(run.notes)
    for note in run.notes:
        console.print(note, style="dim", markup=False)
    interrupted = False
    try:
        with run.progress:
            for name in arguments.only or SECTIONS:
                SECTIONS[name](run)
                run.finish(name)
                _write(path, run)
                for table in tables(name, run.sections[name]):
                    _show(table, console)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what was measured so far is kept")
    finally:
        run.close()
        _write(path, run)
    _show(_verdict(run.sections), console)
    for name, section in run.sections.items():
        if warning := disturbed(section):
            console.print(f"[red]{name}: {warning}[/]")
    console.print(f"written to {path}")
    for note in run.notes[known:]:
        console.print(note, style="dim", markup=False)
    for wrong in run.wrong:
        console.print(f"[red]wrong: {escape(wrong)}[/]")
    return 130 if interrupted else int(bool(run.wrong))


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, few repetitions, no Inductor")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"sections ({', '.join(SECTIONS)})"
    )
    parser.add_argument(
        "--match", nargs="+", default=[], metavar="TEXT", help="cases with this in their names"
    )
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=0, help="rounds of all backends (9; 3 with --quick)")
    parser.add_argument(
        "--settle",
        type=float,
        default=12.0,
        help="seconds for more rounds of a case, until ratios settle (12)",
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of every backend (torch's)")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds for a compilation by Inductor (180)"
    )
    parser.add_argument("--json", type=Path, help="where results are (bench/out/cpu.json)")
    parser.add_argument(
        "--write-docs", action="store_true", help="measure nothing: tables and chart of docs/ from the file"
    )
    return parser.parse_args(given)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())["sections"]
    except (OSError, ValueError, KeyError, TypeError):
        # Absent, or of another form than this version writes.
        return {}


def _write(path: Path, run: Run) -> None:
    """Puts the sections of this run beside those that the file has."""
    sections = {**_read(path), **run.sections}
    ordered = {name: sections[name] for name in SECTIONS if name in sections}
    results = {
        "machine": machine(),
        "sections": ordered,
        "gates": [gate.data() for gate in gates(ordered)],
        "wrong": run.wrong,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _verdict(sections: dict[str, Any]) -> Table:
    table = Table("targets", ["target", "value", "limit", "met", "where"])
    for gate in gates(sections):
        sign = ">=" if gate.at_least else "<"
        # Other work on the machine can make any value of any.
        met = "?" if gate.doubt == "disturbed" else "yes" if gate.met else "NO"
        met += f" ({gate.doubt})" if gate.doubt else ""
        limit = f"{sign} {gate.limit:g} {gate.unit}"
        table.rows.append([gate.name, f"{gate.value:.4g} {gate.unit}", limit, met, gate.note])
    return table


def _show(table: Table, console: Console) -> None:
    console.print(table.title, style="bold", markup=False)
    console.print(table.rich(), "")


def _write_docs(path: Path, console: Console) -> int:
    sections = _read(path)
    if not sections:
        console.print(f"there are no results in {path}; run bench/cpu.py first")
        return 2
    parts = {name: [*tables(name, data)] for name, data in sections.items()}
    picture = f"![{CHART_TEXT}]({CHART.relative_to(PAGE.parent)})"
    page.write(PAGE, sections, {**parts, "gates": [_verdict(sections)]}, picture)
    CHART.write_text(chart.chart(sections))
    console.print(f"written: {PAGE.relative_to(ROOT)}, {CHART.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
