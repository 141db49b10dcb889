"""Numbers at their limits: constants beside narrow types, integers, extreme values, gradients at ties.

A first call is checked by the compiler itself. What is tested here are later calls, which nobody looks at.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import hypatia
from hypatia import _native
from hypatia.capture.records import capture
from hypatia.compiler.rebuild import rebuild_values
from support import fresh_dynamo

HALVES = (torch.bfloat16, torch.float16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, but for what kind of NaN is where."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    alike = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(alike.all())


class Model(nn.Module):
    """A function as a model."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.f(*inputs)


def later(
    f: Callable[..., Any], ordinary: tuple[torch.Tensor, ...], *inputs: torch.Tensor, **options: Any
) -> list[Any]:
    """What a compiled function makes of inputs after a first call on ordinary ones, by each entry."""
    found, model = [], Model(f)
    entries = (torch.compile(model, backend="hypatia", options=options), hypatia.compile(model, **options))
    with torch.no_grad():
        for compiled in entries:
            compiled(*ordinary)
            found.append(compiled(*inputs))
    return found


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


WITH_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "where": lambda x: torch.where(x >= 0.7, x * 2, -x),
    "eq": lambda x: (x * 1.0) == 0.7,
    "ne": lambda x: (x * 1.0) != 1 / 3,
    "lt": lambda x: (x * 1.0) < 0.7,
    "le": lambda x: (x * 1.0) <= 1 / 3,
    "gt": lambda x: (x * 1.0) > 0.7,
    "ge": lambda x: (x * 1.0) >= 1 / 3,
    "add": lambda x: (x + 0.7) + x,
    "sub": lambda x: (x - 1 / 3) + x,
    "rsub": lambda x: (0.7 - x) + x,
    "mul": lambda x: (x * 0.7) + x,
    "div": lambda x: (x / 0.7) + x,
    "clamp": lambda x: (x * 1.0).clamp(-0.7, 0.7) + x,
    "masked_fill": lambda x: (x * 1.0).masked_fill(x > 0.7, 1 / 3) + x,
    "fill": lambda x: torch.where(x > 0.7, torch.full_like(x, 0.7), x) + x,
    "whole": lambda x: (x * 1.0 == 3) | (x > 16777217),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_beside_16_bit_tensors_are_rounded_as_eager_rounds_them(
    dtype: torch.dtype, name: str
) -> None:
    f, x = WITH_NUMBERS[name], every(dtype)
    for result in later(f, (torch.randn(len(x)).to(dtype),), x):
        assert same(result, f(x)), name


WHOLE_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "beyond-f64": lambda x: x * 1 == 2**53 + 1,
    "sum": lambda x: (x + (2**53 + 1)) * 3,
    "product": lambda x: (x * 3 + 1) * 5 - 7,
    "wraps": lambda x: (x * x + x) * x,
    "bytes": lambda x: (x * 1 == 300) | (x + 0 < -1),
    "relu-abs": lambda x: torch.relu(torch.abs(x)) + 1,
    "abs-neg": lambda x: torch.abs(-x) + 1,
    "abs-abs": lambda x: torch.abs(torch.abs(x)) + 1,
    "neg": lambda x: -(-x + 1),
    "sign": lambda x: torch.sign(x) * torch.abs(x),
    "maximum": lambda x: torch.maximum(x, x * 2) - torch.minimum(x, x + 1),
    "float-beside": lambda x: x * 1 == 16777216.0,
    "fraction-beside": lambda x: x * 1 > 0.5,
    "divided": lambda x: (x + 1) / 3,
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_integers_at_their_limits_are_eagers(dtype: torch.dtype, name: str) -> None:
    f, limits = WHOLE_NUMBERS[name], torch.iinfo(dtype)
    values = [limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2, 0, 1, 2, 3, 44, 100]
    values += [2**53, 2**53 + 1, 2**53 + 2, 16777216, 16777217] if dtype == torch.int64 else []
    values += [16777216, 16777217] if dtype == torch.int32 else []
    x = torch.tensor(values * 5, dtype=dtype)
    for result in later(f, (torch.arange(len(x)).remainder(7).to(dtype),), x):
        assert same(result, f(x)), (name, result, f(x))


