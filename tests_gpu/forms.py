"""Which form of a call runs, whatever a clock says: no check may depend on what else uses the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hypatia.execute import binding, timing

ORDER = ("plan", "plain", "masked", "recorded", "torch's, recorded", "plans, recorded", "graph", "eager")
"""Forms of calls and of training steps, from the fastest one on."""


def winning(form: str = "plan") -> Any:
    """Calls that are compiled inside run in this form, or in the first of the others that there is."""
    order = [form, *ORDER]

    def instead(forms: Any) -> dict[str, float]:
        return {name: 1.0 + order.index(name) if name in order else 99.0 for name in forms}

    return mock.patch.object(timing, "instead", instead)


def recorded() -> Any:
    """Recordings are the fastest form, wherever there can be one."""
    known = {"plan": (9.0, 9.0), "graph": (1.0, 5.0), "eager": (1.1, 5.0), "recording": (1.0, 0.1)}

    def timed(forms: Any, *_: Any) -> timing.Times:
        apart = {name: known.get(name, (99.0, 99.0)) for name in forms}
        return timing.Times({name: max(both) for name, both in apart.items()}, apart)

    return mock.patch.object(timing, "timed", timed)


@contextlib.contextmanager
def described() -> Iterator[list[list[str]]]:
    """Gets the steps of each plan that is bound."""
    found: list[list[str]] = []
    describe = binding.Binding._describe

    def noted(self: Any, about: Any) -> None:
        found.append(about["steps"])
        describe(self, about)

    with mock.patch.object(binding.Binding, "_describe", noted):
        yield found
