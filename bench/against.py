"""Two versions of hypatia beside each other, in one run: does a change make calls or compilations slower?

    make bench-against OTHER=../before                or
    .venv/bin/python bench/against.py ../before [--match bert ...] [--device cuda] [--json FILE]

`OTHER` is another checkout whose extension is built (`python/hypatia/_native.abi3.so`). Each version has a
process of its own. The named workloads are compiled by each and called in turns; a ratio is the median over
rounds, 1 where both are as fast, 2 where this checkout is twice as fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
OUT = ROOT / "bench" / "out" / "against.json"
SECONDS = 0.2
"""Of calls by one version before the other has its turn."""
LONG = 0.1
"""Workloads of which a call of eager takes longer are left out."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def workloads() -> dict[str, Any]:
    """The named workloads of this checkout, without hypatia."""
    path = ROOT / "python" / "hypatia" / "tools" / "workloads.py"
    spec = importlib.util.spec_from_file_location("workloads_of_benchmarks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.WORKLOADS


def waited(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def serve(device: str) -> None:
    """The process of one version: compiles and calls what it is told to, and answers with seconds."""
    import hypatia

    known = workloads()
    calls: list[Callable[[], object]] = []

    def compiled(name: str, dtype: str) -> float:
        model, inputs = known[name].build(DTYPES[dtype], device)
        waited(device)
        start = time.perf_counter()
        run = hypatia.compile(model)
        run(*inputs)
        waited(device)
        calls[:] = [lambda: run(*inputs)]
        return time.perf_counter() - start

    def timed() -> float:
        times: list[float] = []
        begun = time.perf_counter()
        while time.perf_counter() - begun < SECONDS or len(times) < 3:
            start = time.perf_counter()
            calls[0]()
            waited(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    for line in sys.stdin:
        asked = json.loads(line)
        with torch.no_grad():
            answer = compiled(*asked["compile"]) if "compile" in asked else timed()
        print(json.dumps(answer), flush=True)


class Version:
    """A version of hypatia in a process of its own."""

    def __init__(self, checkout: Path, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "python"), "HYPATIA_CACHE": "off"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--device", device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **asked: Any) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked or {"time": True}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended; its error is above")
        return json.loads(line)

    def end(self) -> None:
        """The process has no more to do."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def cases(match: list[str], dtypes: list[str], device: str) -> Iterator[tuple[str, str]]:
    """Names and dtypes of the workloads that are wanted and short."""
    for name, workload in workloads().items():
        if match and not any(text in name for text in match):
            continue
        for dtype in dtypes:
            model, inputs = workload.build(DTYPES[dtype], device)
            with torch.no_grad():
                model(*inputs)
                waited(device)
                start = time.perf_counter()
                model(*inputs)
                waited(device)
            if time.perf_counter() - start < LONG:
                yield name, dtype


def measured(ours: Version, theirs: Version, name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Both versions of one workload."""
    both = (theirs, ours)
    first = [[version.ask(compile=(name, dtype)) for version in both] for _ in range(2)]
    turns = []
    for turn in range(rounds):
        seconds = {version: version.ask() for version in (both if turn % 2 else both[::-1])}
        turns.append([seconds[version] for version in both])
    before, now = (statistics.median(side) for side in zip(*turns, strict=True))
    compile_before, compile_now = (min(side) for side in zip(*first, strict=True))
    return {
        "case": f"{name} {dtype}",
        "before": before,
        "now": now,
        "ratio": statistics.median(b / n for b, n in turns),
        "compile before": compile_before,
        "compile now": compile_now,
        "compile ratio": compile_before / compile_now,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown, with medians and geometric means of the ratios."""
    lines = [
        "| workload | before, us | now, us | ratio | first call before, ms | now, ms | ratio |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        cells = [f"{1e6 * row['before']:.1f}", f"{1e6 * row['now']:.1f}", f"{row['ratio']:.3f}"]
        cells += [f"{1e3 * row['compile before']:.0f}", f"{1e3 * row['compile now']:.0f}"]
        cells.append(f"{row['compile ratio']:.2f}")
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    for what, of in (("median", statistics.median), ("geometric mean", _geometric_mean)):
        calls, compiles = (of([row[key] for row in rows]) for key in ("ratio", "compile ratio"))
        lines.append(f"| {what} | | | {calls:.3f} | | | {compiles:.2f} |")
    return "\n".join(lines)


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--match", nargs="+", default=[], help="workloads with this in their names")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9, help="turns of both (9)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=OUT, help="where results are (bench/out/against.json)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.device)
        return 0
    if given.other is None or not (given.other / "python" / "hypatia" / "_native.abi3.so").exists():
        print("against.py: name another checkout whose extension is built", file=sys.stderr)
        return 2
    theirs, ours = (Version(checkout.resolve(), given.device) for checkout in (given.other, ROOT))
    rows = []
    try:
        for name, dtype in cases(given.match, given.dtype, given.device):
            rows.append(measured(ours, theirs, name, dtype, given.rounds))
            print(table(rows[-1:]).splitlines()[2], file=sys.stderr, flush=True)
    finally:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
        for version in (theirs, ours):
            version.end()
    if rows:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
