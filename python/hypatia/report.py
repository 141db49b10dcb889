"""What was done to a graph."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from torch import fx

from ._native import Optimization


@dataclasses.dataclass(frozen=True)
class Replay:
    """A proof checked again: every step evaluated in float64 on random inputs."""

    evaluated: int
    skipped: int
    worst: float
    connected: bool
    failures: list[str]

    @property
    def holds(self) -> bool:
        """Whether the steps lead from the program in to the program out and none differs."""
        return self.connected and not self.failures


class GraphReport:
    """The report of one compiled graph."""

    def __init__(self, kind: str, optimization: Optimization, before: fx.Graph, after: fx.Graph) -> None:
        self.kind = kind
        self.before = before
        self.after = after
        self._optimization = optimization

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Costs, rules, sizes and times, as plain data."""
        return {"kind": self.kind, **json.loads(self._optimization.report())}

    @functools.cached_property
    def proof(self) -> list[dict[str, Any]]:
        """The steps from the program in to the program out."""
        return json.loads(self._optimization.steps())

    @property
    def programs(self) -> tuple[str, str]:
        """The programs in and out as text."""
        return self._optimization.texts()

    @property
    def fused(self) -> list[str]:
        """Names of the fused nodes."""
        return [n.name for n in self.after.nodes if n.op == "call_module" and n.name.startswith("fused_")]

    def replay(self, seed: int = 0, budget: float = 1e9) -> Replay:
        """Checks the proof again; steps of more than ``budget`` operations are left out."""
        return Replay(**json.loads(self._optimization.replay(seed, budget)))

    def __str__(self) -> str:
        d = self.data
        saved = 100 * (1 - d["cost_after"] / d["cost_before"]) if d["cost_before"] else 0.0
        rules = (
            ", ".join(r["rule"] + (f" x{r['times']}" if r["times"] > 1 else "") for r in d["rules"]) or "none"
        )
        lines = [
            f"{self.kind} graph, cost model '{d['target']}'",
            f"  cost      {d['cost_before']:.1f} -> {d['cost_after']:.1f} us ({saved:.0f}% less; "
            f"at most {100 * d['gap']:.1f}% above the optimum of the search; {d['method']})",
            f"  ops       {sum(d['ops_before'].values())} -> {sum(d['ops_after'].values())}, "
            f"{sum(d['opaque'].values())} left to torch",
            f"  fused     {', '.join(self.fused) or 'none'}",
            f"  rules     {rules}",
            f"  proof     {d['steps']} steps",
            f"  search    {d['nodes']} nodes, {d['classes']} classes; "
            + ", ".join(f"{k} {v:.1f} ms" for k, v in d["times"].items()),
        ]
        return "\n".join(lines)
