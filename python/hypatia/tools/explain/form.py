"""The form of a report's JSON, which the page and the text are made of."""

from __future__ import annotations

from typing import TypedDict

from ...capture.source_names import DrawnNode, LineData
from ...compiler.report import CheckData, GraphData, ProofStep

Number = float | str
"""A number; one that is not finite is a text."""


class Device(TypedDict):
    """What the model ran on."""

    type: str
    name: str
    note: str
    threads: int


class Costs(TypedDict):
    """Costs of all graphs."""

    before: float
    after: float


class Stage(TypedDict):
    """A stage of the first call."""

    stage: str
    seconds: float


class BreakData(TypedDict):
    """A graph break."""

    reason: str
    line: LineData | None
    times: int


class LeftData(TypedDict):
    """A graph that runs as it was captured."""

    kind: str
    reason: str


class Accuracy(TypedDict):
    """Errors of a result to float64, ours and eager's."""

    name: str
    hypatia: dict[str, Number]
    eager: dict[str, Number]


class VerificationData(TypedDict):
    """Whether results are as close to float64 as eager's."""

    status: str
    reason: str
    results: list[Accuracy]


class TimingsData(TypedDict):
    """Seconds of calls."""

    samples: dict[str, list[float]]
    medians: dict[str, float]
    warning: str


class StepData(TypedDict):
    """Equal steps of plans: microseconds of all of them, expected and least ones."""

    name: str
    sizes: str
    count: int
    microseconds: float
    predicted: float
    limit: float
    bound_by: str


class ReplayData(TypedDict):
    """A proof checked again."""

    evaluated: int
    skipped: int
    worst: Number
    connected: bool
    failures: list[str]
    holds: bool


class GraphForm(GraphData):
    """What is told of one graph."""

    kept: str
    no_plan: str | None
    forms: dict[str, float] | None
    apart: dict[str, tuple[float, float]]
    later: str
    memory: dict[str, dict[str, int]]
    fused: list[str]
    programs: list[str]
    drawn: dict[str, list[DrawnNode]]
    check: CheckData | None
    replay: ReplayData | None
    proof: list[ProofStep]


class ReportForm(TypedDict):
    """What is told of a model."""

    model: str
    training: bool
    versions: dict[str, str]
    device: Device
    cost: Costs
    first_call: float
    timeline: list[Stage]
    breaks: list[BreakData]
    left: list[LeftData]
    verification: VerificationData
    timings: TimingsData | None
    steps: list[StepData]
    graphs: list[GraphForm]
