"""Faults of the compiler and its surroundings: the model runs all the same, and nothing of it is lost."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hypatia
from hypatia import store
from hypatia.compiler import pipeline, program_cache
from hypatia.frontend.dynamo import collecting
from hypatia.verifier import compare, first_call
from support import assert_as_close_as_eager, fresh_dynamo

grad_modes = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


class Model(nn.Module):
    """Weights, buffers that change and random numbers: all that an interrupted call could spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.inner(x)), 0.25, self.training)


def model_and_input() -> tuple[Model, torch.Tensor]:
    return Model(), torch.randn(6, 8)


def assert_runs_like(twin: nn.Module, model: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> None:
    """The compiled model gives what an untouched copy gives in eager, and leaves the same behind."""
    torch.manual_seed(5)
    ours = call(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert_as_close_as_eager(ours, twin(x))
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert_as_close_as_eager(a, b, label=name)


class Raising:
    """A function that raises an error in its first call, before or after it does its work."""

    def __init__(self, function: Callable[..., Any], error: BaseException, *, late: bool = False) -> None:
        self.function, self.error, self.late = function, error, late
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            if self.late:
                self.function(*args, **kwargs)
            raise self.error
        return self.function(*args, **kwargs)


PLACES: dict[str, tuple[Any, str]] = {
    "capture": (pipeline, "capture"),
    "search": (program_cache._native, "optimize"),
    "rebuild": (pipeline, "rebuild"),
    "checked run": (first_call.CheckedCall, "run"),
    "comparison": (compare.Comparer, "compare"),
}


def planted(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, *, late: bool = False
) -> Raising:
    """Puts an error into a stage of the compiler."""
    owner, name = PLACES[place]
    raising = Raising(getattr(owner, name), error, late=late)
    # A plain function, so that it binds as a method does.
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: raising(*args, **kwargs))
    return raising


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("late", "grad"), [(False, True), (True, False)], ids=["before, training", "after, inference"]
)
def test_an_interrupted_compilation(
    monkeypatch: pytest.MonkeyPatch, place: str, late: bool, grad: bool
) -> None:
    """Ctrl-C in any stage, before or after its work: random numbers, weights and buffers are as before, and
    the same model compiles and runs afterwards."""
    model, x = model_and_input()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hypatia")
    raising = planted(monkeypatch, place, KeyboardInterrupt(), late=late)
    state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
        assert torch.equal(torch.get_rng_state(), state)
        for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
            assert torch.equal(a, b), name
        assert all(p.grad is None for p in model.parameters())
        with collecting() as reports:
            for _ in range(2):
                assert_runs_like(twin, model, compiled, x)
    assert raising.calls > 1, "the stage was not tried again"
    assert all(r.check is None or r.check.status == "passed" for r in reports)


@pytest.mark.parametrize("place", ["search", "rebuild", "comparison"])
@grad_modes
def test_an_interrupted_optimize(monkeypatch: pytest.MonkeyPatch, place: str, grad: bool) -> None:
    """The same for the direct call, on a model without buffers that change."""
    model, x = model_and_input()
    model.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    planted(monkeypatch, place, KeyboardInterrupt())
    with torch.set_grad_enabled(grad):
        with pytest.raises(KeyboardInterrupt):
            hypatia.optimize(model, x)
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert_as_close_as_eager(hypatia.optimize(model, x)(x), model(x))


