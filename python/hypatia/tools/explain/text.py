"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...compiler.report import RuleUse
from . import words
from .form import Accuracy, GraphForm, ReportForm, Stage, StepData
from .savings import Saving, replaced, savings

SHOWN = 6
"""Rows of the largest savings."""

STEPS = 12
"""Rows of the longest steps."""


def render(report: ReportForm) -> RenderableType:
    """What a report says, as its JSON has it."""
    return Group(*_parts(report))


def _parts(report: ReportForm) -> Iterator[RenderableType]:
    yield Text(report["model"], style="bold")
    yield Text(_machine(report), style="dim")
    yield Text("")
    yield _summary(report)
    if not report["graphs"]:
        yield Text("\nNo graph was compiled; the model runs as it was.")
    yield from _cuts(report)
    titles = words.titles([graph["kind"] for graph in report["graphs"]])
    for graph, title in zip(report["graphs"], titles, strict=True):
        yield from _graph(graph, title)
    if report["verification"]["results"]:
        yield _title("Accuracy, to float64")
        yield _accuracy(report["verification"]["results"])
    if report["steps"]:
        yield _title("Steps of the plan")
        yield _steps(report["steps"])
    yield _title(f"First call, {words.duration(report['first_call'])}")
    yield _timeline(report["timeline"], report["first_call"])


def _machine(report: ReportForm) -> str:
    device, versions = report["device"], report["versions"]
    parts = [
        "training" if report["training"] else "inference",
        device["type"] + (f" ({device['name']})" if device["name"] else ""),
        device["note"],
        *(f"{name} {version}" for name, version in versions.items()),
    ]
    return ", ".join(part for part in parts if part)


def _summary(report: ReportForm) -> Table:
    table = Table.grid(padding=(0, 2))
    cost, timings, verification = report["cost"], report["timings"], report["verification"]
    change = words.change(cost["before"], cost["after"])
    table.add_row("cost", f"{words.cost(cost['before'])} -> {words.cost(cost['after'])} ({change})")
    if timings:
        eager, ours = timings["medians"]["eager"], timings["medians"]["hypatia"]
        speed = words.speed(timings["samples"]["eager"], timings["samples"]["hypatia"])
        table.add_row("time", f"{words.duration(eager)} -> {words.duration(ours)} ({speed})")
        if timings["warning"]:
            table.add_row("", Text(timings["warning"], style="red"))
    reason = f": {verification['reason']}" if verification["reason"] else ""
    style = {"passed": "green", "failed": "red"}.get(verification["status"], "")
    table.add_row("verification", Text(verification["status"] + reason, style=style))
    table.add_row("first call", words.duration(report["first_call"]))
    return table


def _graph(graph: GraphForm, title: str) -> Iterator[RenderableType]:
    yield _title(title)
    table = Table.grid(padding=(0, 2))
    before, after = words.ops(graph)
    table.add_row("runs", Text(words.runs(graph)))
    table.add_row("ops", f"{before} -> {after}, {sum(graph['opaque'].values())} not in the op table")
    change = words.change(graph["cost_before"], graph["cost_after"])
    costs = f"{words.cost(graph['cost_before'])} -> {words.cost(graph['cost_after'])} ({change})"
    table.add_row("cost", f"{costs}, at most {100 * graph['gap']:.1f} % above the optimum of the search")
    if check := graph["check"]:
        total = check["equal"] + len(check["results"])
        line = f"{check['status']}: {check['equal']} of {total} results are eager's bit for bit"
        removed = "".join(f"; without {r['kind']} {r['name']}" for r in check["removed"])
        table.add_row("check", Text(line + removed))
    if replay := graph["replay"]:
        holds = "connects the programs" if replay["holds"] else "BROKEN"
        table.add_row("proof", f"{words.count(len(graph['proof']), 'step')}, {holds}")
    stages = ", ".join(f"{name} {words.duration(ms * 1e-3)}" for name, ms in graph["times"].items())
    table.add_row("search", f"{graph['nodes']} nodes, {graph['classes']} classes; {stages}")
    yield table
    if graph["rules"]:
        yield Text("")
        yield _rules(graph["rules"])
    changes = [
        c
        for c in savings(replaced(graph["drawn"]["before"], graph["drawn"]["after"]))
        if c["cost_before"] != c["cost_after"]
    ]
    if changes:
        yield Text("")
        yield _changes(changes[:SHOWN])
    yield Text("")
    yield _modules(words.modules(graph))
    yield Text("")
    yield _memory(graph["memory"])


