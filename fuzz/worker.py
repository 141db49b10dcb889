"""A process that runs cases: seeds come in by lines, outcomes go out as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HYPATIA_CACHE"] = "off"

import torch

from .case import Case
from .check import Outcome, run_case
from .generate import case_of
from .keep import kept, snippet
from .minimise import minimised

MINIMISING = 40.0
"""Seconds that making a case small may take."""


def signature(outcome: Outcome) -> str:
    """What two outcomes share that are the same fault, roughly: the kind and the words without numbers."""
    words = outcome.message.split(":")[0] if outcome.kind == "exception" else ""
    if outcome.kind == "wrong":
        words = next((w for w in ("shape", "strides", "memory", "dtype", "requires_grad", "values", "structure", "gradient of") if w in outcome.message), "")
        words += " gradient" if outcome.message.startswith("gradient") else ""
    if outcome.kind == "rolled back":
        words = outcome.message.split(";")[0]
    return f"{outcome.kind} {words}"


def examine(seed: int, device: str, folder: Path | None, seconds: float = MINIMISING) -> dict[str, Any]:
    """Runs the case of a seed; what fails is made small and written into the folder."""
    start = time.perf_counter()
    case = case_of(seed)
    outcome = run_case(case, device)
    line: dict[str, Any] = {
        "seed": seed,
        "kind": outcome.kind,
        "entry": case.entry.name,
        "training": case.entry.training,
        "doors": case.program.doors,
        "rows": len(case.program.rows),
        "calls": outcome.calls,
        "imprecise": outcome.imprecise,
        "proofs": outcome.proofs,
        "message": outcome.message[:400],
    }
    if outcome.found and folder is not None:
        small = shrunk(case, outcome, device, seconds)
        again = run_case(small, device)
        line["signature"] = signature(outcome)
        line["message"] = again.message[:400]
        line["snippet"] = snippet(small, again if again.found else outcome)
        line["file"] = str(kept(small, again if again.found else outcome, folder).name)
    line["seconds"] = round(time.perf_counter() - start, 3)
    return line


def shrunk(case: Case, outcome: Outcome, device: str, seconds: float) -> Case:
    """A small case with the same fault."""
    wanted = signature(outcome)

    def fails(candidate: Case) -> bool:
        try:
            found = run_case(candidate, device)
        except Exception:
            return False
        return found.found and signature(found) == wanted

    return minimised(case, fails, seconds)


def shrunk_outside(case: Case, device: str, limit: float, seconds: float) -> Case:
    """The same for a case that hangs or ends the process: each candidate runs in a process of its own."""

    def fails(candidate: Case) -> bool:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run_case(candidate, device)
            os._exit(0)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) != 0
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True

    return minimised(case, fails, seconds)


def main() -> None:
    """Answers each seed of the standard input."""
    torch.set_num_threads(1)
    device, folder = sys.argv[1], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    # What libraries print must not mix with the answers.
    os.dup2(2, 1)
    for text in sys.stdin:
        seed = int(text)
        out.write(json.dumps(examine(seed, device, folder)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
