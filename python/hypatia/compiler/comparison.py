"""What comparing a compiled graph with the original showed: part of its report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Result:
    """One result that is not eager's bit for bit."""

    name: str
    type: str
    error: float
    eager_error: float
    to_eager: float
    scale: float
    allowed: float
    ok: bool

    def __str__(self) -> str:
        return (
            f"{self.name} {self.type}: error {self.error:.2g} to float64, eager's {self.eager_error:.2g}, "
            f"allowed {self.allowed:.2g}; {self.to_eager:.2g} to eager"
        )


@dataclasses.dataclass
class Comparison:
    """What comparing one run with eager showed."""

    equal: int = 0
    results: list[Result] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every result passes."""
        return all(r.ok for r in self.results)

    @property
    def worst(self) -> Result | None:
        """The result that is furthest beyond what is allowed."""
        wrong = [r for r in self.results if not r.ok]
        return max(wrong, key=lambda r: r.error / (r.allowed or 1e-300), default=None)
