"""How long compiling takes: published graphs, growth by depth, the nine MLPs, a first call.

    make bench-compile                          or
    .venv/bin/python bench/compile.py [--quick] [--only bert-12 mlp ...] [--json bench/out/compile.json]

Targets are listed at the end; a missed one fails the run only under `--strict`, because times depend on the
machine and on what else it does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import operator
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import verifying
from common import (
    CORE,
    ROOT,
    WHOLE,
    Gate,
    Graph,
    Measurement,
    capture,
    machine,
    measure,
    optimize_once,
    speedup,
)
from first_call import BACKENDS
from models import TENSAT, Workload, bert
from rich.console import Console
from rich.table import Table

from hypatia.compiler import pipeline
from hypatia.jsonable import as_json
from hypatia.options import Options
from hypatia.tools.workloads import NINE_MLPS

LAYERS = (1, 2, 4, 12, 24, 48)
SECTIONS = ("tensat", "bert", "mlp", "verify", "first-call")
FIRST_CALL_MODEL = "tiny_b64"
LIMITS = {"bert-12": 100.0, "bert-48": 500.0}
MLP_LIMIT = 5.0
FIRST_CALL_LIMIT = 0.5

BERTS = [bert(n) for n in LAYERS] + [bert(n, written_out=True) for n in (1, 12, 48)]
GROWTH = (("bert-1", "bert-48", 48), ("bert-1-softmax", "bert-48-softmax", 48))
MLPS = [Workload(s.name, s.build, ((s.batch, s.features),)) for s in NINE_MLPS]
GRAPHS = {w.name: w for w in [*(w for w, _ in TENSAT), *BERTS, *MLPS]}


class Benchmark:
    """The sections, what they measured, and the targets."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.quick: bool = arguments.quick
        self.repeats: int = arguments.repeats or (3 if self.quick else 7)
        self.only: set[str] = set(arguments.only)
        self.options = Options.parse({"target": arguments.target})
        self.console = console
        self.gates: list[Gate] = []
        self.results: dict[str, Any] = {}

    def wanted(self, section: str, name: str) -> bool:
        """Whether a row was asked for, by its own name or by its section's."""
        return not self.only or section in self.only or name in self.only

    def measured(
        self, section: str, workloads: list[Workload]
    ) -> Iterator[tuple[Workload, Graph, Measurement]]:
        """The workloads that were asked for, captured and measured."""
        for workload in workloads:
            if self.wanted(section, workload.name):
                with self.console.status(f"{section}: {workload.name}"):
                    graph = capture(workload.model(), workload.inputs())
                    result = measure(workload.name, graph, self.options, self.repeats)
                result.extra["note"] = workload.note
                yield workload, graph, result

    def show(self, table: Table) -> None:
        """Prints a table that has rows."""
        if table.row_count:
            title, table.title = table.title, None
            self.console.print(title, style=table.title_style)
            self.console.print(table)
            self.console.print()

    def tensat(self) -> None:
        """The graphs of TENSAT's paper, beside what the paper reports."""
        published = {workload.name: paper for workload, paper in TENSAT}
        table = _table("TENSAT's graphs: ms to optimize, and what the cost model expects of it")
        columns = (
            "graph,calls,e-nodes,classes,limited,saturate,extract,prove,total,TENSAT,ratio,cost us,less,"
        )
        _columns(table, columns + "speed-up,on a GPU,TENSAT")
        rows = []
        for workload, graph, result in self.measured("tensat", [w for w, _ in TENSAT]):
            paper = published[workload.name]
            on_gpu = optimize_once(graph, replace(self.options, target="gpu"))[0].data
            ratio = 1e3 * paper.seconds / result.core
            result.extra |= {
                "published_s": paper.seconds,
                "published_speedup_percent": paper.speedup,
                "times_faster": ratio,
                "speedup_percent_gpu": speedup(on_gpu),
            }
            table.add_row(
                workload.name,
                *_sizes(result),
                *_core(result),
                f"{1e3 * paper.seconds:.0f}",
                f"{ratio:.1f}x",
                *_cost(result),
                f"+{result.speedup:.1f}%",
                f"+{speedup(on_gpu):.1f}%",
                f"+{paper.speedup:.1f}%",
            )
            self.gates.append(
                Gate(f"{workload.name} sooner than TENSAT", result.core, 1e3 * paper.seconds, "ms")
            )
            rows.append(result)
        self.show(table)
        self.notes(rows)
        self.keep("tensat", rows)

    def bert(self) -> None:
        """BERT-base by depth."""
        self.plain("bert", "BERT-base by depth, batch 1, 128 tokens: ms to optimize", BERTS)
        rows = {row["name"]: row for row in self.results.get("bert", [])}
        for name, limit in LIMITS.items():
            if name in rows:
                self.gates.append(Gate(name, rows[name]["core_ms"], limit, "ms"))
        for first, last, layers in GROWTH:
            if first in rows and last in rows:
                growth = {key: rows[last][key] / rows[first][key] for key in ("core_ms", "whole_ms", "nodes")}
                saturation = (rows[name]["times_ms"]["saturate"] for name in (last, first))
                growth["saturate_ms"] = operator.truediv(*saturation)
                self.results.setdefault("growth", []).append({"from": first, "to": last, **growth})
                self.console.print(
                    f"growth from {first} to {last}, {layers}x the layers: e-nodes {growth['nodes']:.1f}x, "
                    f"saturation {growth['saturate_ms']:.1f}x, core {growth['core_ms']:.1f}x, "
                    f"whole compilation {growth['whole_ms']:.1f}x\n"
                )

    def mlp(self) -> None:
        """The nine MLPs of every benchmark of this project."""
        self.plain("mlp", "the nine MLPs: ms to optimize", MLPS)
        for row in self.results.get("mlp", []):
            self.gates.append(Gate(row["name"], row["core_ms"], MLP_LIMIT, "ms"))

    def plain(self, section: str, title: str, workloads: list[Workload]) -> None:
        """A section without anything published to compare with."""
        table = _table(title)
        _columns(
            table, "graph,calls,e-nodes,classes,limited,saturate,extract,prove,total,best,cost us,less,gap,by"
        )
        rows = []
        for workload, _, result in self.measured(section, workloads):
            gap = f"{100 * result.report['gap']:.1f}%"
            best = f"{result.best:.1f}"
            sizes, cost = _sizes(result), _cost(result)
            table.add_row(workload.name, *sizes, *_core(result), best, *cost, gap, result.report["method"])
            rows.append(result)
        self.show(table)
        self.notes(rows)
        self.keep(section, rows)

    def notes(self, rows: list[Measurement]) -> None:
        """Beside each table: where the time of a whole compilation goes, and what each graph is."""
        if not rows:
            return
        table = _table("where the time of the whole compilation goes, ms", small=True)
        _columns(
            table, "graph,capture,hand over,core,rebuild,rest,whole,CPU of hand over + core,note", last="left"
        )
        for row in rows:
            parts = [f"{row.times[stage]:.1f}" for stage in WHOLE]
            table.add_row(
                row.name,
                *parts,
                f"{row.whole:.1f}",
                f"{row.times['native cpu']:.1f}",
                row.extra.get("note", ""),
            )
        self.show(table)

    def keep(self, section: str, rows: list[Measurement]) -> None:
        """Puts rows into the results."""
        if rows:
            self.results[section] = [row.data() for row in rows]

    def verify(self) -> None:
        """What the check of the first call adds to it."""
        if not self.wanted("verify", "verify"):
            return
        table = _table("verification: ms that the first call takes longer")
        _columns(table, "model,eager call,in float64,allowed,added,of allowed,if every bit differed,status")
        rows = []
        for name, model, inputs, training in verifying.cases(self.quick):
            with self.console.status(f"verification: {name}"):
                cost = verifying.measure(name, model, inputs, training, self.repeats)
            numbers = (cost.eager, cost.float64, cost.allowed, cost.added)
            share = f"{cost.added / cost.allowed:.2f}x"
            worst = f"{cost.added_at_worst:.2f}"
            table.add_row(name, *(f"{n:.2f}" for n in numbers), share, worst, cost.status)
            self.gates.append(Gate(f"verification of {name}", cost.added, cost.allowed, "ms"))
            rows.append(cost.data())
        self.show(table)
        self.results["verification"] = rows

    def first_call(self) -> None:
        """The first call of a compiled MLP, each in a fresh process."""
        if not self.wanted("first-call", "first-call"):
            return
        backends = [b for b in BACKENDS if not (self.quick and b == "inductor")]
        kinds = ["inference"] if self.quick else ["inference", "training"]
        times: dict[tuple[str, str], list[float]] = {}
        with self.console.status("first call"):
            for _ in range(3):
                for kind in kinds:
                    for name in backends:
                        times.setdefault((kind, name), []).append(_first_call(name, kind))
        seconds = {key: statistics.median(values) for key, values in times.items()}
        table = _table(f"first call of the compiled {FIRST_CALL_MODEL}, s, median of 3 fresh processes")
        _columns(table, "call," + ",".join(backends) + ",hypatia - nothing")
        for kind in kinds:
            more = seconds[kind, "hypatia"] - seconds[kind, "nothing"]
            table.add_row(kind, *(f"{seconds[kind, b]:.2f}" for b in backends), f"{more:+.2f}")
            self.gates.append(Gate(f"first call, {kind}: more than nothing", more, FIRST_CALL_LIMIT, "s"))
        self.show(table)
        self.results["first_call"] = [
            {"kind": kind, "backend": name, "seconds": seconds[kind, name], "runs": values}
            for (kind, name), values in times.items()
        ]

    def verdict(self) -> None:
        """The targets."""
        table = _table("gates")
        _columns(table, "target,value,limit,met")
        for gate in self.gates:
            met = "[green]yes[/]" if gate.met else "[red]NO[/]"
            table.add_row(gate.name, f"{gate.value:.3g} {gate.unit}", f"{gate.limit:g} {gate.unit}", met)
        self.show(table)
        self.results["gates"] = [gate.data() for gate in self.gates]


