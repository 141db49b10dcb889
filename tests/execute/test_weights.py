"""Weights that change in ways that version counters and addresses do not tell of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fresh
import hypatia
from hypatia import _native
from hypatia.execute.binding import Binding, _laid


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(torch.relu(self.first(x))))


def by_torch(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="hypatia", dynamic=False)


ENTRIES = {"torch.compile": by_torch, "hypatia.compile": hypatia.compile}


@pytest.fixture(params=ENTRIES)
def compiled(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return ENTRIES[request.param]


def free(tensor: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.untyped_storage().resize_(0)


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.untyped_storage().resize_(values.nbytes)
        tensor.copy_(values)


def test_blocks_that_share_a_graph_and_memory_do_not_share_packed_weights() -> None:
    """As under ``fully_shard``: the memory of one block's weights is given to the next."""
    torch._dynamo.reset()
    blocks = [Block().eval() for _ in range(3)]
    values = [[p.detach().clone() for p in b.parameters()] for b in blocks]
    x = torch.randn(8, 32)
    with torch.no_grad():
        expected = [b(x) for b in blocks]
        for block in blocks:
            block.compile(backend="hypatia")
            for p in block.parameters():
                free(p)
        for _ in range(4):
            for block, weights, wanted in zip(blocks, values, expected, strict=True):
                for p, value in zip(block.parameters(), weights, strict=True):
                    fill(p, value)
                torch.testing.assert_close(block(x), wanted)
                for p in block.parameters():
                    free(p)


def test_blocks_that_share_a_graph_keep_their_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers with a graph break in each are one graph, called with the weights of all in turns."""
    torch._dynamo.reset()
    blocks = [Block().eval() for _ in range(3)]
    for block in blocks:
        block.compile(backend="hypatia")
    x = torch.randn(8, 32)
    made = []
    bind = Binding._newly_bound
    monkeypatch.setattr(Binding, "_newly_bound", lambda self, *a: made.append(a) or bind(self, *a))
    with torch.no_grad():
        for number in range(4):
            for block in blocks:
                torch.testing.assert_close(block(x), block.forward(x))
            if number == 0:
                assert made, "there is no plan"
                made.clear()
        assert not made
        blocks[1].first.weight.mul_(2.0)
        for block in blocks:
            torch.testing.assert_close(block(x), block.forward(x))
        assert len(made) == 1
        del blocks[1:]


def test_memory_that_was_freed_and_filled_with_other_values_is_noticed(
    compiled: Callable[..., Any],
) -> None:
    model = Block().eval()
    run = compiled(model)
    x = torch.randn(8, 32)
    with torch.no_grad():
        for _ in range(4):
            for p in model.parameters():
                values = torch.randn_like(p)
                free(p)
                fill(p, values)
            torch.testing.assert_close(run(x), model(x))


def test_memory_that_was_replaced_twice_is_noticed(compiled: Callable[..., Any]) -> None:
    """``.data`` moves no version counter, and the second replacement may lie where the first weight lay."""
    model = Block().eval()
    run = compiled(model)
    x = torch.randn(8, 32)
    with torch.no_grad():
        run(x)
        for _ in range(4):
            for p in model.parameters():
                shape = p.shape
                p.data = torch.empty(0)
                p.data = torch.randn(shape)
            torch.testing.assert_close(run(x), model(x))


def test_a_weight_that_is_read_in_another_order_is_noticed(compiled: Callable[..., Any]) -> None:
    """At the same address, by the same version counter, and where it is looked at with the same elements."""
    model, x = nn.Linear(16, 16).eval(), torch.randn(4, 16)
    with torch.no_grad():
        model.weight.zero_()[0, 3] = 1
        run = compiled(model)
        torch.testing.assert_close(run(x), model(x))
        model.weight.data = model.weight.data.t()
        torch.testing.assert_close(run(x), model(x))


def test_what_was_folded_is_not_used_for_other_strides() -> None:
    """torch.compile notices other strides itself since torch 2.12."""
    weight = torch.zeros(16, 16)
    weight[0, 3] = 1
    before = _native.weight_state(weight)
    assert _native.weight_state(weight) == before
    weight.data = weight.data.t()
    assert _native.weight_state(weight) != before


def test_weights_that_changed_are_not_shared_with_a_plan_at_another_size() -> None:
    model = Block().eval()
    run = hypatia.compile(model, torch.randn(8, 32))
    with torch.no_grad():
        for rows in (9, 10, 9, 11):
            model.first.weight.mul_(-1.5)
            x = torch.randn(rows, 32)
            torch.testing.assert_close(run(x), model(x))


SHARDED = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from test_weights import Block
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
plain = nn.Sequential(*[Block() for _ in range(3)]).eval()
model = nn.Sequential(*[Block() for _ in range(3)]).eval()
model.load_state_dict(plain.state_dict())
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
for block in model:
    block.compile(backend="hypatia")
optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (plain, model)]
x = torch.randn(8, 32)
for step in range(3):
    with torch.no_grad():
        for _ in range(2):
            print(float((model(x) - plain(x)).abs().max()))
    for m, optimizer in zip((plain, model), optimizers):
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_sharded_models_see_the_weights_of_this_call() -> None:
    """Inference between training steps: ``fully_shard`` fills the same memory with other weights."""
    tests = Path(__file__).parents[1]
    run = fresh.run(SHARDED, env={**os.environ, "PYTHONPATH": f"{tests / 'execute'}{os.pathsep}{tests}"})
    assert run.returncode == 0, run.stderr
    assert max(map(float, run.stdout.split())) < 1e-5, run.stdout


def test_constants_are_laid_in_an_order_and_without_what_repeats() -> None:
    repeated = torch.arange(12).reshape(4, 3).expand(6, 4, 3)
    assert torch.equal(_laid(repeated, [1, 2]), repeated[0])
    assert torch.equal(_laid(repeated, [2, 1]), repeated[0].t())
    images = torch.randn(2, 3, 4, 5)
    assert torch.equal(_laid(images, [0, 2, 3, 1]), images.permute(0, 2, 3, 1))
    assert _laid(torch.tensor(3.0).expand(5), []).shape == ()
