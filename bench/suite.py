"""The field's own lists of models beside eager and Inductor: right or wrong, how fast, and why not faster.

    make bench-hf | bench-timm | bench-conv | bench-graphnet SAMPLES=FOLDER [ARGS="--small ..."]     or
    .venv/bin/python bench/suite.py hf --small --check-only

hf        models of transformers: the list of PyTorch's Dynamo benchmarks, and newer ones
timm      image models
conv      convolutional nets of torchvision in several layouts, batches and dtypes
graphnet  samples of GraphNet; their model.py is EXECUTED, so run only samples that you trust

Weights are random, from a fixed seed; nothing is asked of the internet. Each model has a process of its own.
Its forms are compared with float64 beside eager's own error, at the first call and at one with other values,
and timed in turns. Rows are added to a file as they are done (--resume goes on there). Exits with 1 if a
result of ours is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

# Also where the package is not installed, as on a machine that is lent for an hour.
sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import torch
from common import machine
from suites import graphnet, lists, tables
from suites.chart import chart
from suites.forms import LABELS, OURS, forms_for
from suites.rows import DTYPES, Setting
from suites.run import OUT, Line, Plan, kept_lines, matching, models, prefill, read_lines, to_do, with_peers


def main(given: list[str] | None = None) -> int:
    """What was asked for; the exit code."""
    arguments = _arguments(given)
    try:
        plan, names = _plan(arguments)
    except (ValueError, ImportError) as e:
        print(f"{arguments.suite}: {e}", file=sys.stderr)
        return 2
    path = arguments.json or OUT / f"{plan.name}.json"
    lines_path = path.with_suffix(".jsonl")
    lines = kept_lines(lines_path, plan) if arguments.resume else []
    tried = read_lines(lines_path) if arguments.resume else []
    if not arguments.resume:
        lines_path.unlink(missing_ok=True)
    left = to_do(names, lines, tried)
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    print(
        f"{plan.name}: {len(left)} models, {len(lines)} kept from before; forms: {', '.join(plan.forms)}",
        flush=True,
    )
    if arguments.prefill:
        prefill(plan, left, arguments.prefill, Progress(len(left), "Inductor's kernels"))
    peers = {line["name"]: line for line in read_lines(arguments.peers_from)} if arguments.peers_from else {}
    try:
        for line in models(plan, left, lines_path, Progress(len(left), "models")):
            lines.append(with_peers(line, peers.get(line["name"])))
    except KeyboardInterrupt:
        print("interrupted: what was done is kept, --resume goes on from here")
    order = {name: number for number, name in enumerate(names)}
    lines = sorted((line for line in lines if line["name"] in order), key=lambda line: order[line["name"]])
    _write(path, plan, lines)
    for text in [*tables.table(lines), *tables.summary(lines)] if lines else []:
        print(text)
    if arguments.profile:
        print("\n".join(tables.profiles(lines)))
    print(f"{len(lines)} of {len(names)} models; written to {path}")
    return int(any(line["cells"].get(form, {}).get("right") is False for line in lines for form in OURS))


class Progress:
    """A line for each model that is done; on a terminal also what runs now, where rich is there."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self.start = time.monotonic()
        self._status: Any = None
        if sys.stdout.isatty():
            try:
                from rich.console import Console
            except ImportError:
                return
            self._status = Console().status("")

    def __call__(self, event: str, line: Line) -> None:
        """Told when a model starts and ends."""
        if event == "start":
            if self._status is not None:
                self._status.update(f"{self.what} {self.done + 1}/{self.total}: {line['name']}")
                self._status.start()
            return
        self.done += 1
        if self._status is not None:
            self._status.stop()
        print(
            f"[{self.done:3}/{self.total} {time.monotonic() - self.start:6.0f} s] {_told(line)}", flush=True
        )


def _told(line: Line) -> str:
    parts = [line["name"]]
    for form, cell in line["cells"].items():
        us = f" {cell['us']:.0f} us" if "us" in cell else ""
        kept = f" {cell['kept']} {tables.verdict(line, form)}" if "kept" in cell else ""
        failed = f" failed: {cell['reason'][:60]}" if "reason" in cell else ""
        if us or kept or failed:
            parts.append(f"{LABELS[form]}{us}{kept}{failed}")
    if line.get("error"):
        parts.append(f"ERROR {line['error'][:200]}")
    return "; ".join(parts)


