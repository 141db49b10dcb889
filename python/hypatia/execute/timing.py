"""How long a call takes in each of several forms."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from .. import _torch
from ..devices import table

log = logging.getLogger(__name__)

REST, LONG = 0.012, 0.2
"""Seconds until threads of torch's with nothing to do sleep, and of a call that they do not matter for."""

BRIEF, WAKE, TURN = 0.002, 0.002, 0.002
"""Seconds of a call that is made many times in a turn, of such calls until threads are awake and on cores of
their own, and of the turn after that."""

ALONE = 0.02
"""Seconds of a call so long that its threads being awake before it makes no difference."""

BEHIND = 1.25
"""A form has lost when each of its calls took so many times as long as any call of another form."""

QUEUED, QUEUE = 20, 0.0005
"""Calls that are queued on a GPU at most, and seconds for which some are. More would fill its queue, and the
host would wait."""

CYCLES = 2e9
"""Of a GPU in a second, about."""

Forms = Mapping[str, Callable[[], object]]

Apart = tuple[float, float]
"""Seconds of the device and of the host. The host of a CPU's call has them all."""

instead: Callable[[Sequence[str]], dict[str, float]] | None = None
"""Says what calls take in forms of these names, and no clock is asked: for tests, none of which may depend
on what else a machine does."""


class Times(NamedTuple):
    """What calls take in several forms."""

    taken: dict[str, float]
    """Seconds of a call, where calls follow each other."""
    apart: dict[str, Apart]
    """On a GPU, what the device and the host take for it; they work at the same time."""


def timed(forms: Forms, seconds: float, device: torch.device) -> Times:
    """What a call usually takes in each form, in turns.

    The form "graph" has the rewrites of the form "plan": where "eager" takes twice as long as the plan, the
    graph is left out. So it is if it does not run. On a CPU, a form that has clearly lost is not called
    again.
    """
    if instead is not None:
        return Times(instead(list(forms)), {})
    if not table.of(device).times_host_apart:
        return Times({name: host for name, (_, host) in _in_turns(forms, seconds, gpu=False).items()}, {})
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        apart = _in_turns(forms, seconds, gpu=True)
    return Times({name: max(both) for name, both in apart.items()}, apart)


def once(forms: Forms, device: torch.device) -> dict[str, float]:
    """Seconds of one call in each form."""
    if instead is not None:
        return instead(list(forms))
    wait = _waiting(device)
    wait()
    return {name: _taken(form, wait) for name, form in forms.items()}


