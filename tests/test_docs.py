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


def test_a_package_says_what_it_is() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert project["description"]
    assert project["keywords"]
    assert all(author["name"] for author in project["authors"])
    assert project["authors"]
    assert project["license"] == cargo["license"]
    for name in (project["readme"], *project["license-files"]):
        assert (ROOT / name).read_text().strip()
    assert (ROOT / "LICENSE").read_text().startswith(f"{project['license']} License")
    classifiers = project["classifiers"]
    assert {c.split(" :: ")[0] for c in classifiers} == {"Programming Language", "Topic"}
    assert "Programming Language :: Python :: 3 :: Only" in classifiers
    assert len({*classifiers}) == len(classifiers)


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_targets_and_files_that_a_page_names_are_there(page: Path) -> None:
    """But for placeholders, which are in capitals, and what runs write."""
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE))
    assert named <= targets, named - targets
    folders = "crates|python|tests|tests_gpu|bench|docs|fuzz"
    files = set(re.findall(rf"[`\s(]((?:{folders})/[\w./-]+\.(?:py|pyi|rs|cu|md|toml)\b)", text))
    files = {f for f in files if not re.search(r"[A-Z]{3}|^bench/out/", f)}
    assert all((ROOT / f).exists() for f in files), [f for f in files if not (ROOT / f).exists()]


def test_commands_of_the_readme_have_these_options() -> None:
    from hypatia.tools.cli import cli

    (block,) = re.findall(r"```\n(hypatia doctor.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines():
        name = line.split()[1]
        known = {o for p in cli.commands[name].params for o in p.opts}
        given = set(re.findall(r"(--[\w-]+) ", line.split("   ")[0] + " "))
        assert given <= known, (name, given - known)


def test_the_warning_of_the_page_is_of_today() -> None:
    """Numbers are of the machine; what is said is not."""
    import torch

    import hypatia
    from hypatia import faults

    (shown,) = re.findall(
        r"```\n(hypatia: the compiled.*?)```", (ROOT / "docs" / "verification.md").read_text(), re.DOTALL
    )
    torch.manual_seed(0)
    sizes = (784, 256, 256, 10)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(sizes)
    ]
    model, x = torch.nn.Sequential(*layers[:-1], layers[-1][0]).eval(), torch.randn(64, 784)
    torch.compiler.reset()
    with faults.wrong_rule(), torch.no_grad(), pytest.warns(hypatia.VerificationWarning) as said:
        torch.compile(model, backend="hypatia")(x)

    def words(text: str) -> str:
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", " ".join(text.split()))

    assert words(shown) in [words(str(w.message)) for w in said]
