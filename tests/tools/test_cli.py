"""The command line as a person uses it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import fresh
import hypatia
from hypatia import _native, faults, store, timeline
from hypatia.devices import cuda_libraries
from hypatia.tools import bench, doctor, measure, peers
from hypatia.tools.cli import cli
from hypatia.tools.cli.bench_page import COLOURS, page
from hypatia.tools.cli.output import check_targets
from hypatia.verifier.verify import Errors, Verification

bench_command = importlib.import_module("hypatia.tools.cli.bench")

COMMANDS = ("bench", "cache", "demo", "doctor", "explain", "rules", "verify")

MODELS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), (torch.randn(3, 6),)

def keywords():
    return nn.MultiheadAttention(8, 2, batch_first=True).eval(), (), dict.fromkeys(
        ("query", "key", "value"), torch.randn(2, 3, 8))

ready = build()
class Holder:
    build = staticmethod(build)

def bare(): return nn.Linear(3, 3)
def four(): return 1, 2, 3, 4
def swapped(): return torch.ones(3), nn.Linear(3, 3)
def text(): return nn.Linear(3, 3), "inputs"
def listed(): return nn.Linear(3, 3), (), []
def broken(): raise ValueError("no\\nluck")
def hungry(size): return build()
model = nn.Linear(3, 3)
number = 3
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with models to work in, a store of its own, and an untouched import path."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "wrong.py").write_text("import no_such_thing\n")
    (tmp_path / "syntax.py").write_text("def\n")
    (tmp_path / "quits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPATIA_CACHE", "on")
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("HYPATIA_CACHE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models", "wrong", "syntax", "quits"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch._dynamo.reset()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def good(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def bad(*arguments: str) -> str:
    """The one line on standard error of a command that was called wrongly."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("hypatia: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]], ids=" ".join)
def test_help_and_version_need_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hypatia", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {
        line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")
    }
    assert "hypatia.tools.cli.bench" in imported
    assert not {"torch", "rich.console", "jinja2"} & imported
    assert _native.__version__ in done.stdout or "Usage: hypatia" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    text = good(command, "--help")
    assert re.search(rf"hypatia {command}", text.split("Example", 1)[1])
    assert command in good("--help")


@pytest.mark.parametrize("arguments", [[], ["cache"]], ids=["hypatia", "cache"])
def test_a_group_alone_shows_its_help(arguments: list[str]) -> None:
    text = good(*arguments)
    assert "Usage: hypatia" in text
    assert "Commands:\n" in text


def test_a_reader_may_go_away() -> None:
    command = f"{sys.executable} -m hypatia rules --json | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rles"], "No such command 'rles'"),
        (["doctor", "--jsn"], "No such option '--jsn'"),
        (["explain"], "Missing argument 'MODULE:FACTORY'. (see hypatia explain --help)"),
        (["verify", "bert-bas"], "there is no workload 'bert-bas'; did you mean 'bert-base'?"),
        (["verify", "zzz"], "there are tiny_b64, "),
        (["verify", "none.py:build"], "there is no file none.py"),
        (["verify", "no.such:build"], "there is no module 'no' here"),
        (["verify", "wrong.py:build"], "wrong.py cannot be imported: No module named 'no_such_thing'"),
        (["verify", "wrong:build"], "wrong cannot be imported: No module named 'no_such_thing'"),
        (["verify", "syntax.py:build"], "syntax.py cannot be imported: SyntaxError"),
        (["verify", "quits.py:build"], "quits.py cannot be imported: SystemExit"),
        (["verify", "models.py:biuld"], "models.py has no 'biuld'; it defines build, keywords, Holder"),
        (["verify", "models.py:bare"], "models.py:bare returned a Linear; it must return (model, inputs) or"),
        (["verify", "models.py:four"], "returned 4 values"),
        (["verify", "models.py:swapped"], "a Tensor where the model should be"),
        (["verify", "models.py:text"], "a str where the inputs should be"),
        (["verify", "models.py:listed"], "a list where the keyword arguments should be"),
        (["verify", "models.py:broken"], "models.py:broken() failed: ValueError: no luck"),
        (["verify", "models.py:hungry"], "missing 1 required positional argument: 'size'"),
        (["verify", "models.py:model"], "is a model without inputs"),
        (["verify", "models.py:number"], "is 3, not a function"),
        (["verify", "models.py:build", "--device", "tpu9"], "'tpu9' is no device"),
        (["verify", "models.py:build", "--against", "gcc"], "there is no backend 'gcc'; there are"),
        (["verify", "models.py:build", "--option", "numerics"], "takes key=value, not 'numerics'"),
        (["verify", "models.py:build", "--option", "numeric=exact"], "has no option 'numeric'"),
        (["explain", "models.py:build", "--option", "node_limit=x"], "'node_limit' must be int, not 'x'"),
        (["bench", "tiny"], "there is no workload 'tiny'"),
        (["bench", "models.py:biuld"], "models.py has no 'biuld'"),
        (["bench", "models.py:bare"], "models.py:bare returned a Linear; it must return (model, inputs) or"),
        (["bench", "--backend", "gcc"], "'gcc' is not one of"),
        (["bench", "tiny_b64", "--backend", "eager-graph", "--device", "cpu"], "eager-graph"),
        (["rules", "fuse-linear-rleu"], "close to it are fuse-linear-relu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    assert message in bad(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line() -> None:
    for command in (["verify", "models.py:build"], ["bench", "tiny_b64"]):
        assert "no GPU found" in bad(*command, "--device", "cuda")


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "verify", "models.py:broken")
    assert isinstance(result.exception, Exception)
    assert isinstance(result.exception.__cause__, ValueError)
    assert "no luck" in bad("verify", "models.py:broken")


