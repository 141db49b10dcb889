"""What the stub says of the extension is what the extension has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

SETTINGS = """
[mypy]
mypy_path = python
follow_imports = skip
"""
"""The stub is read by itself: all of torch would be read along, and `make lint` checks its types anyway."""


def test_the_stub_of_the_extension_says_what_is_there(tmp_path: Path) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy.stubtest", "hypatia._native", "--concise"]
    command += ["--mypy-config-file", str(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
