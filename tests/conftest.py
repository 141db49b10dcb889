"""Set-up of every suite, and the summary of the op database."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Suites see what the compiler does now, not what it did in an earlier run.
os.environ.setdefault("HYPATIA_CACHE", "off")

import pytest
import torch
import torch._dynamo.guards
from torch._subclasses.fake_tensor import FakeTensorMode

import hypatia.compiler.pipeline
import hypatia.execute.timing

REPORTS = Path(__file__).parent.parent / "bench" / "out"
PREFERRED = ("plan", "plainer plan", "kept", "plain", "graph", "eager")
"""Forms of a call, from the fastest one on, whatever a machine does beside the tests."""
COUNTS = ("cases", "passed", "peer_fails", "eager_fails", "failed", "graphs")


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process: suites run in several, and reductions must add in one order.

    Internal errors fail a test: falling back to eager would hide them. No clock decides which form of a
    call is kept, and Dynamo does not time its guards, for which it empties the caches of the processor.
    """
    # A million objects come with what suites import, and all of them stay.
    gc.set_threshold(20_000, 20, 20)
    torch.set_num_threads(1)
    hypatia.compiler.pipeline.raise_errors = True
    hypatia.execute.timing.instead = lambda forms: {name: 1.0 + PREFERRED.index(name) for name in forms}
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # A reset of Dynamo forgets what torch knows of shapes, too, which takes a good part of a trace to find.
    FakeTensorMode.cache_clear = staticmethod(lambda: None)


def pytest_collection_finish() -> None:
    """What collecting imported is there to stay: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries that look at their leaks at the end of a process must find none."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what became of the op database; a full run also leaves it under bench/out."""
    tallies = [
        tally
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, tally in report.user_properties
        if name == "opinfo"
    ]
    if not tallies:
        return
    tallies.sort(key=lambda tally: tally["op"])
    total = {"ops": len(tallies), **{count: sum(t[count] for t in tallies) for count in COUNTS}}
    terminalreporter.section("op database")
    terminalreporter.write_line(", ".join(f"{name.replace('_', ' ')} {n}" for name, n in total.items()))
    if os.environ.get("HYPATIA_OPINFO") == "all":
        REPORTS.mkdir(parents=True, exist_ok=True)
        (REPORTS / "opinfo.json").write_text(json.dumps({"total": total, "ops": tallies}, indent=1) + "\n")
        (REPORTS / "opinfo.md").write_text(_as_markdown(total, tallies))
        terminalreporter.write_line(f"written to {REPORTS / 'opinfo.json'} and {REPORTS / 'opinfo.md'}")


def _as_markdown(total: dict[str, int], tallies: list[dict[str, Any]]) -> str:
    lines = ["# PyTorch's op database through the backend", "", f"torch {torch.__version__}", ""]
    lines += ["| " + " | ".join(name.replace("_", " ") for name in total) + " |", "|---" * len(total) + "|"]
    lines += ["| " + " | ".join(str(n) for n in total.values()) + " |", ""]
    for title, key in (
        ("Failed", "failed"),
        ("The peer fails too", "peer_fails"),
        ("Eager fails", "eager_fails"),
    ):
        named = [f"- `{tally['op']}`: {tally[key]}" for tally in tallies if tally[key]]
        lines += [f"## {title}", "", *(named or ["none"]), ""]
    blind = [f"`{tally['op']}`" for tally in tallies if not tally["graphs"]]
    lines += ["## Never captured by Dynamo, so that no backend sees them", "", ", ".join(blind) or "none", ""]
    return "\n".join(lines)
