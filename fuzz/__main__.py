"""``python -m fuzz``: runs cases, or shows and runs single ones."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    """What was found decides about the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; the clock's if none is given")
    parser.add_argument("--count", type=int, help="how many cases")
    parser.add_argument("--seconds", type=float, help="how long, if no count is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of computing that a case may take")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what an earlier run of these seeds did"
    )
    parser.add_argument("--as-they-are", action="store_true", help="do not make failing cases small")
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--folder", type=Path, help="where failing cases are written")
    parser.add_argument(
        "--show", type=int, metavar="SEED", help="print the case of a seed, and what it shows"
    )
    parser.add_argument(
        "--keep", type=int, metavar="SEED", help="make the case of a seed small and keep it as a test"
    )
    asked = parser.parse_args()
    if asked.show is not None or asked.keep is not None:
        return _single(asked)

    from .runner import OUT, Runner, Settings

    first = asked.seed if asked.seed is not None else int(time.time()) % 10_000_000 * 100
    seconds = asked.seconds if asked.count is None else None
    if asked.count is None and seconds is None:
        seconds = 180.0
    folder = asked.folder or OUT / "fuzz"
    settings = Settings(
        first, asked.count, seconds, asked.jobs, asked.device, asked.limit, folder, asked.resume
    )
    settings.small, settings.once = not asked.as_they_are, asked.first
    print(f"seeds from {first} on, {asked.jobs} processes, {asked.device}", file=sys.stderr)
    result = Runner(settings).run()
    kinds = ", ".join(f"{count} {kind}" for kind, count in result["kinds"].items() if count)
    low, high = result["seeds"]
    print(
        f"{result['cases']} cases (seeds {low} to {high}), {result['calls']} calls "
        f"in {result['seconds']} s: {kinds}"
    )
    for line in result["found"]:
        print(f"  seed {line['seed']}: {line['kind']}: {line['message'][:200]}")
        if "file" in line:
            print(f"    {folder / line['file']}")
    return int(bool(result["found"]))


def _single(asked: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    from .check import run_case
    from .generate import case_of
    from .keep import FOLDER
    from .worker import reduced

    if asked.keep is not None:
        line = reduced(asked.keep, asked.device, asked.folder or FOLDER)
        print(line.get("snippet", "nothing was found"))
        return int("snippet" in line)
    case = case_of(asked.show)
    print(f"{case.program.source()}\n{case.entry}")
    for call in case.calls():
        print(call)
    outcome = run_case(case, asked.device)
    print(f"{outcome.kind}: {outcome.message}" if outcome.message else outcome.kind)
    return int(outcome.found)


if __name__ == "__main__":
    sys.exit(main())
