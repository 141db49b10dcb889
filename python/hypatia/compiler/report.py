"""What was done to a graph."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from torch import fx

from ..capture import source_names
from ..capture.records import module_of
from ..compiler.comparison import Result
from ..execute import plans
from ..execute.choose import Choice
from ..kernels import FusedCall
from .program_cache import Optimization


class RuleUse(TypedDict):
    """A rule of a proof, and how many times it is used."""

    rule: str
    law: str
    numerics: str
    times: int


class ProofStep(TypedDict):
    """A step of a proof: a rule, and the programs before and after it as text."""

    rule: str
    forward: bool
    before: str
    after: str


class GraphData(TypedDict):
    """Costs, rules, sizes and times of a search, as plain data."""

    kind: str
    target: str
    cost_before: float
    cost_after: float
    lower_bound: float
    gap: float
    method: str
    ops_before: dict[str, int]
    ops_after: dict[str, int]
    opaque: dict[str, int]
    rules: list[RuleUse]
    steps: int
    nodes: int
    classes: int
    limited: bool
    times: dict[str, float]


class RemovedData(TypedDict):
    """A part that was rolled back, as plain data."""

    kind: str
    name: str
    message: str


class CheckData(TypedDict):
    """What verifying a first call showed, as plain data."""

    mode: str
    status: str
    equal: int
    results: list[dict[str, float | str | bool]]
    removed: list[RemovedData]
    notes: list[str]
    seconds: float


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


@dataclasses.dataclass(frozen=True)
class Removed:
    """A part of a compilation that was rolled back: a rule, a kernel, or the whole graph."""

    kind: str
    name: str
    message: str


@dataclasses.dataclass
class Check:
    """What verifying the first call of a compiled graph showed."""

    mode: str
    status: str
    """passed, rolled back, kept (although wrong: mode soft) or not checked"""
    equal: int
    """Results that are eager's bit for bit."""
    results: list[Result]
    """The others."""
    removed: list[Removed]
    notes: list[str]
    seconds: float
    """What the check added to the call."""

    def data(self) -> CheckData:
        """The same as plain data."""
        return {
            "mode": self.mode,
            "status": self.status,
            "equal": self.equal,
            "results": [dataclasses.asdict(r) for r in self.results],
            "removed": [{"kind": r.kind, "name": r.name, "message": r.message} for r in self.removed],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        total = self.equal + len(self.results)
        text = f"{self.status}: {self.equal} of {total} results are eager's bit for bit"
        numbers = [r for r in self.results if not r.type.startswith(("int", "uint", "bool"))]
        if numbers:
            worst = max(numbers, key=lambda r: r.error / (r.scale or 1.0))
            text += (
                f"; largest error of the others {worst.error:.1e} to float64 (eager: {worst.eager_error:.1e})"
            )
        without = [f"; without {r.kind} {r.name}" for r in self.removed]
        return text + "".join(without)


FORMS = {"plan": "native plan", "recording": "recording", "graph": "torch's ops", "eager": "eager"}
"""Forms of a graph, as people read them."""


class GraphReport:
    """The report of one compiled graph."""

    def __init__(
        self,
        kind: str,
        optimization: Optimization,
        before: fx.Graph,
        after: fx.Graph,
        folded: int = 0,
        masks: Sequence[str] = (),
        passes: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self.before = before
        """The captured graph, without masks that say nothing."""
        self.after = after
        self.check: Check | None = None
        self.times: dict[str, float] | None = None
        """Seconds of a call in each form, where these were timed."""
        self.apart: dict[str, tuple[float, float]] = {}
        """On a GPU, seconds of the device and of the host, of which `times` has the larger."""
        self.later = ""
        """What came of timing a plan again that had lost by little."""
        self.kept = "plan"
        """Which of these forms runs."""
        self.folded = folded
        """Bytes of folded and merged weights."""
        self.masks = list(masks)
        """What was done to constant masks of attention."""
        self.passes = list(passes)
        """What was done to the graph before the search, and can be left out."""
        self.memory: tuple[int, int] | None = None
        """Bytes of the plan's values in between, and of its packed weights."""
        self.inputs: list[str] = []
        """What the model calls the inputs of the graph that torch.compile captured."""
        self.no_plan = ""
        """Why the graph has no native plan, if it has none."""
        self.may_use_tf32 = False
        """Whether convolutions of the plan may use TF32."""
        self.optimization = optimization

    def chose(self, choice: Choice) -> None:
        """Notes which form was kept, and what was measured."""
        self.kept, (taken, self.apart) = choice
        self.times = taken or None

    def chose_later(self, calls: int, seconds: dict[str, float], won: bool) -> None:
        """Notes what a plan and the form that was kept took at later calls."""
        each = ", ".join(f"{name} {1e6 * taken:.0f} us" for name, taken in seconds.items())
        self.later = f"after {calls} calls: {each}: " + ("the plan is kept now" if won else "it stays so")
        if won:
            self.kept = "plan"

    @functools.cached_property
    def graphs(self) -> dict[str, list[source_names.DrawnNode]]:
        """The programs before and after as nodes: op, name, inputs, type, cost, kind, and what the model
        calls them: its name of an input or a weight, the module and the line that compute a value."""
        captured = [n for n in self.before.nodes if n.op != "output"]
        drawn: dict[str, list[source_names.DrawnNode]] = json.loads(self.optimization.graphs())
        source_names.told(drawn, captured, self.inputs)
        return drawn

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that compute fused ops, each once."""
        calls = [module_of(n) for n in self.after.nodes if n.op == "call_module"]
        names = [c.kernel.name for c in calls if isinstance(c, FusedCall)]
        return list(dict.fromkeys([*names, *([] if self.no_plan else [plans.KERNEL])]))

    @property
    def parts(self) -> list[tuple[str, str]]:
        """What the compilation can do without: its kernels, passes and the rules of its proof."""
        rules = [("rule", r["rule"]) for r in self.data["rules"]]
        passes = [("pass", name) for name in self.passes]
        kernels = ([plans.TF32] if self.may_use_tf32 else []) + self.kernels
        return [("kernel", name) for name in kernels] + passes + rules

    def law(self, kind: str, name: str) -> str:
        """What is known of a part."""
        laws = [r["law"] for r in self.data["rules"] if r["rule"] == name]
        return laws[0] if kind == "rule" and laws else ""

    @functools.cached_property
    def data(self) -> GraphData:
        """Costs, rules, sizes and times, as plain data."""
        data: GraphData = json.loads(self.optimization.report())
        return {"kind": self.kind, **data}

    @functools.cached_property
    def proof(self) -> list[ProofStep]:
        """The steps from the program in to the program out."""
        return json.loads(self.optimization.steps())

    @functools.cached_property
    def programs(self) -> tuple[str, str]:
        """The programs in and out as text."""
        return self.optimization.texts()

    @functools.cached_property
    def fused(self) -> list[str]:
        """Names of the fused nodes."""
        return [n.name for n in self.after.nodes if n.op == "call_module" and n.name.startswith("fused_")]

    def __deepcopy__(self, memo: dict[int, object]) -> GraphReport:
        """A report does not change: copies of a graph share it."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """What can be written down; the search itself and the graphs stay behind."""
        kept = ("kind", "check", "times", "apart", "later", "kept", "no_plan", "folded", "memory", "masks")
        made = ("data", "proof", "programs", "fused", "graphs")
        return {name: getattr(self, name) for name in kept + made}

    def replay(self, seed: int = 0, budget: float = 1e9) -> Replay:
        """Checks the proof again; steps of more than ``budget`` operations are left out."""
        if not hasattr(self, "optimization"):
            raise ValueError("a report that was pickled has the text of the proof, not the proof")
        return Replay(**json.loads(self.optimization.replay(seed, budget)))

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
            f"{sum(d['opaque'].values())} not in the op table",
            f"  fused     {_names(self.fused)}",
            f"  rules     {rules}",
            f"  proof     {d['steps']} steps",
            f"  search    {d['nodes']} nodes, {d['classes']} classes; "
            + ", ".join(f"{k} {v:.1f} ms" for k, v in d["times"].items()),
        ]
        lines += [f"  masks     {done}" for done in self.masks]
        if self.times is not None:
            each = ", ".join(f"{FORMS[k]} {self._taken(k, v)}" for k, v in self.times.items())
            lines.append(f"  native    {each}: {self._verdict(self.times)}")
        if self.later:
            lines.append(f"  later     {self.later}")
        if self.no_plan:
            lines.append(f"  no plan   {self.no_plan}")
        if self.memory is not None or self.folded:
            values, packed = (n / 2**20 for n in self.memory or (0, 0))
            lines.append(
                f"  memory    {values:.1f} MiB in between; copies of weights: {packed:.1f} MiB packed, "
                f"{self.folded / 2**20:.1f} MiB folded"
            )
        if self.check is not None:
            lines.append(f"  verified  {self.check}")
        return "\n".join(lines)

    def _taken(self, name: str, seconds: float) -> str:
        text = f"{1e6 * seconds:.0f} us"
        if name in self.apart:
            device, host = self.apart[name]
            text += f" (device {1e6 * device:.0f}, host {1e6 * host:.0f})"
        return text

    def _verdict(self, times: dict[str, float]) -> str:
        if "plan" not in times:
            return f"no plan, {FORMS[self.kept]} kept"
        if self.kept == "plan":
            return "the plan is kept"
        if self.kept not in times:
            return "dropped, torch's ops faster but wrong: runs as it was captured"
        if times["plan"] < times[self.kept]:
            return "dropped, too little faster for its copies of weights"
        return f"dropped, {FORMS[self.kept]} faster"


def _names(names: list[str], most: int = 12) -> str:
    """Names of nodes; many of them are counted by family."""
    if len(names) <= most:
        return ", ".join(names) or "none"
    families = Counter(name.rpartition("_")[0] for name in names)
    return ", ".join(f"{family} x{count}" for family, count in families.items())
