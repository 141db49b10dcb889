"""Tensors that are filled with a number of another one are made where that is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia
from hypatia.capture.filled_by_tensors import ITEM, PASS
from hypatia.compiler import pipeline


@pytest.fixture(autouse=True)
def _errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)


class Anchors(nn.Module):
    """The end of a detector: boxes in units of the strides of their images."""

    def __init__(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.fill = fill

    def forward(self, x: torch.Tensor, strides: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        filled = torch.cat([self.fill(strides[i]) for i in range(2)])
        return self.project(x) * filled, filled


def _item(x: torch.Tensor) -> torch.Tensor:
    # What ``item()`` is in graphs that others captured.
    return torch.ops.aten._local_scalar_dense(x)


FILLS = {
    "as it is": (lambda s: torch.full((3, 1), _item(s), dtype=torch.float32), torch.float32),
    "wider": (lambda s: torch.full((3, 1), _item(s), dtype=torch.float64), torch.float32),
    "of 16 bits": (lambda s: torch.full((3, 1), _item(s), dtype=torch.float32), torch.bfloat16),
    "of one element": (
        lambda s: torch.full((3, 1), _item(s.reshape(1, 1)), dtype=torch.float32),
        torch.float32,
    ),
    "whole numbers": (lambda s: torch.full((3, 1), _item(s), dtype=torch.int64), torch.int64),
}


@pytest.mark.parametrize("kind", FILLS)
def test_a_plan_fills_with_what_a_tensor_holds(kind: str) -> None:
    """Every call has the numbers of its own strides, not of the first call's."""
    torch.manual_seed(0)
    fill, dtype = FILLS[kind]
    model, x = Anchors(fill).eval(), torch.randn(6, 4)
    with torch.no_grad():
        compiled = hypatia.compile(model)
        for numbers in ([8, 16], [2, 3], [2**24, 0], [-7, 5]):
            strides = torch.tensor(numbers, dtype=dtype)
            for found, expected in zip(compiled(x, strides), model(x, strides), strict=True):
                assert found.dtype == expected.dtype
                assert found.stride() == expected.stride()
                torch.testing.assert_close(found, expected)
    (report,) = compiled.reports
    assert PASS in report.passes
    assert not any(n.target is ITEM for n in report.after.nodes)
    assert not report.no_plan


def test_numbers_that_a_dtype_does_not_have_are_errors_as_in_eager() -> None:
    model = Anchors(lambda s: torch.full((3, 1), _item(s), dtype=torch.float16)).eval()
    x, large = torch.randn(6, 4), torch.tensor([1e10, 2.0])
    with torch.no_grad():
        compiled = hypatia.compile(model)
        compiled(x, torch.ones(2))
        for call in (model, compiled):
            with pytest.raises(RuntimeError, match="overflow"):
                call(x, large)
    assert all(PASS not in r.passes for r in compiled.reports)


class Growing(Anchors):
    """Reads the number, changes what it came from, and fills only then."""

    def __init__(self) -> None:
        super().__init__(lambda s: s)
        self.register_buffer("size", torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = _item(self.size[0])
        self.size.mul_(2)
        return self.project(x) * torch.full((6, 1), number, dtype=torch.float32) + self.size[1]


@pytest.mark.parametrize("verify", ["strict", "off"])
def test_the_number_is_the_one_that_was_read(verify: str) -> None:
    """What changes the tensor comes between: neither the first nor a later call may see the new number."""
    torch.manual_seed(0)
    model, x = Growing().eval(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        compiled = hypatia.compile(model, verify=verify)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), plain(x))
            assert torch.equal(model.size, plain.size)
    assert any(PASS in r.passes for r in compiled.reports)
