"""Attention as people write it, a function for each spelling: of query, key and value, rows before heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypatia.compiler.report import GraphReport

BATCH, ROWS, HEADS, WIDTH = 2, 12, 4, 8
INF = math.inf

Written = Callable[..., Tensor]


class Spelling(NamedTuple):
    """A way to write attention."""

    write: Written
    extra: str = ""
    """What it reads besides: the name of an input or parameter below."""
    groups: int = HEADS
    """How many heads keys and values have."""


def heads(t: Tensor) -> Tensor:
    """Heads before rows."""
    return t.transpose(1, 2)


def joined(t: Tensor) -> Tensor:
    """Heads and batch in one dimension."""
    return heads(t).reshape(-1, t.shape[1], t.shape[3])


def merged(out: Tensor) -> Tensor:
    """The result of all heads beside each other."""
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def apart(out: Tensor) -> Tensor:
    """The same of batch and heads in one dimension."""
    return merged(out.view(-1, HEADS, *out.shape[1:]))


def plain(q: Tensor, k: Tensor, change: Callable[[Tensor], Tensor] = lambda s: s / WIDTH**0.5) -> Tensor:
    """Shares by scores that ``change`` was done to."""
    return change(heads(q) @ heads(k).transpose(-2, -1)).softmax(-1)


def later(s: Tensor) -> Tensor:
    """What a causal mask hides."""
    return torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)


def places(s: Tensor) -> Tensor:
    """Where each key stands."""
    return torch.arange(s.shape[-1], device=s.device)


def by_hand(s: Tensor) -> Tensor:
    """A softmax of exponentials."""
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def by_max(s: Tensor) -> Tensor:
    """The same with the maximum and its place."""
    e = torch.exp(s - s.max(dim=-1, keepdim=True)[0])
    return e / torch.sum(e, dim=-1, keepdim=True)


def repeated(t: Tensor) -> Tensor:
    """Each head of keys for its queries, expanded as transformers does."""
    t = heads(t)
    b, g, n, d = t.shape
    return t[:, :, None, :, :].expand(b, g, HEADS // g, n, d).reshape(b, HEADS, n, d)


def rotated(t: Tensor) -> Tensor:
    """Rotary positions."""
    rows = torch.arange(t.shape[1], dtype=torch.float32, device=t.device)
    angles = rows[:, None] / 10.0 ** torch.arange(0, WIDTH, 2, device=t.device)
    both = torch.cat((angles, angles), -1)[:, None, :].to(t.dtype)
    a, b = t.chunk(2, -1)
    return t * both.cos() + torch.cat((-b, a), -1) * both.sin()


def _over(scores: Callable[[Tensor], Tensor]) -> Written:
    """A spelling by what is done to scores, of heads before rows."""
    return lambda q, k, v: merged(plain(q, k, scores) @ heads(v))


def _by(softmax: Callable[[Tensor], Tensor]) -> Written:
    """A spelling by its softmax."""
    return lambda q, k, v: merged(softmax(heads(q * WIDTH**-0.5) @ heads(k).mT) @ heads(v))


def _masked(scores: Callable[[Tensor, Tensor], Tensor]) -> Written:
    """The same with something that is an input or a parameter."""
    return lambda q, k, v, m: merged(plain(q, k, lambda s: scores(s / WIDTH**0.5, m)) @ heads(v))


def _scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(torch.matmul(torch.softmax(heads(q * 0.35) @ heads(k).mT, dim=-1), heads(v)))


def _both_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by = WIDTH**-0.25
    return merged((heads(q) * by @ (heads(k) * by).transpose(2, 3)).softmax(3) @ heads(v))


def _key_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = (k / WIDTH**0.5).permute(0, 2, 3, 1)
    return merged(torch.softmax(heads(q).matmul(turned), -1).matmul(heads(v)))


def _wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).transpose(2, 3) * WIDTH**-0.5
    return merged(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ heads(v))


def _wide_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q).float() @ heads(k).float().transpose(2, 3)
    return merged((scores * WIDTH**-0.5).softmax(-1).type_as(v) @ heads(v))


def _bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = torch.bmm(joined(q * WIDTH**-0.5), joined(k).transpose(1, 2)).softmax(-1)
    return apart(torch.bmm(shares, joined(v)))


def _bmm_masked(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    n = q.shape[1]
    scores = torch.bmm(joined(q), joined(k).mT).view(-1, HEADS, n, n) + m
    return apart(torch.bmm(F.softmax(scores.view(-1, n, n), dim=-1), joined(v)))


def _baddbmm(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    n = q.shape[1]
    bias = m.expand(q.shape[0], HEADS, n, n).reshape(-1, n, n)
    scores = torch.baddbmm(bias, joined(q), joined(k).transpose(1, 2), beta=1.0, alpha=WIDTH**-0.5)
    return apart(torch.bmm(scores.softmax(-1), joined(v)))


def _alibi(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    n = q.shape[1]
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype, device=q.device)
    alibi = (slopes[:, None, None] * torch.arange(n, dtype=q.dtype, device=q.device)).repeat(q.shape[0], 1, 1)
    scores = alibi.baddbmm(joined(q), joined(k).transpose(1, 2), beta=1.0, alpha=WIDTH**-0.5)
    scores = scores.view(-1, HEADS, n, n) + m
    return apart(torch.bmm(scores.softmax(-1).view(-1, n, n), joined(v)))


def _one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(2) for t in (q, k, v))
    return torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = torch.einsum("bqhd,bkhd->bhqk", q, k).div(WIDTH**0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)


def _einsum_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = torch.einsum("bkhd,bqhd->bhqk", k, q * WIDTH**-0.5).softmax(-1)
    return torch.einsum("bkhd,bhqk->bqhd", v, shares).flatten(2)


def _einsum_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, n, g = k.shape[:3]
    q = q.reshape(b, n, g, -1, WIDTH)
    scores = torch.einsum("bqghd,bkgd->bghqk", q, k) * WIDTH**-0.5
    shares = scores.masked_fill(later(scores), -INF).softmax(-1)
    return torch.einsum("bghqk,bkgd->bqghd", shares, v).reshape(b, n, -1)


def _einsum_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = (torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkd->bqhd", shares, v[:, :, 0]).flatten(2)


def _grouped(again: Callable[[Tensor], Tensor]) -> Written:
    def write(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = heads(q) @ again(k).transpose(2, 3) * WIDTH**-0.5
        return merged(scores.masked_fill(later(scores), -INF).softmax(-1) @ again(v))

    return write


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, n, g = k.shape[:3]
    q = q.view(b, n, g, -1, WIDTH).permute(0, 2, 3, 1, 4)
    k, v = (heads(t).unsqueeze(2) for t in (k, v))
    out = (q @ k.transpose(-1, -2) * WIDTH**-0.5).softmax(-1) @ v
    return out.permute(0, 3, 1, 2, 4).reshape(b, n, -1)


def _rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _over(lambda s: s.div(WIDTH**0.5).masked_fill(later(s), -INF))(rotated(q), rotated(k), v)


def _dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(F.dropout(plain(q, k), p=0.0, training=True) @ heads(v))


def _by_index(s: Tensor) -> Tensor:
    seen = places(s)[:, None] >= places(s)[None, :]
    return torch.where(seen, s, torch.finfo(s.dtype).min)


def _buffer(s: Tensor) -> Tensor:
    whole = torch.tril(torch.ones(32, 32, device=s.device)).view(1, 1, 32, 32)
    return s.masked_fill(whole[:, :, : s.shape[-2], : s.shape[-1]] == 0, -INF)


def _least(s: Tensor) -> Tensor:
    least = torch.full(s.shape[-2:], torch.finfo(s.dtype).min, dtype=s.dtype, device=s.device)
    return s + least.triu(1)


def _padded(s: Tensor, m: Tensor) -> Tensor:
    return s + (1.0 - m[:, None, None, :].to(s.dtype)) * torch.finfo(s.dtype).min


def _both(s: Tensor, m: Tensor) -> Tensor:
    seen = m[:, None, None, :].bool() & ~later(s)
    return torch.where(seen, s, torch.full((), torch.finfo(s.dtype).min, dtype=s.dtype, device=s.device))


def _causal_and_padded(s: Tensor, m: Tensor) -> Tensor:
    s = s.masked_fill(later(s), -INF)
    return s + torch.zeros_like(m, dtype=s.dtype).masked_fill(m == 0, torch.finfo(s.dtype).min)[:, None, None]


def _decomposed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Positions of images, for each direction."""
    b, h, w = q.shape[0], 3, 4
    s = (joined(q) * WIDTH**-0.5) @ joined(k).transpose(-2, -1)
    grid = s.view(b * HEADS, h, w, h, w)
    grid = grid + m[:, :, :, :h].transpose(0, 1).reshape(1, h, w, h, HEADS).mean(-1)[..., None]
    return apart(grid.view(b * HEADS, h * w, h * w).softmax(-1) @ joined(v))


