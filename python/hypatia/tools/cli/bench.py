"""``hypatia bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import click

from .output import check_targets, console, safe, table, write_json, write_text
from .subject import OwnModel, check_device, load

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hypatia.tools.bench import Cell
    from hypatia.tools.workloads import Workload

BACKENDS = (
    *("eager", "eager-graph", "aot-eager", "inductor", "inductor-max-autotune", "inductor-freezing"),
    *("hypatia", "hypatia-direct"),
)
DTYPES = ("fp32", "bf16", "fp16")
QUICK_FLOPS = 1e9
"""Without names, workloads up to this size are measured on a CPU."""


class Settings(TypedDict):
    """What was measured, and how."""

    dtype: str
    device: str
    training: bool
    repeats: int
    notes: list[str]


@click.command()
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD|MODULE:FACTORY]...")
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, help="May be repeated.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Without it fp32, and models of your own as they are."
)
@click.option("--training", is_flag=True, help="Measure forward and backward.")
@click.option(
    "--repeats", type=click.IntRange(1), default=7, show_default=True, help="Rounds of all backends."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch on the CPU.")
@click.option("--device", help="cpu or cuda; the GPU if there is one.")
@click.option(
    "--profile",
    "profiled",
    is_flag=True,
    help="Show each step of the plan beside its prediction and limit, and peers' kernels.",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the results as JSON.")
@click.option("--html", metavar="FILE", help="Write the results as one self-contained page.")
@click.option("--list", "only_list", is_flag=True, help="List the workloads and end.")
@click.pass_context
def bench(
    ctx: click.Context,
    workloads: tuple[str, ...],
    backends: tuple[str, ...],
    dtype: str | None,
    training: bool,
    repeats: int,
    threads: int | None,
    device: str | None,
    profiled: bool,
    json_file: str | None,
    html: str | None,
    only_list: bool,
) -> None:
    """Measure workloads on backends: time, ratio over eager, compile time, error to float64.

    A model of your own is given as for `hypatia explain`: a function without arguments that returns
    (model, inputs) or (model, inputs, kwargs). Without names, all workloads are measured on a GPU, and the
    quick ones on a CPU. The exit code is 1 when Hypatia fails on a workload or its result is worse than
    eager's. eager-graph is eager under a CUDA graph, aot-eager a call through torch.compile that changes
    nothing, hypatia-direct hypatia.compile. A profile is of hypatia.compile in inference, beside kernels of
    eager and inductor as far as they are measured; limits are what moving a step's bytes and doing its
    multiplications takes at the rates of torch's own large copies and products, predictions what its kind of
    step was expected to take at the rates that were measured on this machine.

    \b
    Examples:
      hypatia bench tiny_b64 bert-base --backend eager --backend hypatia --backend inductor
      hypatia bench models.py:build --backend eager --backend hypatia
      hypatia bench bert-base --profile
      hypatia bench medium4 --training --dtype bf16 --html bench.html
      hypatia bench --list
    """
    from hypatia.tools import workloads as known

    check_targets(json_file, html)
    _check_profile(profiled, training)
    out = console(err=json_file == "-")
    if only_list:
        _list(out, list(known.WORKLOADS.values()))
        return
    from hypatia.devices import machine
    from hypatia.tools import bench

    device = _device(device, threads)
    chosen = _chosen(workloads, device)
    asked, notes = _backends(backends, device, training)
    one_dtype = bench.DTYPES[dtype] if dtype else None
    cells = _measured(chosen, asked, one_dtype, device, training, repeats)
    kind = dtype or _dtypes(chosen)
    settings = Settings(dtype=kind, device=device, training=training, repeats=repeats, notes=notes)
    _show(out, cells, settings)
    results = {"machine": machine.describe(), **settings, "cells": [c.data() for c in cells]}
    if profiled:
        results["profiles"] = _profiled(out, chosen, asked, one_dtype, device)
    _write(results, json_file, html)
    ctx.exit(int(any(c.backend == "hypatia" and not c.correct for c in cells)))


def _device(asked: str | None, threads: int | None) -> str:
    """The device that is measured, with so many threads of torch's."""
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if threads:
        torch.set_num_threads(threads)
    return device


def _check_profile(profiled: bool, training: bool) -> None:
    if profiled and training:
        raise click.ClickException("a profile is of inference; leave out --training")