def test_internal_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(hypatia, "verify", fail)
    assert bad("verify", "models.py:build") == "hypatia: RuntimeError: first second\n"


@pytest.mark.parametrize(
    "name",
    ["models.py:build", "models:build", "models.py:ready", "models:Holder.build", "models.py:keywords"],
)
def test_verify(name: str) -> None:
    text = good("verify", name)
    assert "verification passed" in text
    assert re.search(r"0 +hypatia +\d\.\d\de", text)


def test_verify_training_compares_gradients() -> None:
    plain = json.loads(good("verify", "models.py:build", "--json"))
    trained = json.loads(good("verify", "models.py:build", "--training", "--json"))
    assert [len(run["results"]) for run in (plain, trained)] == [1, 5]
    assert trained["ok"]


def test_verify_fails_with_exit_code_1() -> None:
    with faults.wrong_kernel():
        result = run("verify", "models.py:build", "--option", "verify=off")
    assert result.exit_code == 1
    assert "verification FAILED: result 0" in result.stdout


@dataclasses.dataclass
class FakeReport:
    """What `hypatia.explain` returns, as far as the command needs it."""

    given: dict[str, Any]

    def print(self, console: Any) -> None:
        console.print("the report")

    def html(self) -> str:
        return "<html>"

    def json(self) -> dict[str, Any]:
        return {"options": self.given["options"], "training": self.given["training"]}


def test_explain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def explain(model: Any, *inputs: Any, **given: Any) -> FakeReport:
        seen.append((model, *inputs))
        return FakeReport(given)

    monkeypatch.setattr(hypatia, "explain", explain, raising=False)
    assert good("explain", "models.py:build") == "the report\n"
    assert isinstance(seen[0][0], torch.nn.Sequential)
    assert seen[0][1].shape == (3, 6)
    options = ("--option", "numerics=exact", "--option", "freeze=false", "--option", "node_limit=7")
    rules = ("--option", "disabled_rules=fuse-linear-relu,addmm-is-linear")
    data = json.loads(good("explain", "models.py:build", "--training", *options, *rules, "--json", "-"))
    wanted = {"numerics": "exact", "freeze": False, "node_limit": 7}
    assert data["options"] == {**wanted, "disabled_rules": ["fuse-linear-relu", "addmm-is-linear"]}
    assert data["training"] is True
    good("explain", "tiny_b64", "--html", "new/report.html", "--json", "report.json")
    assert (tmp_path / "new" / "report.html").read_text() == "<html>"
    assert json.loads((tmp_path / "report.json").read_text())["training"] is False


