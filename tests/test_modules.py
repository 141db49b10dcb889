"""PyTorch's own module database in inference, on CPU in float32, through both entries.

Every sample of a module runs in eager, as a float64 copy, through `torch.compile` and through
`hypatia.compile`, and once more with other values. A wrong result or an exception counts against us unless
torch's do-nothing backend has it too. By default a fixed tenth of the modules runs, with few samples;
`HYPATIA_MODULES=all` runs all of them.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

import hypatia
from support import (
    BACKEND,
    PEER,
    MismatchError,
    Reference,
    assert_as_close_as_eager,
    copied,
    fresh_dynamo,
    other_values,
    tensors,
)

EVERYTHING = os.environ.get("HYPATIA_MODULES", "tenth") == "all"
SAMPLES = 0 if EVERYTHING else 2
"""Samples of each module, taken evenly from its list; 0 takes all."""

LATER = ("moved", "ties", "nan", "strides") if EVERYTHING else ("ties",)
"""What later calls are made with."""

SEED = 1234

Entry = Callable[[nn.Module, "Given"], Callable[..., Any]]


@dataclass(frozen=True)
class Given:
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def copied(self, *, double: bool = False, nudge: bool = False) -> Given:
        return Given(*copied((self.args, self.kwargs), double=double, nudge=nudge))

    def other(self, kind: str) -> Given:
        return Given(*other_values((self.args, self.kwargs), kind))


def by_torch(backend: str) -> Entry:
    return lambda module, _: torch.compile(module, backend=backend)


def by_us(module: nn.Module, given: Given) -> Callable[..., Any]:
    return hypatia.compile(module, *given.args, kwargs=given.kwargs)


def chosen_modules() -> list[ModuleInfo]:
    """All of them, or a tenth that depends on nothing but their names."""

    def in_the_tenth(info: ModuleInfo) -> bool:
        return int(hashlib.sha256(info.formatted_name.encode()).hexdigest(), 16) % 10 == 0

    return [
        info
        for info in module_db
        if torch.float32 in info.supported_dtypes("cpu") and (EVERYTHING or in_the_tenth(info))
    ]


def samples_of(info: ModuleInfo) -> Iterator[tuple[str, nn.Module, Given]]:
    """Modules in evaluation with their arguments."""
    torch.manual_seed(SEED)
    made = list(
        info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
    )
    count = SAMPLES or len(made)
    for sample in made if len(made) <= count else [made[i * len(made) // count] for i in range(count)]:
        build, call = sample.constructor_input, sample.forward_input
        torch.manual_seed(SEED)
        module = info.module_cls(*build.args, **build.kwargs).to(torch.float32).eval()
        given = Given(call.args, call.kwargs)
        if info.is_lazy:
            # The first call makes the parameters.
            with torch.no_grad():
                module(*given.copied().args, **given.copied().kwargs)
        yield f"{sample.desc or build.args} {build.kwargs}", module, given


def called(call: Callable[..., Any], given: Given) -> Any:
    torch.manual_seed(SEED)
    with torch.no_grad():
        return call(*given.args, **given.kwargs)


def complaint_of(entry: Entry, module: nn.Module, given: Given) -> str | None:
    """What is wrong with the first call or a later one, if anything is."""
    fresh_dynamo()
    compiled: Callable[..., Any] | None = None
    for kind in ("", *LATER):
        values = given.other(kind) if kind else given
        try:
            eager = called(module, values.copied())
        except Exception:
            continue
        try:
            if compiled is None:
                with torch.no_grad():
                    compiled = entry(module, values.copied())
            assert_as_close_as_eager(called(compiled, values.copied()), eager, exact(module, values))
        except MismatchError as mismatch:
            return f"{mismatch} ({kind or 'first'} values)"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip()[:400]} ({kind or 'first'} values)"
    return None


def exact(module: nn.Module, given: Given) -> Reference | None:
    wide = copy.deepcopy(module).double()
    try:
        return Reference(
            tensors(called(wide, given.copied(double=True))),
            lambda: tensors(called(wide, given.copied(double=True, nudge=True))),
        )
    except Exception:
        return None


@pytest.mark.modules
@pytest.mark.parametrize("info", chosen_modules(), ids=lambda info: info.formatted_name)
def test_module(info: ModuleInfo) -> None:
    entries: dict[str, Entry] = {"torch.compile": by_torch(BACKEND)}
    if BACKEND == "hypatia":
        entries["hypatia.compile"] = by_us
    count, found = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, module, given in samples_of(info):
            for entry, make in entries.items():
                count += 1
                complaint = complaint_of(make, module, given)
                if complaint and complaint_of(by_torch(PEER), module, given) is None:
                    found.append(f"{entry}, {name}: {complaint}")
    assert count, "no sample ran"
    assert not found, "\n".join(found)


class _Wrong(nn.Module):
    """A module that is wrong by one part in ten thousand."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) * 1.0001


def test_a_wrong_module_is_caught() -> None:
    given = Given((torch.randn(3, 4),), {})
    complaint = complaint_of(lambda module, _: _Wrong(module), nn.Linear(4, 5).eval(), given)
    assert complaint is not None
    assert "values off by" in complaint
