"""Profiles: kernels of a plan belong to its steps."""

from __future__ import annotations

import torch
from forms import winning
from torch import nn

import hypatia
from hypatia.devices.rates import rates
from hypatia.execute.step_times import plan_calls, step_times


class Net(nn.Module):
    """Layers with a call of torch's between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cumsum(torch.relu(self.first(x)), -1) * 1e-3)


def check_every_step_of_a_profile_has_kernels() -> str:
    """Each has a time of its own, and products take most of their limit at least."""
    torch.manual_seed(0)
    model = Net().cuda().bfloat16().eval()
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = hypatia.compile(model)
    # On a machine that others use a clock may choose torch's ops.
    with torch.no_grad(), winning("plan"):
        expected = compiled(x)
        with plan_calls() as calls:
            compiled(x)
    (call,) = calls
    steps = step_times(*call)
    assert steps is not None
    assert all(step.seconds > 0 for step in steps), steps
    products = [step for step in steps if step.multiplications]
    assert [step.multiplications for step in products] == [2048 * 1024 * 4096] * 2, steps
    for step in products:
        assert 0.3 * step.least < step.seconds < 20 * step.least, step
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)
    rate = rates(torch.device("cuda"))
    said = [f"{step.name} {1e6 * step.seconds:.1f} us (limit {1e6 * step.least:.1f})" for step in steps]
    return f"{rate.bandwidth / 1e12:.2f} TB/s, {rate.products['bf16'] / 1e12:.0f}T: {', '.join(said)}"
