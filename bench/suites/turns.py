"""Processes that share a machine: what is timed runs alone, what is not runs beside each other."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class Turns:
    """Two locked files of a folder. Locks end with their processes, however those end."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While others do the same, but none is alone. Whoever waits to be alone goes first."""
        with contextlib.ExitStack() as stack:
            with self._locked("door", fcntl.LOCK_EX):
                stack.enter_context(self._locked("room", fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process does either."""
        with self._locked("door", fcntl.LOCK_EX), self._locked("room", fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[IO[str] | None]:
        if self.folder is None:
            yield None
            return
        with (self.folder / name).open("w") as file:
            fcntl.flock(file, how)
            yield file
