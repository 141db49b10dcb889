"""Where the CUDA libraries are: already loaded, else in site-packages, else known to the linker."""

from __future__ import annotations

import ctypes
import dataclasses
import glob
import os
import site
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

__all__ = ["KNOWN", "Library", "Place", "find", "folders", "version"]


@dataclasses.dataclass(frozen=True)
class Library:
    """A library, the file names it may have, newest first, and how to ask it for its version."""

    name: str
    files: tuple[str, ...]
    ask: Callable[[ctypes.CDLL], str]
    advice: str


@dataclasses.dataclass(frozen=True)
class Place:
    """A copy of a library and how it was found."""

    path: str
    how: str


def _driver_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"driver for CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _cublaslt_version(library: ctypes.CDLL) -> str:
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    number = library.cublasLtGetVersion()
    # Since version 11 two digits for the minor and the patch number each.
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        return ""
    return f"{major.value}.{minor.value}"


KNOWN = (
    Library("libcuda", ("libcuda.so.1",), _driver_version, "install NVIDIA's driver"),
    Library(
        "cuBLASLt",
        ("libcublasLt.so.13", "libcublasLt.so.12"),
        _cublaslt_version,
        "install a CUDA build of torch, which brings it",
    ),
    Library(
        "NVRTC",
        ("libnvrtc.so.13", "libnvrtc.so.12"),
        _nvrtc_version,
        "install a CUDA build of torch, which brings it",
    ),
)
"""What a GPU is driven with."""


def find(library: Library) -> Place | None:
    """The copy that would be used; a second copy beside torch's own would not mix with it."""
    for search in (_loaded, _installed, _linked):
        for file in library.files:
            for place in search(file):
                return place
    return None


def folders() -> list[str]:
    """The folders of site-packages that may have CUDA libraries."""
    found = (glob.glob(os.path.join(glob.escape(f), "nvidia", "*", "lib")) for f in _packages())
    return [folder for several in found for folder in sorted(several)]


def version(library: Library, place: Place) -> str:
    """What the library says of itself; nothing if it cannot be asked."""
    try:
        return library.ask(ctypes.CDLL(place.path))
    except (OSError, AttributeError):
        return ""


def _loaded(file: str) -> Iterator[Place]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/")):
        if os.path.basename(path).startswith(file):
            yield Place(path, "loaded")


def _installed(file: str) -> Iterator[Place]:
    for path in (os.path.join(folder, file) for folder in folders()):
        if os.path.exists(path):
            yield Place(path, "in site-packages")


def _packages() -> list[str]:
    """Folders that packages are installed in, not the one that somebody happens to work in."""
    places = [sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]
    # Where torch itself was found, its libraries are: an environment need not be known to site.
    places.append(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))
    return list(dict.fromkeys(place for place in places if place and os.path.isabs(place)))


def _linked(file: str) -> Iterator[Place]:
    try:
        ctypes.CDLL(file)
    except OSError:
        return
    yield from (Place(place.path, "by the linker") for place in _loaded(file))
