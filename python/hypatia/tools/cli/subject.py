"""The model that a command is about: a workload by name, or what a factory in a module or a file returns."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch
    from torch import nn

EXPECTED = "it must return (model, inputs) or (model, inputs, kwargs)"


class SubjectType(click.ParamType):
    """Completion and the name of the argument; loading it needs torch and comes later."""

    name = "MODULE:FACTORY"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what it is called with."""

    name: str
    model: nn.Module
    inputs: tuple[object, ...]
    kwargs: dict[str, object]


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A subject to be measured like a workload."""

    name: str
    subject: Subject

    def build(
        self, dtype: torch.dtype | None, device: str
    ) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        """The model, its inputs and its keyword arguments; floating ones in this dtype, if one is given."""
        import torch

        from ..._torch import pytree

        inputs, kwargs = self.subject.inputs, self.subject.kwargs
        if dtype is None:
            return self.subject.model, inputs, kwargs

        def cast(t: torch.Tensor) -> torch.Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        inputs, kwargs = pytree.tree_map_only(torch.Tensor, cast, (inputs, kwargs))
        return self.subject.model.to(dtype), inputs, kwargs


def load(spec: str, device: str = "cpu") -> Subject:
    """The model that ``spec`` names, on the device; errors say what was expected."""
    check_device(device)
    if ":" not in spec:
        return _workload(spec, device)
    place, _, name = spec.rpartition(":")
    target = _attribute(_module(place), place, name)
    return _moved(_unpacked(_called(target, spec), spec), device)


def check_device(device: str) -> None:
    """An error when there is no such device."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as e:
        raise click.ClickException(f"{device!r} is no device; try cpu or cuda") from e
    if kind == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("no GPU found on this machine; use --device cpu")


def parse_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """``key=value`` pairs for ``torch.compile(options=...)``; values are JSON where they can be."""
    from hypatia.options import OptionError, Options

    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise click.ClickException(f"--option takes key=value, not {pair!r}")
        try:
            value = (
                {"None": None, "True": True, "False": False}[text] if text[:1] in "NTF" else json.loads(text)
            )
        except (KeyError, ValueError):
            value = text
        options[key] = text.split(",") if key == "disabled_rules" and isinstance(value, str) else value
    try:
        Options.parse(options)
    except OptionError as e:
        raise click.ClickException(str(e)) from e
    return options


def _workload(name: str, device: str) -> Subject:
    from hypatia.tools import workloads

    try:
        found = workloads.find(name)
    except LookupError as e:
        raise click.ClickException(f"{e.args[0]}; a model of your own is given as module:factory") from e
    model, inputs = found.build(device=device)
    return Subject(found.name, model, inputs, {})


def _module(place: str) -> ModuleType:
    try:
        return _module_of_file(Path(place)) if place.endswith(".py") else _importable(place)
    except click.ClickException:
        raise
    except ModuleNotFoundError as e:
        if e.name and (place == e.name or place.startswith(e.name + ".")):
            raise click.ClickException(
                f"there is no module {e.name!r} here; a file is given as models.py:build"
            ) from e
        raise click.ClickException(f"{place} cannot be imported: {e}") from e
    except (Exception, SystemExit) as e:
        raise click.ClickException(f"{place} cannot be imported: {type(e).__name__}: {e}") from e


def _importable(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise click.ClickException(f"there is no file {path}")
    # A file may be called like a module that is in use.
    name = path.stem if path.stem not in sys.modules else f"{path.stem} from a file"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise click.ClickException(f"{path} is no Python file")
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, name: str) -> object:
    target: object = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [
                n
                for n, v in vars(module).items()
                if callable(v) and getattr(v, "__module__", "") == module.__name__
            ]
            has = f"it defines {', '.join(names)}" if names else "it defines no function"
            raise click.ClickException(f"{place} has no {name!r}; {has}")
        target = getattr(target, part)
    return target


def _called(target: object, spec: str) -> object:
    from torch import nn

    if isinstance(target, (tuple, list)):
        return target
    if isinstance(target, nn.Module):
        raise click.ClickException(f"{spec} is a model without inputs; name a function, and {EXPECTED}")
    if not callable(target):
        raise click.ClickException(f"{spec} is {target!r:.40}, not a function; {EXPECTED}")
    try:
        return target()
    except Exception as e:
        raise click.ClickException(f"{spec}() failed: {type(e).__name__}: {e}") from e


def _unpacked(result: object, spec: str) -> Subject:
    import torch

    def wrong(what: str) -> click.ClickException:
        return click.ClickException(f"{spec} returned {what}; {EXPECTED}")

    if not isinstance(result, (tuple, list)):
        raise wrong(f"a {type(result).__name__}")
    if len(result) not in (2, 3):
        raise wrong(f"{len(result)} values")
    model, inputs, kwargs = (*result, {})[:3]
    if not isinstance(model, torch.nn.Module):
        raise wrong(f"a {type(model).__name__} where the model should be")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise wrong(f"a {type(inputs).__name__} where the inputs should be (a tuple of them)")
    if not isinstance(kwargs, dict):
        raise wrong(f"a {type(kwargs).__name__} where the keyword arguments should be (a dict)")
    return Subject(spec, model, tuple(inputs), kwargs)


def _moved(subject: Subject, device: str) -> Subject:
    import torch

    from ..._torch import pytree

    if device == "cpu":
        return subject
    inputs, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(device), (subject.inputs, subject.kwargs)
    )
    return Subject(subject.name, subject.model.to(device), inputs, kwargs)
