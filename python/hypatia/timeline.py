"""Where the time of a first call goes: stages that say their name, and whoever watches them.

The time of a stage is its own, without that of stages inside of it, so that all of them add up to the whole.
Where nobody watches, stages do nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from . import _torch

CAPTURE = "capture"
AUTOGRAD = "AOTAutograd"
RECORDS = "records"
SEARCH = "search"
EXTRACTION = "extraction"
PROOF = "proof"
REBUILD = "rebuild"
PLANNING = "planning"
BINDING = "binding and packing"
CALL = "the call itself"
EAGER = "verification: eager"
WIDE = "verification: float64"
COMPARISON = "verification: comparison"
FORMS = "timing of forms"
OTHER = "other"

ORDER = (
    *(CAPTURE, AUTOGRAD, RECORDS, SEARCH, EXTRACTION, PROOF, REBUILD, PLANNING, BINDING, CALL),
    *(EAGER, WIDE, COMPARISON, FORMS, OTHER),
)
"""The stages as they follow each other."""


class Timeline:
    """Seconds of stages, each without those inside of it."""

    def __init__(self, told: Callable[[str], None], clock: Callable[[], float] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock or time.perf_counter
        self._told = told
        self._open: list[list[float]] = []
        """Of every open stage, when it began and what stages inside of it took."""
        self._names: list[str] = []
        self._said = OTHER

    def enter(self, name: str) -> int:
        """A stage begins; the number by which it ends."""
        if name != self._said:
            self._said = name
            self._told(name)
        self._names.append(name)
        self._open.append([self._clock(), 0.0])
        return len(self._open)

    def leave(self, number: int) -> None:
        """A stage is over, and all that began inside of it."""
        now = self._clock()
        while len(self._open) >= number:
            name, (start, inside) = self._names.pop(), self._open.pop()
            self.add(name, now - start - inside)
            if self._open:
                self._open[-1][1] += now - start

    def add(self, name: str, seconds: float) -> None:
        """A stage took longer, or what counted for it counts for another."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class _Watched(threading.local):
    timeline: Timeline | None = None


_watched = _Watched()


@contextlib.contextmanager
def watching(
    told: Callable[[str], None] = lambda _: None, clock: Callable[[], float] | None = None
) -> Iterator[Timeline]:
    """Watches the stages of this thread until the end; ``told`` gets the name of each that begins.

    What belongs to no stage is other. One watcher is inside of another like any stage.
    """
    outer = _watched.timeline
    timeline = _watched.timeline = Timeline(told, clock)
    number = timeline.enter(OTHER)
    try:
        yield timeline
    finally:
        timeline.leave(number)
        _watched.timeline = outer


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage; as a decorator, every call of the function is one."""
    timeline = _watched.timeline
    if timeline is None:
        yield
        return
    number = timeline.enter(name)
    try:
        yield
    finally:
        timeline.leave(number)


def moved(source: str, parts: dict[str, float]) -> None:
    """Seconds of a stage that were those of others, which it measured itself."""
    if _watched.timeline is not None:
        for name, seconds in parts.items():
            _watched.timeline.add(name, seconds)
            _watched.timeline.add(source, -seconds)


@contextlib.contextmanager
def dynamo() -> Iterator[None]:
    """Dynamo's compilations in this thread are stages, too."""
    from ._torch import dynamo_callbacks

    timeline = _watched.timeline
    thread = threading.get_ident()
    begun: list[int] = []

    def begin(args: _torch.CallbackArgs) -> None:
        if timeline is not None and threading.get_ident() == thread:
            deferred = args.callback_trigger.name == "LAZY_BACKWARD"
            begun.append(timeline.enter(AUTOGRAD if deferred else CAPTURE))

    def end(_: object) -> None:
        if timeline is not None and threading.get_ident() == thread and begun:
            timeline.leave(begun.pop())

    handler = dynamo_callbacks
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)
