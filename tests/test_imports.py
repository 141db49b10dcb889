"""The order of the packages: each imports only what stands below it, and no two files import each other."""

from __future__ import annotations

import ast
import re

from docs.import_graph import FLOORS, ROOT, all_imports, cycle, imports_of, upward


def test_packages_import_only_what_stands_below() -> None:
    assert not upward(all_imports())


def test_no_modules_import_each_other() -> None:
    found = cycle(all_imports())
    assert not found, " imports ".join(found)


def test_every_package_says_what_it_is_for() -> None:
    for package in FLOORS:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
        assert "ay import" in (text or ""), f"{package}/__init__.py does not say what it may import"


def test_modules_are_small() -> None:
    """A room in which one finds things: no module over 350 lines, no function over 60."""
    large = []
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if len(text.splitlines()) > 350:
            large.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                large.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not large


MOST_ANY = 211
"""How often the package says `Any`. Fewer is better: a value that is only passed on is an `object`."""


def test_few_types_are_any() -> None:
    texts = [p.read_text() for kind in ("*.py", "*.pyi") for p in ROOT.parent.rglob(kind)]
    assert sum(len(re.findall(r"\bAny\b", text)) for text in texts) <= MOST_ANY


def test_a_planted_import_is_found() -> None:
    known = {"capture.layout", "compiler.report", "store"}
    text = "from ..store import get\ndef late():\n    from ..compiler.report import Check"
    seen = imports_of("capture.layout", text, known)
    assert seen == {"store", "compiler.report"}
    assert upward({"capture.layout": seen}) == [
        "capture.layout imports compiler.report, which stands above it"
    ]
    absolute = "import hypatia.compiler.report\nfrom hypatia import store, _native\nimport torch.store"
    assert imports_of("capture.layout", absolute, known) == {"store", "compiler.report"}
    late = "def late():\n    from hypatia.compiler.report import Check\n    from hypatia.store import get"
    assert imports_of("capture.layout", late, known) == {"store", "compiler.report"}
    for text in ("import hypatia", "from hypatia import compile", "from .. import compile"):
        whole = {"capture.layout": imports_of("capture.layout", text, known | {"__init__"})}
        assert upward(whole) == ["capture.layout imports __init__, which stands above it"]
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})
