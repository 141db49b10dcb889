"""What others put into a cache, a folder or a path is not run, not waited for and not removed."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fresh
import hypatia
from hypatia import _native, store
from hypatia.capture import records
from hypatia.compiler import program_cache
from hypatia.devices import cuda_libraries
from hypatia.errors import UnsupportedError
from hypatia.execute.binding import Binding
from hypatia.options import Options

KEY = "key"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HYPATIA_CACHE", "HYPATIA_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / store.NAME


def packed(key: str, data: bytes) -> bytes:
    """The content of a file of ours."""
    with tempfile.TemporaryDirectory() as place:
        made = _native.Store(place, 1 << 30)
        made.put("plan", key, data)
        (entry,) = made.entries()
        return entry[-1].read_bytes()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def run(code: str, **kwargs: Any) -> str:
    """What a process with the cache alone prints; a process that waits for a pipe would wait for ever."""
    load = (
        "import importlib, sys, types\n"
        "package = sys.modules['package'] = types.ModuleType('package')\n"
        f"package.__path__ = [{os.path.dirname(store.__file__)!r}]\n"
        "store = importlib.import_module('package.store')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", load + code], capture_output=True, text=True, timeout=60, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Programs from disk.


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.Tensor, str, dict[str, Any]]:
    """A model, its input, and what was kept of its program."""
    torch.manual_seed(0)
    monkeypatch.setattr(program_cache, "WORTH_MS", 0.0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 8)
    hypatia.optimize(model, x)
    (entry,) = store.entries()
    found = store.get(program_cache.KIND, entry.key)
    assert found is not None
    return model, x, entry.key, json.loads(found)


def _nodes(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], Any]:
    def poison(content: dict[str, Any]) -> None:
        program = json.loads(content["program"])
        change(program)
        content["program"] = json.dumps(program)

    return poison


def _first_op(name: str) -> Callable[[dict[str, Any]], Any]:
    def change(program: dict[str, Any]) -> None:
        at = next(i for i, (word, _) in enumerate(program["nodes"]) if "op" in word)
        program["nodes"][at][0] = {"op": name}

    return _nodes(change)


def _report(**parts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.update(report=json.dumps({**json.loads(content["report"]), **parts}))


POISONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a target": lambda c: c.update(program=c["program"].replace('"op":"', '"op":"load_library.')),
    "an op that is none": _first_op("load_library"),
    "an op with code in its name": _first_op('x"), __import__("os").system("true'),
    "an attribute of an object": _first_op("__class__.__mro__"),
    "a call that was not captured": _nodes(lambda p: p["nodes"].__setitem__(0, [{"opaque": 7}, []])),
    "an input that is not there": _nodes(lambda p: p["nodes"].__setitem__(0, [{"input": 999}, []])),
    "operands after their users": _nodes(lambda p: p["nodes"].__setitem__(0, [{"op": "relu"}, [5]])),
    "too few operands": _nodes(lambda p: p["nodes"].__setitem__(0, [{"op": "relu"}, []])),
    "a root that is not there": _nodes(lambda p: p.update(root=10**9)),
    "another root": _nodes(lambda p: p.update(root=0)),
    "live values as weights": _nodes(lambda p: p.update(weights=[True] * len(p["nodes"]))),
    "records that were not captured": _nodes(lambda p: p.update(origins=[10**6] * len(p["nodes"]))),
    "fewer parts": _nodes(lambda p: p.update(origins=[])),
    "no program": lambda c: c.update(program=None),
    "a number for a program": lambda c: c.update(program=7),
    "no report": lambda c: c.pop("report"),
    "a report of something else": lambda c: c.update(report="[]"),
    "a report with text for a number": _report(cost_after="<script>"),
    "deep lists": lambda c: c.update(program="[" * 100_000),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_program_is_searched_again_and_runs_nothing(
    name: str, kept: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model, x, key, content = kept
    ran: list[Any] = []
    monkeypatch.setattr(torch.ops, "load_library", lambda *a: ran.append(a))
    monkeypatch.setattr(os, "system", lambda *a: ran.append(a))
    before = json.dumps(content)
    POISONS[name](content)
    assert json.dumps(content) != before
    store.put(program_cache.KIND, key, json.dumps(content).encode())
    with caplog.at_level(logging.DEBUG, "hypatia"):
        graph = hypatia.optimize(model, x)
    torch.testing.assert_close(graph(x), model(x))
    assert ran == []
    assert warnings(caplog) == []
    assert "fused_mlp" in str(graph.graph), "it is compiled all the same"
    again = store.get(program_cache.KIND, key)
    assert again is not None
    assert json.loads(again)["program"] == json.loads(before)["program"]


def test_entries_of_the_old_form_with_calls_of_their_own_are_not_read(kept: Any) -> None:
    model, x, key, content = kept
    call = {"kind": "call", "op": "relu", "target": "load_library", "args": [{"str": "./evil.so"}]}
    call |= {"id": 0, "origin": None, "folded": False, "body": None}
    content["emission"] = json.dumps({"nodes": [call], "outputs": [0]})
    store.put(program_cache.KIND, key, json.dumps(content).encode())
    torch.testing.assert_close(hypatia.optimize(model, x)(x), model(x))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "null", "7", '"x"', "[]", "\ud800".encode("utf-8", "ignore").decode()]
)
def test_an_entry_that_is_no_program_is_searched_again(text: str, kept: Any) -> None:
    model, x, key, _ = kept
    store.put(program_cache.KIND, key, text.encode())
    torch.testing.assert_close(hypatia.optimize(model, x)(x), model(x))


def test_a_whole_program_is_used_and_not_searched_again(kept: Any, monkeypatch: Any) -> None:
    model, x, _, _ = kept
    searched: list[Any] = []
    monkeypatch.setattr(program_cache, "_searched", lambda *a: searched.append(a))
    torch.testing.assert_close(hypatia.optimize(model, x)(x), model(x))
    assert searched == []


@pytest.mark.parametrize(
    "name",
    [
        "load_library",
        "loaded_libraries.add",
        "aten.relu",
        "aten.load_library.default",
        "aten.relu.default.__class__",
        "aten.__class__.__init__",
        "aten.relu.__class__",
        "aten.relu.op",
        "__dict__.clear",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "os.system",
        "",
        "..",
    ],
)
def test_a_name_that_is_no_op_of_torch_is_not_resolved(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is no op of torch"):
        records.resolve(name)
    assert records.resolve("aten.relu.default") is torch.ops.aten.relu.default


# Folders.


def test_folders_and_files_are_private(cache_folder: Path) -> None:
    before = os.umask(0)
    try:
        store.put("plan", KEY, b"data")
        assert store.tuning_folder() == cache_folder / "tuning"
    finally:
        os.umask(before)
    modes = {
        p.relative_to(cache_folder).as_posix(): p.stat().st_mode & 0o777
        for p in (cache_folder, *cache_folder.rglob("*"))
    }
    assert {m for n, m in modes.items() if (cache_folder / n).is_dir()} == {0o700}
    assert {m for n, m in modes.items() if (cache_folder / n).is_file()} == {0o600}


@pytest.mark.parametrize("part", ["", "plan"])
@pytest.mark.parametrize("how", ["foreign", "group", "world"])
def test_a_folder_that_others_may_write_is_refused(
    how: str, part: str, cache_folder: Path, caplog: Any
) -> None:
    if how == "foreign" and os.geteuid() != 0:
        pytest.skip("only root may give a folder away")
    store.put("plan", KEY, b"data")
    path = cache_folder / part
    if how == "foreign":
        os.chown(path, 12345, -1)
    else:
        path.chmod(0o770 if how == "group" else 0o707)
    before = sorted(cache_folder.rglob("*"))
    assert store.get("plan", KEY) is None
    store.put("plan", "other", b"data")
    assert store.clear() == 0
    assert sorted(cache_folder.rglob("*")) == before
    (warning,) = warnings(caplog)
    assert str(path) in warning or part in warning
    assert ("belongs to" if how == "foreign" else "others may write") in warning


def test_no_measurements_from_a_folder_that_others_may_write(cache_folder: Path) -> None:
    cache_folder.mkdir(mode=0o700)
    cache_folder.chmod(0o777)
    assert store.tuning_folder() is None
    assert list(cache_folder.iterdir()) == []


def test_a_folder_below_one_that_everybody_may_exchange_is_refused(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(shared))
    shared.chmod(0o777)
    store.put("plan", KEY, b"data")
    assert store.get("plan", KEY) is None
    assert "everybody may write" in warnings(caplog)[0]
    # In a folder like /tmp everybody may remove only his own.
    shared.chmod(0o1777)
    store.put("plan", KEY, b"data")
    assert store.get("plan", KEY) == b"data"


def test_a_link_in_place_of_the_folder_is_refused(cache_folder: Path, tmp_path: Path, caplog: Any) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    cache_folder.symlink_to(other)
    store.put("plan", KEY, b"data")
    assert store.get("plan", KEY) is None
    assert list(other.iterdir()) == []
    assert "is a link" in warnings(caplog)[0]


def test_a_folder_of_somebody_else_with_our_name_is_left_alone(cache_folder: Path, caplog: Any) -> None:
    (cache_folder / "plan").mkdir(parents=True)
    theirs = cache_folder / "plan" / f"{'a' * 40}.entry"
    theirs.write_bytes(packed("theirs", b"x" * 100))
    store.put("plan", KEY, b"data")
    assert store.get("plan", KEY) is None
    assert store.clear() == 0
    assert store.entries() == []
    assert theirs.exists()
    assert "has no file" in warnings(caplog)[0]


# Entries.


def _entry(cache_folder: Path) -> Path:
    """Where the entry of the key is, without one."""
    store.put("plan", KEY, b"data")
    (path,) = cache_folder.rglob("*.entry")
    path.unlink()
    return path


def _as_socket(path: Path) -> None:
    # Names of sockets are short.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _as_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(packed(KEY, b"data"))
        file.truncate(60 << 30)
    path.chmod(0o600)


def _as_link(path: Path) -> None:
    target = path.parent.parent.parent / "target"
    target.write_bytes(packed(KEY, b"planted"))
    target.chmod(0o600)
    path.symlink_to(target)


def _as_shared(path: Path) -> None:
    path.write_bytes(packed(KEY, b"planted"))
    path.chmod(0o666)


ODD: dict[str, Callable[[Path], Any]] = {
    "a pipe": lambda path: os.mkfifo(path, 0o600),
    "60 GB": _as_sparse,
    "a link": _as_link,
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: (path / "inner").mkdir(parents=True),
    "a socket": _as_socket,
    "a file that others may write": _as_shared,
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_entry_counts_as_absent_and_nobody_waits(
    name: str, cache_folder: Path, tmp_path: Path
) -> None:
    path = _entry(cache_folder)
    ODD[name](path)
    target = tmp_path / "target"
    before = target.read_bytes() if target.exists() else None
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
    code = f"print(store.get('plan', {KEY!r}), [e.key for e in store.entries()][:3], store.clear())"
    assert run(limit + code).startswith("None")
    # It may be replaced, by its name, but not written or followed.
    found = run(f"store.put('plan', {KEY!r}, b'new'); print(store.get('plan', {KEY!r}))")
    assert found == ("None" if name == "a folder" else "b'new'")
    assert (path / "inner").is_dir() or name != "a folder"
    if before is not None:
        assert target.read_bytes() == before


@pytest.mark.parametrize("name", ODD)
def test_odd_measurements_count_as_absent_and_nobody_waits(name: str, cache_folder: Path) -> None:
    folder = store.tuning_folder()
    assert folder is not None
    (cache_folder / "plan").mkdir(mode=0o700)
    ODD[name](folder / "tuning.jsonl")
    assert run("print(store.measurements(), store.clear())") == "0 0"
    load = f"from hypatia import _native as n; n.tuning_folder({str(folder)!r}); print(n.tuning_entries())"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_files_of_others_stay(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in "abcd":
        store.put("plan", key, bytes(1000))
    tuning = store.tuning_folder()
    assert tuning is not None
    ours, outside = "f" * 40, tmp_path / "work"
    (outside / "plan").mkdir(parents=True)
    (cache_folder / "Notes").mkdir()
    theirs = [
        tmp_path / "notes.tmp",
        outside / "x.tmp",
        outside / "plan" / f"{ours}.entry",
        cache_folder / "notes.txt",
        cache_folder / "x.entry",
        cache_folder / "plan" / "x.tmp",
        cache_folder / "plan" / "x.entry",
        cache_folder / "plan" / f"{ours}.entry",
        cache_folder / "Notes" / f"{ours}-1-0123456789ab.tmp",
        tuning / "tuning.txt",
        tuning / "tuning.part",
        tuning / "tuning.jsonl",
    ]
    for path in theirs:
        path.write_bytes(b"of somebody else" * 100)
        path.chmod(0o600)
        os.utime(path, (1000, 1000))
    link, folder = cache_folder / "plan" / f"{'e' * 40}.entry", cache_folder / "plan" / f"{'d' * 40}.entry"
    link.symlink_to(theirs[0])
    (folder / "inner").mkdir(parents=True)
    (cache_folder / "linked").symlink_to(outside)
    monkeypatch.setenv("HYPATIA_CACHE_SIZE", "3K")
    store.put("plan", "e", bytes(1000))
    assert len(store.entries()) < 5
    assert store.clear() > 0
    assert store.entries() == []
    for path in theirs:
        assert path.read_bytes() == b"of somebody else" * 100, path
    assert link.is_symlink()
    assert (folder / "inner").is_dir()


# Libraries.


def test_libraries_are_not_looked_for_in_the_working_folder(tmp_path: Path, monkeypatch: Any) -> None:
    planted = tmp_path / "nvidia" / "cuda" / "lib"
    planted.mkdir(parents=True)
    for library in cuda_libraries.KNOWN:
        (planted / library.files[0]).write_bytes(b"planted")
    monkeypatch.chdir(tmp_path)
    for place in ("", ".", str(tmp_path)):
        monkeypatch.syspath_prepend(place)
    assert not [f for f in cuda_libraries.folders() if not os.path.isabs(f) or f.startswith(str(tmp_path))]
    for library in cuda_libraries.KNOWN:
        found = cuda_libraries.find(library)
        assert found is None or not found.path.startswith(str(tmp_path))


# The process that we are a guest of.


class Looking(nn.Module):
    """Looks around while it is traced."""

    def __init__(self, bystander: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 2.0
        self.others = [nn.LeakyReLU(0.1)]
        object.__setattr__(self, "look", _Look(bystander))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look(self)
        return self.others[0](self.layer(x)) * self.scale


class _Look:
    def __init__(self, bystander: nn.Module) -> None:
        self.bystander = bystander
        self.seen: set[Any] = set()

    def __call__(self, model: nn.Module) -> None:
        same = (
            model.__class__ is Looking,
            isinstance(model.layer, nn.Linear),
            type(self.bystander) is nn.Linear,
        )
        self.seen.add(("__getattribute__" in vars(nn.Module), "__getattribute__" in vars(nn.Linear), *same))
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(model.scale))
        thread.start()
        thread.join()
        self.seen.add(len(other))


def test_tracing_patches_nothing_that_others_use() -> None:
    bystander = nn.Linear(4, 4)
    model, x = Looking(bystander), torch.randn(2, 4)
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert model.look.seen == {(False, False, True, True, True), 1}
        assert (type(model), type(model.layer)) == (Looking, nn.Linear)
        for change in (
            lambda: setattr(model, "scale", 3.0),
            lambda: setattr(model.others[0], "negative_slope", 0.7),
        ):
            change()
            torch.testing.assert_close(compiled(x), model(x))


def test_threads_that_trace_the_same_model_see_all_reads() -> None:
    from hypatia.capture.attribute_reads import reading

    model, barrier, seen = nn.Sequential(nn.LeakyReLU(0.1)), threading.Barrier(2), []

    def trace(first: bool) -> None:
        with reading(list(model.modules())) as reads:
            barrier.wait()
            if not first:
                barrier.wait()
            model(torch.ones(2))
            seen.append("negative_slope" in reads[id(model[0])][1])
        if first:
            barrier.wait()

    threads = [threading.Thread(target=trace, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]
    assert (type(model), type(model[0])) == (nn.Sequential, nn.LeakyReLU)


def test_backward_passes_stay_in_autograds_threads_unless_asked() -> None:
    assert Options().backward_in_caller is False
    assert Options.parse({"backward_in_caller": True}).backward_in_caller is True


LIMITED = """
import contextlib, faulthandler, resource, torch, hypatia
from hypatia import _native
from hypatia.execute.binding import Binding

