"""Samples of GraphNet: graphs of real models as Python source, with shapes and statistics of their tensors.

Weights become parameters and buffers, inputs stay inputs. The descriptions (``weight_meta.py``,
``input_meta.py``) are read as data; ``model.py`` is the graph itself and has to be executed.
"""

from __future__ import annotations

import ast
import functools
import math
import random
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .rows import Arguments, Row, Setting

METAS = ("weight_meta.py", "input_meta.py")
SPREAD = 0.1
"""The standard deviation of tensors whose own is not known."""


def rows(setting: Setting) -> list[Row]:
    """All samples in a folder, at any depth; each has ``graph_net.json``.

    Raises:
        ValueError: there is none.
    """
    root = Path(setting.samples)
    found = sorted(p.parent for p in root.rglob("graph_net.json") if (p.parent / "model.py").is_file())
    if not found:
        raise ValueError(
            f"there are no samples of GraphNet in {str(root)!r} (folders with graph_net.json, model.py)"
        )
    return [Row(_name(folder, root), functools.partial(make, folder)) for folder in found]


def _name(folder: Path, root: Path) -> str:
    return folder.name if folder == root else folder.relative_to(root).as_posix()


def chosen(found: list[Row], count: int, seed: int, setting: Setting) -> list[Row]:
    """So many of them at random that are not too large, the same ones for the same seed."""
    if not count:
        return found
    root, taken = Path(setting.samples), []
    for row in random.Random(seed).sample(found, len(found)):
        folder = root if row.name == root.name else root / row.name
        if _bytes(_metas(folder)) <= setting.gib * 2**30:
            taken.append(row)
        if len(taken) == count:
            break
    return taken


def _metas(folder: Path) -> dict[str, dict[str, Any]]:
    """What is said of a sample's tensors, by their names."""
    return {m["name"]: m for file in METAS for m in read_metas(folder / file)}


def _bytes(metas: dict[str, dict[str, Any]]) -> int:
    return sum(math.prod(m["shape"]) * _dtype(m).itemsize for m in metas.values())


class Sample(nn.Module):
    """A graph with its weights; called with its inputs in their order."""

    def __init__(
        self, graph: nn.Module, arguments: list[str], weights: dict[str, torch.Tensor | nn.Parameter]
    ) -> None:
        super().__init__()
        # Not a submodule: the graph has no state, and its forward is all that is called.
        self._forward = graph.forward
        self._arguments = arguments
        for name, value in weights.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
        self._weights = set(weights)

    def forward(self, *inputs: Any) -> Any:
        given = iter(inputs)
        return self._forward(
            *[getattr(self, n) if n in self._weights else next(given) for n in self._arguments]
        )


def make(folder: Path, setting: Setting) -> tuple[nn.Module, Any]:
    """The sample as a model, and what draws its inputs.

    Raises:
        ValueError: the sample lacks something, or is larger than the run allows.
    """
    metas = _metas(folder)
    bytes_ = _bytes(metas)
    if bytes_ > setting.gib * 2**30:
        raise ValueError(f"its tensors are {bytes_ / 2**30:.1f} GiB, more than --gib {setting.gib:g}")
    source = (folder / "model.py").read_text()
    kinds = _arguments(source)
    if missing := [name for name in kinds if name not in metas]:
        raise ValueError(f"nothing is said about {missing[0]} and {len(missing) - 1} other arguments")
    dice = torch.Generator().manual_seed(zlib.crc32(folder.name.encode()))
    weights: dict[str, torch.Tensor | nn.Parameter] = {}
    inputs: list[str] = []
    for name, kind in kinds.items():
        if kind.endswith("Parameter") or "_parameters_" in name:
            value = _tensor(metas[name], dice)
            weights[name] = nn.Parameter(value, requires_grad=value.is_floating_point())
        elif "_buffers_" in name:
            weights[name] = _tensor(metas[name], dice)
        else:
            inputs.append(name)

    def draw(dice: torch.Generator) -> Arguments:
        return tuple(_input(metas[name], kinds[name], dice) for name in inputs), {}

    return Sample(_graph(_with_numbers(source, metas), folder, setting.device), list(kinds), weights), draw


