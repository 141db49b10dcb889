"""Where the first call of a compiled model goes: each in a process of its own, without caches and with them.

    make bench-first-calls                      or
    .venv/bin/python bench/first_calls.py [--device cuda] [--only bert llama] [--json FILE]

On a GPU models have all their layers. Imports are done before the clock starts, and eager has run: kernels of
torch's are loaded then. `eager` is the time of an eager call, to compare verification with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODELS = {
    "resnet50": ("timm", "resnet50", 0, 0),
    "bert-base": ("hf", "BertForMaskedLM", 12, 4),
    "vit-base": ("hf", "ViT-B16", 12, 4),
    "llama-16": ("hf", "Llama-3.2-1B", 16, 2),
    "electra-16": ("hf", "ElectraForCausalLM", 16, 16),
}
"""Suite, row, layers, and layers on a CPU. Electra's are small."""
ENTRIES = ("hypatia.compile", "torch.compile")


def one(name: str, entry: str, device: str, cpu_time: bool) -> dict[str, Any]:
    """Seconds of the first call by stage, of the second, and of an eager call."""
    import torch
    import torch._dynamo
    from suites.lists import own_dtype, row_named
    from suites.rows import Setting

    import hypatia
    from hypatia.frontend import compiled_call, dynamo  # noqa: F401
    from hypatia.timeline import watching
    from hypatia.tools import measure

    suite, row, whole, few = MODELS[name]
    layers = few if device == "cpu" else whole
    setting = Setting(device=device, dtype=own_dtype(suite, device), small=device == "cpu", layers=layers)
    clock = time.process_time if cpu_time else time.perf_counter
    if cpu_time:
        torch.set_num_threads(1)
    case = row_named(suite, row, setting).build(setting)
    args, kwargs = case.arguments(1)

    def timed(call: Any) -> float:
        start = clock()
        call(*args, **kwargs)
        measure.wait(device)
        return clock() - start

    with torch.no_grad():
        eager = min(timed(case.model) for _ in range(4))
        if entry == "hypatia.compile":
            compiled = hypatia.compile(case.model)
        else:
            dynamo.register()
            compiled = torch.compile(case.model, backend="hypatia")
        with watching(clock=clock) as timeline:
            first = timed(compiled)
        second = timed(compiled)
    return {"eager": eager, "first": first, "second": second, "stages": timeline.seconds}


def in_process(name: str, entry: str, device: str, cache: str, cpu_time: bool) -> dict[str, Any]:
    """The same in a new process, with caches in a folder."""
    command = [sys.executable, __file__, "--one", name, entry, "--device", device]
    command += ["--cpu-time"] * cpu_time
    where = os.pathsep.join([str(HERE), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command,
        env={**os.environ, "HYPATIA_CACHE_DIR": cache, "PYTHONPATH": where},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        return {"reason": ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown: seconds, the longest stages first."""
    lines = [
        "| model | entry | caches | eager ms | first s | second ms | where |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        start = f"| {row['model']} | {row['entry']} | {row['caches']} |"
        if "reason" in row:
            lines.append(f"{start} | | | {' '.join(row['reason'])[:160]} |")
            continue
        stages = sorted(row["stages"].items(), key=lambda pair: -pair[1])
        where = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages if seconds >= 0.02)
        numbers = f"{1e3 * row['eager']:.1f} | {row['first']:.2f} | {1e3 * row['second']:.1f}"
        lines.append(f"{start} {numbers} | {where} |")
    return "\n".join(lines)


def main() -> None:
    """Every model by every entry, cold and warm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="models whose names have one of these words")
    parser.add_argument("--entries", nargs="*", default=ENTRIES, choices=ENTRIES)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and seconds of a CPU instead of a clock's, for a machine that others use",
    )
    parser.add_argument("--json", type=Path, default=HERE / "out" / "first_calls.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one, given.device, given.cpu_time)))
        return
    models = [m for m in MODELS if not given.only or any(word in m for word in given.only)]

    def both(name: str, entry: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as cache:
            return [
                {
                    "model": name,
                    "entry": entry,
                    "caches": caches,
                    **in_process(name, entry, given.device, cache, given.cpu_time),
                }
                for caches in ("none", "filled")
            ]

    with ThreadPoolExecutor(given.jobs) as pool:
        made = [pool.submit(both, name, entry) for name in models for entry in given.entries]
        rows = [row for pair in made for row in pair.result()]
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
