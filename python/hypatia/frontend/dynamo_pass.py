"""What AOTAutograd gives to be compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from .. import _torch
from ..compiler.report import GraphReport


@dataclasses.dataclass
class Pass:
    """One graph of a model: of inference, or the forward or backward graph of a training step."""

    kind: str
    graph: fx.Graph
    """As it was captured."""
    metadata: _torch.ViewAndMutationMeta | None
    """What AOTAutograd knows of inputs and results."""
    latest: Callable[[], Callable[[list[object]], object]]
    """What runs it, on a list of arguments that it empties."""
    settled: Callable[[], bool]
    """Whether that stays so."""
    report: GraphReport | None
    """None: it runs as it was captured."""
    unread: tuple[int, ...] = ()
    """Of a backward graph: tangents that it takes for zero, and ``whole`` does not."""
    whole: Callable[[list[object]], object] | None = None
