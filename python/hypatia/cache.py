"""A small store on disk for compiled programs and measured times; trouble with files is never an error.

Whatever cannot be read counts as absent, and whatever cannot be written is not kept. Every file carries a
magic, the version of its form and a checksum. It is written under another name and renamed, so that several
processes can share a folder, and a killed one leaves nothing that is ever read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "Entry",
    "clear",
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

_MAGIC = b"HYPATIA\0"
_VERSION = 1
_HEAD = struct.Struct("<8sII32s")
_SUFFIX = ".entry"
_UNFINISHED = ".tmp"
_STALE_SECONDS = 3600.0
_ROOM = 0.9
"""Eviction goes down to this share of the limit, so that it is not needed again at the next write."""

_lock = threading.Lock()
_warned: set[str] = set()


class _BrokenError(Exception):
    """A file that is not what this module wrote."""


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
    """Where the files are: ``HYPATIA_CACHE_DIR``, else ``hypatia`` in the user's cache folder."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME is to be ignored, says its specification.
    return Path(os.path.expanduser(shared if os.path.isabs(shared) else "~/.cache")) / "hypatia"


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
    path = _path(kind, key)
    if not enabled() or path is None:
        return None
    try:
        found, data = _parse(path.read_bytes())
        if found != key:
            raise _BrokenError("it belongs to another key")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (_BrokenError, OSError) as e:
        log.debug("cache file %s is not usable and counts as absent: %s", path, e)
        _remove(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return data


def put(kind: str, key: str, data: bytes) -> None:
    """Keeps the bytes under the key; in place of what was there before."""
    path = _path(kind, key)
    if not enabled() or path is None:
        return
    content = _packed(key, data)
    if len(content) > size_limit():
        log.debug("%d bytes are more than the cache may hold: not kept", len(content))
        return
    try:
        _write(path, content)
    except OSError as e:
        if isinstance(e, FileNotFoundError) and path.parent.is_dir():
            # Another process has cleared the folder meanwhile.
            log.debug("not kept in the cache: %s", e)
            return
        _warn_once("write", "the cache folder %s cannot be written, nothing is kept: %s", folder(), e)
        return
    _evict(keep=path)


def entries() -> list[Entry]:
    """All that is kept, least recently used first."""
    found = []
    for path, stat in _files(_SUFFIX):
        with contextlib.suppress(OSError, _BrokenError), path.open("rb") as file:
            key = _parse_key(file.read(_HEAD.size + (1 << 16)))
            found.append(Entry(path.parent.name, key, stat.st_size, stat.st_mtime, path))
    return sorted(found, key=lambda entry: (entry.used, entry.path))


def clear() -> int:
    """Removes all entries, measurements and unfinished writes; the number of entries removed."""
    removed = sum(_remove(path) for path, _ in _files(_SUFFIX))
    for path, _ in _files(_UNFINISHED):
        _remove(path)
    with contextlib.suppress(OSError):
        for path in tuning_folder().glob("tuning.*"):
            _remove(path)
    return removed


def tuning_folder() -> Path:
    """Where measured times of kernels are kept, in a file of their own."""
    return folder() / "tuning"


def measurements() -> int:
    """How many measured times are kept."""
    with contextlib.suppress(OSError), (tuning_folder() / "tuning.jsonl").open("rb") as file:
        return sum(line.startswith(b"{") and b'"times"' in line for line in file)
    return 0


def trouble() -> str | None:
    """Why nothing can be written, if that is so."""
    if (path := _path("probe", "probe")) is None:
        return "there is no home folder"
    try:
        _write(path, b"probe")
    except OSError as e:
        return str(e)
    _remove(path)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return None


def _path(kind: str, key: str) -> Path | None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", kind):
        raise ValueError(f"a kind is made of a-z, 0-9, '-' and '_', not {kind!r}")
    root = folder()
    if not root.is_absolute():
        _warn_once("home", "there is no home folder, so nothing is cached; set %s", FOLDER_VARIABLE)
        return None
    return root / kind / (hashlib.sha256(key.encode()).hexdigest()[:40] + _SUFFIX)


def _packed(key: str, data: bytes) -> bytes:
    name = key.encode()
    body = name + data
    return _HEAD.pack(_MAGIC, _VERSION, len(name), hashlib.sha256(body).digest()) + body


def _parse(content: bytes) -> tuple[str, bytes]:
    key = _parse_key(content)
    *_, length, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if hashlib.sha256(body).digest() != checksum:
        raise _BrokenError("the checksum does not fit")
    return key, body[length:]


def _parse_key(content: bytes) -> str:
    if len(content) < _HEAD.size:
        raise _BrokenError("it is too short")
    magic, version, length, _ = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise _BrokenError("it is no file of this cache")
    if version != _VERSION:
        raise _BrokenError(f"it has version {version}, not {_VERSION}")
    try:
        return content[_HEAD.size : _HEAD.size + length].decode()
    except UnicodeDecodeError as e:
        raise _BrokenError(f"its key is no text: {e}") from e


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}-{os.getpid()}-{secrets.token_hex(6)}{_UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
        try:
            os.replace(unfinished, path)
        except IsADirectoryError:
            _remove(path)
            os.replace(unfinished, path)
    except BaseException:
        _remove(unfinished)
        raise


def _files(suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        kinds = sorted(path for path in folder().iterdir() if path.is_dir())
    except OSError:
        return
    for kind in kinds:
        # Another process may remove a file or a folder at any moment.
        with contextlib.suppress(OSError):
            for path in sorted(kind.iterdir()):
                if path.name.endswith(suffix):
                    with contextlib.suppress(OSError):
                        yield path, path.stat()


def _evict(keep: Path) -> None:
    """Removes what was used least recently until the rest fits, and unfinished files that are old."""
    for path, stat in _files(_UNFINISHED):
        if time.time() - stat.st_mtime > _STALE_SECONDS:
            _remove(path)
    limit = size_limit()
    files = sorted(_files(_SUFFIX), key=lambda file: (file[1].st_mtime_ns, file[0]))
    total = sum(stat.st_size for _, stat in files)
    if total <= limit:
        return
    for path, stat in files:
        if total <= _ROOM * limit:
            return
        if path != keep and _remove(path):
            total -= stat.st_size


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as e:
        if not isinstance(e, FileNotFoundError):
            log.debug("%s cannot be removed: %s", path, e)
        return False
    return True


def _warn_once(subject: str, message: str, *args: object) -> None:
    with _lock:
        if subject in _warned:
            return
        _warned.add(subject)
    log.warning(message, *args)
