"""How long steps of plans were expected to take, over how long they take, for the models of the tests' zoo.

    make bench-cost                             or
    .venv/bin/python bench/cost.py [--device cuda] [--only REGEX] [--seconds 1] [--json FILE]

Each model runs in inference, in rounds. Between them the rates of the device are measured, as on the first
profile, since a machine that others use changes its speed. What counts of a rate, a step or a plan is the
fastest of all rounds. `again` compares two halves of the rounds
with each other, as predictions are compared with them: no prediction can be nearer than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

from common import ROOT, machine

from hypatia.devices import table
from hypatia.devices.calibration import Rates, measured
from hypatia.devices.prediction import call_kind, predicted, predicted_call
from hypatia.devices.rates import rates
from hypatia.execute.step_times import Call, StepTime, plan_calls, step_times
from hypatia.frontend.direct import compile as hypatia_compile

sys.path.insert(0, str(ROOT / "tests"))

from zoo import ZOO, Entry

OUT = ROOT / "bench" / "out"
ROUNDS, CALLS, REPEATS, CALIBRATIONS = 4, 10, 2, 4
"""At least so many rounds, calls of a plan in each, calls for the times of its steps; and calibrations."""
WORST = 10


def main(given: list[str] | None = None) -> int:
    """What was asked for; the exit code."""
    asked = _arguments(given)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU")
        return 0
    found: dict[str, Any] = {
        "machine": {**machine(), "threads": torch.get_num_threads(), "device": asked.device},
        "rates": dataclasses.asdict(rates(device)),
        "plans": [],
        "steps": [],
        "failed": {},
    }
    for name, entry in ZOO.items():
        if (asked.only and not re.search(asked.only, name)) or (entry.slow and not asked.slow):
            continue
        try:
            model(found, name, entry, device, asked)
        except Exception as e:
            found["failed"][name] = f"{type(e).__name__}: {e}"[:200]
        torch.compiler.reset()
        print(f"{name}: {_line(found, name)}", file=sys.stderr)
    found["summary"] = summary(found["steps"], found["plans"])
    print("\n".join(tables(found)))
    path = asked.json or OUT / f"cost-{asked.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwritten to {path}")
    return 0


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", metavar="REGEX", help="models with this in their names")
    parser.add_argument("--slow", action="store_true", help="the large models of the zoo, too")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a model (1)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch and of plans (1); 0: torch's"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="take the rates that are kept, or are measured once, not those between the rounds",
    )
    parser.add_argument("--json", type=Path, help="where results are (bench/out/cost-DEVICE.json)")
    return parser.parse_args(given)


def model(
    found: dict[str, Any], name: str, entry: Entry, device: torch.device, asked: argparse.Namespace
) -> None:
    """Adds the plans of a model, and their steps."""
    net = entry.model().to(device)
    positional, named = entry.arguments()
    args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), positional)
    kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), named)
    with torch.no_grad():
        compiled = hypatia_compile(net)
        for _ in range(2):
            compiled(*args, **kwargs)
        with plan_calls() as calls:
            compiled(*args, **kwargs)
        for call in calls:
            plan(found, name, call, device, asked.seconds / len(calls), asked.once)


def plan(
    found: dict[str, Any], name: str, call: Call, device: torch.device, seconds: float, once: bool
) -> None:
    """Adds a plan, and its steps."""
    native, args = call
    rounds: list[tuple[float, list[StepTime]]] = []
    known = [rates(device)] if once else []
    end = time.perf_counter() + seconds
    while len(rounds) < ROUNDS or time.perf_counter() < end:
        if not once and len(known) < CALIBRATIONS:
            known.append(measured(device))
        steps = step_times(native, args, REPEATS)
        if steps is None:
            return
        rounds.append((_called(call, device), steps))
    halves = [rounds[::2], rounds[1::2]]
    whole = [min(taken for taken, _ in half) for half in halves]
    first, rate = rounds[0][1], fastest(known)
    within = sum(step.moved for step in first)
    expected = [predicted(step.demand, rate, within) for step in first]
    found["plans"].append(
        {
            "model": name,
            "steps": len(first),
            "seconds": min(whole),
            "predicted": predicted_call(expected, rate, table.of(device).times_host_apart),
            "again": whole[0] / whole[1],
            "rates": dataclasses.asdict(rate),
        }
    )
    for at, step in enumerate(first):
        half = [min(steps[at].seconds for _, steps in half) for half in halves]
        about = step.demand._asdict() | {"model": name, "plan": len(found["plans"]) - 1, "sizes": step.sizes}
        again = half[0] / half[1] if half[1] else 1.0
        found["steps"].append(
            about | {"seconds": min(half), "predicted": expected[at], "least": step.least, "again": again}
        )


def fastest(known: Sequence[Rates]) -> Rates:
    """The best of several measurements, number by number."""

    def best(each: Sequence[Any], slow: bool = False) -> Any:
        if isinstance(each[0], dict):
            return {key: best([one[key] for one in each], slow) for key in each[0]}
        if isinstance(each[0], list):
            return [best(list(column), slow) for column in zip(*each, strict=False)]
        return min(each) if slow else max(each)

    fields = [dataclasses.asdict(one) for one in known]
    times = ("launch", "host", "calls")
    return Rates(**{key: best([each[key] for each in fields], key in times) for key in fields[0]})


def _called(call: Call, device: torch.device) -> float:
    """Seconds of a call of a plan, the fastest of several."""
    native, args = call
    times = []
    for _ in range(CALLS):
        table.of(device).wait(device)
        start = time.perf_counter()
        native.run(args)
        table.of(device).wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def shares(ratios: Sequence[float]) -> dict[str, float]:
    """Median of some ratios, and how many are near one."""
    count = len(ratios) or 1
    return {
        "count": len(ratios),
        "median": statistics.median(ratios) if ratios else math.nan,
        "within 20%": sum(abs(r - 1.0) <= 0.2 for r in ratios) / count,
        "within 25%": sum(abs(r - 1.0) <= 0.25 for r in ratios) / count,
        "within 50%": sum(abs(r - 1.0) <= 0.5 for r in ratios) / count,
    }


def ratios(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Predicted over measured, where something was measured."""
    return [row["predicted"] / row["seconds"] for row in rows if row["seconds"] > 0]


