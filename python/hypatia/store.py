"""A small store on disk for compiled programs and measured times; trouble with files is never an error.

Whatever cannot be read counts as absent, and whatever cannot be written is not kept. Every file carries a
magic, the version of its form and a checksum. It is written under another name and renamed, so that several
processes can share a folder, and a killed one leaves nothing that is ever read.

Everything lies in one folder of our own, marked, and written by its user alone (`private_files.py`).
No file outside of it is touched, and none inside that is not named and made as ours are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from . import private_files
from .store_format import MAGIC, MOST_OF_A_KEY, BrokenError, packed, parse, parse_key

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

_MARKER = "HYPATIA-CACHE"
_MARK = b"This folder is Hypatia's cache. Files in it may be removed at any time.\n"
_ENTRY = re.compile(r"[0-9a-f]{40}\.entry")
_UNFINISHED = re.compile(r"([0-9a-f]{40}-[0-9]+-[0-9a-f]{12}\.tmp)|(tuning-[0-9]+-[0-9a-f]+\.part)")
_KIND = re.compile(r"[a-z0-9][a-z0-9_-]*")
_TUNING = "tuning.jsonl"
_TUNING_HEAD = b'{"hypatia tuning":'
_STALE_SECONDS = 3600.0
_ROOM = 0.9
"""Eviction goes down to this share of the limit, so that it is not needed again at the next write."""
_LARGEST = 64 << 20
"""Bytes of an entry; more is not read."""

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
    name = _name(kind, key)
    if not enabled():
        return None
    try:
        with _opened(kind) as place:
            return _get(place, name, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        _refused(e)
        return None


def _get(place: int, name: str, key: str) -> bytes | None:
    try:
        content = private_files.read(place, name, min(_LARGEST, size_limit()))
    except FileNotFoundError:
        return None
    except OSError as e:
        log.debug("cache file %s is not usable and counts as absent: %s", name, e)
        return None
    try:
        found, data = parse(content)
        if found != key:
            raise BrokenError("it belongs to another key")
    except BrokenError as e:
        log.debug("cache file %s is not usable and counts as absent: %s", name, e)
        _remove(place, name)
        return None
    with contextlib.suppress(OSError):
        os.utime(name, dir_fd=place, follow_symlinks=False)
    return data


def put(kind: str, key: str, data: bytes) -> None:
    """Keeps the bytes under the key; in place of what was there before."""
    name = _name(kind, key)
    if not enabled():
        return
    content = packed(key, data)
    if len(content) > min(_LARGEST, size_limit()):
        log.debug("%d bytes are more than the cache may hold: not kept", len(content))
        return
    try:
        with _opened(kind, make=True) as place:
            _write(place, name, content)
    except IsADirectoryError as e:
        log.debug("not kept in the cache: %s", e)
        return
    except OSError as e:
        if isinstance(e, FileNotFoundError) and (folder() / kind).is_dir():
            # Another process has cleared the folder meanwhile.
            log.debug("not kept in the cache: %s", e)
            return
        _refused(e)
        return
    _evict(keep=(kind, name))


def drop(kind: str, key: str) -> None:
    """Forgets what was put under the key: it turned out to be of no use."""
    with contextlib.suppress(OSError), _opened(kind) as place:
        _remove(place, _name(kind, key))


def entries() -> list[Entry]:
    """All that is kept, least recently used first."""
    found = []
    for kind, place, name, stat in _files(_ENTRY):
        with contextlib.suppress(OSError, BrokenError):
            key = parse_key(private_files.start(place, name, MOST_OF_A_KEY))
            found.append(Entry(kind, key, stat.st_size, stat.st_mtime, folder() / kind / name))
    return sorted(found, key=lambda entry: (entry.used, entry.path))


def clear() -> int:
    """Removes all entries, measurements and unfinished writes; the number of entries removed."""
    removed = 0
    for _, place, name, _ in _files(_ENTRY):
        removed += _starts(place, name, MAGIC) and _remove(place, name)
    for _, place, name, _ in _files(_UNFINISHED):
        _remove(place, name)
    with contextlib.suppress(OSError), _opened("tuning") as place:
        if _starts(place, _TUNING, _TUNING_HEAD):
            _remove(place, _TUNING)
    return removed


def tuning_folder() -> Path | None:
    """Where measured times of kernels are kept, in a file of their own; none if there is no such place."""
    if not enabled():
        return None
    try:
        with _opened("tuning", make=True):
            return folder() / "tuning"
    except OSError as e:
        _refused(e)
        return None


def measurements() -> int:
    """How many measured times are kept."""
    with contextlib.suppress(OSError), _opened("tuning") as place:
        lines = private_files.read(place, _TUNING, _LARGEST).splitlines()
        return sum(line.startswith(b"{") and b'"times"' in line for line in lines)
    return 0


def trouble() -> str | None:
    """Why nothing can be written, if that is so."""
    name = _name("probe", "probe")
    try:
        with _opened("probe", make=True) as place:
            _write(place, name, packed("probe", b""))
            _remove(place, name)
    except OSError as e:
        return str(e)
    with contextlib.suppress(OSError), _opened() as place:
        os.rmdir("probe", dir_fd=place)
    return None


def _name(kind: str, key: str) -> str:
    if not _KIND.fullmatch(kind):
        raise ValueError(f"a kind is made of a-z, 0-9, '-' and '_', not {kind!r}")
    return hashlib.sha256(key.encode()).hexdigest()[:40] + ".entry"


@contextlib.contextmanager
def _opened(kind: str | None = None, *, make: bool = False) -> Iterator[int]:
    """Our folder, or one of a kind in it, as a descriptor: nobody can exchange what it stands for."""
    root = folder()
    if not root.is_absolute():
        raise private_files.RefusedError("there is no home folder")
    with private_files.folder(root, _MARKER, _MARK, make=make) as store:
        if kind is None:
            yield store
            return
        with private_files.inner(store, kind, make=make) as place:
            yield place


def _refused(error: OSError) -> None:
    """Says once that nothing is kept, and why."""
    _warn_once("folder", "the cache folder %s is not used, nothing is kept: %s", folder(), error)


def _write(place: int, name: str, content: bytes) -> None:
    unfinished = f"{name.partition('.')[0]}-{os.getpid()}-{secrets.token_hex(6)}.tmp"
    private_files.replace(place, name, unfinished, content)


def _files(names: re.Pattern[str]) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Regular files with such names: kind, its folder while it is looked at, name, what is known of it."""
    try:
        with _opened() as store:
            kinds = sorted(name for name in os.listdir(store) if _KIND.fullmatch(name))
    except OSError:
        return
    for kind in kinds:
        # Another process may remove a file or a folder at any moment.
        with contextlib.suppress(OSError), _opened(kind) as place:
            for name in sorted(filter(names.fullmatch, os.listdir(place))):
                with contextlib.suppress(OSError):
                    found = os.stat(name, dir_fd=place, follow_symlinks=False)
                    if private_files.is_file(found):
                        yield kind, place, name, found