@pytest.mark.skipif(not hasattr(hypatia, "explain"), reason="hypatia.explain does not exist yet")
def test_explain_for_real(tmp_path: Path) -> None:
    text = good("explain", "models.py:build", "--html", "r.html", "--json", "r.json", "--no-timings")
    assert "fused" in text
    assert "<html" in (tmp_path / "r.html").read_text()
    assert json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "models.py:build", "--html", "models.py/report.html"),
        ("explain", "models.py:build", "--json", "."),
        ("bench", "models.py:build", "--html", "models.py/report.html"),
        ("bench", "models.py:build", "--json", "."),
    ],
    ids=lambda a: "-".join(a[::2]),
)
def test_files_are_checked_before_the_work(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(hypatia, "explain", never)
    monkeypatch.setattr(bench, "bench", never)
    assert "cannot be written" in bad(*arguments)


def test_checking_a_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    check_targets("new/report.html", "old.json", "-", None)
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new" / "report.html").exists()


def on_a_terminal(*arguments: str, columns: int, **environment: str) -> tuple[str, str]:
    """What a command prints to a terminal that is so wide: on standard output, and on standard error."""
    ends = [os.openpty() for _ in range(2)]
    for _, end in ends:
        termios.tcsetwinsize(end, (40, columns))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    names = [os.ttyname(end) for _, end in ends]
    environment = {**kept, "TERM": "xterm-256color", **environment}
    child = fresh.start("module", "hypatia", arguments, names, env=environment)
    texts: list[bytes] = [b"", b""]

    def read(at: int) -> None:
        # A terminal whose last writer is gone ends with an error.
        with contextlib.suppress(OSError):
            while part := os.read(ends[at][0], 65536):
                texts[at] += part

    readers = [threading.Thread(target=read, args=(at,)) for at in range(2)]
    for reader in readers:
        reader.start()
    code = fresh.wait(child)
    for _, end in ends:
        os.close(end)
    for reader in readers:
        reader.join()
    for end, _ in ends:
        os.close(end)
    assert code == 0, texts
    return texts[0].decode(), texts[1].decode()


@pytest.mark.skipif(not hasattr(termios, "tcsetwinsize"), reason="Python 3.10 cannot set a terminal's size")
def test_a_terminal_sees_progress_in_its_width_and_colours() -> None:
    out, err = on_a_terminal("explain", "models.py:build", "--no-timings", columns=72)
    assert "capture" in err
    assert "explain models.py:build" in err
    assert "\x1b[" in out
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, bare.splitlines())) <= 72
    assert "fused" in bare


@pytest.mark.skipif(not hasattr(termios, "tcsetwinsize"), reason="Python 3.10 cannot set a terminal's size")
def test_a_terminal_sees_what_verify_does() -> None:
    out, err = on_a_terminal("verify", "models.py:build", columns=72)
    assert "verify models.py:build" in err
    assert timeline.CAPTURE in err
    assert "verification passed" in re.sub(r"\x1b\[[0-9;]*m", "", out)


