"""Private names of torch: each is still there, and is named in one module alone."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

import hypatia
from hypatia import _torch

ROOT = Path(hypatia.__file__).parent
PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]\w*|functorch(?:\.\w+)*")


@pytest.mark.parametrize("name", _torch.NAMES)
def test_torch_has_the_name(name: str) -> None:
    about = _torch.NAMES[name]
    if about.without != "required" and not torch.cuda.is_available():
        pytest.importorskip(about.module)
        return
    assert about.found() is not None
    assert about.purpose


@pytest.mark.parametrize("path", _torch.ATTRIBUTES)
def test_torch_has_the_attribute(path: str) -> None:
    holder, _, attribute = path.rpartition(".")
    module, _, name = holder.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    inside = hasattr(owner, attribute) or attribute in getattr(owner, "__annotations__", {})
    made = hasattr(torch.ops.aten.add.Tensor, attribute) or hasattr(torch.fx.Graph(), attribute)
    assert inside or made, f"torch {torch.__version__} has no {path}: {_torch.ATTRIBUTES[path]}"


def test_a_name_that_is_gone_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = _torch.Name("torch", "_no_such_thing", "a test")
    monkeypatch.setitem(_torch.NAMES, "gone", gone)
    with pytest.raises(
        ImportError, match=r"has no torch\._no_such_thing, which hypatia needs for this: a test"
    ):
        _ = _torch.gone
    assert _torch.optional.__wrapped__("gone") is None
    with pytest.raises(AttributeError, match="has no attribute 'never'"):
        _ = _torch.never


def private_names(text: str) -> list[str]:
    """Private names of torch that a module imports or asks torch for."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return sorted({name for name in found if PRIVATE.match(name) and "torch.__" not in name})


def test_no_other_module_names_one() -> None:
    modules = (p for p in ROOT.rglob("*.py") if p.name != "_torch.py")
    found = {str(p.relative_to(ROOT)): private_names(p.read_text()) for p in modules}
    assert not {path: names for path, names in found.items() if names}


def test_planted_names_are_found() -> None:
    text = "import torch\nfrom torch.fx.graph import _BoxedCodeGen\nif torch._C._foo(): pass"
    assert private_names(text) == ["torch._C", "torch._C._foo", "torch.fx.graph._BoxedCodeGen"]
    assert private_names("from torch._ops import OpOverload") == ["torch._ops.OpOverload"]
    assert private_names("import torch\ntorch.__version__, torch.nn.Linear") == []