# Whoever waits says where.
faulthandler.dump_traceback_later(150, exit=True)

@contextlib.contextmanager
def less_than(size):
    '''So many bytes are not there: neither new nor what was freed before.'''
    limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    taken = []
    try:
        with contextlib.suppress(RuntimeError):
            while len(taken) < 100:
                taken.append(torch.empty(size, dtype=torch.uint8))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

bind, seen = Binding._bound_plan, []
"""

MEMORY = """
model, x = torch.nn.Linear(4096, 4096), torch.randn(64, 4096)

def limited(*args, **kwargs):
    with less_than(4096 * 4096 * 4):
        try:
            bound = bind(*args, **kwargs)
            seen.append("bound")
            return bound
        except _native.HypatiaError as e:
            seen.append("memory" if "there is no memory" in str(e) else str(e))
            raise

Binding._bound_plan = limited
with torch.no_grad():
    compiled = hypatia.compile(model, x)
    torch.testing.assert_close(compiled(x), model(x))
print(*sorted(set(seen)))
"""

PANIC = """
class Product(torch.nn.Module):
    def forward(self, x, y):
        return torch.relu(x @ y)

# The right factor is packed at every call, into memory of its own.
model, x, y = Product(), torch.randn(256, 1 << 16), torch.randn(1 << 16, 40)