SPELLINGS: dict[str, Spelling] = {
    # Where the scale stands.
    "scores divided": Spelling(_over(lambda s: s / WIDTH**0.5)),
    "scores multiplied": Spelling(_over(lambda s: s * WIDTH**-0.5)),
    "no scale": Spelling(_over(lambda s: s)),
    "divided by a tensor": Spelling(_over(lambda s: s / torch.sqrt(torch.tensor(float(WIDTH))))),
    "divided by a full tensor": Spelling(
        _over(lambda s: s / torch.full([], WIDTH**0.5, dtype=s.dtype, device=s.device))
    ),
    "query scaled": Spelling(_scaled_before),
    "both scaled": Spelling(_both_scaled),
    "key divided and turned": Spelling(_key_scaled),
    # Precision, and softmax by hand.
    "softmax in fp32": Spelling(_wide),
    "scores in fp32": Spelling(_wide_before),
    "softmax by hand": Spelling(_by(by_hand)),
    "softmax by max": Spelling(_by(by_max)),
    "log softmax": Spelling(_by(lambda s: F.log_softmax(s, -1).exp())),
    "dropout of nothing": Spelling(_dropped),
    # Products.
    "bmm": Spelling(_bmm),
    "bmm and a mask": Spelling(_bmm_masked, "mask"),
    "baddbmm": Spelling(_baddbmm, "mask"),
    "alibi": Spelling(_alibi, "padding"),
    "one head": Spelling(_one_head),
    "einsum": Spelling(_einsum),
    "einsum turned": Spelling(_einsum_turned),
    # Heads that share keys.
    "einsum of groups": Spelling(_einsum_groups, groups=2),
    "einsum of one": Spelling(_einsum_one, groups=1),
    "groups expanded": Spelling(_grouped(repeated), groups=2),
    "groups repeated": Spelling(
        _grouped(lambda t: heads(t).repeat_interleave(HEADS // t.shape[2], 1)), groups=2
    ),
    "one repeated": Spelling(_grouped(lambda t: heads(t).repeat(1, HEADS, 1, 1)), groups=1),
    "groups broadcast": Spelling(_broadcast, groups=2),
    "rotary": Spelling(_rotary),
    # Masks that are known.
    "causal filled": Spelling(_over(lambda s: s.masked_fill(later(s), -INF))),
    "causal by index": Spelling(_over(_by_index)),
    "causal buffer": Spelling(_over(_buffer)),
    "causal least": Spelling(_over(_least)),
    "known bias": Spelling(_over(lambda s: s - places(s).to(s.dtype) / 4)),
    # Masks that are inputs.
    "added": Spelling(_masked(lambda s, m: s + m), "mask"),
    "added first": Spelling(_masked(lambda s, m: m + s), "mask"),
    "padding added": Spelling(_masked(_padded), "kept"),
    "filled": Spelling(_masked(lambda s, m: s.masked_fill(m[:, None, None] == 0, -INF)), "kept"),
    "filled with the least": Spelling(
        _masked(lambda s, m: s.masked_fill(~m[:, None, None].bool(), torch.finfo(s.dtype).min)), "kept"
    ),
    "where": Spelling(_masked(lambda s, m: torch.where(m[:, None, None] > 0, s, -INF)), "kept"),
    "where it is hidden": Spelling(
        _masked(lambda s, m: torch.where(m[:, None, None] == 0, torch.tensor(-INF), s)),
        "kept",
    ),
    "causal and padding": Spelling(_masked(_causal_and_padded), "kept"),
    "both in one": Spelling(_masked(_both), "kept"),
    "relative positions": Spelling(_masked(lambda s, m: s + m), "bias"),
    "positions of images": Spelling(_decomposed, "bias"),
}


def _shares_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = plain(q, k)
    return merged(shares @ heads(v)) + shares.mean()


OTHERS: dict[str, Spelling] = {
    "shares are read": Spelling(_shares_read),
    "softmax of rows": Spelling(
        lambda q, k, v: merged((heads(q) @ heads(k).mT).softmax(-2) @ heads(v)),
    ),
    "softmax of heads": Spelling(lambda q, k, v: merged((heads(q) @ heads(k).mT).softmax(1) @ heads(v))),
    "scale of heads": Spelling(_over(lambda s: s * (1.0 + places(s)[:HEADS, None, None]))),
    "scale of an input": Spelling(_masked(lambda s, m: s * m), "mask"),
    "capped": Spelling(_over(lambda s: 5.0 * torch.tanh(s / 5.0))),
    "hidden by little": Spelling(_masked(lambda s, m: s.masked_fill(m[:, None, None] == 0, -1e4)), "kept"),
    "hidden by scores": Spelling(_over(lambda s: s.masked_fill(s < 0, -INF))),
    "shares hidden": Spelling(lambda q, k, v: merged(plain(q, k).tril() @ heads(v))),
    "not normed": Spelling(lambda q, k, v: merged((heads(q) @ heads(k).mT / 9).exp() @ heads(v))),
}


class Model(nn.Module):
    """A spelling between two linear layers."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        width, shared = HEADS * WIDTH, spelling.groups * WIDTH
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        # A bias of keys changes nothing: its gradient is zero but for roundings.
        self.key, self.value = nn.Linear(width, shared, bias=False), nn.Linear(width, shared)
        if spelling.extra == "bias":
            self.bias = nn.Parameter(torch.randn(1, HEADS, ROWS, ROWS))

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        """Attention of ``x`` to itself."""
        b, n, _ = x.shape
        q, k, v = (each(x).view(b, n, -1, WIDTH) for each in (self.query, self.key, self.value))
        if self.spelling.extra == "bias":
            extra = (self.bias,)
        return self.out(self.spelling.write(q, k, v, *extra))


def inputs(spelling: Spelling, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[Tensor]:
    """What a model of a spelling is called with."""
    torch.manual_seed(seed)
    given = [torch.randn(BATCH, ROWS, HEADS * WIDTH).to(dtype)]
    kept = torch.ones(BATCH, ROWS, dtype=torch.int64)
    kept[1, 7 - seed :] = 0
    if spelling.extra == "mask":
        given.append(torch.randn(BATCH, 1, ROWS, ROWS).to(dtype))
    elif spelling.extra == "kept":
        given.append(kept)
    elif spelling.extra == "padding":
        given.append((1.0 - kept[:, None, None].to(dtype)) * torch.finfo(dtype).min)
    return given


def calls(reports: list[GraphReport]) -> tuple[int, int]:
    """How many calls of attention and how many parts of a softmax the graphs have."""
    names = [str(n.target) for r in reports for n in r.after.nodes]
    return (
        sum("scaled_dot_product" in n for n in names),
        sum("softmax" in n or ".exp." in n for n in names),
    )
