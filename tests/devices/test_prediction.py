"""What a step is expected to take, by given rates; and that a device can be measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hypatia.devices import calibration
from hypatia.devices.calibration import Rates
from hypatia.devices.prediction import (
    AFTER_CALL,
    APART,
    CALL_KINDS,
    CALL_RUN,
    CALLS,
    HOST,
    KINDS,
    PARALLEL,
    PARALLEL_CALL,
    PARALLEL_CALLS,
    PARALLEL_STEP,
    Demand,
    call_kind,
    predicted,
    predicted_call,
)

RATES = Rates(
    bandwidth=1e9,
    products={"f32": 1e9, "bf16": 4e9},
    by_size=[[1e3, 4e9], [1e5, 1e9]],
    products_by_size={"f32": [[1e3, 1e8], [1e9, 1e9]]},
    vector=1e9,
    launch=1e-6,
    host=2e-6,
    parallel=False,
    calls={kind: [1e-5, 2.0] for kind in [*CALL_KINDS, "index"]},
)
GPU = dataclasses.replace(RATES, parallel=True)


def linear(**more: float) -> Demand:
    return Demand("linear", "linear + relu", "f32", more.pop("moved", 0.0), more.pop("products", 0.0), **more)  # type: ignore[arg-type]


def test_rates_between_sizes() -> None:
    assert RATES.moving(1e2) == 1e2 / 4e9, "no faster than the smallest that was measured"
    assert RATES.moving(1e6) == 1e6 / 1e9
    assert RATES.moving(1e4) == pytest.approx(1e4 / 2e9), "half way, as sizes grow by factors"
    assert RATES.moving(1e2, within=1e6) == 1e2 / 1e9, "a part of something large comes from where that lies"
    assert RATES.moving(0.0) == 0.0
    assert RATES.multiplying(1e9, "f32") == 1.0
    assert RATES.multiplying(1e3, "f32") == pytest.approx(1e-5)


def test_a_step_takes_what_its_parts_take() -> None:
    kind = KINDS["linear"]
    assert predicted(linear(), RATES) == pytest.approx(kind.start * 1e-6)
    more = predicted(linear(products=1e6), RATES) - predicted(linear(), RATES)
    assert more == pytest.approx(kind.multiplying * 1e-3)
    more = predicted(linear(vector=1e6), RATES) - predicted(linear(), RATES)
    assert more == pytest.approx(kind.vector * 1e-3)
    more = predicted(linear(runs=1e3), RATES) - predicted(linear(), RATES)
    assert more == pytest.approx(kind.run * 1e-6)
    more = predicted(linear(moved=1e5), RATES) - predicted(linear(), RATES)
    assert more == pytest.approx(kind.moving * 1e-4)
    more = predicted(linear(after_call=True), RATES) - predicted(linear(), RATES)
    assert more == pytest.approx(AFTER_CALL * 1e-6)


def test_constants_come_from_where_those_of_the_plan_lie() -> None:
    near, far = (predicted(linear(moved=1e3, constants=1e3), RATES, within) for within in (1e3, 1e6))
    moving = KINDS["linear"].moving
    assert far - near == pytest.approx(moving * 1e3 * (1 / 1e9 - 1 / 4e9))
    assert predicted(linear(moved=1e3), RATES, 1e6) == predicted(linear(moved=1e3), RATES, 1e3)


def test_a_kind_of_rows_has_constants_of_its_own() -> None:
    norm = Demand("rows", "rmsnorm { eps: 1e-6 } over [2, 32]", "f32", 0, 0)
    assert predicted(norm, RATES) == pytest.approx(KINDS["rows rmsnorm"].start * 1e-6)
    assert predicted(norm._replace(name="softmax over [2, 32]"), RATES) == KINDS["rows"].start * 1e-6


def test_a_device_with_threads_for_all_moves_and_computes_at_once() -> None:
    start, work = PARALLEL["linear"]
    assert predicted(linear(products=1e9, moved=1e8), GPU) == pytest.approx(work + start * 1e-6)
    assert predicted(linear(products=1e3, moved=1e9, runs=1e9), GPU) == pytest.approx(work + start * 1e-6)
    region = Demand("region", "relu", "f32", 1e9, 0.0)
    assert predicted(region, GPU) == pytest.approx(PARALLEL_STEP[1] + PARALLEL_STEP[0] * 1e-6)


def test_calls_into_torch_by_their_kind() -> None:
    call = Demand("torch", "aten.convolution.default", "f32", 0.0, 1e6)
    start, work = CALL_KINDS["convolution"]
    assert predicted(call, RATES) == pytest.approx(start * 1e-5 + work * 2.0 * 1e-3)
    packed = predicted(call._replace(call="packed convolution"), RATES)
    assert packed == pytest.approx(
        CALL_KINDS["packed convolution"][0] * 1e-5 + CALL_KINDS["packed convolution"][1] * 2e-3
    )
    kernel, work = PARALLEL_CALLS["convolution"]
    assert predicted(call, GPU) == pytest.approx(kernel * 1e-5 + work * 2.0 * 1e-3)
    kernel, work = PARALLEL_CALL
    other = predicted(call._replace(name="aten.cumsum.default"), GPU)
    assert other == pytest.approx(kernel * 1e-5 + work * 2e-3)
    attention = Demand("torch", "aten.scaled_dot_product_attention.default", "f32", 0.0, 0.0, 1.0, runs=1e3)
    less = predicted(attention._replace(runs=0.0), RATES)
    assert predicted(attention, RATES) - less == pytest.approx(CALL_RUN * 1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.convolution.default", "convolution"),
        ("aten.scaled_dot_product_attention.default", "attention"),
        ("aten.native_group_norm.default", "norm"),
        ("aten.max_pool2d.default", "pool"),
        ("aten.bmm.default", "product"),
        ("aten.mm.out", "product"),
        ("aten.mean.dim", "reduction"),
        ("aten.index.Tensor", "index"),
        ("aten.embedding.default", "lookup"),
        ("aten.index_select.default", "lookup"),
        ("aten.cat.default", "copy"),
        ("aten.cumsum.default", "other"),
    ],
)
def test_kinds_of_calls(name: str, kind: str) -> None:
    assert call_kind(name) == kind


def test_a_call_of_a_plan_takes_the_host_too() -> None:
    assert predicted_call([1e-3, 1e-3], RATES, overlaps=False) == pytest.approx(2e-3 + HOST * 2e-6)
    host, between = APART
    apart = host * 2e-6 + 2 * between * 1e-6
    assert predicted_call([1e-3, 1e-3], RATES, overlaps=True) == pytest.approx(2e-3 + apart)


def test_a_processor_can_be_measured() -> None:
    found = calibration.measured(torch.device("cpu"))
    assert set(found.calls) >= {kind for kind, _ in CALLS} | {*CALL_KINDS}
    numbers = [found.bandwidth, found.vector, found.launch, found.host, *found.products.values()]
    numbers += [n for size in found.by_size for n in size] + [
        n for call in found.calls.values() for n in call
    ]
    assert all(number > 0 for number in numbers)
    sizes = [size for size, _ in found.by_size]
    assert sizes == sorted(sizes)
    assert set(found.products) == set(found.products_by_size) == {"f32", "bf16", "f16"}
    step = Demand("region", "pointwise over [8]", "f32", 64.0, 0.0, 8.0)
    assert predicted(step, found) > 0
