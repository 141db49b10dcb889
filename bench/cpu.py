"""Speed on a CPU: the nine MLPs in fp32 and bf16, batch as given and batch 1, all backends in one run.

    .venv/bin/python bench/cpu.py [--quick] [--only tiny_b64 ...] [--dtype fp32 bf16] [--json FILE]

Every result is compared with float64 beside its time. Ratios are eager's time over the backend's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, machine
from rich.console import Console
from rich.table import Table

from hypatia.benching import DTYPES, Cell, bench
from hypatia.workloads import NINE_MLPS, MLPShape

QUICK = ("eager", "hypatia", "hypatia-direct")
ALL = ("eager", "inductor", "inductor-freezing", "hypatia", "hypatia-direct")
SMALL = ("tiny", "small", "medium")


def shapes(arguments: argparse.Namespace) -> Iterator[tuple[str, MLPShape]]:
    """The MLPs, each with its own batch and with one row."""
    for shape in NINE_MLPS:
        if not arguments.only or shape.name in arguments.only:
            yield shape.name, shape
            if shape.batch > 1 and not shape.name.endswith(("_b256", "_b1024")):
                yield f"{shape.name} b1", dataclasses.replace(shape, batch=1)


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def main() -> int:
    """All of them; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without Inductor")
    parser.add_argument("--only", nargs="+", default=[], choices=[s.name for s in NINE_MLPS], metavar="MLP")
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (all)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "out" / "cpu.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(
        ", ".join(f"{k} {v}" for k, v in machine().items()) + f", {torch.get_num_threads()} threads\n"
    )
    backends = QUICK if arguments.quick else ALL
    results: list[dict[str, Any]] = []
    for dtype in arguments.dtype:
        results += measured(arguments, dtype, backends, console)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": machine(), "cells": results}, indent=1) + "\n")
    console.print(f"written to {arguments.json}")
    return 0 if all(r["correct"] for r in results if not r["reason"]) else 1


def measured(
    arguments: argparse.Namespace, dtype: str, backends: tuple[str, ...], console: Console
) -> list[dict[str, Any]]:
    """A table of one dtype."""
    table = Table(
        title=f"{dtype}: microseconds, and how many times as fast as eager", box=None, title_justify="left"
    )
    table.add_column("MLP", no_wrap=True)
    for name in backends:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error / eager's", justify="right")
    results: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {name: [] for name in backends}
    for name, shape in shapes(arguments):
        with console.status(f"{dtype}: {name}"):
            cells = bench(shape.workload(), backends, dtype=DTYPES[dtype], repeats=arguments.repeats)
        for cell in cells:
            results.append({**cell.data(), "case": name, "dtype": dtype})
            if cell.ratio and name.startswith(SMALL):
                ratios[cell.backend].append(cell.ratio)
        table.add_row(name, *(_text(c) for c in cells), f"{cells[-1].error:.1e} / {cells[0].error:.1e}")
    table.add_row("geometric mean, tiny to medium", *(f"{mean(ratios[b]):.2f}x" for b in backends), "")
    console.print(table)
    console.print()
    return results


def _text(cell: Cell) -> str:
    if cell.reason:
        return cell.reason[:20]
    wrong = "" if cell.correct else " WRONG"
    return f"{cell.microseconds:,.0f} {cell.ratio:.2f}x{wrong}"


if __name__ == "__main__":
    sys.exit(main())