def limited(binding, *args):
    bound = bind(binding, *args)
    given = [(x, y)[i] for i in binding.inputs]
    with less_than(y.nbytes):
        try:
            bound(1, *given)
        except BaseException as e:
            seen.append(f"{type(e) is _native.HypatiaError} {e}")
    (result,) = bound(1, *given)
    torch.testing.assert_close(result, model(x, y), rtol=1e-4, atol=1e-2)
    return bound

Binding._bound_plan = limited
with torch.no_grad():
    hypatia.compile(model, x, y, verify="off")
print(*seen, sep="\\n")
"""


def without_memory(code: str) -> list[str]:
    """The lines that a process prints whose memory is limited for a while."""
    done = fresh.run(LIMITED + code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc")
def test_no_memory_for_weights_is_an_error_of_ours_and_the_graph_runs() -> None:
    """For so many rows every kind of kernel has a copy of the weights."""
    assert without_memory(MEMORY) == ["memory"]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc")
def test_a_panic_is_an_error_of_ours_and_the_plan_runs_afterwards() -> None:
    """Kernels that find no memory panic."""
    (said,) = without_memory(PANIC)
    assert said.startswith("True internal error: the compiler panicked: there is no memory for "), said


def test_a_plan_that_cannot_be_bound_leaves_the_call_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a mistake of ours is, the user has a result, and the log has the reason."""

    def fails(*_: Any) -> Any:
        raise ValueError("a constant is no dense one")

    monkeypatch.setattr(Binding, "_bound_plan", fails)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))
    assert "cannot be bound after an internal error" in caplog.text
    assert compiled.reports[0].kept != "plan"


