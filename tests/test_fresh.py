"""Processes that are forked from one with torch are like new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fresh

SHOW = """
import os, sys
had = sorted(m for m in sys.modules if m.split(".")[0] in ("hypatia", "pytest"))
print(sys.argv[1:], os.environ["SHOWN"], os.getcwd(), __name__, had, "HYPATIA_CACHE" in os.environ)
print("noise", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_has_what_it_is_given_and_nothing_of_ours(tmp_path: Path) -> None:
    done = fresh.run(SHOW, "a", 1, cwd=tmp_path, env={"SHOWN": "here"})
    assert done.stdout == f"['a', '1'] here {tmp_path} __main__ [] False\n"
    assert (done.stderr, done.returncode) == ("noise\n", 3)


def test_files_and_modules_run_as_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 7")
    program = tmp_path / "program.py"
    program.write_text("import sys, beside\nprint(__name__, beside.NUMBER, sys.argv[1:])")
    for done in (
        fresh.run(program, "x"),
        fresh.run("program", "x", module=True, cwd=tmp_path),
        subprocess.run([sys.executable, program, "x"], capture_output=True, text=True),
    ):
        assert (done.stdout, done.returncode) == ("__main__ 7 ['x']\n", 0), done.stderr


def test_an_exception_is_an_exit_code_and_a_traceback() -> None:
    done = fresh.run("raise ValueError('so')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: so\n")
    assert fresh.run("import os; os.abort()").returncode == -6


def test_what_a_program_leaves_to_the_end_is_done() -> None:
    done = fresh.run("import atexit; atexit.register(print, 'the end')")
    assert done.stdout == "the end\n"


def test_one_that_takes_too_long_is_ended() -> None:
    with pytest.raises(TimeoutError):
        fresh.run("import time; time.sleep(100)", timeout=0.5)
    assert fresh.run("print(1)").stdout == "1\n"


def test_torch_is_there_and_works() -> None:
    done = fresh.run(
        "import torch, hypatia\n"
        "f = torch.compile(lambda x: torch.relu(x + 1), backend='hypatia')\n"
        "print(f(torch.ones(3)).tolist(), torch.get_num_threads())"
    )
    assert (done.stdout, done.returncode) == ("[2.0, 2.0, 2.0] 1\n", 0), done.stderr
