"""The report as one HTML page: style, script and data inside, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TypedDict

import jinja2

from ...capture.source_names import DrawnNode
from . import words
from .drawing import Drawing, drawn, is_weight, label, shape
from .form import GraphForm, Number, ReportForm, TimingsData
from .savings import Saving, replaced, savings

SCRIPTS = ("drawing.js", "pane.js", "page.js")
"""Parts of the script, in the order they need each other."""


class Side(TypedDict):
    """One program of a graph: its nodes, and where they are drawn without and with weights."""

    nodes: list[dict[str, object]]
    flow: Drawing
    all: Drawing


class PageData(TypedDict):
    """What the script draws and expands."""

    before: Side
    after: Side
    lines: list[tuple[str, str, str]]
    rules: list[str]
    proof: list[list[int | str]]


Place = TypedDict("Place", {"from": float, "to": float, "delta": float, "left": float, "width": float})


class Row(Saving, Place):
    """A row of the waterfall: a saving, and where it is drawn."""


def render(report: ReportForm) -> str:
    """The page of a report, as its JSON has it."""
    script = '"use strict";\n' + "".join(_part(name) for name in SCRIPTS)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    environment.globals["words"] = words
    titles = words.titles([g["kind"] for g in report["graphs"]])
    data = [_data(g) for g in report["graphs"]]
    return environment.from_string(_part("page.html.j2")).render(
        report=report,
        figures=_figures(report),
        graphs=[
            _graph(graph, title, drawn)
            for graph, title, drawn in zip(report["graphs"], titles, data, strict=True)
        ],
        timings=_timings(report["timings"]),
        timeline=_bars({part["stage"]: part["seconds"] for part in report["timeline"]}),
        style=_part("page.css"),
        script=script,
        # The page runs this script only, whatever a name in it may contain.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=data,
    )


def _part(name: str) -> str:
    return (resources.files(__package__) / "template" / name).read_text(encoding="utf-8")


def _figures(report: ReportForm) -> list[dict[str, str]]:
    """The numbers at the head of the page."""
    cost, timings, verification = report["cost"], report["timings"], report["verification"]
    targets = ", ".join(sorted({g["target"] for g in report["graphs"]}))
    figures = [
        {
            "name": "Modelled cost",
            "value": f"{words.cost(cost['before'])} → {words.cost(cost['after'])}",
            "note": f"{words.change(cost['before'], cost['after'])}, cost model {targets}"
            if report["graphs"]
            else "no graph was compiled",
            "tone": "",
        }
    ]
    if timings:
        eager, ours = timings["samples"]["eager"], timings["samples"]["hypatia"]
        medians = [words.duration(timings["medians"][name]) for name in ("eager", "hypatia")]
        figures.append(
            {
                "name": "Time of a call",
                "value": " → ".join(medians),
                "note": f"{words.speed(eager, ours)}; medians of {len(eager)}",
                "tone": "",
            }
        )
    results = verification["results"]
    if results:
        error, own = _largest([r["hypatia"] for r in results]), _largest([r["eager"] for r in results])
        note = "the same as eager's" if error == own else f"eager's own: {words.error(own)}"
        figures.append(
            {"name": "Error to float64", "value": words.error(error), "note": f"largest; {note}", "tone": ""}
        )
    tone = {"passed": "good", "failed": "bad"}.get(verification["status"], "")
    note = verification["reason"] or f"{words.count(len(results), 'result')} as close to float64 as eager's"
    figures.append(
        {"name": "Verification", "value": verification["status"].capitalize(), "note": note, "tone": tone}
    )
    return figures


def _largest(errors: list[dict[str, Number]]) -> Number:
    return max((e["max_abs"] for e in errors), key=float)


def _graph(graph: GraphForm, title: str, data: PageData) -> dict[str, object]:
    """What the template shows of a graph."""
    before, after = graph["drawn"]["before"], graph["drawn"]["after"]
    ops = dict(zip(("before", "after"), words.ops(graph), strict=True))
    steps: dict[str, int] = {}
    for step in graph["proof"]:
        steps[step["rule"]] = steps.get(step["rule"], 0) + 1
    return {
        **graph,
        "title": title,
        "height": max(data["before"]["flow"]["height"], data["after"]["flow"]["height"]),
        "panes": [
            {
                "side": side,
                "title": side.capitalize(),
                "nodes": ops[side],
                "cost": cost,
            }
            for side, cost in (("before", graph["cost_before"]), ("after", graph["cost_after"]))
        ],
        "modules": words.modules(graph),
        "waterfall": _waterfall(graph, savings(replaced(before, after))),
        "rule_steps": steps,
    }


def _waterfall(graph: GraphForm, changes: list[Saving]) -> dict[str, object]:
    """Rows from the cost before to the cost after; the axis starts where there is something to see."""
    before, after = graph["cost_before"], graph["cost_after"]
    changed = [c for c in changes if abs(c["cost_after"] - c["cost_before"]) > 1e-6 * max(before, 1e-9)]
    level, levels = before, [before, after]
    rows: list[Row] = []
    for c in changed:
        delta = c["cost_after"] - c["cost_before"]
        rows.append({**c, "delta": delta, "from": level, "to": level + delta, "left": 0.0, "width": 0.0})
        level += delta
        levels.append(level)
    # The cost before counts a value once that several of its nodes compute.
    rest = after - level
    if abs(rest) > 1e-4 * max(before, 1e-9):
        rows.append(
            {
                "before": "equal values",
                "after": "counted once before",
                "times": 1,
                "cost_before": 0.0,
                "cost_after": rest,
                "delta": rest,
                "from": level,
                "to": after,
                "left": 0.0,
                "width": 0.0,
            }
        )
    lowest, highest = min(levels), max(levels)
    start = 0.0 if lowest < 0.6 * highest else max(0.0, lowest - 0.25 * (highest - lowest) - 1e-9)
    scale = 100 / ((highest - start) or 1.0)
    for row in rows:
        low, high = sorted((row["from"], row["to"]))
        row["left"], row["width"] = (low - start) * scale, max(0.15, (high - low) * scale)
    return {
        "rows": rows,
        "start": start,
        "end": highest,
        "before": (before - start) * scale,
        "after": (after - start) * scale,
        "unchanged": sum(c["cost_after"] for c in changes if c not in changed),
    }


def _bars(seconds: dict[str, float]) -> list[dict[str, object]]:
    longest = max(seconds.values(), default=0.0) or 1.0
    return [{"name": n, "seconds": s, "width": 100 * s / longest} for n, s in seconds.items()]


def _timings(timings: TimingsData | None) -> list[dict[str, object]]:
    """A bar for each median, and a mark for each call; slow outliers end at the edge."""
    if timings is None:
        return []
    end = 1.25 * max(timings["medians"].values()) or 1.0
    return [
        {
            "name": name,
            "median": median,
            "width": 100 * median / end,
            "marks": [min(100.0, 100 * s / end) for s in timings["samples"][name]],
            "calls": len(timings["samples"][name]),
        }
        for name, median in timings["medians"].items()
    ]


def _data(graph: GraphForm) -> PageData:
    """What the script draws and expands, in few bytes."""
    rules = list(dict.fromkeys(step["rule"] for step in graph["proof"]))
    number = {rule: i for i, rule in enumerate(rules)}
    groups = replaced(graph["drawn"]["before"], graph["drawn"]["after"])
    lines: dict[tuple[str, str, str], int] = {}
    sides: dict[str, Side] = {}
    for side, nodes in graph["drawn"].items():
        other = {n["name"] for n in graph["drawn"]["after" if side == "before" else "before"]}
        group = {n["id"]: i for i, members in enumerate(groups) for n in members[side]}
        reads = _weights_read(nodes)
        sides[side] = {
            "nodes": [
                {
                    **_node(n, other),
                    "line": _line(n, lines),
                    "group": group.get(n["id"], -1),
                    "reads": reads[n["id"]],
                }
                for n in nodes
            ],
            "flow": drawn(nodes, weights=False),
            "all": drawn(nodes, weights=True),
        }
    return {
        "before": sides["before"],
        "after": sides["after"],
        "lines": list(lines),
        "rules": rules,
        "proof": [[number[s["rule"]], int(s["forward"]), s["before"], s["after"]] for s in graph["proof"]],
    }


def _weights_read(nodes: list[DrawnNode]) -> dict[int, str]:
    """Names of the weights that nodes read, which are not drawn at first, by the numbers of the nodes."""
    known = {n["id"]: n for n in nodes}
    names: dict[int, list[str]] = {}
    for n in nodes:
        names[n["id"]] = [n["called"]] if n["kind"] == "weight" else []
        for i in n["inputs"]:
            if i in names and is_weight(known[i]):
                names[n["id"]] += names[i]
    return {i: " ".join(found) for i, found in names.items()}


def _line(node: DrawnNode, lines: dict[tuple[str, str, str], int]) -> int:
    """The number of a node's line among all lines; -1 if it has none."""
    place = node["line"]
    if place is None:
        return -1
    key = (words.line(place), f"{place['file']}:{place['line']} in {place['function']}", place["code"])
    return lines.setdefault(key, len(lines))


def _node(node: DrawnNode, other: set[str]) -> dict[str, object]:
    kind = "folded" if node["folded"] else node["kind"]
    return {
        "id": node["id"],
        "label": label(node),
        "shape": shape(node),
        "op": node["op"],
        "name": node["name"],
        "called": node["called"] if node["called"] != node["name"] else "",
        "module": node["module"],
        "type": node["type"],
        "attrs": " ".join(node.get("attrs", ())),
        "cost": round(node["cost"], 4),
        "kind": kind,
        "inputs": node["inputs"],
        "kept": int(node["name"] in other or node["kind"] in ("input", "weight", "result")),
    }