def test_a_truth_value_is_no_other_number() -> None:
    x = torch.tensor([True, False] * 10)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x & x == 2) | (x == 1)

    for result in later(f, (~x,), x):
        assert same(result, f(x))


@pytest.mark.parametrize("to", [*WHOLE, torch.bool], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_floats_out_of_range_become_eagers_integers(dtype: torch.dtype, to: torch.dtype) -> None:
    edges = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64) for d in (-1.0, 0.0, 1.0, 256.0)]
    x = torch.tensor([*edges, *(-e for e in edges), INF, -INF, NAN, 0.5, -0.5, 1e30, -1e30]).to(dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).to(to)

    for result in later(f, (torch.rand(len(x)).to(dtype) * 7,), x):
        assert same(result, f(x)), (result[result != f(x)], f(x)[result != f(x)])


def mean_of_var_mean(x: torch.Tensor) -> torch.Tensor:
    return torch.var_mean(x, -1)[1] * 2


def hard_swish(x: torch.Tensor) -> torch.Tensor:
    return x * ((x + 3).clamp(0, 6) / 6)


def soft_max(x: torch.Tensor) -> torch.Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def stable_soft_max(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


EXTREME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var_mean": mean_of_var_mean,
    "hardswish": hard_swish,
    "hard-swish": lambda x: F.hardswish(x) * 1.0,
    "hardsigmoid": lambda x: F.hardsigmoid(x) * 1.0,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2) * 1.0,
    "elu": lambda x: F.elu(x, 1.5) * 1.0,
    "softplus": lambda x: F.softplus(x, 2.0, 30.0) * 1.0,
    "mish": lambda x: F.mish(x) * 1.0,
    "softmax": soft_max,
    "stable-softmax": stable_soft_max,
    "relu6": lambda x: F.relu6(x) * 1.0,
    "relu": lambda x: F.relu(x) * 1.0,
    "clamp": lambda x: x.clamp(-0.0, 0.0) * 1.0,
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "layer_norm": lambda x: F.layer_norm(x * 1.0, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x * 1.0, x.shape[-1:]),
    "sum": lambda x: (x * 1.0).sum(-1),
    "mean": lambda x: (x * 1.0).mean(-1),
    "log_softmax": lambda x: (x * 1.0).log_softmax(-1),
}
BIG, TINY = torch.finfo(torch.float32).max, 1e-40
ROWS = {
    "infinite": [-INF, 1.0, 2.0, 3.0],
    "infinite-last": [1.0, 2.0, 3.0, INF],
    "none": [NAN, 1.0, 0.0, -0.0],
    "zeros": [-0.0, 0.0, -0.0, 0.0],
    "greatest": [BIG, BIG, BIG, BIG],
    "opposite": [BIG, -BIG, BIG, -BIG],
    "one": [BIG, 0.0, 0.0, 0.0],
    "large": [6e37, -6e37, 1e38, 3.0],
    "exponents": [90.0, -90.0, 100.0, 0.0],
    "denormal": [TINY, -TINY, TINY, 0.0],
}


