"""What the stub says of the extension is what the extension has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_stub_of_the_extension_says_what_is_there() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "hypatia._native", "--concise"]
    command += ["--mypy-config-file", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
