"""What the diagnostics share: a table of cases, each of which holds or falls short, JSON, an exit code.

It imports neither torch nor hypatia: one of the diagnostics does without both.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hypatia.jsonable import as_json

ROOT = Path(__file__).parent.parent


@dataclass
class Case:
    """One row: what was looked at, what was seen, and why it falls short if it does."""

    cells: tuple[str, ...]
    data: dict[str, Any]
    short: str = ""


@dataclass
class Diagnostic:
    """Cases under a title; columns whose names start with ``>`` hold numbers."""

    title: str
    columns: tuple[str, ...]
    arguments: argparse.Namespace
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.console = Console(
            file=sys.stderr if self.arguments.json == "-" else sys.stdout,
            width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150,
            highlight=False,
        )

    def add(self, *cells: str, short: str = "", **data: Any) -> None:
        """Enters a case; ``short`` says why it falls short."""
        self.cases.append(Case(cells, {**data, "ok": not short, "short": short}, short))

    def finish(self) -> int:
        """Shows the table and the verdict, writes JSON, returns the exit code."""
        table = Table(box=None, pad_edge=False)
        for name in self.columns:
            number = name.startswith(">")
            table.add_column(name.removeprefix(">"), justify="right" if number else "left", no_wrap=number)
        table.add_column("verdict", overflow="fold")
        for case in self.cases:
            verdict = f"[red]{escape(case.short)}[/]" if case.short else "[green]ok[/]"
            table.add_row(*(escape(cell) for cell in case.cells), verdict)
        short = sum(bool(case.short) for case in self.cases)
        seconds = time.perf_counter() - self.started
        self.console.print(self.title, style="bold")
        for note in self.notes:
            self.console.print(note, style="dim", markup=False)
        self.console.print(table)
        verdict = f"[red]{short} of {len(self.cases)} cases fall short[/]" if short else "[green]all hold[/]"
        self.console.print(f"{len(self.cases)} cases in {seconds:.0f} s: {verdict}")
        if self.arguments.json:
            self._write(seconds)
        return 1 if short or not self.cases else 0

    def _write(self, seconds: float) -> None:
        data = {"title": self.title, "notes": self.notes, "seconds": seconds}
        text = as_json({**data, "cases": [case.data for case in self.cases]}) + "\n"
        if self.arguments.json == "-":
            sys.stdout.write(text)
            return
        path = Path(self.arguments.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.console.print(f"written to {path}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all diagnostics have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", metavar="FILE|-", help="write the results as JSON")
    return made


def add_device_options(made: argparse.ArgumentParser) -> None:
    """Where to run, for diagnostics that run models."""
    made.add_argument("--device", help="cpu or cuda (the GPU if there is one)")
    made.add_argument("--threads", type=int, help="threads of torch on the CPU")


def prepare(arguments: argparse.Namespace, diagnostic: Diagnostic) -> str:
    """Sets torch up as the options say, notes the machine, and returns the device."""
    import torch

    from hypatia.devices import machine

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    diagnostic.notes += [note for note in (machine.line(), machine.busy()) if note]
    return device
