"""How long a call takes in each of several forms."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

log = logging.getLogger(__name__)

REST, LONG = 0.012, 0.2
"""Seconds until threads of torch's with nothing to do sleep, and of a call that they do not matter for."""

BRIEF, WAKE, TURN = 0.002, 0.002, 0.002
"""Seconds of a call that is made many times in a turn, of such calls until threads are awake and on cores of
their own, and of the turn after that."""

instead: Callable[[Sequence[str]], dict[str, float]] | None = None
"""Says what calls take in forms of these names, and no clock is asked: for tests, none of which may depend
on what else a machine does."""


def in_turns(forms: Mapping[str, Callable[[], object]], seconds: float, *, gpu: bool) -> dict[str, float]:
    """What a call usually takes in each form, in turns.

    The form "graph" has the rewrites of the form "plan": where "eager" takes twice as long as the plan, the
    graph is left out. So it is if it does not run.
    """
    if instead is not None:
        return instead(list(forms))
    times: dict[str, list[float]] = {name: [] for name in forms}
    first = next(iter(forms))
    spinning = not gpu
    wait = torch.cuda.synchronize if gpu else lambda: None
    wait()
    start = time.perf_counter()
    while (
        not times[first]
        or (spent := time.perf_counter() - start) < seconds
        or (len(times[first]) < 3 and spent < 1.0)
    ):
        for name in list(times):
            form = forms[name]
            if name == "graph" and not times[name] and (_is_twice_as_fast(times) or not _runs(form)):
                del times[name]
                continue
            latest = times[name][-1] if times[name] else 0.0
            if name.endswith("plan") and spinning and latest < LONG:
                # Plans have threads of their own, which sleep at once.
                time.sleep(REST)
            spinning = not gpu and not name.endswith("plan")
            times[name] += [_taken(form, wait)] if gpu or latest > BRIEF else _turn(form)
        if gpu and _is_clear(times):
            break
    # The median, since some kernels are slower while the other half of a core is busy; the fastest of a
    # few, since what disturbs one of them only makes it longer.
    usual = statistics.median if len(times[first]) >= 5 else min
    return {name: usual(taken) for name, taken in times.items()}


def in_few_turns(
    forms: Mapping[str, Callable[[], object]],
    turns: tuple[int, int],
    seconds: float,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Seconds of single calls in turns: medians without the first turn.

    So many ``turns`` there are at least and at most; between, they end after these ``seconds``.
    """
    if instead is not None:
        return instead(list(forms))
    fewest, most = turns
    taken: dict[str, list[float]] = {name: [] for name in forms}
    start = time.perf_counter()
    for turn in itertools.count():
        if turn >= fewest and (turn >= most or time.perf_counter() - start >= seconds):
            break
        for name, form in forms.items():
            wait()
            taken[name].append(_taken(form, wait))
    return {name: statistics.median(times[1:] or times) for name, times in taken.items()}


def _turn(form: Callable[[], object]) -> list[float]:
    """Seconds of calls in a row, when the threads that they need are awake."""
    start = time.perf_counter()
    while time.perf_counter() - start < WAKE:
        form()
    start = time.perf_counter()
    taken: list[float] = []
    while not taken or time.perf_counter() - start < TURN:
        taken.append(_taken(form))
    return taken


def _taken(form: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    before = time.perf_counter()
    form()
    wait()
    return time.perf_counter() - before


def _is_twice_as_fast(times: Mapping[str, Sequence[float]]) -> bool:
    if not all(times.get(name) for name in ("plan", "eager")):
        return False
    return 2 * statistics.median(times["plan"]) < statistics.median(times["eager"])


def _runs(form: Callable[[], object]) -> bool:
    try:
        form()
    except Exception:
        log.info("the graph does not run", exc_info=True)
        return False
    return True


def _is_clear(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether each call of one form took less than half of what any call of another did."""
    if min(map(len, times.values())) < 3:
        return False
    slowest = {name: max(taken) for name, taken in times.items()}
    best = min(slowest, key=slowest.__getitem__)
    return all(2 * slowest[best] < min(taken) for name, taken in times.items() if name != best)