@pytest.mark.parametrize("width", [4, 60, 256])
@pytest.mark.parametrize("name", EXTREME)
def test_what_eager_computes_as_a_number_is_one_at_extreme_values(name: str, width: int) -> None:
    f = EXTREME[name]
    x = torch.tensor(list(ROWS.values())).repeat(1, width // 4)
    eager, exact = f(x), f(x.double())
    for result in later(f, (torch.randn_like(x),), x):
        for row, e, r, w in zip(ROWS, eager, result, exact, strict=True):
            finite = e.isfinite()
            assert bool(r[finite].isfinite().all()), (row, e, r)
            # Where eager has no number, a result may be what float64 says, or have none either.
            rest = r[~finite]
            right = (rest == e[~finite]) | ~rest.isfinite() | (rest.double() - w[~finite]).abs().le(1e-5)
            assert bool(right.all()), (row, e, r)
            scale = w[finite].abs().amax() if finite.any() else 0.0
            error = (r[finite].double() - w[finite]).abs()
            own = (e[finite].double() - w[finite]).abs()
            assert bool((error <= 2 * own + 1e-5 * scale).all()), (row, e, r)


NO_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of var_mean": lambda x: torch.var_mean(x, -1)[1],
    "mean of var_mean, kept": lambda x: torch.var_mean(x, -1, keepdim=True)[1] * x,
    "exponentials over their sum": soft_max,
}
FILLED = [[-INF, 1.0], [1.0, INF], [-INF, INF], [NAN, 1.0], [1e3, 0.0], [BIG, -BIG], [-1e3, -1e3], [1.0, 2.0]]


@pytest.mark.parametrize("numerics", ["exact", "reassoc"])
@pytest.mark.parametrize("width", [4, 60, 256])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_in_eager_is_none(name: str, width: int, numerics: str) -> None:
    """Programs that no class rewrites: a mean or a softmax in their place has its NaNs elsewhere."""
    f, x = NO_NUMBERS[name], torch.tensor(FILLED).repeat(1, width // 2)
    eager = f(x)
    assert bool(eager.isnan().any())
    for result in later(f, (torch.randn_like(x),), x, numerics=numerics):
        torch.testing.assert_close(result, eager, equal_nan=True)
        assert same(result[~eager.isfinite()], eager[~eager.isfinite()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["relu6", "relu", "clamp"])
def test_zeros_keep_their_sign_at_bounds(name: str, dtype: torch.dtype) -> None:
    f, x = EXTREME[name], torch.tensor([-0.0, 0.0, -1.0, 6.0, 7.0, NAN] * 11).to(dtype)
    for result in later(f, (torch.randn(len(x)).to(dtype),), x):
        assert same(result, f(x)), (result, f(x))


@pytest.mark.parametrize("shape", [(8, 8, 5), (8, 32, 16), (33, 8, 5), (1, 512, 512), (4, 64, 64)])
def test_products_in_bf16_keep_denormal_numbers_where_eager_does(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    layer = nn.Linear(terms, columns, bias=False).to(torch.bfloat16)
    compiled = hypatia.compile(layer)
    with torch.no_grad():
        compiled(torch.randn(rows, terms).bfloat16())
        for x, w in ((1e-39, 1.0), (1e-20, 1e-20)):
            layer.weight.fill_(w)
            given = torch.full((rows, terms), x).bfloat16()
            eager, result = layer(given), compiled(given)
            assert bool(((result != 0) | (eager == 0)).all()), (eager, result)


TIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(1)[0],
    "min": lambda x: x.min(1)[0],
    "max-kept": lambda x: x.max(1, keepdim=True)[0] * x,
    "amax": lambda x: x.amax(1),
    "median": lambda x: x.median(1)[0],
    "max of all": lambda x: torch.stack([row.max() for row in x]),
    "min of all": lambda x: torch.stack([row.min() for row in x]),
    "sort": lambda x: x.sort(1)[0] * torch.arange(4.0),
    "clamp": lambda x: x.clamp(min=0.0),
    "clamp-both": lambda x: x.clamp(0.0, 1.0),
    "relu": lambda x: F.relu(x),
    "relu6": lambda x: F.relu6(x),
    "abs-relu": lambda x: F.relu(x).abs(),
    "relu-abs": lambda x: F.relu(x.abs()),
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": hard_swish,
    "softmax": stable_soft_max,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
}


@pytest.mark.parametrize("name", TIES)
def test_gradients_at_ties_and_bounds_are_eagers(name: str) -> None:
    model = Model(TIES[name])
    values = [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, -0.0, -1.0], [-3.0, 3.0, 3.0, 6.0], [2.0, 1.0, 2.0, 0.5]]
    compiled = hypatia.optimize(model, torch.randn(4, 4, requires_grad=True))
    for run in (compiled, torch.compile(model, backend="hypatia"), hypatia.compile(model)):
        gradients = []
        for f in (model, run):
            x = torch.tensor(values, requires_grad=True)
            y = f(x)
            y.backward(torch.arange(1.0, 1.0 + y.numel()).reshape(y.shape))
            gradients.append(x.grad)
        assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6), (name, gradients)


