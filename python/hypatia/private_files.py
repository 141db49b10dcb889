"""Folders and files that nobody but their user may have written.

What others could have put there is refused, by the descriptor that is read from, not by the name: links are
not followed, pipes are not waited for, and no more is read than asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RefusedError", "folder", "inner", "is_file", "read", "replace", "start", "write"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RefusedError(PermissionError):
    """Something that others may have written, or that is not what it should be."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return self.strerror or ""


@contextlib.contextmanager
def folder(path: Path, marker: str, mark: bytes, *, make: bool = False) -> Iterator[int]:
    """A folder of our own, which has a marker, as a descriptor; ``make`` makes it if there is none.

    Raises:
        RefusedError: others may have written it, or it has no marker and is not empty.
        OSError: it cannot be opened or made.
    """
    if make:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    with _opened(path) as place:
        _check_above(path)
        if not _is_marked(place, marker, mark):
            if not make:
                raise FileNotFoundError(errno.ENOENT, "it has no marker", str(path))
            strange = not all(name.startswith(marker) for name in os.listdir(place))
            # Another process may have made it meanwhile.
            if strange and not _is_marked(place, marker, mark):
                raise RefusedError(f"{path} is not empty and has no file {marker}: it is somebody else's")
            _mark(place, marker, mark)
        yield place


@contextlib.contextmanager
def inner(place: int, name: str, *, make: bool = False) -> Iterator[int]:
    """A folder in one of ours."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=place)
    with _opened(name, place) as found:
        yield found


def read(place: int, name: str, most: int) -> bytes:
    """All of a file, if it has at most so many bytes."""
    with _file(place, name) as file:
        size = os.fstat(file).st_size
        if size > most:
            raise RefusedError(f"it has {size} bytes, more than {most}")
        return _content(file, most)


def start(place: int, name: str, count: int) -> bytes:
    """The first bytes of a file."""
    with _file(place, name) as file:
        return _content(file, count)


def write(place: int, name: str, content: bytes) -> None:
    """Makes a file."""
    file = os.open(name, _WRITE, 0o600, dir_fd=place)
    with open(file, "wb") as opened:
        opened.write(content)


def replace(place: int, name: str, unfinished: str, content: bytes) -> None:
    """Makes a file, in place of one that is there: written under another name, of which nothing is left."""
    try:
        write(place, unfinished, content)
        os.replace(unfinished, name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=place)
        raise


def is_file(found: os.stat_result) -> bool:
    """Whether it is a regular file that only its user may have written."""
    return stat.S_ISREG(found.st_mode) and _is_private(found)


def _is_private(found: os.stat_result) -> bool:
    # Root may do anything anyway, and makes folders that others only read.
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


@contextlib.contextmanager
def _opened(path: Path | str, place: int | None = None) -> Iterator[int]:
    try:
        found = os.open(path, _FOLDER, dir_fd=place)
    except OSError as e:
        # Linux says "not a directory" of a link that is not to be followed.
        if _is_link(path, place):
            raise RefusedError(f"{path} is a link") from e
        raise
    try:
        about = os.fstat(found)
        if about.st_uid not in (0, os.geteuid()):
            raise RefusedError(f"{path} belongs to user {about.st_uid}")
        if not _is_private(about):
            raise RefusedError(f"others may write {path} (mode {about.st_mode & 0o7777:o})")
        yield found
    finally:
        os.close(found)


def _is_link(path: Path | str, place: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=place, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check_above(path: Path) -> None:
    """Who may write a folder above, may exchange ours; not so where everybody has only his own."""
    for above in Path(os.path.realpath(path.parent)).parents:
        _check_shared(above)
    _check_shared(path.parent)


def _check_shared(above: Path) -> None:
    mode = os.stat(above).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise RefusedError(f"everybody may write {above} (mode {mode & 0o7777:o})")


def _is_marked(place: int, marker: str, mark: bytes) -> bool:
    try:
        return start(place, marker, len(mark)) == mark
    except FileNotFoundError:
        return False


def _mark(place: int, marker: str, mark: bytes) -> None:
    replace(place, marker, f"{marker}-{secrets.token_hex(6)}", mark)


@contextlib.contextmanager
def _file(place: int, name: str) -> Iterator[int]:
    try:
        file = os.open(name, _READ, dir_fd=place)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise RefusedError("it is a link") from e
        raise
    try:
        if not is_file(os.fstat(file)):
            raise RefusedError("it is no regular file that only its user may write")
        yield file
    finally:
        os.close(file)


def _content(file: int, most: int) -> bytes:
    parts = []
    while most > 0 and (part := os.read(file, min(most, 1 << 20))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)