def _rules(rules: list[RuleUse]) -> Table:
    table = Table("rule", "times", "numerics", "law", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    for r in rules:
        table.add_row(*map(Text, (r["rule"], str(r["times"]), r["numerics"], r["law"])))
    return table


def _changes(changes: list[Saving]) -> Table:
    table = Table("replaced", "by", "times", "change of cost", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for c in changes:
        delta = c["cost_after"] - c["cost_before"]
        sign = "+" if delta > 0 else "-"
        row = (c["before"], c["after"] or "nothing", str(c["times"]), sign + words.cost(abs(delta)))
        table.add_row(*map(Text, row))
    return table


def _modules(modules: list[words.ModuleCost]) -> Table:
    """The dearest modules."""
    table = Table("module", "lines", "ops", "cost", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    dearest = sorted(modules, key=lambda m: -max(m["cost_before"], m["cost_after"]))
    for m in dearest[:SHOWN]:
        lines = ", ".join(m["lines"][:2]) + (", …" if len(m["lines"]) > 2 else "")
        costs = f"{words.cost(m['cost_before'])} -> {words.cost(m['cost_after'])}"
        table.add_row(
            *map(Text, (m["module"] or "the model", lines, f"{m['before']} -> {m['after']}", costs))
        )
    if len(dearest) > SHOWN:
        table.add_row(f"and {len(dearest) - SHOWN} more", "", "", "")
    return table


def _memory(memory: dict[str, dict[str, int]]) -> Table:
    table = Table("memory", "eager", "hypatia", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, taken in memory.items():
        table.add_row(name, words.size(taken["eager"]), words.size(taken["hypatia"]))
    return table


def _steps(steps: list[StepData]) -> Table:
    """The longest steps, beside what they were expected to take, and the least that they can take."""
    names = ("step", "reads and writes", "times", "time", "predicted", "limit", "by")
    table = Table(*names, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:6]:
        column.justify = "right"
    for s in steps[:STEPS]:
        times = (words.cost(s[key]) for key in ("microseconds", "predicted", "limit"))
        table.add_row(*map(Text, (s["name"], s["sizes"], str(s["count"]), *times, s["bound_by"])))
    if len(steps) > STEPS:
        rest = sum(s["microseconds"] for s in steps[STEPS:])
        table.add_row(f"and {len(steps) - STEPS} more", "", "", words.cost(rest), "", "", "")
    return table


def _timeline(timeline: list[Stage], whole: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for part in timeline:
        share = 100 * part["seconds"] / (whole or 1.0)
        table.add_row(part["stage"], words.duration(part["seconds"]), f"{share:.0f} %")
    return table


def _cuts(report: ReportForm) -> Iterator[RenderableType]:
    """Graph breaks, and graphs that were left as they are."""
    if report["breaks"]:
        yield _title("Graph breaks")
        for b in report["breaks"]:
            times = f" ({b['times']} times)" if b["times"] > 1 else ""
            place = f"{words.line(b['line'])}: " if b["line"] else ""
            yield Text(f"{place}{b['reason']}{times}")
    if report["left"]:
        yield _title("Graphs that run as they were captured")
        for g in report["left"]:
            yield Text(f"{g['kind']}: {g['reason']}")


def _accuracy(results: list[Accuracy]) -> Table:
    table = Table(
        "result", "", "largest", "mean", "relative", "roundings", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for result in results:
        for who, e in (("hypatia", result["hypatia"]), ("eager", result["eager"])):
            errors = [words.error(e[key]) for key in ("max_abs", "mean_abs", "max_relative")]
            table.add_row(
                Text(result["name"] if who == "hypatia" else ""), who, *errors, f"{float(e['ulps']):.1f}"
            )
    return table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
