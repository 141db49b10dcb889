"""`hypatia.compile`: calls of any structure run by the plan, and return what the model returns."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import hypatia
from hypatia._torch import pytree
from hypatia.compiler import pipeline
from hypatia.execute import choose, timing
from hypatia.frontend import compiled_call
from hypatia.frontend.dynamo import collecting

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float = 1.0


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: a dictionary too, without values that are none."""

    logits: Any = None
    z: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        for name, value in [*vars(self).items()]:
            if value is not None:
                self[name] = value


pytree.register_pytree_node(
    Output,
    lambda o: (list(o.values()), list(o.keys())),
    lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
    serialized_type_name="test_calls.Output",
)


class Layer:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.seen = 0


class Cache:
    """As transformers' DynamicCache: an object that a model fills, and that grows."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.layer_class = Layer

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        if not self.layers:
            self.layers.append(self.layer_class())
        layer = self.layers[0]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], 1)
        return layer.keys


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, value: Any = None, *, mask: Any = None, kind: str = "sum", form: str = "one") -> Any:
        x = value
        if isinstance(value, Batch):
            x, mask = value.x * value.scale, value.mask
        elif isinstance(value, dict):
            x = value["a"] + value["b"]
        elif isinstance(value, (list, tuple)):
            x = value[0] - value[1]
        y = self.down(torch.relu(self.up(x)))
        if mask is not None:
            y = y * mask
        z = y.sum(-1) if kind == "sum" else y.mean(-1)
        return {
            "one": lambda: y,
            "tuple": lambda: (y, None, 3, [z]),
            "dict": lambda: {"y": y, "kind": kind, 5: z},
            "pair": lambda: Pair(y, z),
            "dataclass": lambda: Batch(y, z, 0.5),
            "output": lambda: Output(logits=y, z=(z, y)),
        }[form]()


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 8, generator=generator) for _ in range(3))


x, y, z = tensors()
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "keywords": ((), {"value": x, "mask": y, "kind": "mean"}),
    "none": ((x,), {"mask": None}),
    "a dictionary": (({"a": x, "b": y},), {}),
    "a list": (([x, y],), {}),
    "a named tuple": ((Pair(x, y),), {}),
    "an ordered dictionary": ((OrderedDict(a=x, b=y),), {}),
    "a dataclass": ((Batch(x, y, 2.0),), {}),
    **{
        f"returns: {form}": ((x,), {"form": form})
        for form in ("tuple", "dict", "pair", "dataclass", "output")
    },
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
        if isinstance(a, Output):
            same(vars(a), vars(b))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for p, q in zip(a, b, strict=True):
            same(p, q)
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        same(vars(a), vars(b))
    else:
        assert a == b


@pytest.mark.parametrize("name", CALLS)
def test_any_call_runs_by_the_plan(name: str) -> None:
    args, kwargs = CALLS[name]
    model = Model().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for _ in range(3):
            same(compiled(*args, **kwargs), model(*args, **kwargs))
        entry = compiled._last
        assert entry is not None
        assert entry.native is not None, "there is no plan"
        assert entry.take(args, kwargs) is not None
        other = pytree.tree_map_only(torch.Tensor, lambda t: t + 1.0, (args, kwargs))
        same(compiled(*other[0], **other[1]), model(*other[0], **other[1]))


@pytest.mark.parametrize("name", CALLS)
def test_any_call_trains(name: str) -> None:
    args, kwargs = CALLS[name]
    model = Model()
    compiled = hypatia.compile(model)
    for _ in range(3):
        found = []
        for call in (model, compiled):
            result = call(*args, **kwargs)
            leaves = pytree.tree_leaves(vars(result) if isinstance(result, Batch) else result)
            sum(t.sum() for t in leaves if isinstance(t, torch.Tensor)).backward()
            found.append([result, [p.grad for p in model.parameters()]])
            model.zero_grad()
        same(*found)
    assert compiled._last_training is not None
    assert compiled._captured is None, "torch.compile was asked"


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> Any:
        cache = Cache() if cache is None else cache
        keys = cache.update(self.keys(x))
        scores = torch.softmax(x @ keys.transpose(1, 2), -1)
        return Output(logits=self.out(torch.relu(scores @ keys)), cache=cache)


def test_a_cache_is_returned_and_taken_back() -> None:
    model = Decoder().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for seed in range(2):
            prompt = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(seed))
            expected, got = model(prompt), compiled(prompt)
            assert compiled._last is not None
            assert compiled._last.native is not None, "there is no plan"
            for _ in range(6):
                same(got, expected)
                assert type(got["cache"]) is Cache
                token = torch.randn(1, 1, 8)
                mine, theirs = got["cache"], expected["cache"]
                expected, got = model(token, cache=theirs), compiled(token, cache=mine)
                assert got["cache"] is mine
                assert got["cache"].layers[0] is mine.layers[0]
    same(got, expected)
    assert len(compiled._entries) < 12


def test_what_a_model_changes_in_its_arguments_is_changed() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, data: dict[str, Any], log: list[Any]) -> Any:
            data["h"] = torch.relu(self.layer(data["x"]))
            log.append(data["h"])
            return data

    model = Changing().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for _ in range(3):
            mine, theirs = ({"x": x}, []), ({"x": x}, [])
            assert compiled(*mine) is mine[0]
            model(*theirs)
            same(mine, theirs)
            assert mine[0]["x"] is x
            assert mine[1][0] is mine[0]["h"]


def test_a_result_that_is_an_argument_is_that_tensor() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            h = self.layer(x).relu()
            return h, y, h

    compiled = hypatia.compile(Through().eval())
    with torch.no_grad():
        for _ in range(2):
            a, b, c = compiled(x, y=y)
            assert b is y
            assert a is c


def test_numbers_are_not_compiled_for_without_end() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return self.layer(x).relu() * scale

    model = Scaled().eval()
    for kind in (float, int):
        compiled = hypatia.compile(model)
        with torch.no_grad():
            for i in range(12):
                number = kind(i + 3)
                torch.testing.assert_close(compiled(x, number), model(x, number))
        made = {id(e) for e in compiled._entries.values() if e.report is not None}
        assert len(made) <= (2 if kind is int else 4), kind


def test_lengths_of_a_batch_of_one_are_left_open() -> None:
    model = Model().eval()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for length in (5, 6, 7, 8, 5):
            value, mask = torch.randn(1, length, 8), torch.randn(1, length, 1)
            same(compiled(value=value, mask=mask), model(value=value, mask=mask))
        assert len({id(e) for e in compiled._entries.values()}) == 2
        # The mask is for all of them.
        value, mask = torch.randn(1, 6, 8), torch.randn(1, 1, 1)
        same(compiled(value=value, mask=mask), model(value=value, mask=mask))
        with pytest.raises(RuntimeError):
            compiled(value=value, mask=torch.randn(1, 7, 1))


def test_a_model_that_fills_a_cache_is_compiled_at_the_second_call() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(8.0)
            return self.layer(x).relu() + self.table

    model = Filling().eval()
    compiled = hypatia.compile(model, x)
    assert model.table is None
    with torch.no_grad():
        for i in range(3):
            torch.testing.assert_close(compiled(x), model(x))
            assert model.table is not None
            assert i == 0 or compiled.reports


def test_a_model_without_its_hooks_is_compiled() -> None:
    model = Model().eval()
    compiled = hypatia.compile(model)
    seen = []
    with torch.no_grad():
        handle = compiled.register_forward_hook(lambda *_: seen.append(1))
        compiled(x)
        assert seen == [1]
        assert not compiled.reports
        handle.remove()
        compiled(x)
        assert seen == [1]
        assert compiled.reports


def test_lengths_settle_after_two_compilations_in_training() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            y = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
            return {"y": y, "masked": y if mask is None else y * mask}

    model = Block()
    compiled = hypatia.compile(model)
    for length in (5, 6, 7, 8, 9, 5, 7):
        value, mask = torch.randn(2, length, 8), torch.randn(2, length, 1)
        found = []
        for call in (model, compiled):
            result = call(value, mask=mask)
            (result["y"] * value + result["masked"]).sum().backward()
            found.append([result, [p.grad for p in model.parameters()]])
            model.zero_grad()
        same(*found)
    kept = {id(t): t for t in compiled._trainings.values()}
    assert len(kept) <= 2
    assert any(t.open for t in kept.values())
    assert compiled._captured is None, "torch.compile was asked"


class Deciding(nn.Module):
    """What it does depends on values, so that it cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.second(torch.relu(y)) if x.sum() > 0 else y


