"""Private names of torch: each is still there, and is named in one module alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import hypatia
from hypatia import _torch

ROOT = Path(hypatia.__file__).parent
PRIVATE = re.compile(r"(?:torch|fx|nn|F)(?:\.\w+)*\._[a-zA-Z]\w*|functorch(?:\.\w+)*")
NAMED = {path.rpartition(".")[2] for path in _torch.ATTRIBUTES}
"""Attributes that are listed."""

NOT_TORCH = {"_fields", "_replace", "_getframe", "_target", "_args"}
"""Names of named tuples, of `sys` and of threads."""

EXAMPLES = (
    torch.nn.Linear(1, 1),
    torch.zeros(1).requires_grad_(),
    torch.zeros(1).untyped_storage(),
    torch.fx.Graph(),
    torch.fx.Graph().placeholder("x"),
    torch.ops.aten.add.Tensor,
)


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
    made = hasattr(owner, attribute) or any(
        isinstance(owner, type) and isinstance(x, owner) and hasattr(x, attribute) for x in EXAMPLES
    )
    # Where torch sets it on objects that are hard to make, its source says so.
    written = inspect.getmodule(owner)
    made = made or (written is not None and attribute in inspect.getsource(written))
    assert made, f"torch {torch.__version__} has no {path}: {_torch.ATTRIBUTES[path]}"
    assert _torch.ATTRIBUTES[path]


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
        elif isinstance(node, ast.Attribute) and not NAMED & set(ast.unparse(node).split(".")):
            found.append(ast.unparse(node))
    return sorted({name for name in found if PRIVATE.match(name) and "torch.__" not in name})


def defined_names(text: str) -> set[str]:
    """Functions, classes, variables and attributes that a module gives names to."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def private_attributes(text: str, ours: set[str]) -> list[str]:
    """Private attributes that a module reads of objects of others, as attributes or by a string.

    Ops of torch's dispatcher are public, whatever their names begin with.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            of = ast.unparse(node.value)
            if of not in ("self", "cls", "aten", "_aten", "onednn") and node.attr not in ours:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(node.value)):
            found |= {str(node.value)} if any(hasattr(x, str(node.value)) for x in EXAMPLES) else set()
    return sorted(found - NAMED - NOT_TORCH)


def modules() -> dict[str, str]:
    """The texts of all modules but the one that names what is private."""
    paths = (p for p in ROOT.rglob("*.py") if p.name != "_torch.py")
    return {str(p.relative_to(ROOT)): p.read_text() for p in paths}


def test_no_other_module_names_one() -> None:
    found = {path: private_names(text) for path, text in modules().items()}
    assert not {path: names for path, names in found.items() if names}


def test_private_attributes_are_listed() -> None:
    texts = modules()
    ours = set().union(*map(defined_names, texts.values()))
    found = {path: private_attributes(text, ours) for path, text in texts.items()}
    assert not {path: names for path, names in found.items() if names}


def test_every_listed_attribute_is_used() -> None:
    together = "\n".join([*modules().values(), (ROOT / "_torch.py").read_text().partition("ATTRIBUTES")[0]])
    assert [name for name in sorted(NAMED) if not re.search(rf"\b{name}\b", together)] == []


def test_planted_names_are_found() -> None:
    text = "import torch\nfrom torch.fx.graph import _BoxedCodeGen\nif torch._C._foo(): pass"
    assert private_names(text) == ["torch._C", "torch._C._foo", "torch.fx.graph._BoxedCodeGen"]
    assert private_names("from torch._ops import OpOverload") == ["torch._ops.OpOverload"]
    assert private_names("import torch\ntorch.__version__, torch.nn.Linear") == []
    assert private_names("fx.node._foo, nn.Module._call_impl") == ["fx.node._foo"]


def test_planted_attributes_are_found() -> None:
    text = "x._foo, self._foo, aten._softmax, x._ours, x._version, getattr(x, '_is_zerotensor')"
    assert private_attributes(text, {"_ours"}) == ["_foo", "_is_zerotensor"]
    assert defined_names("def _a(): self._b = _c = 1; x._d = 2") == {"_a", "_b", "_c"}