def test_verify_tells_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def progress(title: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
        told.append(f"{title} {quiet}")
        yield told.append

    monkeypatch.setattr(importlib.import_module("hypatia.tools.cli.verify"), "progress", progress)
    good("verify", "models.py:build")
    wanted = ["verify models.py:build False", "importing torch and the model"]
    wanted += [timeline.EAGER, timeline.CAPTURE, timeline.SEARCH, timeline.WIDE]
    assert [t for t in dict.fromkeys(told) if t in wanted] == wanted


@pytest.mark.skipif(not hasattr(termios, "tcsetwinsize"), reason="Python 3.10 cannot set a terminal's size")
def test_no_color_and_quiet_are_respected() -> None:
    out, err = on_a_terminal("verify", "models.py:build", "--quiet", columns=80, NO_COLOR="1")
    assert "verification passed" in out
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", out), "a colour"
    assert err == ""


def test_no_terminal_sees_no_progress() -> None:
    result = run("verify", "models.py:build")
    assert result.exit_code == 0
    assert result.stderr == ""


def test_json_has_no_numbers_that_json_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = Errors(math.inf, math.nan, -math.inf, math.nan, 1.0)
    found = Verification(False, "result 0 is far away", [errors], [errors])
    monkeypatch.setattr(hypatia, "verify", lambda *_, **__: found)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    result = run("verify", "models.py:build", "--json")
    data = json.loads(result.stdout, parse_constant=refuse)
    assert data["results"][0]["compiled"]["max_abs"] == "inf"
    assert data["results"][0]["eager"]["cosine"] == "nan"
    assert result.exit_code == 1


def test_rules() -> None:
    everything = json.loads(_native.rules())
    text = good("rules")
    assert f"{len(everything)} rules" in text
    assert "(relu (linear ?w ?b ?x)) = (fused_linear_relu ?w ?b ?x)" in good("rules", "fuse-linear-relu")
    assert [r["name"] for r in json.loads(good("rules", "linear-relu", "--json"))] == [
        r["name"] for r in everything if "linear-relu" in r["name"]
    ]
    assert "(permute ?m [1,0])" in good("rules", "addmm-is-linear"), "brackets are no mark-up"


def test_rules_check(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = [
        {"rule": "fuse-linear-relu", "fired": 12, "failure": None},
        {"rule": "fuse-linear-gelu", "fired": 3, "failure": "differs at [2,3]"},
        {"rule": "fuse-linear-silu", "fired": 0, "failure": None},
    ]
    monkeypatch.setattr(_native, "check_rules", lambda seed: json.dumps(walked))
    assert "1 rules, 1 sound, 0 not" in good("rules", "fuse-linear-relu", "--check")
    for name in ("fuse-linear-gelu", "fuse-linear-silu"):
        assert run("rules", name, "--check").exit_code == 1
    assert "differs at [2,3]" in run("rules", "--check").stdout


def test_rules_check_takes_a_range_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def walk(seed: int) -> str:
        seeds.append(seed)
        failure = "OnlySquare" if seed == 3 else None
        return json.dumps([{"rule": "fuse-linear-relu", "fired": 2, "failure": failure}])

    monkeypatch.setattr(_native, "check_rules", walk)
    assert "1 rules, 1 sound, 0 not, seeds 0 to 2" in good("rules", "--check", "--seed", "0..2")
    failed = run("rules", "--check", "--seed", "2..4")
    assert failed.exit_code == 1
    assert "seed 3: OnlySquare" in failed.stdout
    assert seeds == [0, 1, 2, 2, 3, 4]
    for wrong in ("-1", "4..2", "1..", "x"):
        assert run("rules", "--check", "--seed", wrong).exit_code == 2


@pytest.mark.slow
def test_rules_check_for_real() -> None:
    assert "0 not" in good("rules", "--check")


def test_cache() -> None:
    assert "0 entries, 0 B of 512.0 MiB" in good("cache", "show")
    store.put("plan", "a [bold]key[/]", b"data")
    text = good("cache", "show")
    assert "1 entries" in text
    assert "a [bold]key[/]" in text
    assert [e["key"] for e in json.loads(good("cache", "show", "--json"))["entries"]] == ["a [bold]key[/]"]
    tuning = store.tuning_folder()
    assert tuning is not None
    (tuning / "tuning.jsonl").write_text('{"hypatia tuning":1}\n{"entry":{"times":{}}}\n')
    assert "1 measured kernels" in good("cache", "show")
    assert "1 entries removed" in good("cache", "clear")
    assert store.entries() == []
    assert store.measurements() == 0


def test_doctor() -> None:
    data = json.loads(good("doctor", "--json"))
    assert data["works"] is True
    found = {(f["topic"], f["name"]): f for f in data["findings"]}
    assert found["versions", "extension"]["found"] == _native.__version__
    assert torch.__version__ in found["versions", "torch"]["found"]
    assert found["backend", "entry point"]["state"] == "ok"
    assert found["self-check", "cpu"]["state"] == "ok", found["self-check", "cpu"]
    assert "verified" in found["self-check", "cpu"]["found"]
    assert all(f["advice"] for f in data["findings"] if f["state"] != "ok")
    assert not [f for f in data["findings"] if f["name"] == "examination"]
    if not torch.cuda.is_available():
        assert found["GPU", "devices"]["found"] == "no GPU found"


def test_doctor_shows_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cuda_libraries, "find", lambda library: None)

    def explode() -> list[doctor.Finding]:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(doctor, "_environment", explode)
    text = good("doctor", "--quick")
    assert "Not a directory" in " ".join(text.split()) or "File exists" in " ".join(text.split())
    assert "not found" in text
    assert "RuntimeError: unforeseen" in text
    assert "works here" in text


def test_doctor_fails_only_when_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(ok=False, reason="result 0 is off", candidate=[])
    monkeypatch.setattr(hypatia, "verify", lambda *_: wrong)
    result = run("doctor")
    assert result.exit_code == 1
    assert "CANNOT work here" in result.stdout
    assert "result 0 is off" in " ".join(result.stdout.split())


@pytest.mark.parametrize("where", ["of this Python", "of the system", "of the user", "beside torch"])
def test_libraries_are_found_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    packages = tmp_path / "site-packages"
    library = cuda_libraries.Library("fake", ("libhypatia_fake.so.1",), lambda _: "1.2", "install it")
    assert cuda_libraries.find(library) is None
    folder = packages / "nvidia" / "fake" / "lib"
    folder.mkdir(parents=True)
    (folder / "libhypatia_fake.so.1").write_bytes(b"no library")
    monkeypatch.syspath_prepend(packages)
    assert cuda_libraries.find(library) is None, "a folder that only sys.path has is not searched"
    owner, name, value = {
        "of this Python": (cuda_libraries.sysconfig, "get_path", lambda _: str(packages)),
        "of the system": (cuda_libraries.site, "getsitepackages", lambda: [str(packages)]),
        "of the user": (cuda_libraries.site, "getusersitepackages", lambda: str(packages)),
        "beside torch": (torch, "__file__", str(packages / "torch" / "__init__.py")),
    }[where]
    monkeypatch.setattr(owner, name, value)
    place = cuda_libraries.find(library)
    assert place == cuda_libraries.Place(str(folder / "libhypatia_fake.so.1"), "in site-packages")
    assert cuda_libraries.version(library, place) == ""
    loaded = cuda_libraries.find(cuda_libraries.Library("torch", ("libtorch_cpu.so",), lambda _: "", ""))
    assert loaded is not None
    assert loaded.how == "loaded"


def test_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.001)
    backends = ("--backend", "eager", "--backend", "hypatia")
    text = good(
        *("bench", "tiny-b64", *backends, "--repeats", "2", "--device", "cpu"),
        *("--json", "b.json", "--html", "b.html"),
    )
    assert "eager-graph (eager under a CUDA graph) is left out" in text
    data = json.loads((tmp_path / "b.json").read_text())
    eager, ours = data["cells"]
    assert (eager["backend"], ours["backend"]) == ("eager", "hypatia")
    assert ours["correct"] is True
    assert ours["ratio"] == pytest.approx(eager["microseconds"] / ours["microseconds"])
    assert ours["compile_seconds"] > 0
    assert eager["compile_seconds"] is None
    assert len(ours["samples"]) == 2
    html = (tmp_path / "b.html").read_text()
    assert html.count("<rect") == 2
    assert not re.search(r"https?:|src=|@import|url\(", html)


