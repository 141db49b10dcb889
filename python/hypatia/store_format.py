"""How an entry of the store is written into a file: a head with a checksum, its key, its data."""

from __future__ import annotations

import hashlib
import struct

MAGIC = b"HYPATIA\0"
"""How a file of ours begins."""

_VERSION = 2
_HEAD = struct.Struct("<8sII32s")

MOST_OF_A_KEY = _HEAD.size + (1 << 16)
"""Bytes from which the key of an entry can be read."""


class BrokenError(Exception):
    """A file that is not what this module wrote."""


def packed(key: str, data: bytes) -> bytes:
    """The content of a file."""
    name = key.encode()
    body = name + data
    return _HEAD.pack(MAGIC, _VERSION, len(name), hashlib.sha256(body).digest()) + body


def parse(content: bytes) -> tuple[str, bytes]:
    """The key and the data of a file.

    Raises:
        BrokenError: it is not one of ours, or not as it was written.
    """
    key = parse_key(content)
    *_, length, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if hashlib.sha256(body).digest() != checksum:
        raise BrokenError("the checksum does not fit")
    return key, body[length:]


def parse_key(content: bytes) -> str:
    """The key of a file, of its first bytes."""
    if len(content) < _HEAD.size:
        raise BrokenError("it is too short")
    magic, version, length, _ = _HEAD.unpack_from(content)
    if magic != MAGIC:
        raise BrokenError("it is no file of this cache")
    if version != _VERSION:
        raise BrokenError(f"it has version {version}, not {_VERSION}")
    try:
        return content[_HEAD.size : _HEAD.size + length].decode()
    except UnicodeDecodeError as e:
        raise BrokenError(f"its key is no text: {e}") from e