@pytest.mark.parametrize(
    "place",
    [
        "capture",
        "search",
        "rebuild",
        "checked run",
        "comparison",
    ],
)
@grad_modes
@pytest.mark.filterwarnings("error::hypatia.errors.PrecisionWarning")
def test_an_internal_error_is_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, grad: bool
) -> None:
    """A bug of the compiler costs the user a log line, never the result, a buffer or a random number."""
    monkeypatch.setattr(pipeline, "raise_errors", False)
    model, x = model_and_input()
    twin = copy.deepcopy(model)
    planted(monkeypatch, place, RuntimeError("planted fault"), late=True)
    compiled = torch.compile(model, backend="hypatia")
    with torch.set_grad_enabled(grad), caplog.at_level(logging.WARNING, logger="hypatia"):
        for _ in range(2):
            assert_runs_like(twin, model, compiled, x)
    assert "planted fault" in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_an_internal_error_is_let_through_on_demand(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """With `raise_errors`, as in these suites, nothing is hidden by falling back."""
    assert pipeline.raise_errors
    planted(monkeypatch, place, RuntimeError("planted fault"))
    model, x = model_and_input()
    with pytest.raises(Exception, match="planted fault"):
        torch.compile(model.eval(), backend="hypatia")(x)


class Picky(nn.Module):
    """Raises in the middle: in Python, or in an op that only real values make fail."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.register_buffer("calls", torch.zeros(()))
        self.table = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor, scold: bool) -> torch.Tensor:
        self.calls += 1
        y = self.inner(x)
        if scold:
            raise ValueError(f"not with {y.shape[0]} rows")
        return y + self.table(index)


@grad_modes
def test_a_forward_that_raises(grad: bool) -> None:
    """Errors are eager's, in the first call and later; the calls between them are as good as ever."""
    model, x = Picky(), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hypatia")
    good, bad = torch.arange(6) % 5, torch.arange(6)
    with torch.set_grad_enabled(grad):
        for index, scold in ((bad, False), (good, False), (good, True), (bad, False), (good, False)):
            outcomes = []
            for call in (twin, compiled):
                torch.manual_seed(5)
                try:
                    outcomes.append(call(x, index, scold))
                except Exception as error:
                    outcomes.append(error)
            theirs, ours = outcomes
            if isinstance(theirs, Exception):
                assert type(ours) is type(theirs), repr(ours)
                assert str(ours) == str(theirs)
                # What ran before the error is eager's business alone.
                model.load_state_dict(twin.state_dict())
            else:
                assert_as_close_as_eager(ours, theirs)
    assert_as_close_as_eager(model.calls, twin.calls)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that keeps every program."""
    monkeypatch.setattr(program_cache, "WORTH_MS", 0.0)
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setenv("HYPATIA_CACHE", "on")
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


class Searches:
    """Counts how often the core is asked for a program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        native = program_cache._native.optimize

        def counted(*args: Any) -> Any:
            self.count += 1
            return native(*args)

        monkeypatch.setattr(program_cache._native, "optimize", counted)


def compile_anew(grad: bool = False) -> None:
    """Compiles the same model from the beginning, and compares with eager."""
    fresh_dynamo()
    torch.manual_seed(0)
    model, x = model_and_input()
    twin = copy.deepcopy(model)
    with torch.set_grad_enabled(grad):
        assert_runs_like(twin, model, torch.compile(model, backend="hypatia"), x)


@grad_modes
def test_a_program_from_disk(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    """What is found on disk is used, is checked, and has a proof that can be asked for."""
    searches = Searches(monkeypatch)
    compile_anew(grad)
    assert (searches.count, len(store.entries())) == (1, 1)
    with collecting() as reports:
        compile_anew(grad)
    assert searches.count == 1, "the program was searched again"
    (report,) = reports
    assert report.check.status == "passed"
    assert report.replay().holds
    fresh_dynamo()
    with torch.set_grad_enabled(grad):
        torch.compile(model_and_input()[0].inner, backend="hypatia")(torch.randn(6, 8))
    assert len(store.entries()) == 2, "two graphs share an entry"


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_corrupted_cache_file(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It counts as absent, and a whole one takes its place."""
    searches = Searches(monkeypatch)
    compile_anew()
    (entry,) = store.entries()
    spoil(entry.path, how)
    compile_anew()
    assert searches.count == 2
    compile_anew()
    assert searches.count == 2, "the spoilt file was not replaced"


def test_a_folder_in_place_of_a_cache_file(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as absent and stays, for it is not ours: the program is searched every time."""
    searches = Searches(monkeypatch)
    compile_anew()
    (entry,) = store.entries()
    entry.path.unlink()
    entry.path.mkdir()
    for count in (2, 3):
        compile_anew()
        assert searches.count == count
    assert entry.path.is_dir()
    assert files(cache_folder) == ["HYPATIA-CACHE"], "a half-written file was left behind"
    assert warnings_of_the_cache(caplog) == []


@pytest.mark.parametrize("content", [b"{}", b"[]", b"not json", b'{"emission": "{}"}', b"null"])
def test_a_whole_file_without_a_program(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """A file whose checksum fits, from a version that wrote something else: the program is searched again."""
    searches = Searches(monkeypatch)
    compile_anew()
    (entry,) = store.entries()
    store.put(entry.kind, entry.key, content)
    compile_anew()
    assert searches.count == 2


@pytest.mark.parametrize(
    "program", ["{}", '{"nodes": [], "root": 0, "weights": [], "origins": []}', "no json"]
)
def test_a_file_with_half_a_program(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """A program that cannot be rebuilt is searched again, and the whole one takes its place."""
    searches = Searches(monkeypatch)
    compile_anew()
    (entry,) = store.entries()
    kept = json.loads(store.get(entry.kind, entry.key))
    store.put(entry.kind, entry.key, json.dumps({**kept, "program": program}).encode())
    compile_anew()
    assert searches.count == 2
    assert program_in(entry) == kept["program"]


def program_in(entry: store.Entry) -> str:
    return json.loads(store.get(entry.kind, entry.key))["program"]


def exchanged(compile_another: Callable[[], Any]) -> store.Entry:
    """The entry of the model, which has the program of another one."""
    compile_anew()
    (entry,) = store.entries()
    compile_another()
    (other,) = (e for e in store.entries() if e.key != entry.key)
    assert program_in(other) != program_in(entry)
    store.put(entry.kind, entry.key, store.get(other.kind, other.key))
    return entry


def test_a_program_of_another_graph(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case: a whole program of the same inputs that computes something else. The check rolls it
    back, and the results are right."""
    monkeypatch.setattr(pipeline, "raise_errors", False)

    def with_tanh() -> None:
        with monkeypatch.context() as other:
            other.setattr(nn, "ReLU", nn.Tanh)
            compile_anew()

    exchanged(with_tanh)
    with pytest.warns(hypatia.VerificationWarning):
        compile_anew()


def test_a_program_of_a_graph_with_other_inputs(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fit, so that it is not used at all: the program is searched again and takes its place."""
    wide = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4))
    entry = exchanged(lambda: torch.compile(wide, backend="hypatia")(torch.randn(6, 8)))
    wrong = program_in(entry)
    searches = Searches(monkeypatch)
    compile_anew()
    assert searches.count == 1
    assert program_in(entry) != wrong
    compile_anew()
    assert searches.count == 1, "the program that does not fit was not replaced"


def files(cache_folder: Path) -> list[str]:
    """What is there beside the tuning database, which a plan writes by itself."""
    tuning = ("tuning.jsonl", "tuning.lock")
    return [p.name for p in cache_folder.rglob("*") if p.is_file() and p.name not in tuning]


def warnings_of_the_cache(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (r for r in caplog.records if r.name == "hypatia.store" and r.levelno >= logging.WARNING)
    return [r.getMessage() for r in records]


new_or_old = pytest.mark.parametrize("old", [False, True], ids=["new folder", "old folder"])


@pytest.mark.parametrize(
    "code", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=["read-only", "full", "denied"]
)
@new_or_old
def test_a_cache_folder_that_cannot_be_written(
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    old: bool,
) -> None:
    """Nothing is kept, one line says so, and compiling goes on."""
    if old:
        assert store.trouble() is None

    class Refusing:
        def get(self, *_: Any) -> None:
            return None

        def put(self, *_: Any) -> None:
            raise OSError(code, os.strerror(code))

        def tuning_folder(self) -> Path:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as refused:
        refused.setattr(store, "_store", Refusing)
        compile_anew()
        compile_anew()
    (said,) = warnings_of_the_cache(caplog)
    assert "nothing is kept" in said
    assert str(cache_folder) in said
    assert os.strerror(code) in said
    assert files(cache_folder) == ["HYPATIA-CACHE"] * old, "a half-written file was left behind"


@pytest.mark.parametrize("where", ["missing", "under a file", "removed"])
def test_a_missing_cache_folder(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """It is made when it is needed, and done without when that fails."""
    if where == "under a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path / "file" / "store"))
    compile_anew()
    if where == "removed":
        for path in sorted(cache_folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        cache_folder.rmdir()
        compile_anew()
    assert cache_folder.is_dir() == (where != "under a file")


@new_or_old
def test_an_interrupted_write_of_the_cache(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """Ctrl-C before a program is written: nothing is left of it, and the next compilation is whole."""
    if old:
        assert store.trouble() is None
    monkeypatch.setattr(store, "put", Raising(store.put, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        compile_anew()
    assert files(cache_folder) == ["HYPATIA-CACHE"] * old
    compile_anew()
    assert len(store.entries()) == 1
