"""Runs many cases in several processes; a process that hangs or ends is a finding, and another takes over."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from . import KINDS

ROOT = Path(__file__).parent.parent
OUT = ROOT / "bench" / "out"
RECYCLED = 250
"""Cases after which a process is replaced: tracers keep what they saw."""


@dataclasses.dataclass
class Settings:
    """What is run, and how."""

    first: int
    count: int | None = None
    seconds: float | None = None
    jobs: int = 2
    device: str = "cpu"
    limit: float = 60.0
    """Seconds that a case may take; what is made small has some more."""
    folder: Path = OUT / "fuzz"
    resume: bool = False
    small: bool = True
    """Failing cases are made small."""
    once: bool = False
    """The first finding ends the run."""
    worker: str = "fuzz.worker"
    """The module that runs cases."""


class Runner:
    """The seeds, the processes and what they answered."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lines: list[dict[str, Any]] = []
        self.log = settings.folder / f"run_{settings.device}_{settings.first}.jsonl"
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        settings.folder.mkdir(parents=True, exist_ok=True)
        done: set[int] = set()
        if settings.resume and self.log.exists():
            self.lines = [json.loads(text) for text in self.log.read_text().splitlines()]
            done = {line["seed"] for line in self.lines}
        else:
            self.log.write_text("")
        self._seeds = self._wanted(done)

    def _wanted(self, done: set[int]) -> Iterator[int]:
        seed, s = self.settings.first, self.settings
        while s.count is None or seed < s.first + s.count:
            if s.once and any(line["kind"] in KINDS for line in self.lines):
                return
            if s.seconds is not None and time.monotonic() - self._begun > s.seconds:
                return
            if seed not in done:
                yield seed
            seed += 1

    def run(self) -> dict[str, Any]:
        """Runs all seeds; what was found, in figures."""
        threads = [threading.Thread(target=self._work) for _ in range(self.settings.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(file=sys.stderr)
        return self.summary()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._seeds, None)

    def _work(self) -> None:
        seed = self._next()
        while seed is not None:
            process = _Process(self.settings)
            for _ in range(RECYCLED):
                line = process.ask(seed, self.settings.limit, small=self.settings.small)
                if line["kind"] == "crash":
                    line["kind"] = self._who_ends(seed)
                self._note(line)
                seed = self._next()
                if seed is None or process.gone:
                    break
            process.end()

    def _who_ends(self, seed: int) -> str:
        """Whose crash a crash is: torch's own where a fresh process with torch alone does not live either."""
        process = _Process(self.settings)
        lives = process.lives(seed, self.settings.limit)
        process.end()
        return "crash" if lives else "torch's"

    def _note(self, line: dict[str, Any]) -> None:
        with self._lock:
            self.lines.append(line)
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            found = [x for x in self.lines if x["kind"] in KINDS]
            taken = time.monotonic() - self._begun
            if line["kind"] in KINDS:
                print(f"\rseed {line['seed']}: {line['kind']}: {line['message'][:150]}", file=sys.stderr)
            if sys.stderr.isatty() or len(self.lines) % 100 == 0:
                text = f"{len(self.lines)} cases in {taken:.0f} s, {len(found)} with findings"
                print(f"\r{text}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        """Counts by kind and entry, and every finding; also written to bench/out/fuzz.json."""
        kinds = collections.Counter(line["kind"] for line in self.lines)
        entries = collections.Counter(
            f"{line.get('entry', '?')} {'training' if line.get('training') else 'inference'}"
            for line in self.lines
        )
        seeds = [line["seed"] for line in self.lines]
        result = {
            "seeds": [min(seeds, default=0), max(seeds, default=0)],
            "cases": len(self.lines),
            "device": self.settings.device,
            "seconds": round(time.monotonic() - self._begun, 1),
            "calls": sum(line.get("calls", 0) for line in self.lines),
            "proofs": sum(line.get("proofs", 0) for line in self.lines),
            "imprecise": sum(bool(line.get("imprecise")) for line in self.lines),
            "structures": sum(line.get("doors", "flat") != "flat" for line in self.lines),
            "kinds": {kind: kinds[kind] for kind in ("ok", "invalid", "torch's", *KINDS)},
            "entries": dict(sorted(entries.items())),
            "found": [line for line in self.lines if line["kind"] in KINDS],
        }
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
        return result


class _Process:
    """A worker."""

    def __init__(self, settings: Settings) -> None:
        self.gone = False
        path = os.pathsep.join([str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._errors = settings.folder / f"worker_{threading.get_ident()}.txt"
        self._process = subprocess.Popen(
            [sys.executable, "-m", settings.worker, settings.device, str(settings.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
            text=True,
            bufsize=1,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            self._answers.put(text)
        self._answers.put("")

    def ask(self, seed: int, limit: float, *, small: bool) -> dict[str, Any]:
        """The outcome of a seed, and a small case if it is a finding."""
        line = self._answer(f"run {seed}", limit)
        if line is None:
            return {"seed": seed, **self._ended(limit)}
        if small and line["kind"] in KINDS and not self.gone:
            line |= self._answer(f"small {seed}", 10 * limit) or {}
        return line

    def lives(self, seed: int, limit: float) -> bool:
        """Whether the process has not been ended by a signal when torch alone has run a case."""
        self._answer(f"alone {seed}", limit)
        return (self._process.poll() or 0) >= 0

    def _answer(self, question: str, limit: float) -> dict[str, Any] | None:
        """What the process answers within so many seconds of its own time; None if it does not."""
        assert self._process.stdin is not None
        begun, waited = self._used(), 0.0
        try:
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        except OSError:
            return None
        while True:
            try:
                text = self._answers.get(timeout=0.5)
                break
            except queue.Empty:
                waited += 0.5
                # By the clock only where nothing moves at all: other processes may be busy.
                if self._used() - begun > limit or waited > 10 * limit:
                    return None
        if not text:
            # Its output ended, and so will it.
            self._process.wait()
            return None
        line = json.loads(text)
        if line["over"]:
            self.end()
        return line

    def _used(self) -> float:
        """Seconds that the process has computed."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            return 0.0

    def _ended(self, limit: float) -> dict[str, Any]:
        if self._process.poll() is None:
            self.end()
            return {"kind": "hang", "message": f"no answer within {limit:.0f} s"}
        self.gone = True
        said = self._errors.read_text().strip().splitlines()
        # A fatal error comes first, with what the library said before; lists of frames and modules follow.
        fatal = next(
            (i for i, line in enumerate(said) if line.startswith("Fatal Python error")), len(said) - 6
        )
        code, shown = self._process.returncode, said[max(fatal - 4, 0) : fatal + 8]
        return {"kind": "crash", "message": f"exit code {code}: {' | '.join(shown)[:900]}"}

    def end(self) -> None:
        """Ends the process."""
        self.gone = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