def _table(title: str, *, small: bool = False) -> Table:
    return Table(
        title=title, title_justify="left", title_style="dim" if small else "bold", box=None, pad_edge=False
    )


def _columns(table: Table, names: str, *, last: str = "right") -> None:
    first, *middle, end = names.split(",")
    table.add_column(first, no_wrap=True)
    for name in middle:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(end, justify=last, no_wrap=True)


def _sizes(result: Measurement) -> tuple[str, ...]:
    report = result.report
    calls = "{} -> {}".format(*result.calls)
    return calls, str(report["nodes"]), str(report["classes"]), "YES" if report["limited"] else "no"


def _core(result: Measurement) -> tuple[str, ...]:
    return (*(f"{result.times[stage]:.1f}" for stage in CORE), f"{result.core:.1f}")


def _cost(result: Measurement) -> tuple[str, str]:
    report = result.report
    return f"{report['cost_before']:.0f} -> {report['cost_after']:.0f}", f"{result.saved:.0f}%"


def _first_call(backend: str, kind: str) -> float:
    """Seconds of a first call in a process of its own, with no cache on disk."""
    worker = [sys.executable, str(Path(__file__).parent / "first_call.py"), backend, FIRST_CALL_MODEL, kind]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(worker, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"first call with {backend}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["first"]


def _profile(name: str, options: Options, console: Console) -> None:
    """Where the Python side of one compilation spends its time."""
    graph = capture(GRAPHS[name].model(), GRAPHS[name].inputs())
    optimize_once(graph, options)
    profiler = cProfile.Profile()
    request = pipeline.Request(options, "inference", frozenset(graph.weights))
    profiler.runcall(pipeline.compile_graph, graph.module, request)
    for order in ("cumulative", "tottime"):
        console.print(f"{name}, by {order}")
        pstats.Stats(profiler).sort_stats(order).print_stats(25)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no Inductor, inference only")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "bench" / "out" / "compile.json", help="where to write"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        choices=[*SECTIONS, *GRAPHS],
        help=f"sections ({', '.join(SECTIONS)}) or graphs ({', '.join(GRAPHS)})",
    )
    parser.add_argument(
        "--repeats", type=int, help="timed repetitions of each optimization (7; 3 with --quick)"
    )
    parser.add_argument("--target", default="cpu", help="cost model: cpu, gpu or h200 (cpu)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument(
        "--profile", metavar="GRAPH", choices=[*GRAPHS], help="profile one compilation instead"
    )
    return parser.parse_args()


def main() -> int:
    """Runs what was asked for; the exit code."""
    arguments = _arguments()
    logging.captureWarnings(True)
    torch.manual_seed(0)
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    header = machine()
    console.print(", ".join(f"{key} {value}" for key, value in header.items()) + "\n")
    benchmark = Benchmark(arguments, console)
    if arguments.profile:
        _profile(arguments.profile, benchmark.options, console)
        return 0
    sections: list[Callable[[], None]] = [
        benchmark.tensat,
        benchmark.bert,
        benchmark.mlp,
        benchmark.verify,
        benchmark.first_call,
    ]
    for section in sections:
        section()
    benchmark.verdict()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(as_json({"machine": header, **benchmark.results}) + "\n")
    console.print(f"written to {arguments.json}")
    return int(arguments.strict and not all(gate.met for gate in benchmark.gates))


if __name__ == "__main__":
    sys.exit(main())
