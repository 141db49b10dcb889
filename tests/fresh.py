"""Programs in processes of their own that do not pay for importing torch.

One process for each process of the tests has imported torch, and Dynamo, and nothing of hypatia. Each
program runs in a fork of it: with its own arguments, folder and environment, from `import hypatia` to the
end of its interpreter.
What depends on how a process starts, or on the order in which modules are taken down, needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.export",
    "jinja2",
    "rich.console",
)
"""What hypatia and its tests import beside themselves."""

PATIENCE = 250.0
"""Seconds that a program may take if nothing else is said."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Read when torch is loaded, so the same for all."""


def run(
    program: str | Path,
    *arguments: object,
    module: bool = False,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Runs the text of a program, a file, or a module by its name, and keeps what it prints."""
    kind = "module" if module else "file" if isinstance(program, Path) else "text"
    with tempfile.TemporaryDirectory() as folder:
        ends = [str(Path(folder, name)) for name in ("out", "err")]
        code = wait(start(kind, str(program), arguments, ends, cwd=cwd, env=env), timeout)
        out, err = (Path(end).read_text() for end in ends)
    return subprocess.CompletedProcess([str(program), *map(str, arguments)], code, out, err)


def start(
    kind: str,
    program: str,
    arguments: Sequence[object],
    ends: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
) -> int:
    """Starts a program whose output and errors go to two files, or terminals; the number of its process."""
    request = {
        "kind": kind,
        "program": program,
        "arguments": [str(a) for a in arguments],
        "ends": list(ends),
        "cwd": str(cwd or os.getcwd()),
        "env": {**(os.environ if env is None else env), **ONE_THREAD},
    }
    server = _server()
    assert server.stdin is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(_answer(server))


def wait(process: int, timeout: float = PATIENCE) -> int:
    """The exit code of the program that was started last.

    Raises:
        TimeoutError: it took longer, and was ended.
    """
    server = _server()
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], timeout)
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        _answer(server)
        raise TimeoutError(f"a program takes more than {timeout} seconds")
    return int(_answer(server))


def _answer(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, "the process that forks is gone"
    return line


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that has imported torch. It ends when its input does."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HYPATIA")}
    server = subprocess.Popen(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, **ONE_THREAD},
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


# The process that forks.


def _requests() -> Iterator[dict[str, Any]]:
    """In the children, the request of each; nothing in the process that forks."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            yield request
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _surround(request: dict[str, Any]) -> None:
    """Gives this process the surroundings of a program."""
    os.setpgid(0, 0)
    for number, end in ((1, request["ends"][0]), (2, request["ends"][1])):
        file = os.open(end, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY, 0o600)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False, **more)  # noqa: SIM115
        for number, mode, more in ((0, "r", {}), (1, "w", {}), (2, "w", {"errors": "backslashreplace"}))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    given = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [p for p in given if p and p not in sys.path]


def _run(request: dict[str, Any]) -> None:
    """Runs a program as the main module of this process."""
    kind, program = request["kind"], request["program"]
    sys.argv = ["-c" if kind == "text" else program, *request["arguments"]]
    if kind == "file":
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    elif kind == "module":
        sys.path.insert(0, "")
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            __import__(name)
    import threading

    assert threading.active_count() == 1, "what is forked has one thread"
    assert not [m for m in sys.modules if m.split(".")[0] == "hypatia"]
    for found in _requests():
        _surround(found)
        _run(found)
