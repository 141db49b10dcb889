"""One run: what was asked for, which backends there are, what was found, and how far it is."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hypatia.devices import machine
from hypatia.tools import bench

from . import inductor, peers
from .cases import DTYPES, Case, of

OURS = "hypatia-direct"
"""``hypatia.compile``, the entry that the targets are about."""

LABELS = {
    "eager": "eager",
    OURS: "hypatia.compile",
    "hypatia": "torch.compile, hypatia",
    "inductor": "Inductor",
    "inductor-freezing": "Inductor, freezing + max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
"""Names of backends for readers, in the order of the tables."""

MOST_OTHERS = 0.2
"""Cores that other work may take; torch's threads wait for each other, and for the slowest."""

FEW = 3
"""Backends that all go on until their ratios settle; of more, only ours and eager."""

PEERS = ("inductor", "inductor-freezing", "onnxruntime", "openvino")


class Run:
    """Settings, the other process, results by section and mistakes."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.quick: bool = arguments.quick
        self.repeats: int = arguments.repeats or (3 if self.quick else 9)
        self.settle: float = 0.0 if self.quick else arguments.settle
        self.match: list[str] = arguments.match
        self.dtypes: list[str] = arguments.dtype
        self.console = console
        self.sections: dict[str, dict[str, Any]] = {}
        self.notes = [n for name in peers.NEEDS if (n := peers.missing(name))]
        if self.quick:
            self.notes.append("--quick: a few cases, without Inductor")
        self.workshop = inductor.Workshop(torch.get_num_threads(), arguments.limit)
        self.wrong: list[str] = []
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console, transient=True)
        self._task = self.progress.add_task("", total=None)

    def open(self, section: str) -> dict[str, Any]:
        """The results of a section, to be filled; what is in it counts even if the run is broken off."""
        self.say(section)
        data: dict[str, Any] = {
            "machine": machine.describe(),
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "quick": self.quick,
            "repeats": self.repeats,
            "complete": False,
            "others": others(),
        }
        self.sections[section] = data
        return data

    def finish(self, section: str) -> None:
        """Looks again at what else the machine does, and notes whether all cases were measured."""
        data = self.sections[section]
        data["complete"] = not (self.quick or self.match) and len(self.dtypes) == len(DTYPES)
        data["others"] = max(data["others"], others())

    def cases(self, section: str) -> Iterator[Case]:
        """The cases of a section that were asked for, with progress."""
        yield from self.each(
            [
                c
                for c in of(section, self.quick)
                if c.dtype in self.dtypes and (not self.match or any(m in c.name for m in self.match))
            ]
        )

    def each(self, items: Sequence[Any]) -> Iterator[Any]:
        """The items, with progress."""
        self.progress.reset(self._task, total=len(items), description="")
        for item in items:
            yield item
            self.progress.advance(self._task)

    def say(self, text: str) -> None:
        """What is being done now."""
        self.progress.update(self._task, description=text)

    def backends(self, *wanted: str) -> list[str]:
        """Those that are there and belong to this form of the run."""
        left_out = inductor.NAMES if self.quick else ()
        return [b for b in wanted if b not in left_out and not peers.missing(b)]

    def cold(self, name: str, case: Case) -> float | None:
        """Seconds of a compilation in a fresh process; none if it failed."""
        self.say(f"{case.name} {case.dtype}: {name} in a fresh process")
        try:
            return inductor.cold(torch.get_num_threads(), self.workshop.limit, name, case)
        except Exception as e:
            self.notes.append(f"{case.key}, {name} in a fresh process: {bench.reason(e)}")
            return None

    def measure(
        self,
        case: Case,
        wanted: Sequence[str],
        makers: dict[str, bench.Maker] | None = None,
        rounds: int | None = None,
    ) -> list[dict[str, Any]]:
        """Cells of a case as plain data; wrong results of ours are remembered."""
        backends = self.backends(*wanted)
        found = {name: self.workshop.maker(name, case) for name in backends if name in inductor.NAMES}
        found |= peers.makers([name for name in backends if name in peers.NEEDS])
        cells = bench.bench(
            case.workload,
            backends,
            dtype=bench.DTYPES[case.dtype],
            repeats=self.repeats if rounds is None else rounds,
            progress=self.say,
            makers={**found, **(makers or {})},
            settle=backends if len(backends) <= FEW else (OURS,),
            seconds=self.settle if rounds is None else 0.0,
        )
        for cell in cells:
            if cell.backend in (OURS, "hypatia") and cell.correct is not True:
                self.wrong.append(f"{case.key}, {LABELS[cell.backend]}: {cell.reason or 'wrong result'}")
        return [
            {"case": case.name, "dtype": case.dtype, **case.facts, **_rounded(cell.data())} for cell in cells
        ]

    def close(self) -> None:
        """Ends the other process."""
        self.workshop.close()


def others(seconds: float = 0.5) -> float:
    """Cores that other processes keep busy; to be asked while this one does nothing. 0 if nobody knows."""
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0

    def ticks() -> tuple[int, int, int]:
        lines = file.read_text().splitlines()
        user, nice, system, idle, wait, *rest = map(int, lines[0].split()[1:9])
        return user + nice + system + sum(rest), idle + wait, sum(x.startswith("cpu") for x in lines) - 1

    (busy, idle, cores), _ = ticks(), time.sleep(seconds)
    later_busy, later_idle, _ = ticks()
    both = later_busy + later_idle - busy - idle
    return round(cores * (later_busy - busy) / both, 2) if both else 0.0


def disturbed(section: dict[str, Any]) -> str:
    """A warning when times of a section are not to be trusted."""
    if section["others"] <= MOST_OTHERS:
        return ""
    cores = section["machine"]["cores"]
    return f"OTHER WORK TOOK {section['others']:.1f} OF {cores} CORES: these times are not to be trusted"


def _rounded(data: dict[str, Any]) -> dict[str, Any]:
    """Without digits that say nothing: a file that people read."""
    samples = [float(f"{1e6 * s:.5g}") for s in data.pop("samples")]
    return {**data, "samples_us": samples}