@pytest.mark.parametrize("faster", ["plan", "kept"])
def test_a_model_that_cannot_be_exported_runs_by_torch_compile(
    faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as it is from some call on, if that is faster."""
    torch._dynamo.reset()
    model = Deciding().eval()
    monkeypatch.setattr(choose, "LATER", (3,))
    monkeypatch.setattr(timing, "instead", lambda names: {n: 1.0 if n == faster else 2.0 for n in names})
    with torch.no_grad(), collecting() as reports:
        compiled = hypatia.compile(model, torch.ones(4, 16))
        for number in range(24):
            x = torch.full((4, 16), 1.0 if number % 2 else -1.0) * (1 + number)
            torch.testing.assert_close(compiled(x), model(x))
    assert reports, "no graph was compiled"
    (entry,) = compiled._entries.values()
    assert entry.by_torch == (faster == "kept")


def test_a_captured_graph_that_fails_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors may lie otherwise than real ones: a graph of them has a view that cannot be made."""

    def fails(*_: object) -> bool:
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr(pipeline, "raise_errors", False)
    monkeypatch.setattr(compiled_call, "computes_the_same", fails)
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        assert torch.equal(compiled(x), model(x))
    assert [r.kept for r in compiled.reports] == ["eager"]


class Reading(nn.Module):
    """A layer whose input a function makes of the arguments."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 8), read

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.layer(self.read(self, *inputs))


def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x


def remembered(_: nn.Module, x: torch.Tensor, seen: deque[torch.Tensor]) -> torch.Tensor:
    seen.append(x)
    return x


LEFT: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a set": (lambda _, x, s: x, (x, {1}), "an argument is of a type that nothing is known of"),
    "counting": (counted, (x,), "the model changes calls when it is called"),
    "a deque": (remembered, (x, deque()), "it cannot be exported"),
    "hooks": (lambda _, x: x, (x,), "it has hooks"),
}


@pytest.mark.parametrize("name", LEFT)
def test_where_a_call_is_left_to_the_model_the_log_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    read, inputs, why = LEFT[name]
    model = Reading(read).eval()
    if name == "hooks":
        model.register_forward_hook(lambda *_: None)
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="hypatia"):
        compiled = hypatia.compile(model)
        assert torch.equal(compiled(*inputs), model(*inputs))
    assert not compiled.reports
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "runs as it is" in r.getMessage()]
    assert said == [("INFO", f"the model runs as it is: {why}")]


def test_where_a_model_with_hooks_trains_the_log_says_how(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="hypatia"):
        hypatia.compile(model)(torch.randn(2, 4)).sum().backward()
    said = [r.getMessage() for r in caplog.records if "trains through" in r.getMessage()]
    assert said == ["the model trains through torch.compile: it has hooks"]