@pytest.mark.parametrize("f", [torch.max, torch.min])
def test_gradients_of_an_extreme_that_is_nan(f: Any) -> None:
    """That of `max` goes to what is NaN, that of `amax` is NaN everywhere."""
    model = Model(lambda x: f(x) * 2.0)
    compiled = hypatia.optimize(model, torch.randn(2, 3, requires_grad=True))
    gradients = []
    for run in (compiled, torch.compile(model, backend="hypatia"), hypatia.compile(model), model):
        x = torch.tensor([[1.0, NAN, 2.0], [2.0, 2.0, 1.0]], requires_grad=True)
        run(x).backward()
        gradients.append(x.grad)
    assert gradients[-1].tolist() == [[0, 2, 0], [0, 0, 0]]
    assert all(torch.equal(g, gradients[-1]) for g in gradients), gradients


@pytest.mark.parametrize("f", [lambda x: x * torch.tanh(F.softplus(x))], ids=["mish"])
def test_gradients_where_exponentials_end(f: Any) -> None:
    """torch's gradient of mish has the other sign there; that of its parts has not."""
    x = torch.tensor([[-80.0, -88.0, -89.0, -92.0]])
    compiled = hypatia.optimize(Model(f), torch.randn(1, 4, requires_grad=True))
    gradients = []
    for run in (compiled, f):
        given = x.clone().requires_grad_()
        run(given).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=0.0)


def test_a_proof_whose_sides_share_terms_of_the_rule_holds() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.relu(torch.relu(x)) + torch.abs(torch.abs(y)) + torch.abs(torch.relu(y))
        return a * (torch.relu(torch.abs(x)) - (-torch.neg(-x)))

    x = torch.randn(5, 5)
    with torch.no_grad():
        torch.compile(f, backend="hypatia")(x, x + 1)
    replay = hypatia.reports()[-1].replay()
    assert replay.holds, replay


# Both sides of every rule as torch computes them.


def sides(pair: dict[str, Any]) -> fx.GraphModule | None:
    """A graph with the two sides of a rule as results; none if torch refuses such a program."""
    return _sides(json.dumps([pair["inputs"], pair["emission"]]))


@functools.cache
def _sides(text: str) -> fx.GraphModule | None:
    inputs, emission = json.loads(text)
    graph, mode = fx.Graph(), FakeTensorMode()
    for i, (dtype, shape, _) in enumerate(inputs):
        with mode:
            graph.placeholder(f"x{i}").meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype))
    graph.output(())
    gm = fx.GraphModule(nn.Module(), graph)
    try:
        return rebuild_values(gm, capture(gm), emission)
    except (RuntimeError, ValueError, IndexError):
        return None


POOL = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, 2.0, -0.25], dtype=torch.float64)


def drawn(dtype: str, shape: list[int], positive: bool, ties: bool) -> torch.Tensor:
    """Ordinary numbers, or few different ones: ties, zeros, bounds of activations."""
    x = POOL[torch.randint(len(POOL), shape)] if ties else torch.randn(shape, dtype=torch.float64)
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return x.round().to(kind) if kind != torch.uint8 else x.abs().round().to(kind)
    return (x.abs() + 0.5 if positive else x).to(kind)


