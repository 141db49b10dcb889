"""Large results of recorded plans: new memory at every call, and no copies."""

from __future__ import annotations

import gc
import json
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from forms import winning
from test_plans import _assert_right, _compiled
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import hypatia
from hypatia.execute import recorded_plan
from hypatia.execute.recorded_plan import Recorded


class Language(nn.Module):
    """Embeddings, one layer with attention, and a product with a vocabulary."""

    def __init__(self, vocabulary: int, width: int = 64, *, bias: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.head = nn.Linear(width, vocabulary, bias=bias)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(y)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.hidden(tokens))


class Both(Language):
    """Returns what is small and written early, too."""

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.hidden(tokens)
        logits = self.head(x)
        return x, logits, logits[:, -1]


ODD, EVEN = 8195, 8192
"""Vocabularies; rows of the first start at no multiple of 16 bytes."""


def _language(
    vocabulary: int, dtype: torch.dtype = torch.bfloat16, cls: type[Language] = Language, **more: Any
) -> tuple[Language, torch.Tensor]:
    torch.manual_seed(0)
    model = cls(vocabulary, **more).cuda().to(dtype).eval()
    return model, _tokens(vocabulary)


def _tokens(vocabulary: int, batch: int = 8) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, 512), device="cuda")


def _recorded(compiled: Any) -> list[Recorded]:
    """The recorded plans of a compiled model."""
    bound = compiled._last.native.__self__.binding.bound
    return [plan for plan, _ in bound.values() if isinstance(plan, Recorded)]


def _late(compiled: Any) -> list[bool]:
    """Which results follow the recording."""
    (recorded,) = _recorded(compiled)
    (recording,) = recorded._cache._known.values()
    return [r is None for r in recording._early]


def check_logits() -> str:
    """Both kinds of vocabularies, with and without a bias: right, and all kept results stay as they were."""
    kinds = set()
    for vocabulary in (ODD, EVEN):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bias in (False, True):
                model, x = _language(vocabulary, dtype, bias=bias)
                with torch.no_grad():
                    compiled = _compiled(model, x)
                    assert _late(compiled) == [True]
                    given = [_tokens(vocabulary) for _ in range(4)]
                    # The addresses of those that are kept are others at each call.
                    kept = [compiled(tokens) for tokens in given]
                    copies = [k.clone() for k in kept]
                    for tokens in given:
                        # These are dropped: addresses come back, and the last steps are replayed.
                        _assert_right(compiled(tokens), model, tokens)
                    for tokens, result, copy in zip(given, kept, copies, strict=True):
                        _assert_right(result, model, tokens)
                        assert torch.equal(result, copy), "a later call wrote into a result"
                    assert len({k.data_ptr() for k in kept}) == len(kept)
                kinds.add(compiled._last.native.__self__.binding.kinds[-1])
    return ", ".join(sorted(kinds))


def check_copies() -> str:
    """The profiler sees no copy of the logits; what it sees are the tokens."""
    said = []
    for vocabulary in (ODD, EVEN):
        model, x = _language(vocabulary)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for _ in range(5):
                result = compiled(x)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                result = compiled(x)
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            seen.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        copied = [e["args"]["bytes"] for e in events if e.get("cat") == "gpu_memcpy"]
        assert copied, "the tokens are copied in"
        assert max(copied) < result.nbytes // 4, copied
        # No kernel copies them either: a call of torch's would be there.
        assert not {e["name"] for e in events} & {"aten::clone", "aten::contiguous"}
        said.append(f"{vocabulary}: copies of {copied} bytes")
    return ", ".join(said)


def check_early_and_late() -> str:
    """Results that are written before are copied, and those that share memory share it."""
    model, x = _language(ODD, cls=Both)
    with torch.no_grad():
        compiled = _compiled(model, x)
        assert sorted(_late(compiled)) == [False, True]
        kept = []
        for _ in range(4):
            tokens = _tokens(ODD)
            kept.append((tokens, compiled(tokens)))
        for tokens, (hidden, logits, last) in kept:
            theirs = model(tokens)
            for ours, eager in zip((hidden, logits, last), theirs, strict=True):
                assert (ours.shape, ours.stride()) == (eager.shape, eager.stride())
                torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
            assert last.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
            assert hidden.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
    return f"{len(kept)} calls"


def check_small_results() -> str:
    """A result whose copy takes less than a launch is copied, as before."""
    model, _ = _language(64)
    tokens = torch.randint(0, 64, (2, 16), device="cuda")
    with torch.no_grad():
        compiled = _compiled(model, tokens)
        assert _late(compiled) == [False]
        first = compiled(tokens)
        before = first.clone()
        _assert_right(compiled(tokens.flip(0)), model, tokens.flip(0))
        assert torch.equal(first, before)
    return ""


