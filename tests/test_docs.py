"""The documentation says what is."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import fresh
from docs.examples import masked, renewed
from hypatia import Options

ROOT = Path(__file__).parent.parent


def test_tables_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docs/generate.py --check` finds it, but for the processes that examples run in."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = importlib.import_module("generate")

    def printed(*arguments: str, env: dict[str, str]) -> str:
        kind, program = arguments
        done = fresh.run(program, module=kind == "-m", env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    monkeypatch.setattr(generate.examples, "printed", printed)
    assert generate.stale() == {}


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
    run = fresh.run(example)
    assert run.returncode == 0, run.stderr
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
    run = fresh.run(snippet, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_an_example_is_renewed_where_more_than_times_and_errors_differ() -> None:
    page = "before\n```\ndemo: 0.48 s\n  ops  32 -> 18\n  error  7.2e-07 to eager\n```\nafter"
    slower = "demo: 12 s\n  ops  32 -> 18\n  error  1e-6 to eager"
    assert renewed(page, r"demo: .*?(?=\n```)", slower) == page
    more = slower.replace("18", "19")
    assert renewed(page, r"demo: .*?(?=\n```)", more) == page.replace("18", "19")
    assert "\n```\ndemo: 3 s\n```\n" in renewed(page, r"demo: .*?(?=\n```)", "demo: 3 s")
    kept = "native    native plan 1 us, torch's ops 1.5 us, eager 2 us: the plan is kept\n  memory"
    assert masked(kept) == masked("native    native plan 3 us, eager 9 us: the plan is kept\n  memory")
    assert masked(kept) != masked("native    no plan: a reason\n  memory")


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


MODELS = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval(), (torch.randn(2, 4),)
"""


def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, but for the name of a large model."""
    from hypatia.tools.cli import cli

    (block,) = re.findall(r"```\n(hypatia doctor.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    for line in block.splitlines():
        command = re.split(" {2,}", line)[0].replace("bert-base", "models.py:build").split()[1:]
        run = CliRunner().invoke(cli, command)
        assert run.exit_code == 0, (line, run.output)
        assert run.output.strip(), line
    assert {"bert.html", "bench.html"} <= {p.name for p in tmp_path.iterdir()}


def test_the_examples_of_the_reference_run() -> None:
    import torch

    import hypatia

    torch.compiler.reset()
    given = {"hypatia": hypatia, "torch": torch, "model": torch.nn.Linear(4, 4), "x": torch.randn(2, 4)}
    page = (ROOT / "docs" / "api.md").read_text()
    examples = [e for e in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if e.startswith(">>>")]
    assert examples
    for number, example in enumerate(examples):
        test = doctest.DocTestParser().get_doctest(example, dict(given), f"api-{number}", None, 0)
        assert doctest.DocTestRunner().run(test).failed == 0


def test_every_snippet_runs_somewhere() -> None:
    """Those of Python begin with an import, or are of the reference."""
    pages = [p.read_text() for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]]
    found = [s for page in pages for s in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    assert [s for s in found if not s.startswith(("import ", "from ", ">>> "))] == []