def _profiled(
    out: Console, chosen: list[Workload | OwnModel], asked: list[str], dtype: torch.dtype | None, device: str
) -> list[dict[str, object]]:
    from hypatia.tools import bench
    from hypatia.tools.profile import PEERS, profile

    from .profile_tables import show

    found, peers = [], [peer for peer in PEERS if peer in asked]
    for workload in chosen:
        own = None if isinstance(workload, OwnModel) else bench.DTYPES["fp32"]
        with console(err=True).status("") as status:
            one = profile(
                workload,
                dtype=dtype or own,
                device=device,
                peers=peers,
                progress=lambda text: status.update(text),
            )
        show(out, one)
        found.append(one.data())
    return found


def _write(results: dict[str, object], json_file: str | None, html: str | None) -> None:
    if json_file:
        write_json(json_file, results)
    if html:
        from .bench_page import page

        write_text(html, page(results))


def _list(out: Console, known: list[Workload]) -> None:
    rows = table("workload", ">GFLOP", "what it is")
    for w in known:
        rows.add_row(w.name, f"{w.flops / 1e9:.2f}", w.note)
    out.print(rows)


def _dtypes(chosen: list[Workload | OwnModel]) -> str:
    """What was measured where no dtype was asked for."""
    kinds = dict.fromkeys("as they are" if isinstance(w, OwnModel) else "fp32" for w in chosen)
    return ", ".join(kinds)


def _chosen(names: tuple[str, ...], device: str) -> list[Workload | OwnModel]:
    from hypatia.tools import workloads as known

    if not names:
        return [w for w in known.WORKLOADS.values() if device != "cpu" or w.flops < QUICK_FLOPS]
    try:
        return [OwnModel(name, load(name, device)) if ":" in name else known.find(name) for name in names]
    except LookupError as e:
        raise click.ClickException(f"{e.args[0]} (hypatia bench --list)") from e


def _backends(given: tuple[str, ...], device: str, training: bool) -> tuple[list[str], list[str]]:
    """The backends to measure, and a line for each that is left out."""
    graphs = device != "cpu" and not training
    names = list(dict.fromkeys(given)) or [
        "eager",
        *(["eager-graph"] if graphs else []),
        "inductor",
        "hypatia",
    ]
    notes = []
    if device == "cpu":
        notes.append("no GPU is used, so eager-graph (eager under a CUDA graph) is left out")
        names = [n for n in names if n != "eager-graph"]
    elif training and "eager-graph" in names:
        notes.append("eager-graph is measured in inference only and left out")
        names.remove("eager-graph")
    if not names:
        raise click.ClickException(notes[0])
    from hypatia.devices import machine

    return names, notes + ([warning] if (warning := machine.busy()) else [])


def _measured(
    chosen: list[Workload | OwnModel],
    backends: list[str],
    dtype: torch.dtype | None,
    device: str,
    training: bool,
    repeats: int,
) -> list[Cell]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hypatia.tools import bench

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    cells: list[Cell] = []
    with Progress(*columns, console=console(err=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for workload in chosen:
            cells += bench.bench(
                workload,
                backends,
                dtype=dtype or (None if isinstance(workload, OwnModel) else bench.DTYPES["fp32"]),
                device=device,
                training=training,
                repeats=repeats,
                progress=lambda text: progress.update(task, description=text),
            )
            progress.advance(task)
    return cells


def _show(out: Console, cells: list[Cell], settings: Settings) -> None:
    what = "training step" if settings["training"] else "inference"
    out.print(f"{what}, {settings['dtype']} on {settings['device']}; medians of {settings['repeats']} rounds")
    for note in settings["notes"]:
        out.print(note, style="dim")
    rows = table("workload", "backend", ">us per call", ">over eager", ">compile s", ">error", "")
    last = None
    for c in cells:
        if last not in (None, c.workload):
            rows.add_section()
        name = c.workload if c.workload != last else ""
        last = c.workload
        rows.add_row(name, c.backend, *_numbers(c), _verdict(c))
    out.print(rows)


def _numbers(c: Cell) -> tuple[str, ...]:
    return (
        f"{c.microseconds:,.1f}" if c.microseconds is not None else "-",
        f"{c.ratio:.2f}x" if c.ratio is not None else "-",
        f"{c.compile_seconds:.1f}" if c.compile_seconds is not None else "-",
        f"{c.error:.1e}" if c.error is not None else "-",
    )


def _verdict(c: Cell) -> str:
    if c.reason:
        return safe(c.reason)[0]
    return c.noise if c.correct else "[red]WRONG: further from float64 than eager allows[/]"
