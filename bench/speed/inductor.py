"""Inductor in a process of its own: its compilations have a time limit, and its samples are taken in turn.

The other process builds the same models from the same seeds, so that only names, times and results cross.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hypatia.tools import bench, measure, peers
from hypatia.tools.bench import Peer
from hypatia.tools.measure import Block
from hypatia.tools.peers import NotMeasured

from . import cases

NAMES = ("inductor", "inductor-freezing")
START_SECONDS = 300.0
"""For the first compilation of the process, which imports Inductor and builds its headers."""
CALL_SECONDS = 120.0
"""For a sample."""
END_SECONDS = 10.0
"""For the end of the process."""


class Workshop:
    """The other process. It is started when it is first needed, and again after it had to be ended."""

    def __init__(self, threads: int, limit: float, *, warm: bool = True) -> None:
        self.threads = threads
        self.limit = limit
        self.warm = warm
        self.start_seconds: float | None = None
        self._process: Any = None
        self._pipe: Connection | None = None

    def maker(self, name: str, case: cases.Case) -> bench.Maker:
        """Compiles a case by one of Inductor's forms."""
        return lambda model, inputs: _Remote(self, name, case)

    def ask(self, limit: float, *request: Any) -> Any:
        """The answer to a request; what takes too long ends the process."""
        if self._process is None:
            self._start()
        return self._exchange(limit, *request)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.threads), daemon=True)
        self._process.start()
        theirs.close()
        if self.warm:
            self.start_seconds = self._exchange(START_SECONDS, "start")

    def _exchange(self, limit: float, *request: Any) -> Any:
        assert self._pipe is not None
        try:
            self._pipe.send(request)
            if not self._pipe.poll(limit):
                self._kill()
                raise NotMeasured(f"took longer than {limit:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as e:
            self._kill()
            raise NotMeasured("Inductor's process ended") from e
        if kind == "error":
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        """Lets the process end."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.join(END_SECONDS)
            self._kill()

    def _kill(self) -> None:
        """Ends the process, and the compilers that it started, if it still runs."""
        if self._process is not None and self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # It had not yet made a group of its own.
                self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def cold(threads: int, limit: float, name: str, case: cases.Case) -> float:
    """Seconds of a compilation and a first call in a new process, imports of the compiler included."""
    workshop = Workshop(threads, limit, warm=False)
    try:
        seconds, _ = workshop.ask(limit, "compile", name, case.key)
    finally:
        workshop.close()
    return seconds


class _Remote(Peer):
    def __init__(self, workshop: Workshop, name: str, case: cases.Case) -> None:
        self._workshop = workshop
        self._name = name
        self.compile_seconds, self._results = workshop.ask(workshop.limit, "compile", name, case.key)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self._results

    def block(self) -> Block:
        return self._workshop.ask(CALL_SECONDS, "block", self._name)

    def close(self) -> None:
        if self._workshop._process is not None:
            self._workshop.ask(CALL_SECONDS, "drop", self._name)


def _serve(pipe: Connection, threads: int) -> None:
    """Answers requests until the pipe is closed."""
    os.setsid()
    # Compilers and autotuning write at length; what goes wrong is answered.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    shop = _Shop()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        while True:
            try:
                name, *arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(("answer", getattr(shop, name)(*arguments)))
            except Exception as e:
                pipe.send(("error", bench.reason(e)))


class _Shop:
    """What the other process does."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[], Any]] = {}
        self._build = functools.cache(self._built)

    @staticmethod
    def _built(key: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        case = cases.BY_KEY[key]
        return case.workload.build(bench.DTYPES[case.dtype])

    def start(self) -> float:
        """Compiles something small, so that later compilations are measured without imports."""
        start = time.perf_counter()
        small, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
        for name in NAMES:
            peers.compiled_by(name, small, [x], training=False)(x)
        torch._dynamo.reset()
        return time.perf_counter() - start

    def compile(self, name: str, key: str) -> tuple[float, list[torch.Tensor]]:
        """Seconds up to the end of the first call, and its results."""
        model, inputs = self._build(key)
        start = time.perf_counter()
        compiled = peers.compiled_by(name, model, inputs, training=False)
        results = compiled(*inputs)
        seconds = time.perf_counter() - start
        self._calls[name] = functools.partial(compiled, *inputs)
        return seconds, [t.detach().clone() for t in pytree.tree_leaves(results)]

    def block(self, name: str) -> Block:
        """One sample."""
        return measure.block(self._calls[name])

    def drop(self, name: str) -> None:
        """Forgets a compiled model."""
        self._calls.pop(name, None)
        if not self._calls:
            self._build.cache_clear()
            torch._dynamo.reset()