def read_metas(path: Path) -> list[dict[str, Any]]:
    """What a file of descriptions says, a dictionary for each of its classes; nothing of it is executed."""
    if not path.is_file():
        return []
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            pairs = [n for n in node.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
            meta = {n.targets[0].id: _value(n.value) for n in pairs if isinstance(n.targets[0], ast.Name)}
            found.append({"shape": [], "dtype": "torch.float32", **meta})
    return found


def _value(node: ast.expr) -> Any:
    """A literal; also ``float("inf")``, alone or in a list, which Python writes no other way."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
        return float(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Call):
        return -_value(node.operand)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(n) for n in node.elts]
    return ast.literal_eval(node)


def _dtype(meta: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, meta["dtype"].split(".")[-1])
    return found


def _tensor(meta: dict[str, Any], dice: torch.Generator) -> torch.Tensor:
    """Values as they were, if they are given; else drawn by mean and deviation."""
    shape, dtype = meta["shape"], _dtype(meta)
    low, high = meta.get("min_val"), meta.get("max_val")
    if meta.get("data") is not None:
        return torch.tensor(meta["data"], dtype=dtype).reshape(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=dice) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(
            int(low or 0), int(high if high is not None else 1) + 1, shape, generator=dice
        ).to(dtype)
    mean, std = meta.get("mean") or 0.0, SPREAD if meta.get("std") is None else meta["std"]
    value = torch.randn(shape, generator=dice) * std + mean
    if low is not None or high is not None:
        # A variance is not negative.
        value = value.clamp(low, high)
    return value.to(dtype)


def _input(meta: dict[str, Any], kind: str, dice: torch.Generator) -> Any:
    """An input; whole numbers that are given change places, since they may be indices."""
    value = _tensor(meta, dice)
    if kind.endswith("SymInt"):
        return int(value.reshape(-1)[0])
    if (
        meta.get("data") is not None
        and not value.is_floating_point()
        and value.dim()
        and value.dtype != torch.bool
    ):
        return value[..., torch.randperm(value.shape[-1], generator=dice)]
    return value


def _arguments(source: str) -> dict[str, str]:
    """Names of the arguments of the graph's forward, and the types that it says they have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            given = [a for a in node.args.args if a.arg != "self"]
            return {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in given}
    raise ValueError("model.py has no forward")


def _with_numbers(source: str, metas: dict[str, dict[str, Any]]) -> str:
    """The source with the numbers of modules written out, such as a batch norm's momentum.

    Dynamo made tensors of them, which the graph asks for their ``item()``; the model had plain numbers.
    """
    numbers: dict[str, str] = {}
    for name, meta in metas.items():
        known = meta.get("data") is not None or not meta.get("std", SPREAD)
        if name.startswith("L_self_") and not meta["shape"] and known:
            numbers[_spelled(name)] = repr(_tensor(meta, torch.Generator()).item())
    return re.sub(r"\b(\w+)\.item\(\)", lambda found: numbers.get(_spelled(found[1]), found[0]), source)


def _spelled(name: str) -> str:
    """A name whichever way it is written: inside a graph, arguments are in snake case."""
    return name.replace("_", "").lower()


def _graph(source: str, folder: Path, device: str) -> nn.Module:
    """The graph; the devices that it names become the one of this run."""
    kind = torch.device(device).type
    source = re.sub(r"type=(['\"])(?:cuda|cpu)\1", f'type="{kind}"', source)
    source = re.sub(r"(['\"])cuda(:\d+)?\1", f'"{kind}"', source)
    if kind == "cpu":
        source = re.sub(r"(type=\"cpu\"), *index=\d+", r"\1", source)
    names: dict[str, Any] = {"__name__": f"sample_{zlib.crc32(str(folder).encode())}"}
    exec(compile(source, str(folder / "model.py"), "exec"), names)
    graph: nn.Module = names["GraphModule"]()
    return graph
