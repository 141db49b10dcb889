"""Where Dynamo cut a model into several graphs, and why."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

from torch import fx

from ..._torch import dynamo_counters
from ...capture.source_names import Line


@dataclasses.dataclass(frozen=True)
class Break:
    """A place where a graph ends before the model does."""

    reason: str
    line: Line | None
    """None: Dynamo does not say where."""
    times: int


class Breaks:
    """Collects them while a model is compiled."""

    def __init__(self) -> None:
        self._before = Counter(dynamo_counters["graph_break"])
        self._found: Counter[tuple[str, Line | None]] = Counter()

    def saw(self, gm: fx.GraphModule) -> None:
        """A graph came to the backend: it may know why it ends."""
        why = getattr(gm, "compile_subgraph_reason", None)
        if why is None or not why.graph_break:
            return
        frames = list(why.user_stack or ())
        line = None
        if frames:
            last = frames[-1]
            line = Line(last.filename, last.lineno or 0, last.name, (last.line or "").strip())
        self._found[_short(why.reason), line] += 1

    def listed(self) -> list[Break]:
        """All of them; those that left no graph behind are known by Dynamo's own counts."""
        found = [Break(reason, line, times) for (reason, line), times in self._found.items()]
        return [*found, *self._uncollected()]

    def _uncollected(self) -> Iterator[Break]:
        # Callers of a function that has one break as well, for the same reason.
        seen = {reason for reason, _ in self._found}
        counted: Counter[str] = Counter()
        for text, times in (Counter(dynamo_counters["graph_break"]) - self._before).items():
            counted[_short(text)] += times
        for reason, times in counted.items():
            if reason not in seen:
                yield Break(reason, None, times)


def _short(text: str) -> str:
    """The first line of what Dynamo says, and its explanation."""
    title = text.strip().splitlines()[0].strip() if text.strip() else "not known"
    why = re.search(r"^ *Explanation: *(.+)$", text, re.M)
    return f"{title}: {why[1].strip()}" if why else title