@pytest.mark.parametrize("name", ["models.py:build", "models:keywords"])
def test_bench_of_a_model_of_ones_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.001)
    names = ("eager", "hypatia", "hypatia-direct")
    backends = [part for backend in names for part in ("--backend", backend)]
    data = json.loads(good("bench", name, *backends, "--repeats", "1", "--device", "cpu", "--json", "-"))
    assert data["dtype"] == "as they are"
    for cell, backend in zip(data["cells"], names, strict=True):
        assert (cell["workload"], cell["backend"], cell["reason"]) == (name, backend, "")
        assert cell["correct"] is True
        assert cell["microseconds"] > 0


def test_bench_of_token_ids_and_another_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4)), (torch.arange(6),)\n"
    )
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.001)
    arguments = ("--backend", "hypatia", "--repeats", "1", "--device", "cpu", "--dtype", "bf16", "--training")
    data = json.loads(good("bench", "words.py:build", *arguments, "--json", "-"))
    assert data["dtype"] == "bf16"
    (cell,) = data["cells"]
    assert (cell["reason"], cell["correct"]) == ("", True)


def test_bench_page_escapes_and_shows_reasons() -> None:
    cell = bench.Cell("<b>", "hypatia", reason="<script>alert(1)</script>").data()
    slow = bench.Cell("<b>", "eager", 2e6, 1.0, None, 1e-6, True).data()
    machine = dict.fromkeys(("hypatia", "torch", "python", "cpu", "threads", "cores", "gpu"), "?")
    settings = {"dtype": "fp32", "device": "cpu", "training": False, "repeats": 1, "notes": ["no GPU"]}
    html = page({"machine": machine, **settings, "cells": [slow, cell]})
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "2.00 s" in html


def test_bench_offers_what_can_be_measured() -> None:
    assert bench_command.BACKENDS == peers.BACKENDS
    assert set(bench_command.DTYPES) == set(bench.DTYPES)
    assert set(COLOURS) == set(peers.BACKENDS)


def test_bench_lists() -> None:
    text = good("bench", "--list")
    for name in ("tiny_b64", "xlarge6", "linear_relu_large", "bert-base", "gpt2", "llama", "lora"):
        assert name in text
