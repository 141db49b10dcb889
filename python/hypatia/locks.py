"""What only one thread may do at a time."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

COMPILING = threading.RLock()
"""Held while a model is traced, compiled or checked.

A model that is traced has fake weights for that time, fake tensors are not made for several threads, and the
modes in which torch exports are on one stack for all threads, off which checks take them. Locks of single
objects are taken after this one.
"""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Compilations make many objects that stay: looking through all of torch's for cycles takes longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
