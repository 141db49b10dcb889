"""The models of a run, each in a process of its own with a time limit; rows are kept as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .forms import INDUCTOR, OURS
from .rows import Setting

BENCH = Path(__file__).parent.parent
OUT = BENCH / "out" / "suites"

COMMAND = ("-m", "suites.one")
"""What Python runs for a model."""

_running: set[subprocess.Popen[bytes]] = set()

Line = dict[str, Any]
"""What is known of a model: its name, settings, and a cell for each form."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does."""

    suite: str
    setting: Setting
    forms: tuple[str, ...]
    check_only: bool = False
    rounds: int = 7
    profile: bool = False
    threads: int = 0
    cpu_time: bool = False
    """Times are those that the process had a CPU."""
    limit: float = 300.0
    seconds: float = 0.0
    """For all models together; 0: no end."""
    jobs: int = 1
    turns: str = ""
    """The folder of the locks by which models that run beside each other are timed alone."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a row must agree in to be kept by a later run."""
        return {**dataclasses.asdict(self.setting), "check_only": self.check_only}

    @property
    def name(self) -> str:
        """What files of the run are called."""
        mode = "training" if self.setting.training else "inference"
        mode += "-small" if self.setting.small else ""
        mode += "-check" if self.check_only else ""
        return f"{self.suite}_{self.setting.device}_{self.setting.dtype}_{mode}"

    def job(self, name: str, forms: Sequence[str], prefill: bool = False) -> dict[str, Any]:
        """What the process of a model is told."""
        return {
            "suite": self.suite,
            "name": name,
            "setting": dataclasses.asdict(self.setting),
            "forms": list(forms),
            "check_only": self.check_only,
            "prefill": prefill,
            "rounds": self.rounds,
            "profile": self.profile,
            "threads": self.threads,
            "cpu_time": self.cpu_time,
            "turns": "" if prefill else self.turns,
        }


def read_lines(path: Path) -> list[Line]:
    """The rows of a file: lines of JSON, or the JSON of a whole run. The last row of a name counts."""
    if not path.exists():
        return []
    text = path.read_text()
    with contextlib.suppress(ValueError):
        whole = json.loads(text)
        return whole.get("rows", [whole])
    found: dict[str, Line] = {}
    for line in text.splitlines():
        # The last one is cut off where a run was ended by force.
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            found.pop(row["name"], None)
            found[row["name"]] = row
    return list(found.values())


def kept_lines(path: Path, plan: Plan) -> list[Line]:
    """Rows of an earlier run that need not be run again: done, under the same settings, with these forms."""
    rows = [row for row in read_lines(path) if row.get("settings") == plan.settings and not row.get("error")]
    return [row for row in rows if set(plan.forms) <= set(row["cells"])]


def to_do(names: Sequence[str], lines: Sequence[Line], tried: Sequence[Line]) -> list[str]:
    """The models that are left; those that failed before come last."""
    done, failed = {row["name"] for row in lines}, {row["name"] for row in tried}
    return sorted((name for name in names if name not in done), key=lambda name: name in failed)


def with_peers(line: Line, peers: Line | None) -> Line:
    """A row with the peers' cells of an earlier one, which are marked; eager's errors are new."""
    cells = dict(line["cells"])
    for name, cell in (peers or {"cells": {}})["cells"].items():
        if name not in OURS:
            cells[name] = {**cell, "earlier": True}
    return {**line, "cells": cells}


def models(plan: Plan, names: Sequence[str], path: Path, tell: Callable[[str, Line], None]) -> Iterator[Line]:
    """Runs the models, as many at a time as the plan says, and adds a line to the file for each.

    ``tell`` is called with "start" and "end".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + plan.seconds if plan.seconds else float("inf")

    def work(name: str) -> Line | None:
        if time.monotonic() >= end:
            return None
        tell("start", {"name": name})
        return one(plan, name)

    with ThreadPoolExecutor(plan.jobs) as pool, tempfile.TemporaryDirectory() as folder:
        if plan.jobs > 1 and not plan.check_only:
            # A model may have to wait for all others.
            plan = dataclasses.replace(plan, turns=folder, limit=plan.limit * plan.jobs)
        waiting = [pool.submit(work, name) for name in names]
        try:
            for done in as_completed(waiting):
                line = done.result()
                if line is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    tell("end", line)
                    yield line
        finally:
            # Also where the run is interrupted: what still runs is ended, not waited for.
            for job in waiting:
                job.cancel()
            for process in list(_running):
                _end(process)


def one(plan: Plan, name: str) -> Line:
    """A model in a process of its own; what it had when its time was over is kept."""
    start = time.monotonic()
    line, problem = _process(plan.job(name, plan.forms), plan.limit)
    stage = line.get("stage", "starting")
    if problem:
        line["error"] = f"{stage}: {problem}"
    return {"cells": {}, **line, "name": name, "settings": plan.settings, "seconds": time.monotonic() - start}


def prefill(plan: Plan, names: Sequence[str], processes: int, tell: Callable[[str, Line], None]) -> None:
    """Inductor's kernels of all models, compiled beforehand in parallel processes into one cache."""
    forms = [form for form in plan.forms if form in INDUCTOR]
    if not forms:
        return

    def work(name: str) -> None:
        _, problem = _process(plan.job(name, forms, prefill=True), 3 * plan.limit)
        tell("end", {"name": name, "cells": {}, "error": problem})

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(work, names))


def _process(job: dict[str, Any], limit: float) -> tuple[Line, str]:
    """What the process wrote, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        told, out, errors = (Path(folder, name) for name in ("job.json", "result.json", "errors"))
        told.write_text(json.dumps(job))
        command = [sys.executable, *COMMAND, str(told), str(out)]
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment(), start_new_session=True
            )
            _running.add(process)
            problem = _wait(process, limit)
            _running.discard(process)
        line: Line = json.loads(out.read_text()) if out.exists() else {}
        if problem == "" and line.get("stage") != "done":
            last = [text for text in errors.read_text(errors="replace").splitlines() if text.strip()]
            problem = f"the process ended with {process.returncode}: {last[-1][:300] if last else ''}"
        return line, problem


def _wait(process: subprocess.Popen[bytes], limit: float) -> str:
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:.0f} s"
    finally:
        _end(process)
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    """Of the processes: they import what this one does, share Inductor's cache, never ask the internet."""
    paths = [str(BENCH), str(BENCH.parent / "python"), os.environ.get("PYTHONPATH", "")]
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(OUT / "inductor"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """Names in which the pattern is found, whatever the case."""
    return [name for name in names if re.search(pattern, name, re.IGNORECASE)]
