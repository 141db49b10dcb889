"""What a model calls the parts of its graph: parameters, modules, and the lines that compute a value."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TypedDict

import torch
from torch import fx, nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_INSIDE = (_TORCH, "<", _OWN)
"""How names of files begin that are no part of a model."""
_CALL = nn.Module._call_impl.__code__
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n +(?P<code>[^\n]*))?'
)
_PART = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_ROOT = re.compile(r"^[LG]\['(\w+)'\]")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a program."""

    file: str
    line: int
    function: str
    code: str

    def data(self) -> LineData:
        """The same as plain data."""
        return {"file": self.file, "line": self.line, "function": self.function, "code": self.code}


class LineData(TypedDict):
    """A line of a program, as plain data."""

    file: str
    line: int
    function: str
    code: str


class _Emitted(TypedDict, total=False):
    origin: int | None
    """The captured record that has the same value; taken away when names are told."""


class DrawnNode(_Emitted):
    """A node of a program, for drawing."""

    id: int
    op: str
    name: str
    inputs: list[int]
    attrs: list[str]
    type: str
    cost: float
    folded: bool
    kind: str
    """input, weight, op, fused, opaque or result"""
    called: str
    module: str
    line: LineData | None


def inputs_of(gm: fx.GraphModule) -> list[str]:
    """What a model calls the inputs of the graph that Dynamo captured of it."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        text = name() if callable(name) else name
        found.append(plain(text) if isinstance(text, str) else node.name)
    return found


def plain(source: str) -> str:
    """A source of Dynamo's as people write it: ``L['m']._modules['up']._parameters['bias']`` is up.bias."""
    text = _PART.sub(r".\1", source)
    owned = text != source
    root = _ROOT.match(text)
    if root is None:
        return text
    rest = text[root.end() :]
    return rest.removeprefix(".") if owned else root[1] + rest


def called(node: fx.Node, given: Sequence[str]) -> str:
    """What a model calls an input or a weight; the name of the node if that is not known."""
    if node.op == "get_attr":
        return str(node.target)
    about = node.meta.get("desc")
    target, index = getattr(about, "target", None), getattr(about, "idx", None)
    if isinstance(target, str):
        return target
    return given[index] if isinstance(index, int) and index < len(given) else str(node.target)


def module_of(node: fx.Node) -> str:
    """The path of the module that computes a value; of a gradient the one whose pass is differentiated."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return _ROOT.sub("", _PART.sub(r".\1", paths[-1])).removeprefix(".") if paths else ""


def line_of(node: fx.Node) -> Line | None:
    """The innermost line of the model, outside of torch, that computes a value."""
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    frames = [m for m in _FRAME.finditer(trace) if not m["file"].startswith((_TORCH, "<"))]
    if not frames:
        return None
    last = frames[-1]
    return Line(last["file"], int(last["line"]), last["function"].strip(), (last["code"] or "").strip())


class Places:
    """Where in a model an op is called, seen from inside of the call: by the frames of its modules.

    No module needs a hook for it, and nothing outside of the calling thread is looked at.
    """

    def __init__(self, model: nn.Module, outermost: CodeType) -> None:
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._outermost = outermost

    def here(self) -> dict[str, object]:
        """What torch's own tracers write down of a node: modules from the outermost on, and a line."""
        frame: FrameType | None = sys._getframe(1)
        modules: list[tuple[str, type]] = []
        trace = ""
        while frame is not None and frame.f_code is not self._outermost:
            code = frame.f_code
            if code is _CALL:
                module = frame.f_locals.get("self")
                if id(module) in self._paths:
                    modules.append((self._paths[id(module)], type(module)))
            elif not trace and not code.co_filename.startswith(_INSIDE):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                trace = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {text}\n'
            frame = frame.f_back
        return {
            "nn_module_stack": {path: (path, kind) for path, kind in reversed(modules)},
            "stack_trace": trace,
        }


def common(paths: Iterable[str]) -> str:
    """The module that all of these are in."""
    first, *others = [path.split(".") for path in paths if path] or [[]]
    alike = itertools.takewhile(
        lambda i: all(first[i : i + 1] == o[i : i + 1] for o in others), range(len(first))
    )
    return ".".join(first[i] for i in alike)


def told(drawn: Mapping[str, Sequence[DrawnNode]], captured: Sequence[fx.Node], given: Sequence[str]) -> None:
    """Gives drawn nodes the names of the model: what it calls inputs and weights, modules and lines."""
    for nodes in drawn.values():
        known: dict[int, DrawnNode] = {}
        for node in nodes:
            origin = node.pop("origin")
            source = captured[origin] if origin is not None else None
            if not node["name"]:
                node["name"] = source.name if source is not None else node["op"]
            node["called"] = node["name"]
            node["module"], node["line"] = "", None
            if node["kind"] == "result":
                continue
            if source is not None and source.op in ("placeholder", "get_attr"):
                node["called"] = called(source, given)
                node["module"] = node["called"].rpartition(".")[0] if node["kind"] == "weight" else ""
            elif source is not None:
                line = line_of(source)
                node["module"] = module_of(source)
                node["line"] = None if line is None else line.data()
            else:
                # A value that is new: of the module of the weights it is made of, or else of its operands.
                operands = [known[i] for i in node["inputs"] if i in known]
                weights = [n["module"] for n in operands if n["kind"] == "weight" or n["folded"]]
                node["module"] = common(weights or [n["module"] for n in operands])
            known[node["id"]] = node