def test_other_threads_run_while_a_plan_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing large weights takes long. No thread gives way here but one that waits or leaves Python."""
    bind, seen, over = Binding._bound_plan, [0], threading.Event()
    during: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = seen[0]
        bound = bind(*args, **kwargs)
        during.append(seen[0] - before)
        return bound

    def count() -> None:
        while not over.wait(1e-4):
            seen[0] += 1

    monkeypatch.setattr(Binding, "_bound_plan", counted)
    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1e6)
        with torch.no_grad():
            for _ in range(20):
                if not any(during):
                    hypatia.compile(nn.Linear(1024, 1024), torch.randn(8, 1024))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert any(during)


LATE = """
import os, sys, torch
from torch import fx, nn
from hypatia.execute.folding import FoldedWeights

class Sum(nn.Module):
    def forward(self, a, b):
        return (a + b,)

folded = FoldedWeights(fx.symbolic_trace(Sum()))
weights = [torch.randn(3) for _ in range(2)]
folded(*weights)
# Modules are taken apart in the order of their age: these are gone last.
sys.kept, os.kept = folded, weights
del weights
"""

BLOCKS = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).reshape(b, t, d))

blocks = [Attention().eval() for _ in range(2)]
compiled = [torch.compile(block, backend="hypatia") for block in blocks]
with torch.no_grad():
    for _ in range(2):
        for block in compiled:
            block(torch.randn(2, 8, 32))
"""


@pytest.mark.parametrize("code", [LATE, BLOCKS], ids=["weights that go last", "attention blocks"])
def test_a_process_ends_without_a_word(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