class CallTimes:
    """Times of calls that somebody makes anyway. On a GPU nobody waits for them until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Callable[[], object]) -> object:
        """What the call returns."""
        events = None
        if table.of(self._device).times_host_apart:
            stream = torch.cuda.current_stream(self._device)
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record(stream)
        start = time.perf_counter()
        results = call()
        self._host.append(time.perf_counter() - start)
        if events is not None:
            events[1].record(stream)
            self._events.append(events)
        return results

    def seconds(self) -> float:
        """What a call usually took."""
        for _, last in self._events[-1:]:
            last.synchronize()
        device = [first.elapsed_time(last) * 1e-3 for first, last in self._events]
        return max(statistics.median(self._host), statistics.median(device or [0.0]))


def _in_turns(forms: Forms, seconds: float, *, gpu: bool) -> dict[str, Apart]:
    times: dict[str, list[Apart]] = {name: [] for name in sorted(forms, key=lambda name: name == "graph")}
    running = list(times)
    spinning = not gpu
    start = time.perf_counter()
    spent, rounds = 0.0, 0
    while not rounds or spent < seconds or (rounds < 3 and spent < 1.0):
        for name in list(running):
            latest = times[name][-1][1] if times[name] else 0.0
            if not gpu:
                if name.endswith("plan") and spinning and latest < LONG:
                    # Plans have threads of their own, which sleep at once.
                    time.sleep(REST)
                spinning = not name.endswith("plan")
            if name == "graph" and not times[name]:
                taken = [] if _is_twice_as_fast(times) else _if_it_runs(forms[name], latest, gpu=gpu)
            else:
                taken = _measured(forms[name], latest, gpu=gpu)
            times[name] += taken
            if not taken:
                running.remove(name)
        rounds += 1
        spent = time.perf_counter() - start
        if gpu and _is_clear({name: times[name] for name in running}):
            break
        if not gpu and spent >= seconds and rounds > 1:
            running = [name for name in running if not _is_beaten(name, times)]
            if len(running) == 1:
                break
    return {name: _usual(times[name]) for name in forms if times[name]}


def _measured(form: Callable[[], object], latest: float, *, gpu: bool) -> list[Apart]:
    """Seconds of one call or more, of which the latest took so long."""
    if gpu:
        return [_apart(form)]
    return [(0.0, _busy(form))] if latest > BRIEF else _turn(form)


def _if_it_runs(form: Callable[[], object], latest: float, *, gpu: bool) -> list[Apart]:
    """The same; none if the call fails."""
    try:
        return _measured(form, latest, gpu=gpu)
    except Exception:
        log.info("the graph does not run", exc_info=True)
        return []


def _is_beaten(name: str, times: Mapping[str, Sequence[Apart]]) -> bool:
    """Whether each of at least two calls took clearly longer than any call of another form."""
    least = min(host for _, host in times[name])
    others = (taken for other, taken in times.items() if other != name and taken)
    return any(least > BEHIND * max(host for _, host in taken) for taken in others)


def _usual(taken: Sequence[Apart]) -> Apart:
    """The median, since some kernels are slower while the other half of a core is busy; the fastest of a
    few, since what disturbs one of them only makes it longer."""
    usual = statistics.median if len(taken) >= 5 else min
    device, host = zip(*taken, strict=True)
    return usual(device), usual(host)


def _apart(form: Callable[[], object]) -> Apart:
    """Seconds of the device and of the host for one of several calls that are queued."""
    latest = _taken(form)
    torch.cuda.synchronize()
    calls = max(1, min(QUEUED, int(QUEUE / max(latest, 1e-9))))

    def queue() -> None:
        for _ in range(calls):
            form()

    host = _taken(queue)
    torch.cuda.synchronize()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    hold = _torch.optional("cuda_sleep")
    if hold is not None:
        # The device begins when all is queued, so that it never waits for the host.
        hold(int(1.5 * CYCLES * host))
    before.record()
    queue()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e-3 / calls, host / calls


def _waiting(device: torch.device) -> Callable[[], object]:
    return functools.partial(table.of(device).wait, device)


def _turn(form: Callable[[], object]) -> list[Apart]:
    """Seconds of calls in a row, when the threads that they need are awake."""
    start = time.perf_counter()
    first = _busy(form)
    if first > ALONE:
        return [(0.0, first)]
    while time.perf_counter() - start < WAKE:
        form()
    start = time.perf_counter()
    taken: list[Apart] = []
    while not taken or time.perf_counter() - start < TURN:
        taken.append((0.0, _taken(form)))
    return taken


def _taken(form: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    before = time.perf_counter()
    form()
    wait()
    return time.perf_counter() - before


def _busy(form: Callable[[], object]) -> float:
    """Seconds of a call of a CPU; of one thread those in which it had a core, whatever else runs there."""
    before = time.process_time()
    taken = _taken(form)
    return min(taken, time.process_time() - before) if torch.get_num_threads() == 1 else taken


def _is_twice_as_fast(times: Mapping[str, Sequence[Apart]]) -> bool:
    if not all(times.get(name) for name in ("plan", "eager")):
        return False
    return 2 * max(_usual(times["plan"])) < max(_usual(times["eager"]))


def _is_clear(times: Mapping[str, Sequence[Apart]]) -> bool:
    """Whether each call of one form took less than half of what any call of another did."""
    if min(map(len, times.values())) < 3:
        return False
    slowest = {name: max(map(max, taken)) for name, taken in times.items()}
    best = min(slowest, key=slowest.__getitem__)
    return all(2 * slowest[best] < min(map(max, taken)) for name, taken in times.items() if name != best)