def check_streams_and_threads() -> str:
    """Calls on two streams and from several threads at once, and inside a user's recording."""
    model, x = _language(ODD)
    given = [_tokens(ODD) for _ in range(6)]
    with torch.no_grad():
        compiled = _compiled(model, x)
        expected = [compiled(t) for t in given]
        side, own = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(own)
        found: list[Any] = [None] * len(given)
        for i, tokens in enumerate(given):
            with torch.cuda.stream(side if i % 2 else own):
                found[i] = compiled(tokens)
        own.wait_stream(side)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

        errors: list[Exception] = []

        def many(i: int) -> None:
            try:
                with torch.no_grad():
                    for _ in range(8):
                        assert torch.equal(compiled(given[i]), expected[i])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=many, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

        static, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(static)
        static.copy_(given[0])
        graph.replay()
        _assert_right(result, model, given[0])
    return "two streams, 4 threads, a user's graph"


def check_weights_and_sizes() -> str:
    """Changed weights, also those of the last step, and other batch sizes, each recorded."""
    model, x = _language(ODD, bias=True)
    with torch.no_grad():
        compiled = _compiled(model, x)
        for change in (model.head.weight, model.head.bias, model.qkv.weight):
            change.mul_(1.5)
            for _ in range(5):
                _assert_right(compiled(x), model, x)
        model.head.weight.data = model.head.weight.data.flip(0).contiguous()
        for _ in range(5):
            _assert_right(compiled(x), model, x)
        with winning("plan"):
            for batch in (4, 5, 8, 4, 5, 5, 4):
                tokens = _tokens(ODD, batch)
                kept = compiled(tokens)
                for _ in range(3):
                    _assert_right(compiled(tokens), model, tokens)
                _assert_right(kept, model, tokens)
    return ""


def check_backend() -> str:
    """torch.compile."""
    model, x = _language(ODD)
    torch.compiler.reset()
    with winning("plan"), torch.no_grad():
        call = torch.compile(model, backend="hypatia")
        for _ in range(4):
            tokens = torch.randint_like(x, 0, ODD)
            first = call(tokens)
            before = first.clone()
            call(x)
            assert torch.equal(first, before)
            _assert_right(first, model, tokens)
    return ""


def check_memory() -> str:
    """Dropped results go back; without room for one, torch's error comes, and later calls run."""
    model, x = _language(ODD)
    size = x.numel() * ODD * 2
    with torch.no_grad():
        compiled = _compiled(model, x)
        expected = compiled(x)
        for _ in range(4):
            compiled(x)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            compiled(x)
        assert torch.cuda.memory_allocated() == before
        kept = [compiled(x) for _ in range(3)]
        taken = torch.cuda.memory_allocated() - before
        assert 3 * size <= taken <= 3 * size + (8 << 20), taken
        del kept
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        share = (torch.cuda.memory_reserved() + size // 2) / total
        torch.cuda.set_per_process_memory_fraction(share)
        raised = False
        try:
            compiled(x)
        except torch.OutOfMemoryError:
            raised = True
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert raised, "there was room"
        assert torch.equal(compiled(x), expected)
    assert _recorded(compiled), "it is still a recorded plan"
    return f"{taken >> 20} MiB for three results, {free >> 20} MiB free"


def check_last_steps_of_torch() -> str:
    """Last steps that torch computes are launched at each call."""

    class Sorted(Language):
        def forward(self, tokens: torch.Tensor) -> Any:
            return self.head(self.hidden(tokens)).float().cumsum(1)

    model, x = _language(EVEN, cls=Sorted)
    with torch.no_grad():
        compiled = _compiled(model, x)
        assert _late(compiled) == [True]
        first = compiled(x)
        before = first.clone()
        for _ in range(4):
            tokens = _tokens(EVEN)
            _assert_right(compiled(tokens), model, tokens)
        assert torch.equal(first, before)
    return ""


def check_changes_of_inputs() -> str:
    """A plan that changes an input keeps all its steps in the recording."""

    class Counting(Language):
        def forward(self, tokens: torch.Tensor, seen: torch.Tensor) -> Any:
            x = self.hidden(tokens)
            seen.add_(1)
            return self.head(x)

    model, x = _language(ODD, cls=Counting)
    seen = torch.zeros(8, device="cuda")
    recordings: list[Any] = []
    made = recorded_plan._Recording.__init__

    def noted(self: Any, *args: Any) -> None:
        made(self, *args)
        recordings.append(self)

    with winning("plan"), torch.no_grad(), mock.patch.object(recorded_plan._Recording, "__init__", noted):
        compiled = hypatia.compile(model, x, seen)
        before = seen.clone()
        for i in range(6):
            tokens = _tokens(ODD)
            result = compiled(tokens, seen)
            torch.testing.assert_close(seen, before + i + 1)
            torch.testing.assert_close(result, model.head(model.hidden(tokens)), rtol=2e-2, atol=2e-2)
    assert recordings
    assert all(None not in r._early for r in recordings)
    return f"{len(recordings)} recordings"
