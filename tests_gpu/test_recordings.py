"""Graphs without a plan on a GPU: recorded as CUDA graphs, right, and given up where that cannot be."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import torch
from forms import recorded
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute import cuda_graph, recording, timing
from hypatia.frontend.dynamo import collecting


class Block(nn.Module):
    """Products, norms and attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = x + self.out(y)
        return y, y[:, -1]


def _model(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Block().cuda().to(dtype).eval(), torch.randn(2, 16, 64, device="cuda", dtype=dtype)


def _compiled(entry: str, model: nn.Module, *inputs: torch.Tensor) -> tuple[Any, Any]:
    """The model by a recording, and its report."""
    with recorded(), torch.no_grad(), collecting() as reports:
        if entry == "compile":
            call: Any = hypatia.compile(model, *inputs)
            report = call.reports[0]
        else:
            torch.compiler.reset()
            call = torch.compile(model, backend="hypatia")
            call(*inputs)
            (report,) = reports
    return call, report


def _assert_same(call: Any, model: nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        ours, theirs = call(*inputs), model(*inputs)
    unit = torch.finfo(inputs[0].dtype).eps
    for a, b in zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]:
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert (a - b).abs().max().item() <= 64 * unit * b.abs().max().item()


ENTRIES = ("compile", "torch.compile")


def check_results() -> str:
    """Both entries, in three dtypes; results stay what they are at later calls, and share memory."""
    for entry in ENTRIES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            model, x = _model(dtype)
            call, report = _compiled(entry, model, x)
            assert report.kept == "recording", (entry, dtype, str(report))
            with torch.no_grad():
                first, last = call(x)
                before = first.clone()
                assert last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                for _ in range(5):
                    _assert_same(call, model, torch.randn_like(x))
                assert torch.equal(first, before), "a later call wrote into a result"
    return "6 cases"


def check_weights() -> str:
    """Weights that change in place, lie elsewhere, or are others."""
    for entry in ENTRIES:
        model, x = _model()
        call, _ = _compiled(entry, model, x)
        with torch.no_grad():
            model.out.weight.mul_(2.0)
            _assert_same(call, model, x)
            model.qkv.weight.data = model.qkv.weight.data * 0.5
            for _ in range(5):
                _assert_same(call, model, x)
            model.norm.weight.copy_(torch.rand_like(model.norm.weight))
            for _ in range(5):
                _assert_same(call, model, x)
            model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
            for _ in range(5):
                _assert_same(call, model, x)
        model.out = nn.Linear(64, 64).cuda()
        for _ in range(5):
            _assert_same(call, model, x)
    return "2 entries"


def check_modes() -> str:
    """Where somebody looks at ops, records, or uses another stream, the graph runs."""
    for entry in ENTRIES:
        model, x = _model()
        call, _ = _compiled(entry, model, x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _assert_same(call, model, x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.inference_mode():
            _assert_same(call, model, x)
        with torch.no_grad():
            call(x)
            torch.cuda.synchronize()
            static, graph = x.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = call(static)
            other = torch.randn_like(x)
            static.copy_(other)
            graph.replay()
            torch.testing.assert_close(results[0], model(other)[0], rtol=1e-4, atol=1e-4)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert call(x)[0].shape == x.shape
        y = x.clone().requires_grad_()
        call(y)[0].sum().backward()
        assert y.grad is not None
    return "streams, inference mode, a user's graph, autocast, gradients"


def check_sizes() -> str:
    """A hundred lengths in turns: a bounded number of recordings, in bounded memory."""
    made = []
    record = recording.Recording.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(1)
        record(self, *args)

    said = []
    for entry in ENTRIES:
        del made[:]
        model, x = _model()
        with mock.patch.object(recording.Recording, "__init__", counted):
            call, _ = _compiled(entry, model, x)
            before = torch.cuda.memory_reserved()
            with recorded():
                for _ in range(6):
                    for length in range(2, 102):
                        _assert_same(call, model, torch.randn(2, length, 64, device="cuda"))
        held = torch.cuda.memory_reserved() - before
        assert len(made) <= 4 * (cuda_graph.MOST + recording.EVICTED), len(made)
        assert held <= 3 << 30, held
        said.append(f"{entry}: {len(made)} recorded, {held >> 20} MiB more")
    return "; ".join(said)


def check_what_is_not_recorded() -> str:
    """Random numbers, values that the host reads, changes in place, results that are inputs."""

    class Called(nn.Module):
        def __init__(self, f: Any) -> None:
            super().__init__()
            self.f, self.scale = f, nn.Parameter(torch.ones(64, device="cuda"))

        def forward(self, x: torch.Tensor) -> Any:
            return self.f(self.scale * x)

    cases = {
        "dropout": lambda x: F.dropout(x, 0.5, training=True).sum() * 0 + x.cumsum(-1),
        "nonzero": lambda x: x.cumsum(-1)[x.cumsum(-1) > 0],
        "item": lambda x: x.cumsum(-1) * (2.0 if x.sum().item() > 0 else 3.0),
    }
    for name, f in cases.items():
        for entry in ENTRIES:
            model, x = Called(f).eval(), torch.randn(8, 64, device="cuda")
            torch.compiler.reset()
            with recorded(), torch.no_grad():
                call = (
                    hypatia.compile(model, x)
                    if entry == "compile"
                    else torch.compile(model, backend="hypatia")
                )
                for _ in range(4):
                    y = torch.randn_like(x)
                    torch.testing.assert_close(
                        call(y), model(y), rtol=1e-4, atol=1e-4, msg=f"{name}, {entry}"
                    )
    return f"{2 * len(cases)} cases"


def check_other_threads() -> str:
    """While recordings are made, another thread draws random numbers and computes, and notices nothing."""
    ended, errors, draws = threading.Event(), [], [0]

    def busy() -> None:
        x = torch.randn(64, 64, device="cuda")
        try:
            while not ended.is_set():
                torch.rand(32, device="cuda").sum().item()
                F.dropout(x, 0.5).matmul(x).sum().item()
                draws[0] += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            for entry in ENTRIES:
                model, x = _model()
                call, _ = _compiled(entry, model, x)
                _assert_same(call, model, x)
        # A step that draws: it is not recorded while others may draw.
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).cuda().train()
        call, x = hypatia.compile(model), torch.randn(8, 64, device="cuda")
        for _ in range(6):
            call(x).sum().backward()
    finally:
        ended.set()
        thread.join()
    assert not errors, errors
    torch.rand(4, device="cuda").sum().item()
    return f"{draws[0]} turns beside 10 recordings"


def check_times_apart() -> str:
    """Time of the device and of the host: a sleeping host is no time of the device."""
    x = torch.randn(2048, 2048, device="cuda")

    def slow_host() -> None:
        time.sleep(0.002)
        torch.relu(x)

    forms = {"eager": slow_host, "plain": lambda: [x @ x for _ in range(20)]}
    taken, apart = timing.timed(forms, 0.05, torch.device("cuda", 0))
    # The rest depends on what else uses the machine, and is only said.
    assert apart["eager"][1] >= 0.002, apart
    assert taken == {name: max(both) for name, both in apart.items()}
    return ", ".join(f"{n}: device {1e6 * d:.0f} us, host {1e6 * h:.0f} us" for n, (d, h) in apart.items())


def check_kept_by_the_clock() -> str:
    """What is kept by the clock is right, and how long it takes is said: of a deep narrow model without a
    plan it should be a recording."""
    layers = [
        nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Hardswish()) for _ in range(24)
    ]
    model, x = nn.Sequential(*layers).cuda().eval(), torch.randn(2, 8, 128, device="cuda")
    with torch.no_grad():
        call = hypatia.compile(model, x)
        _assert_same(call, model, x)
        times = timing.timed({"ours": lambda: call(x), "eager": lambda: model(x)}, 0.2, x.device)
    said = ", ".join(f"{n} {1e6 * t:.0f} us" for n, t in times.taken.items())
    return f"kept {call.reports[0].kept}: {said}\n{call.reports[0]}"