def _plan(arguments: argparse.Namespace) -> tuple[Plan, list[str]]:
    """What to run, and the names of the models.

    Raises:
        ValueError: a form is not known, or no model is chosen.
    """
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(
        device=device,
        dtype=arguments.dtype or lists.own_dtype(arguments.suite, device),
        small=arguments.small,
        layers=arguments.layers,
        training=arguments.training,
        samples=str(Path(arguments.samples).resolve()) if arguments.samples else "",
        gib=arguments.gib,
    )
    forms = OURS if arguments.peers_from and not arguments.forms else ()
    plan = Plan(
        suite=arguments.suite,
        setting=setting,
        forms=tuple(forms_for(device, arguments.forms or ",".join(forms), arguments.check_only)),
        check_only=arguments.check_only,
        rounds=arguments.rounds,
        profile=arguments.profile,
        threads=arguments.threads,
        cpu_time=arguments.cpu_time,
        limit=arguments.limit,
        seconds=arguments.seconds,
        jobs=arguments.jobs,
    )
    found = lists.rows(arguments.suite, setting)
    if arguments.suite == "graphnet":
        found = graphnet.chosen(found, arguments.count, arguments.seed, setting)
    names = matching([row.name for row in found], arguments.only)
    if not names:
        raise ValueError(f"no model has {arguments.only!r} in its name")
    return plan, names


def _write(path: Path, plan: Plan, lines: list[Line]) -> None:
    """The JSON of the run, and the picture where there are times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "machine": machine()
        | ({"gpu": torch.cuda.get_device_name()} if plan.setting.device != "cpu" else {}),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "settings": plan.settings,
        "means": tables.means(lines),
        "right": {form: tables.counted(lines, form) for form in OURS},
        "no_plan": {form: tables.why(lines, form) for form in OURS},
        "rows": lines,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
    if tables.means(lines):
        path.with_suffix(".svg").write_text(chart(lines, plan.name))


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suite", choices=lists.SUITES, help="which list")
    add("--device", choices=["cpu", "cuda"], help="where (a GPU, if there is one)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights and inputs (bf16 on a GPU, fp32 on a CPU; conv, graphnet: the row's)",
    )
    add("--small", action="store_true", help="2 layers, batch 1, sequence 64, small vocabularies: for a CPU")
    add("--layers", type=int, default=0, help="layers of models of transformers (4; small: 2)")
    add("--training", action="store_true", help="forward, loss and backward; dropout drops nothing")
    add("--forms", default="", help=f"which of {','.join(LABELS)} (all; without times only ours)")
    add("--only", default="", metavar="REGEX", help="models with this in their names")
    add("--limit", type=float, default=300.0, help="seconds for a model (300)")
    add("--seconds", type=float, default=0.0, help="no new model is started after so many (0: no end)")
    add("--check-only", action="store_true", help="right or wrong, what is kept and why; no times")
    add("--jobs", type=int, default=1, help="models at a time; each is still timed alone (1)")
    add("--rounds", type=int, default=7, help="samples of each form, in turns (7)")
    add("--threads", type=int, default=0, help="torch's threads in each process")
    add(
        "--cpu-time",
        action="store_true",
        help="seconds of a CPU instead of a clock's, for a machine that others use; with --threads 1",
    )
    add("--resume", action="store_true", help="keep the rows that an earlier run has done")
    add(
        "--peers-from",
        type=Path,
        metavar="FILE",
        help="keep the peers' times of this run and measure only ours",
    )
    add(
        "--prefill", type=int, default=0, metavar="N", help="compile Inductor's kernels first, in N processes"
    )
    add(
        "--profile",
        action="store_true",
        help="the longest kernels of the ten models where we are furthest behind",
    )
    add("--samples", default="", metavar="FOLDER", help="graphnet: the folder of samples")
    add(
        "--count",
        type=int,
        default=0,
        help="graphnet: so many samples that fit --gib, at random (0: all)",
    )
    add("--seed", type=int, default=0, help="graphnet: which ones (0)")
    add("--gib", type=float, default=4.0, help="graphnet: samples with larger tensors are refused (4)")
    add("--json", type=Path, help="where results are (bench/out/suites/<suite>_<device>_<dtype>_<mode>.json)")
    arguments = parser.parse_args(given)
    if arguments.cpu_time and (arguments.threads != 1 or arguments.device != "cpu"):
        parser.error("--cpu-time is for --device cpu --threads 1: seconds of several threads add up")
    if arguments.suite == "graphnet" and not arguments.samples:
        parser.error("graphnet needs --samples FOLDER")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
