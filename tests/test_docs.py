"""The documentation says what is."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hypatia import Options

ROOT = Path(__file__).parent.parent


def test_tables_are_current() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=True)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not run.stderr.strip(), run.stderr
    assert (tmp_path / "api" / "index.html").exists()


def test_commands_name_modules_that_exist() -> None:
    """`make demo` is no test of its own: it sets up an environment."""
    for page in [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"-m (hypatia[\w.]*)", page.read_text()):
            assert importlib.util.find_spec(name.rstrip(".")), f"{page.name}: {name}"


def test_every_option_is_in_the_readme() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert dict(table) == {f.name: repr(f.default).replace("'", '"') for f in dataclasses.fields(Options)}


def test_the_first_example_of_the_readme_runs() -> None:
    (example,) = re.findall(
        r"```python\n(import torch, hypatia.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    run = subprocess.run([sys.executable, "-c", example], check=True, capture_output=True, text=True)
    assert "fused_mlp_0" in run.stdout
    assert run.stdout.rstrip().endswith("True")


SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{number}")
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    for number, snippet in enumerate(
        re.findall(r"```python\n((?:import|from) .*?)```", page.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_output_of_the_demo_is_of_today() -> None:
    """Times and errors are of the machine; what is said is not."""

    def said(text: str) -> dict[str, str]:
        lines = text.partition("transformer block on cpu")[2].splitlines()[1:]
        parts = (re.fullmatch(r"(inference graph|  \w+) *(.*)", line) for line in lines)
        return {part[1].strip(): part[2] for part in itertools.takewhile(bool, parts) if part}

    environment = {**os.environ, "HYPATIA_CACHE": "off", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "hypatia.tools.demo"]
    printed = said(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )
    page = said((ROOT / "README.md").read_text())
    assert len(page) > 8
    assert page.keys() == printed.keys()
    for line in ("ops", "fused", "rules", "proof"):
        assert page[line] == printed[line]


def test_pages_that_people_look_for_are_there() -> None:
    for name in ("limitations", "troubleshooting", "api", "comparison"):
        assert (ROOT / "docs" / f"{name}.md").exists()
    assert (ROOT / "SECURITY.md").exists()
    for package in ("hypatia", "hypatia_core"):
        assert (ROOT / "python" / package / "py.typed").exists(), "its types are not seen by users"


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
