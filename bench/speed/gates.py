"""The targets, computed from the results; one that nothing was measured for is left out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from common import Gate

from hypatia.devices.machine import cpu_fields
from hypatia.tools.bench import times_as_fast

from .run import LABELS, OURS, PEERS, disturbed

Cells = list[dict[str, Any]]
Ratios = dict[str, float]
"""How many times as fast, by what was measured."""

NEVER_SLOWER = 0.97
SMALL_OVER_EAGER = 1.3
COMPILE_RATIO = 20.0
AMX_MLPS, AMX_LINEARS = 1.6, 1.5
POINTWISE_OVER_EAGER = 2.0
LLAMA_OVER_EAGER = 1.3
OF_PREDICTED = 0.8
OVERHEADS_US = {"one 8x8 linear layer": 5.0, "a hundred steps": 10.0}
LEAKED_BYTES = 2**20


def gates(sections: dict[str, Any]) -> list[Gate]:
    """All targets that these results say something about."""
    makers: dict[str, Callable[[dict[str, Any]], Iterator[Gate]]] = {
        "mlp": _mlp,
        "linear": _linear,
        "pointwise": _pointwise,
        "models": _models,
        "rewrites": _rewrites,
        "overhead": _overhead,
        "memory": _memory,
    }
    found = [
        dataclasses.replace(gate, doubt=_doubt(sections[name]))
        for name, make in makers.items()
        if name in sections
        for gate in make(sections[name])
    ]
    return [gate for gate in found if gate.value == gate.value]


def _doubt(section: dict[str, Any]) -> str:
    """Why a section proves nothing."""
    if disturbed(section):
        return "disturbed"
    return "" if section["complete"] else "not all cases"


def has_amx() -> bool:
    """Whether this CPU multiplies bf16 in tiles."""
    return "amx_bf16" in cpu_fields().get("flags", "").split()


def over(cells: Cells, peer: str, key: str = "microseconds", ours: str = OURS) -> Ratios:
    """The peer's number divided by ours, by case and dtype; times are of common rounds."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for c in cells:
        if c[key]:
            found.setdefault(f"{c['case']} {c['dtype']}", {})[c["backend"]] = c
    ratios = {
        name: times_as_fast(by[ours]["samples_us"], by[peer]["samples_us"])
        if key == "microseconds"
        else by[peer][key] / by[ours][key]
        for name, by in found.items()
        if peer in by and ours in by
    }
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def over_best(cells: Cells) -> Ratios:
    """The fastest peer's time divided by ours."""
    best: Ratios = {}
    for peer in PEERS:
        for name, ratio in over(cells, peer).items():
            best[name] = min(ratio, best.get(name, ratio))
    return best


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean; no number of nothing."""
    ratios = list(ratios)
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def _least(name: str, ratios: Ratios, limit: float, unit: str = "x", shortest: Ratios | None = None) -> Gate:
    """A target that the worst case must reach."""
    worst = min(ratios, key=ratios.__getitem__, default="")
    note = worst
    below = sum(r < limit for r in ratios.values())
    if len(ratios) > 1 and below:
        note += f"; {below} of {len(ratios)} below"
    if shortest and worst in shortest:
        note += f"; by the shortest calls {shortest[worst]:.2f}x"
    return Gate(name, ratios.get(worst, float("nan")), limit, unit, True, note)


def _mean(name: str, ratios: Ratios, limit: float, note: str = "") -> Gate:
    return Gate(name, mean(ratios.values()), limit, "x", True, note)


def _mlp(section: dict[str, Any]) -> Iterator[Gate]:
    cells: Cells = section["cells"]
    small = [c for c in cells if c["small"]]
    yield _least(
        "MLPs over eager, everywhere", over(cells, "eager"), NEVER_SLOWER, "x", over(cells, "eager", "least")
    )
    groups = {
        f"{dtype} {batch}": [c for c in small if c["dtype"] == dtype and (c["batch"] == 1) == one]
        for dtype in ("fp32", "bf16")
        for batch, one in (("as given", False), ("batch 1", True))
    }
    split = {name: mean(over(group, "eager").values()) for name, group in groups.items()}
    note = ", ".join(f"{name} {value:.2f}x" for name, value in split.items() if value == value)
    yield _mean("tiny to medium MLPs over eager", over(small, "eager"), SMALL_OVER_EAGER, note)
    each = {peer: mean(over(small, peer).values()) for peer in PEERS}
    note = ", ".join(f"{LABELS[peer]} {value:.2f}x" for peer, value in each.items() if value == value)
    yield _mean("tiny to medium MLPs over the best peer of each", over_best(small), 1.0, note)
    quicker = over(cells, "inductor-freezing", "compile_seconds")
    least = f"least {min(quicker.values()):.0f}x" if quicker else ""
    for row in section.get("cold", []):
        both = [row["seconds"].get(name) for name in ("inductor-freezing", OURS)]
        if all(both):
            least += f", {row['case']} {row['dtype']} in fresh processes {both[0] / both[1]:.0f}x"
    yield _mean("compile time under Inductor max-autotune's", quicker, COMPILE_RATIO, least)
    if has_amx():
        tiles = [c for c in cells if c["dtype"] == "bf16" and c["batch"] >= 64]
        yield _mean("bf16 MLPs of batch 64 and more over eager, AMX", over(tiles, "eager"), AMX_MLPS)


def _linear(section: dict[str, Any]) -> Iterator[Gate]:
    if has_amx():
        tiles = [c for c in section["cells"] if c["dtype"] == "bf16" and c["rows"] >= 16]
        name = "bf16 linear layers of 16 rows and more over torch, AMX"
        yield _least(name, over(tiles, "eager"), AMX_LINEARS, "x", over(tiles, "eager", "least"))


def _pointwise(section: dict[str, Any]) -> Iterator[Gate]:
    cells: Cells = section["cells"]
    yield _least("pointwise chains over eager", over(cells, "eager"), POINTWISE_OVER_EAGER)
    yield _least("pointwise chains over Inductor", over(cells, "inductor"), 1.0)


def _models(section: dict[str, Any]) -> Iterator[Gate]:
    bert = [c for c in section["cells"] if c["case"].startswith("BERT")]
    llama = [c for c in section["cells"] if c["case"].startswith("Llama")]
    yield _least("BERT-base over Inductor", over(bert, "inductor"), 1.0)
    yield _least("Llama block over eager", over(llama, "eager"), LLAMA_OVER_EAGER)


def predicted(cell: dict[str, Any]) -> float:
    """How many times as fast the operations that are left would be."""
    return cell["flops_before"] / cell["flops_after"]


def _rewrites(section: dict[str, Any]) -> Iterator[Gate]:
    expected = {f"{c['case']} {c['dtype']}": predicted(c) for c in section["cells"]}
    reached = {name: ratio / expected[name] for name, ratio in over(section["cells"], "eager").items()}
    yield _least("rewrites: measured over predicted", reached, OF_PREDICTED)


def _overhead(section: dict[str, Any]) -> Iterator[Gate]:
    rows = {row["case"]: row for row in section["rows"]}
    for name, limit in OVERHEADS_US.items():
        if name not in rows:
            continue
        row = rows[name]
        note = f"at most: the whole call {row['call_us']:.1f} us, eager {row['eager_us']:.1f} us"
        if row["plan_us"] is None:
            note += "; NO PLAN: torch was faster"
        yield Gate(f"overhead of a call, {name}", row["overhead_us"], limit, "us", note=note)


def _memory(section: dict[str, Any]) -> Iterator[Gate]:
    shares = {
        f"{r['section']} {r['case']} {r['dtype']}": r["ours_bytes"] / r["eager_bytes"]
        for r in section["rows"]
        if r["eager_bytes"]
    }
    if shares:
        worst = max(shares, key=shares.__getitem__)
        above = sum(s > 1.0 for s in shares.values())
        note = f"{worst}; {above} of {len(shares)} above"
        yield Gate("activations over eager's", shares[worst], 1.0 + 1e-9, "x", note=note)
    grown = [(r["grown_bytes"], r["case"]) for r in section.get("leaks", []) if r["grown_bytes"] is not None]
    if grown:
        most, name = max(grown)
        yield Gate("growth over 10,000 calls", most, LEAKED_BYTES, "B", note=name)
    if section.get("threads"):
        wrong = sum(r["wrong"] + (not r["right"]) for r in section["threads"])
        yield Gate("wrong results of 8 threads", wrong, 1, "")
