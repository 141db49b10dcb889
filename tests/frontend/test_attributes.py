"""Attributes of a model that its forward pass reads: a compiled model notices when they change."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypatia
from hypatia.frontend import direct


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Settings:
    """Something that models keep their numbers in."""

    def __init__(self) -> None:
        self.shift = 0.25


class Hooked(nn.Module):
    """A layer with hooks of its own, as those of graphs have them, and a chain of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: dict[int, Callable[[torch.Tensor], torch.Tensor]] = OrderedDict()
        self.chain = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.chain(x)
        for hook in self.hooks.values():
            y = hook(y)
        for part in self.children():
            y = y + sum(p.sum() for p in part.parameters())
        return y


class Reading(nn.Module):
    """A forward pass that reads attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.leaky = nn.Linear(8, 8), nn.LeakyReLU(0.1)
        self.scale = 2.0
        self.offset = torch.linspace(0, 1, 8)
        self.named = {"power": 2}
        self.several = [1.0, 3.0]
        self.settings = Settings()
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.silu
        self.steps = 0
        self.hooked = Hooked()
        self.factors: dict[Any, float] = {}
        self.pairs = {(1, 2): 1.5, (3, 4): 2.5}
        self.kinds, self.last = {"a"}, deque([1.0, 2.0])
        self.nested = ({"shift": 0.5}, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them but ``steps``."""
        y = self.leaky(self.layer(x)) * self.scale + self.offset
        y = self.hooked(y) * math.prod(self.factors.values()) + len(self.kinds) + sum(self.last)
        for factor in self.pairs.values():
            y = y * factor - 1
        y = y * getattr(self, "late", 1.0) + getattr(self.settings, "late", 0.0) + self.nested[0]["shift"]
        y = self.act(y ** self.named["power"] + sum(self.several)) + self.settings.shift
        return y if not hasattr(self, "last_layer") else self.last_layer(y)


CHANGES: dict[str, Callable[[Reading], Any]] = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a tensor": lambda m: setattr(m, "offset", -m.offset),
    "a tensor in place": lambda m: m.offset.add_(1),
    "an entry": lambda m: m.named.update(power=3),
    "an element": lambda m: m.several.__setitem__(1, 5.0),
    "a new element": lambda m: m.several.append(7.0),
    "an object's attribute": lambda m: setattr(m.settings, "shift", 0.75),
    "an object": lambda m: setattr(m, "settings", type("Other", (), {"shift": 1.5})()),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "a number of a part": lambda m: setattr(m.leaky, "negative_slope", 0.7),
    "a first entry": lambda m: m.factors.update(new=0.5),
    "a new entry": lambda m: m.pairs.update({(5, 6): 0.5}),
    "an entry of any key": lambda m: m.pairs.update({(1, 2): 0.5}),
    "an entry less": lambda m: m.pairs.pop((3, 4)),
    "the order of entries": lambda m: m.pairs.update({(1, 2): m.pairs.pop((1, 2))}),
    "a member of a set": lambda m: m.kinds.add("b"),
    "an element of a deque": lambda m: m.last.rotate() or m.last.append(5.0),
    "an entry in a tuple": lambda m: m.nested[0].update(shift=2.0),
    "an attribute that was not there": lambda m: setattr(m, "late", 3.0),
    "a part that was not there": lambda m: setattr(m, "last_layer", nn.ReLU()),
    "an attribute that an object had not": lambda m: setattr(m.settings, "late", 3.0),
    "a hook of the model's own": lambda m: m.hooked.hooks.update({0: torch.tanh}),
    "a part at the end of a chain": lambda m: m.hooked.chain.append(nn.Tanh()),
    "a new part": lambda m: m.hooked.add_module("more", nn.Linear(8, 8)),
    "a forward of one module": lambda m: setattr(m.leaky, "forward", torch.tanh),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str, training: bool) -> None:
    model, x = Reading(), torch.randn(4, 8)
    compiled = hypatia.compile(model, x)
    assert [r.kept for r in compiled.reports] == ["plan"]
    with torch.set_grad_enabled(training):
        for change in (lambda m: None, CHANGES[name]):
            change(model)
            for _ in range(3):
                ours, theirs = compiled(x), model(x)
                torch.testing.assert_close(ours, theirs)
                if training:
                    ours.sum().backward()


def test_what_is_equal_or_not_read_is_no_change() -> None:
    model, x = Reading(), torch.randn(4, 8)
    compiled = hypatia.compile(model, x)
    entry = compiled._last or next(iter(compiled._entries.values()))
    with torch.no_grad():
        model.scale, model.steps = math.sqrt(16.0) / 2, 7
        model.seen = x
        compiled(x)
    assert list(compiled._entries.values()) == [entry]


def test_what_a_model_holds_is_what_it_held() -> None:
    """torch.export leaves copies of dictionaries, to which those who hold the first ones have no way."""
    model, x = Reading(), torch.randn(4, 8)
    held = [
        (part, name, value)
        for part in model.modules()
        for name, value in vars(part).items()
        if name[0] != "_"
    ]
    compiled = hypatia.compile(model, x)
    compiled(x).sum().backward()
    assert compiled.reports
    assert all(vars(part)[name] is value for part, name, value in held)


def test_a_model_that_changes_at_every_call_is_left_alone() -> None:
    model, x = Reading(), torch.randn(4, 8)
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        for n in range(direct._AGAIN + 4):
            model.scale = 1.0 + n
            torch.testing.assert_close(compiled(x), model(x))
        entry = compiled._last
        model.scale = 0.5
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled._last is entry
    assert entry._run is model


def test_a_forward_that_asks_for_exact_types_runs_as_it_is() -> None:
    """While a model is traced its modules are of classes that note what is read."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if type(self.layer) is nn.Linear else x

    model = Asking()
    compiled = hypatia.compile(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))


def test_a_module_of_several_names_is_compiled() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.outer = nn.Sequential(self.inner, self.first)
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.outer(self.inner(self.first(x))))

    model, x = Shared().eval(), torch.randn(4, 8)
    before = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.reports, "the model runs as it is"
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is value for name, value in before.items())
