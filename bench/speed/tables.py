"""The results as tables, for the terminal and for the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from .gates import Cells, mean, over, over_best, predicted
from .run import LABELS, OURS, PEERS


@dataclasses.dataclass
class Table:
    """Cells of text; all columns but the first are to the right."""

    title: str
    columns: list[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)

    def rich(self) -> RichTable:
        """For a terminal, without the title."""
        table = RichTable(box=None, pad_edge=False)
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *("--:" for _ in self.columns[1:])]
        lines = [self.columns, rule, *self.rows]
        return f"**{self.title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(name: str, section: dict[str, Any]) -> Iterator[Table]:
    """The tables of a section."""
    if name == "overhead":
        yield _overhead(section)
    elif name == "memory":
        yield from _memory(section)
    elif name == "rewrites":
        yield _rewrites(section["cells"])
    else:
        for dtype in ("fp32", "bf16"):
            cells = [c for c in section["cells"] if c["dtype"] == dtype]
            if cells:
                yield _times(name, dtype, cells)
        if name == "mlp" and section["cells"]:
            yield _compile_times(section["cells"], section.get("cold", []))


def _by_case(cells: Cells) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for c in cells:
        found.setdefault(c["case"], {})[c["backend"]] = c
    return found


def _names(cells: Cells) -> list[str]:
    there = {c["backend"] for c in cells}
    return [name for name in LABELS if name in there]


def _times(section: str, dtype: str, cells: Cells) -> Table:
    names = _names(cells)
    has_peers = len(set(names) & set(PEERS)) > 1
    title = f"{section}, {dtype}: microseconds (median), and how many times as fast as eager"
    columns = [section, *(LABELS[n] for n in names), *(["over the best peer"] if has_peers else [])]
    table = Table(title, [*columns, "error (eager's)"])
    best = over_best(cells)
    for case, by in _by_case(cells).items():
        last = [_ratio(best.get(f"{case} {dtype}"))] if has_peers else []
        table.rows.append([case, *(_time(by.get(n)) for n in names), *last, _errors(by)])
    if len(table.rows) > 1:
        means = [_ratio(mean(over(cells, "eager", ours=n).values())) for n in names]
        last = [_ratio(mean(best.values()))] if has_peers else []
        table.rows.append(["geometric mean", *means, *last, ""])
    return table


def _time(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["microseconds"] is None:
        return cell["reason"][:60].replace("|", "/")
    wrong = "" if cell["correct"] else ", less exact" if cell["backend"] in PEERS else ", WRONG"
    # Then the ratio tells how much eager differs from itself.
    same = ", eager" if cell.get("form") == "eager" else ""
    ratio = "" if cell["backend"] == "eager" else f" ({cell['ratio']:.2f}x{wrong}{same})"
    return f"{_short(cell['microseconds'])}{ratio}"


def _short(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.2f}x"


def _errors(by: dict[str, dict[str, Any]]) -> str:
    return " ".join(
        form.format(by[n]["error"])
        for n, form in ((OURS, "{:.0e}"), ("eager", "({:.0e})"))
        if n in by and by[n]["error"] is not None
    )


def _compile_times(cells: Cells, cold: list[dict[str, Any]]) -> Table:
    names = [n for n in _names(cells) if n != "eager"]
    table = Table("mlp: seconds up to the end of the first call", ["mlp", *(LABELS[n] for n in names)])
    for dtype in ("fp32", "bf16"):
        for case, by in _by_case([c for c in cells if c["dtype"] == dtype]).items():
            seconds = [by[n]["compile_seconds"] if n in by else None for n in names]
            table.rows.append([f"{case} {dtype}", *map(_number, seconds)])
    for row in cold:
        name = f"{row['case']} {row['dtype']}, fresh process"
        table.rows.append([name, *(_number(row["seconds"].get(n)) for n in names)])
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rewrites(cells: Cells) -> Table:
    columns = ["rewrite", "MFLOP before", "after", "predicted", "hypatia.compile", "Inductor", "eager, us"]
    table = Table("rewrites: how many times as fast as eager", [*columns, "error (eager's)"])
    for case, by in _by_case(cells).items():
        first = next(iter(by.values()))
        counted = first["flops_counted"]
        left = f"{counted / 1e6:.1f}" + ("" if counted == first["flops_after"] else ", not found")
        ratios = [_ratio(by[n]["ratio"] if n in by else None) for n in (OURS, "inductor")]
        numbers = [f"{first['flops_before'] / 1e6:.1f}", left, _ratio(predicted(first))]
        table.rows.append([f"{case}: {first['note']}", *numbers, *ratios, _time(by["eager"]), _errors(by)])
    return table


def _overhead(section: dict[str, Any]) -> Table:
    columns = ["model", "eager", "whole call", "plan alone", "work of a row", "overhead at most", "steps"]
    table = Table("overhead: microseconds of a call", columns)
    for r in section["rows"]:
        kinds = ("eager_us", "call_us", "plan_us", "work_us", "overhead_us")
        table.rows.append([r["case"], *(_number(r[k]) for k in kinds), str(r["steps"] or "no plan")])
    return table


def _memory(section: dict[str, Any]) -> Iterator[Table]:
    columns = ["model", "eager", "hypatia.compile", "ratio", "weights", "packed copies", "folded copies"]
    table = Table("memory: MiB of activations at the worst moment, and of weights", columns)
    for r in section["rows"]:
        kinds = ("eager_bytes", "ours_bytes", "weight_bytes", "packed_bytes", "folded_bytes")
        eager, ours, *weights = (f"{r[k] / 2**20:.2f}" for k in kinds)
        ratio = _ratio(r["ours_bytes"] / r["eager_bytes"] if r["eager_bytes"] else None)
        name = f"{r['section']}: {r['case']} {r['dtype']}{'' if r['plan'] else ' (no plan)'}"
        table.rows.append([name, eager, ours, ratio, *weights])
    yield table
    checks = Table("memory: leaks and threads", ["check", "result"])
    for r in section.get("leaks", []):
        grown = "not measured" if r["grown_bytes"] is None else f"{r['grown_bytes'] / 1024:+.0f} KiB"
        checks.rows.append([f"{r['case']}: growth over {r['calls']:,} calls", grown])
    for r in section.get("threads", []):
        verdict = "right" if r["right"] and not r["wrong"] else f"{r['wrong']} WRONG"
        checks.rows.append([f"{r['case']}: {r['threads']} threads on one compiled model", verdict])
    if checks.rows:
        yield checks
