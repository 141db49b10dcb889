"""The report about a model: what was measured, and the forms it can be read in."""

from __future__ import annotations

import dataclasses
import io
import platform
from pathlib import Path

import torch
from rich.console import Console

from ..._native import __version__
from ...compiler.pipeline import UncompiledGraph
from ...compiler.report import GraphReport, Replay
from ...devices import machine
from ...jsonable import as_json, plain
from ...timeline import ORDER
from ...verifier.verify import Verification
from ..steps import Line
from . import page, text
from .breaks import Break
from .form import Accuracy, Device, GraphForm, ReplayData, ReportForm, VerificationData
from .memory import memory

WIDTH = 110
"""Columns of the plain text."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of every call and their medians, by what was called: eager and hypatia."""

    samples: dict[str, list[float]]
    medians: dict[str, float]
    warning: str
    """Why the times are not to be trusted, if so."""

    @property
    def speedup(self) -> float:
        """How many times quicker the compiled model is than eager."""
        return self.medians["eager"] / self.medians["hypatia"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a model; ``str()`` is readable, ``save()`` writes a page, JSON or text."""

    name: str
    device: torch.device
    threads: int
    training: bool
    graphs: list[GraphReport]
    replays: list[Replay | None]
    verification: Verification | None
    unverified: str
    compared: list[str]
    timeline: dict[str, float]
    """Seconds of the stages of the first call, each without those inside of it."""
    breaks: list[Break]
    """Where Dynamo cut the model into several graphs."""
    left: list[UncompiledGraph]
    """Graphs that run as they were captured."""
    weights: frozenset[str]
    """Names of the model's parameters and buffers."""
    timings: Timings | None
    steps: list[Line]
    """Steps of the plans that a call runs, where they were timed."""

    @property
    def first_call(self) -> float:
        """Seconds of the first call: the sum of its stages."""
        return sum(self.timeline.values())

    def json(self) -> ReportForm:
        """Everything as plain data; numbers that are not finite are strings."""
        form: ReportForm = plain(
            {
                "model": self.name,
                "training": self.training,
                "versions": {
                    "hypatia": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "device": self._device(),
                "cost": {
                    "before": sum(g.data["cost_before"] for g in self.graphs),
                    "after": sum(g.data["cost_after"] for g in self.graphs),
                },
                "first_call": self.first_call,
                "timeline": [
                    {"stage": name, "seconds": self.timeline[name]} for name in ORDER if name in self.timeline
                ],
                "breaks": [dataclasses.asdict(b) for b in self.breaks],
                "left": [dataclasses.asdict(g) for g in self.left],
                "verification": self._verification(),
                "timings": dataclasses.asdict(self.timings) if self.timings else None,
                "steps": [dataclasses.asdict(line) for line in self.steps],
                "graphs": [
                    _graph(graph, replay, self.weights)
                    for graph, replay in zip(self.graphs, self.replays, strict=True)
                ],
            }
        )
        return form

    def text(self) -> str:
        """The report as plain text."""
        buffer = io.StringIO()
        self.print(Console(file=buffer, width=WIDTH, color_system=None))
        return buffer.getvalue()

    def __str__(self) -> str:
        return self.text()

    def print(self, console: Console | None = None) -> None:
        """The report on a console, in colours where it has them."""
        (console or Console()).print(text.render(self.json()))

    def html(self) -> str:
        """The report as one page that needs nothing else."""
        return page.render(self.json())

    def save(self, path: str | Path) -> Path:
        """Writes the report; the suffix says how: ``.html``, ``.json`` or ``.txt``."""
        path = Path(path)
        forms = {
            ".html": self.html,
            ".json": lambda: as_json(self.json()),
            ".txt": self.text,
        }
        if path.suffix not in forms:
            raise ValueError(f"a report is saved as {', '.join(forms)}, not as {path.name!r}")
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path

    def _device(self) -> Device:
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else machine.cpu_name()
        note = "" if torch.cuda.is_available() else "no GPU found on this machine"
        return {"type": str(self.device), "name": name, "note": note, "threads": self.threads}

    def _verification(self) -> VerificationData:
        if self.verification is None:
            return {"status": "not compared", "reason": self.unverified, "results": []}
        v = self.verification
        results: list[Accuracy] = [
            {"name": name, "hypatia": dataclasses.asdict(ours), "eager": dataclasses.asdict(own)}
            for name, ours, own in zip(self.compared, v.candidate, v.reference, strict=True)
        ]
        return {"status": "passed" if v.ok else "failed", "reason": v.reason, "results": results}


def _graph(graph: GraphReport, replay: Replay | None, weights: frozenset[str]) -> GraphForm:
    return {
        **graph.data,
        "kept": graph.kept,
        "no_plan": graph.no_plan or None,
        "forms": graph.times,
        "apart": graph.apart,
        "later": graph.later,
        "memory": memory(graph, weights),
        "fused": graph.fused,
        "programs": list(graph.programs),
        "drawn": graph.graphs,
        "check": None if graph.check is None else graph.check.data(),
        "replay": None if replay is None else _replay(replay),
        "proof": graph.proof if replay is not None else [],
    }


def _replay(replay: Replay) -> ReplayData:
    return {
        "evaluated": replay.evaluated,
        "skipped": replay.skipped,
        "worst": replay.worst,
        "connected": replay.connected,
        "failures": replay.failures,
        "holds": replay.holds,
    }
