"""The store on disk for compiled programs, kernels and measured times; trouble with files is never an error.

What is kept, how, and what is refused is in the Rust half (``store.rs`` of the runtime). Here is where the
folder lies and how large it may be, which the environment says at each call. Whatever cannot be read counts
as absent, and whatever cannot be written is not kept.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from pathlib import Path

from . import _native

__all__ = [
    "Entry",
    "clear",
    "drop",
    "enabled",
    "entries",
    "folder",
    "get",
    "measurements",
    "put",
    "size_limit",
    "trouble",
    "tuning_folder",
]

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HYPATIA_CACHE_DIR"
SWITCH_VARIABLE = "HYPATIA_CACHE"
SIZE_VARIABLE = "HYPATIA_CACHE_SIZE"
DEFAULT_SIZE = 512 << 20

NAME = "hypatia-cache"
"""Our own folder, in the one that is chosen."""

_lock = threading.Lock()
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept under a key."""

    kind: str
    key: str
    size: int
    used: float
    path: Path


def enabled() -> bool:
    """Whether the store is used at all; ``HYPATIA_CACHE=off`` turns it off."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() not in ("off", "0", "no", "false")


def folder() -> Path:
    """Our own folder: in ``HYPATIA_CACHE_DIR``, else in the user's cache folder."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(chosen))) / NAME
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME is to be ignored, says its specification.
    return Path(os.path.expanduser(shared if os.path.isabs(shared) else "~/.cache")) / NAME


def size_limit() -> int:
    """Bytes that the files may take together: ``HYPATIA_CACHE_SIZE``, plain or with K, M or G."""
    text = os.environ.get(SIZE_VARIABLE, "").strip()
    if not text:
        return DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        _warn_once(
            "size", "%s=%r is no size (like 512M); %d bytes are used", SIZE_VARIABLE, text, DEFAULT_SIZE
        )
        return DEFAULT_SIZE
    return int(float(match[1]) * 1024 ** " KMG".index(match[2].upper() or " "))


def get(kind: str, key: str) -> bytes | None:
    """What was put under the key, if it is still there and whole."""
    if enabled():
        try:
            return _store().get(kind, key)
        except OSError as e:
            _refused(e)
    return None


def put(kind: str, key: str, data: bytes) -> None:
    """Keeps the bytes under the key; in place of what was there before."""
    if enabled():
        try:
            _store().put(kind, key, data)
        except OSError as e:
            _refused(e)


def drop(kind: str, key: str) -> None:
    """Forgets what was put under the key: it turned out to be of no use."""
    _store().drop(kind, key)


def entries() -> list[Entry]:
    """All that is kept, least recently used first."""
    return [Entry(*found) for found in _store().entries()]


def clear() -> int:
    """Removes all entries, measurements and unfinished writes; the number of entries removed."""
    return _store().clear()


def tuning_folder() -> Path | None:
    """Where measured times of kernels are kept, in a file of their own; none if there is no such place."""
    if enabled():
        try:
            return _store().tuning_folder()
        except OSError as e:
            _refused(e)
    return None


def measurements() -> int:
    """How many measured times are kept."""
    return _store().measurements()


def trouble() -> str | None:
    """Why nothing can be written, if that is so."""
    try:
        _store().probe()
    except OSError as e:
        return str(e)
    return None


def _store() -> _native.Store:
    return _native.Store(folder(), min(size_limit(), 1 << 62))


def _refused(error: OSError) -> None:
    """Says once that nothing is kept, and why."""
    _warn_once("folder", "the cache folder %s is not used, nothing is kept: %s", folder(), error)


def _warn_once(subject: str, message: str, *args: object) -> None:
    with _lock:
        if subject in _warned:
            return
        _warned.add(subject)
    log.warning(message, *args)