def gradients(gm: fx.GraphModule, side: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [x.detach().clone().requires_grad_(x.dtype.is_floating_point) for x in inputs]
    result = gm(*given)[side]
    wanted = [x for x in given if x.requires_grad]
    if not result.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    cotangent = torch.linspace(0.5, 2.0, max(1, result.numel()), dtype=result.dtype)[: result.numel()]
    found = torch.autograd.grad(result, wanted, cotangent.reshape(result.shape), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def used(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs that the graph still takes, by name."""
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    return [inputs[int(name.removeprefix("x"))] for name in names]


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, Any]]:
    # Kernels of attention take other shapes than the walk draws.
    return [p for p in json.loads(_native.rule_pairs(5, 6)) if "attention" not in p["rule"]]


def test_every_rule_that_keeps_the_gradient_does_so_in_torch(pairs: list[dict[str, Any]]) -> None:
    wrong, seen = [], set()
    for pair in pairs:
        frozen = any("weight" in g for g in pair["guards"])
        wide = all(d in ("float32", "float64") for d, _, _ in pair["inputs"])
        if not pair["gradient"] or frozen or not wide:
            continue
        gm = sides(pair)
        if gm is None:
            continue
        for ties in (False, True, True):
            inputs = used(gm, [drawn(*i, ties) for i in pair["inputs"]])
            try:
                left, right = (gradients(gm, side, inputs) for side in (0, 1))
            except RuntimeError as e:
                # torch 2.11 says the second of a group norm without a weight.
                refused = (
                    "is not differentiable with respect to argument 'running_",
                    "does not have a device",
                )
                if any(text in str(e) for text in refused):
                    continue
                raise
            for a, b in zip(left, right, strict=True):
                seen.add(pair["rule"])
                scale = a[a.isfinite()].abs().amax() if a.isfinite().any() else torch.tensor(1.0)
                finite = a.isfinite()
                if not torch.allclose(a[finite], b[finite], rtol=1e-4, atol=1e-4 * float(scale.clamp(1.0))):
                    wrong.append((pair["rule"], pair["text"], ties, a, b))
    assert not wrong, "\n".join(f"{rule}: {text} {a} {b}" for rule, text, _, a, b in wrong[:5])
    assert len(seen) > 60, sorted(seen)


def test_rules_of_values_alone_are_no_more_than_they_need_be(pairs: list[dict[str, Any]]) -> None:
    """Each of them has another gradient somewhere: at ties, at a bound, at NaN."""
    needed = {
        "max-item",
        "min-item",
        "max-all",
        "min-all",
        "relu-of-clamp",
        "hardsigmoid-of-clamp",
        "abs-relu",
    }
    needed |= {"mish-of-softplus", "detach-none"}
    assert {p["rule"] for p in pairs if not p["gradient"]} == needed
    differ = set()
    for pair in pairs:
        if pair["gradient"] or not all(d in ("float32", "float64") for d, _, _ in pair["inputs"]):
            continue
        gm = sides(pair)
        assert gm is not None
        for value in (1.0, 0.0, -3.0, NAN):
            given = [torch.full(s, value, dtype=getattr(torch, d)) for d, s, _ in pair["inputs"]]
            left, right = (gradients(gm, side, used(gm, given)) for side in (0, 1))
            differ |= {pair["rule"] for a, b in zip(left, right, strict=True) if not torch.equal(a, b)}
    assert differ == needed


SPECIAL = torch.tensor(
    [NAN, INF, -INF, 0.0, -0.0, 1.0, -3.0, 6.0, 6e4, 3e38, -3e38, 1e-40, 1e-45, 0.7, 90.0, -90.0]
)


def extreme(dtype: str, shape: list[int], positive: bool) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        x = SPECIAL[torch.randint(len(SPECIAL), shape)].to(kind)
        return x.abs() + 0.5 if positive else x
    if kind == torch.bool:
        return torch.randint(2, shape).bool()
    limits = torch.iinfo(kind)
    values = torch.tensor([limits.min, limits.max, limits.min // 2, 0, 1, 2], dtype=torch.int64)
    return values[torch.randint(6, shape)].to(kind)


ELEMENTWISE = (
    "neg",
    "abs",
    "relu",
    "add",
    "sub",
    "mul",
    "not",
    "clamp",
    "cast",
    "twice",
    "pow",
    "square",
    "div",
    "item",
)


def test_exact_and_wider_rules_hold_in_torch_at_extreme_values(pairs: list[dict[str, Any]]) -> None:
    """Exact ones bit for bit where each element is computed by itself; wider ones make nothing infinite."""
    wrong, seen = [], set()
    for pair in pairs:
        if pair["numerics"] not in ("exact", "wider"):
            continue
        gm = sides(pair)
        if gm is None:
            continue
        for _ in range(3):
            try:
                left, right = gm(*used(gm, [extreme(*i) for i in pair["inputs"]]))
            except RuntimeError as refused:
                # Torch has no such tensor, a negative number of an unsigned type, or the op is cuDNN's.
                if "without overflow" not in str(refused) and "cudnn" not in pair["rule"]:
                    raise
                continue
            if not left.dtype.is_floating_point or (pair["numerics"] == "exact" and _elementwise(pair)):
                holds = same(left, right)
            else:
                holds = bool((right.isfinite() | ~left.isfinite()).all())
            seen.add(pair["rule"])
            if not holds:
                wrong.append((pair["rule"], pair["text"], left, right))
    assert not wrong, "\n".join(map(str, wrong[:5]))
    assert len(seen) > 80, sorted(seen)


def _elementwise(pair: dict[str, Any]) -> bool:
    return any(word in ELEMENTWISE for word in pair["rule"].split("-")) and "linear" not in pair["text"][0]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x * 1e25 * 1e25,
        lambda x: x * 1e25 / 1e-25,
        lambda x: x / 1e-25 * 1e25,
        lambda x: x / 1e-25 / 1e-25,
    ],
    ids=["mul-mul", "mul-div", "div-mul", "div-div"],
)
def test_numbers_that_become_one_do_not_overflow(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return form(x)

    x = torch.tensor([1e-20, -3e-20])
    with torch.no_grad():
        graph = hypatia.optimize(Model(), x, options={"verify": "off"})
        torch.testing.assert_close(graph(x), form(x))


@pytest.mark.parametrize("number", [1.2345678901234567e-3, 1 / 3, 1e-300, 123456.78901234567, 5e-324])
def test_constants_keep_all_their_digits(number: float) -> None:
    """On their way into the search and back into a graph; nothing is checked at the first call."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * number) + number

    x = torch.linspace(-2, 2, 64, dtype=torch.float64)
    optimized = hypatia.optimize(Scaled(), x, options={"verify": "off"})
    assert torch.equal(optimized(x), Scaled()(x))


@pytest.mark.parametrize("width", [2, 200])
@pytest.mark.parametrize("follows", ["nothing", "division", "cast"])
def test_probabilities_below_the_normal_numbers(follows: str, width: int) -> None:
    """Who divides by them, or takes their logarithm, sees them; products do not."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * 1.0).softmax(-1)
        return {"nothing": y, "division": y / y, "cast": y.double() * 1e40}[follows]

    x = torch.full((3, width), -200.0)
    x[:, 0], x[:, 1] = 0.0, -98.0
    with torch.no_grad():
        compiled = hypatia.compile(Model(f), torch.randn(3, width))
        found, eager = compiled(x), Model(f)(x)
    assert eager[0, 1] != 0
    torch.testing.assert_close(found, eager, equal_nan=True)
    assert torch.equal(found == 0, eager == 0)
    assert [report.no_plan for report in compiled.reports] == [""]
