"""A case: a program, how it is compiled, and the calls that are made."""

from __future__ import annotations

import dataclasses
from typing import Any

from .program import Program, arranged

ENTRIES = ("direct", "optimize", "torch", "step")
"""hypatia.compile, hypatia.optimize, torch.compile, and the method step of what hypatia.compile returns."""

FORMS = ("plan", "graph", "eager", "clock")


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a program is compiled."""

    name: str = "direct"
    training: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the compiler."""
    form: str = "plan"
    """Which form wins where forms are timed; clock: the fastest one, and each is called many times before."""
    random_costs: int | None = None
    """The seed of an equal program that is taken instead of the fastest."""
    again: bool = False
    """The equal program is compiled once more, by itself."""
    dynamic: bool | None = None
    """torch.compile's argument of that name; hypatia.optimize: sizes are open."""
    examples: bool = True
    """hypatia.compile is given example inputs."""
    peer: bool = False
    """torch's own machinery instead, which changes nothing: what fails there too is torch's to mend."""

    def __repr__(self) -> str:
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Entry({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call, and what is done to the weights before it."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    change: str = ""
    """add, copy, replace, load or halve: how parameters are changed before."""

    def __repr__(self) -> str:
        parts = [repr(self.args)]
        parts += [f"kwargs={self.kwargs!r}"] if self.kwargs else []
        parts += [f"change={self.change!r}"] if self.change else []
        return f"Call({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call of a case, before its arguments are arranged."""

    inputs: tuple[Any, ...]
    choice: int = 0
    change: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that is needed to run it again."""

    seed: int
    program: Program
    entry: Entry
    plans: tuple[Plan, ...]

    def calls(self) -> list[Call]:
        """The calls with their arguments arranged as the program takes them."""
        found = []
        for plan in self.plans:
            named = [(n, v) for (n, _), v in zip(self.program.inputs, plan.inputs, strict=True)]
            args, kwargs = arranged(self.program.doors, named, plan.choice)
            found.append(Call(args, tuple(kwargs.items()), plan.change))
        return found

    def replace(self, **changes: Any) -> Case:
        """The same case with other fields."""
        return dataclasses.replace(self, **changes)
