"""What the packages ask of a device: without a GPU, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hypatia import _torch
from hypatia.devices import table
from hypatia.devices.bound import Request

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")


class _Plan:
    """Keeps what it is bound with."""

    def __init__(self, *given: object) -> None:
        self.given = given


def _request(device: torch.device, plan: object, like: object) -> Request:
    return Request(
        plan=plan,  # type: ignore[arg-type]
        constants=[torch.zeros(1)],
        watched=[torch.ones(1)],
        calls=["aten::relu"],
        libtorch="libtorch.so",
        device=device,
        lead=7,
        returns=[1, 0],
        split=False,
        most=100,
        without=["tiles"],
        like=like,  # type: ignore[arg-type]
    )


def test_a_plan_of_the_host_is_bound_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_native", SimpleNamespace(BoundPlan=_Plan))
    like = _Plan()
    request = _request(CPU, SimpleNamespace(bind=_Plan), like)
    given = table.of(CPU).bind(request).given  # type: ignore[attr-defined]
    expected = (request.constants, request.watched, ["aten::relu"], "libtorch.so", 7, 100, ["tiles"], like)
    assert given == expected
    other = _request(CPU, SimpleNamespace(bind=_Plan), object())
    assert table.of(CPU).bind(other).given[-1] is None  # type: ignore[attr-defined]


def test_a_plan_of_a_gpu_is_bound_with_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_native", SimpleNamespace(BoundCudaPlan=_Plan))
    monkeypatch.setitem(vars(_torch), "cublas_allows_tf32", lambda: True)
    like, plan = _Plan(), object()
    request = _request(GPU, plan, like)
    given = table.of(GPU).bind(request).given  # type: ignore[attr-defined]
    first = (plan, request.constants, request.watched, ["aten::relu"], "libtorch.so", 3, 7, True)
    assert given == (*first, [1, 0], False, 100, like)


def test_only_plans_with_calls_into_torch_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        kind = type("BoundCudaPlan", (), {"is_native": lambda self, native=native: native})
        monkeypatch.setattr(table, "_native", SimpleNamespace(BoundCudaPlan=kind))
        plan = kind()
        assert table.of(GPU).recordable(plan) is (None if native else plan)
        assert table.of(CPU).recordable(plan) is None
        assert table.of(GPU).recordable(object()) is None  # type: ignore[arg-type]


def test_devices_differ_in_these() -> None:
    assert table.of(CPU).eager_wins_ties
    assert not table.of(GPU).eager_wins_ties
    assert not table.of(CPU).times_host_apart
    assert table.of(GPU).times_host_apart
    assert table.of(CPU).allows_tf32() is None
    assert table.of(CPU).free_memory(CPU) is None
    assert table.of(META).no_kernels(META, "inference") == "there are no kernels for meta"
    values = [torch.zeros(1), torch.zeros(1, device="meta"), 3]
    assert table.random_devices(values) == []
    assert table.of(GPU).random_devices(GPU) == [GPU]