def label(step: dict[str, Any]) -> str:
    """The kind of a step, as people call it."""
    if step["kind"] == "torch":
        return f"torch {call_kind(step['name'])}: {step['name']}"
    return f"{step['kind']}: {re.split(r'[ ,]', step['name'])[0]}"


def summary(steps: list[dict[str, Any]], plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all steps, all plans, and kinds of steps, of which the worst come first."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        kinds[label(step)].append(step)
    each = {kind: shares(ratios(of)) for kind, of in kinds.items()}
    whole = sum(step["seconds"] for step in steps) or 1.0
    for kind, of in kinds.items():
        each[kind]["share of time"] = sum(step["seconds"] for step in of) / whole
    by_median = sorted(each, key=lambda kind: -abs(math.log(each[kind]["median"] or 1e-9)))
    return {
        "steps": shares(ratios(steps)),
        "steps again": shares([step["again"] for step in steps]),
        "plans": shares(ratios(plans)),
        "plans again": shares([plan["again"] for plan in plans]),
        "kinds": {kind: each[kind] for kind in by_median},
    }


def tables(found: dict[str, Any]) -> Iterable[str]:
    """The summary as Markdown."""
    told = found["summary"]
    yield "| predicted over measured | count | median | within 20% | within 25% | within 50% |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name in ("steps", "steps again", "plans", "plans again"):
        yield _row(name, told[name])
    yield ""
    yield "| worst kinds of steps | count | median | within 20% | within 25% | within 50% | share of time |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for kind in [*told["kinds"]][:WORST]:
        yield f"{_row(kind, told['kinds'][kind])} {told['kinds'][kind]['share of time']:.1%} |"
    yield ""
    yield "| plan | steps | us | predicted | ratio | again |"
    yield "|---|--:|--:|--:|--:|--:|"
    for plan in found["plans"]:
        us, will = 1e6 * plan["seconds"], 1e6 * plan["predicted"]
        yield (
            f"| {plan['model']} | {plan['steps']} | {us:.1f} | {will:.1f} | {will / us:.2f} "
            f"| {plan['again']:.2f} |"
        )
    for name, why in found["failed"].items():
        yield f"{name} was left out: {why}"


def _row(name: str, of: dict[str, float]) -> str:
    near = " | ".join(f"{of[key]:.0%}" for key in ("within 20%", "within 25%", "within 50%"))
    return f"| {name} | {of['count']} | {of['median']:.2f} | {near} |"


def _line(found: dict[str, Any], name: str) -> str:
    """How a model went."""
    if name in found["failed"]:
        return found["failed"][name]
    of = [p for p in found["plans"] if p["model"] == name]
    near = shares(ratios(s for s in found["steps"] if s["model"] == name))
    text = ", ".join(f"{1e6 * p['seconds']:.0f} us, predicted {1e6 * p['predicted']:.0f}" for p in of)
    return f"{text or 'no plan'}; steps: median {near['median']:.2f}, {near['within 50%']:.0%} within 50%"


if __name__ == "__main__":
    sys.exit(main())