def _evict(keep: tuple[str, str]) -> None:
    """Removes what was used least recently until the rest fits, and unfinished files that are old."""
    for _, place, name, stat in _files(_UNFINISHED):
        if time.time() - stat.st_mtime > _STALE_SECONDS:
            _remove(place, name)
    limit = size_limit()
    found = [(stat.st_mtime_ns, kind, name, stat.st_size) for kind, _, name, stat in _files(_ENTRY)]
    total = sum(size for *_, size in found)
    if total <= limit:
        return
    for _, kind, name, size in sorted(found):
        if total <= _ROOM * limit:
            return
        if (kind, name) != keep:
            with contextlib.suppress(OSError), _opened(kind) as place:
                if _starts(place, name, MAGIC) and _remove(place, name):
                    total -= size


def _starts(place: int, name: str, magic: bytes) -> bool:
    """Whether a file is one that we made."""
    try:
        return private_files.start(place, name, len(magic)) == magic
    except OSError:
        return False


def _remove(place: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=place)
    except OSError as e:
        if not isinstance(e, FileNotFoundError):
            log.debug("%s cannot be removed: %s", name, e)
        return False
    return True


def _warn_once(subject: str, message: str, *args: object) -> None:
    with _lock:
        if subject in _warned:
            return
        _warned.add(subject)
    log.warning(message, *args)
