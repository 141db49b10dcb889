"""The store on disk: what is put is found again, and no state of the disk is an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypatia import store

MARKER = "HYPATIA-CACHE"
OURS = "0123456789" * 4
"""The name of a file of ours, without an ending."""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HYPATIA_CACHE", "HYPATIA_CACHE_SIZE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / store.NAME


def files(cache_folder: Path) -> list[Path]:
    """All but the marker."""
    return [p for p in cache_folder.rglob("*") if p.is_file() and p.name != MARKER]


def only_file(cache_folder: Path) -> Path:
    (path,) = files(cache_folder)
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_is_put_is_found_again(cache_folder: Path) -> None:
    store.put("plan", "a key\nof any text: \u00fc", b"\0bytes\xff")
    store.put("plan", "empty", b"")
    assert store.get("plan", "a key\nof any text: \u00fc") == b"\0bytes\xff"
    assert store.get("plan", "empty") == b""
    assert store.get("plan", "other") is None
    assert store.get("times", "empty") is None
    store.put("plan", "empty", b"new")
    assert store.get("plan", "empty") == b"new"
    assert store.trouble() is None
    assert sorted(p.name for p in cache_folder.iterdir()) == [MARKER, "plan"]


def test_entries_and_clear(cache_folder: Path) -> None:
    assert store.entries() == []
    for kind, key in (("plan", "a"), ("times", "b")):
        store.put(kind, key, b"data")
    assert {(e.kind, e.key) for e in store.entries()} == {("plan", "a"), ("times", "b")}
    assert all(e.size == e.path.stat().st_size > 4 for e in store.entries())
    unfinished = cache_folder / "plan" / f"{OURS}-1-0123456789ab.tmp"
    unfinished.write_bytes(b"half")
    assert store.clear() == 2
    assert store.entries() == []
    assert not unfinished.exists()
    assert store.get("plan", "a") is None


def test_entries_of_versions_before_are_not_shown_and_give_way(cache_folder: Path) -> None:
    store.put("plan", "a", b"data")
    old = cache_folder / "plan" / f"{OURS}.entry"
    old.write_bytes(b"HYPATIA\0" + (2).to_bytes(4, "little") + bytes(100))
    old.chmod(0o600)
    assert [e.key for e in store.entries()] == ["a"]
    assert store.clear() == 2
    assert not old.exists()


def test_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPATIA_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "hypatia-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.folder() == tmp_path / ".cache" / "hypatia-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "hypatia-cache"


def test_off_means_off(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("plan", "a", b"data")
    monkeypatch.setenv("HYPATIA_CACHE", "off")
    assert store.get("plan", "a") is None
    store.put("plan", "b", b"data")
    assert [e.key for e in store.entries()] == ["a"]


def test_a_wrong_kind_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="a kind is made of"):
        store.put("../plan", "a", b"")


def _version_moved(content: bytes) -> bytes:
    return content[:8] + (99).to_bytes(4, "little") + content[12:]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: b"",
        lambda c: c[:5],
        lambda c: c[:-1],
        lambda c: c + b"x",
        lambda c: c[:-1] + bytes([c[-1] ^ 1]),
        lambda c: b"garbage" * 100,
        lambda c: c[:12] + b"\xff\xff\xff\xff" + c[16:],
        _version_moved,
    ],
    ids=["empty", "no head", "truncated", "longer", "one bit", "garbage", "key length", "version"],
)
def test_a_broken_file_counts_as_absent_and_goes(cache_folder: Path, spoil: Any, caplog: Any) -> None:
    store.put("plan", "key", b"some data")
    path = only_file(cache_folder)
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.DEBUG, "hypatia"):
        assert store.get("plan", "key") is None
    assert not path.exists()
    assert "counts as absent" in caplog.text
    assert warnings(caplog) == []
    store.put("plan", "key", b"again")
    assert store.get("plan", "key") == b"again"


def test_a_file_of_another_key_is_not_taken(cache_folder: Path) -> None:
    store.put("plan", "key", b"data")
    path = only_file(cache_folder)
    store.put("plan", "other", b"other")
    (other,) = [p for p in cache_folder.rglob("*.entry") if p != path]
    path.write_bytes(other.read_bytes())
    assert store.get("plan", "key") is None


def test_a_folder_in_place_of_a_file(cache_folder: Path) -> None:
    store.put("plan", "key", b"data")
    path = only_file(cache_folder)
    path.unlink()
    (path / "inner").mkdir(parents=True)
    assert store.get("plan", "key") is None
    store.put("plan", "key", b"again")
    assert store.get("plan", "key") is None
    assert (path / "inner").is_dir(), "it is not ours to remove"
    assert list(cache_folder.rglob("*.tmp")) == [], "what could not be renamed goes"
    store.put("plan", "other", b"data")
    assert store.get("plan", "other") == b"data"


def test_a_file_in_place_of_the_folder_is_one_warning(cache_folder: Path, caplog: Any) -> None:
    cache_folder.write_text("in the way")
    for i in range(3):
        store.put("plan", str(i), b"data")
        assert store.get("plan", str(i)) is None
    assert len(warnings(caplog)) == 1
    assert str(cache_folder) in warnings(caplog)[0]
    assert store.entries() == []
    assert store.clear() == 0
    assert store.trouble()
    assert cache_folder.read_text() == "in the way"


LOAD = """
import importlib, os, resource, sys, types
package = sys.modules["package"] = types.ModuleType("package")
package.__path__ = [os.path.dirname(sys.argv[1])]
store = importlib.import_module("package.store")
"""
"""The module is loaded from its file: torch, which the package imports, would take most of the time."""

FAULTS = {
    "no file can be opened": ("limit(resource.RLIMIT_NOFILE, 0)", "Too many open files"),
    "no file can be written": ("limit(resource.RLIMIT_FSIZE, 0)", "File too large"),
    "the disk is full after some bytes": ("limit(resource.RLIMIT_FSIZE, 10_000)", "File too large"),
    "the user may not write": ("os.chmod(store.folder() / 'plan', 0o500); nobody()", "Permission denied"),
}

FAULTY = """
def limit(what, most):
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))

