"""Which module of the Python package imports which, and what each package may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent / "python" / "hypatia"

FLOORS = ["tools", "frontend", "verifier", "compiler", "execute", "capture", "devices"]
"""Packages from the top down: each imports only what stands below it."""

ABOVE = {"__init__": 1, "__main__": 0, "nn": 1}
"""Modules beside the packages that stand with one of them: what users import. Others stand below all."""

NATIVE = "_native"
"""The extension, which imports nothing of the package."""

Imports = Mapping[str, set[str]]


def floor(module: str) -> int:
    """The number of a module's floor, from the top."""
    package = module.split(".")[0]
    return FLOORS.index(package) if package in FLOORS else ABOVE.get(package, len(FLOORS))


def upward(imports: Imports) -> list[str]:
    """Imports of something that stands above."""
    return [
        f"{module} imports {other}, which stands above it"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if floor(other) < floor(module)
    ]


def cycle(imports: Imports) -> list[str]:
    """Modules that import each other in a circle, if there is one."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(imports.get(module, ())):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(imports) if (found := walk(module, []))), [])


def imports_of(module: str, text: str, known: set[str]) -> set[str]:
    """The modules of the package that a module imports anywhere, but for the sake of types alone."""
    package = module.split(".")[:-1] if module != "__init__" else []
    found: set[str] = set()
    for node in _statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(_inside(alias.name) for alias in node.names if _is_ours(alias.name))
            continue
        if not node.level and not _is_ours(node.module or ""):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            start = ".".join(part for part in base if part)
        else:
            start = (node.module or "").partition(".")[2]
        for alias in node.names:
            inner = f"{start}.{alias.name}".lstrip(".")
            if inner != NATIVE:
                found.add(inner if inner in known else start or "__init__")
    return {m for m in found if m in known and m != module}


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == ROOT.name


def _inside(name: str) -> str:
    """`hypatia.tools.bench` without the first part. `import hypatia` means the package's own file."""
    return name.partition(".")[2] or "__init__"


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from _statements(child)


def all_imports() -> dict[str, set[str]]:
    """All imports of the package, by module."""
    texts = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        inner = len(parts) > 1 and parts[-1] == "__init__"
        name = ".".join(parts[:-1] if inner else parts)
        # The statements of a package's own file are relative to the package.
        texts[name] = (f"{name}.__init__" if inner else name, path.read_text())
    known = set(texts)
    return {name: imports_of(place, text, known) - {name} for name, (place, text) in texts.items()}


def purpose(package: str) -> str:
    """The first line of a package's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    return text.split("\n")[0]