def nobody():
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
"""


@pytest.fixture
def readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that every user may look into: the folders of pytest are for one alone."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("HYPATIA_CACHE_DIR", place)
        store.put("plan", "old", b"data")
        for path in (Path(place) / store.NAME).rglob(""):
            path.chmod(0o755)
        (Path(place) / store.NAME / MARKER).chmod(0o644)
        yield Path(place) / store.NAME


def run(code: str) -> tuple[str, str]:
    """What a process with the store alone prints, and what it warns of."""
    command = [sys.executable, "-c", LOAD + FAULTY + code, store.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_written(fault: str, readable: Path) -> None:
    happen, said = FAULTS[fault]
    code = f"{happen}\nfor key in ('a', 'b', 'old'): store.put('plan', key, b'data' * 10_000)\n"
    if "after some bytes" not in fault:
        code += "print(store.trouble())"
    trouble, warned = run(code)
    assert said in trouble or "after some bytes" in fault
    assert len(warned.splitlines()) == 1
    assert said in warned
    (readable / "plan").chmod(0o700)
    assert store.get("plan", "a") is None
    assert store.get("plan", "old") == b"data"
    assert list(readable.rglob("*.tmp")) == []


def test_an_unreadable_file_counts_as_absent(readable: Path) -> None:
    assert run("print(store.get('plan', 'old'))") == ("b'data'", "")
    (path,) = readable.rglob("*.entry")
    path.chmod(0)
    assert run("nobody(); print(store.get('plan', 'old'))") == ("None", "")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_a_folder_that_cannot_be_made(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("HYPATIA_CACHE_DIR", "/proc/self/hypatia")
    for key in "ab":
        store.put("plan", key, b"data")
        assert store.get("plan", key) is None
    assert len(warnings(caplog)) == 1


def test_a_file_that_another_thread_cleared_is_no_warning(caplog: Any) -> None:
    over = threading.Event()

    def clear() -> None:
        while not over.is_set():
            store.clear()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(300):
            store.put("plan", "key", b"data")
            assert store.get("plan", "key") in (None, b"data")
    finally:
        over.set()
        thread.join()
    assert warnings(caplog) == []


def test_no_home(monkeypatch: Any, caplog: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("HYPATIA_CACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        store.put("plan", "key", b"data")
        assert store.get("plan", "key") is None
    assert len(warnings(caplog)) == 1
    assert store.trouble() == "there is no home folder"
    assert store.entries() == []
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_goes_first(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, key in enumerate("abcd"):
        store.put("plan", key, bytes(1000))
        (entry,) = [e for e in store.entries() if e.key == key]
        os.utime(entry.path, (1000 + i, 1000 + i))
    assert store.get("plan", "a") is not None
    stale, fresh = (cache_folder / "plan" / f"{OURS}-{n}-0123456789ab.tmp" for n in (1, 2))
    stale.write_bytes(b"")
    fresh.write_bytes(b"")
    os.utime(stale, (1000, 1000))
    monkeypatch.setenv("HYPATIA_CACHE_SIZE", "4K")
    store.put("plan", "e", bytes(1000))
    assert {e.key for e in store.entries()} == {"a", "d", "e"}
    assert fresh.exists()
    assert not stale.exists()
    store.put("plan", "huge", bytes(5000))
    assert {e.key for e in store.entries()} == {"a", "d", "e"}


@pytest.mark.parametrize(
    ("text", "size"), [("100", 100), ("2k", 2048), ("1.5M", 3 << 19), ("1 GiB", 1 << 30), ("", 512 << 20)]
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("HYPATIA_CACHE_SIZE", text)
    assert store.size_limit() == size


def test_a_wrong_size_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("HYPATIA_CACHE_SIZE", "plenty")
    assert store.size_limit() == store.size_limit() == store.DEFAULT_SIZE
    assert len(warnings(caplog)) == 1


WRITER = f"""{LOAD}
me = sys.argv[2].encode()
for i in range(150):
    for key in "ab":
        store.put("plan", key, me * 3000)
        found = store.get("plan", key)
        assert found is None or (len(found) == 3000 and len(set(found)) == 1), found
    if me == b"z" and i % 10 == 0:
        store.clear()
"""


def test_processes_share_a_folder(cache_folder: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", WRITER, store.__file__, name], stderr=subprocess.PIPE)
        for name in "xyz"
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=250)
        assert worker.returncode == 0, errors.decode()
        assert errors == b""
    assert list(cache_folder.rglob("*.tmp")) == []


def test_threads_share_a_folder() -> None:
    wrong: list[Any] = []

    def work(letter: bytes) -> None:
        for _ in range(100):
            store.put("plan", "key", letter * 2000)
            found = store.get("plan", "key")
            if found is None or len(found) != 2000 or len(set(found)) != 1:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"x", b"y", b"z")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_killed_writer_leaves_nothing_that_is_read(cache_folder: Path) -> None:
    code = WRITER.replace("range(150)", "range(10**9)")
    worker = subprocess.Popen([sys.executable, "-c", code, store.__file__, "x"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not list(cache_folder.rglob("*.entry")) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    assert store.get("plan", "a") in (None, b"x" * 3000)
    store.clear()
    assert files(cache_folder) == []
