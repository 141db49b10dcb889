"""The fuzzer: a fixed sample of its cases, those that it found and that are kept, and the fuzzer itself."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fresh
import hypatia
from fuzz import keep
from fuzz.case import FORMS, Case, Entry, Plan
from fuzz.check import Outcome, run_case
from fuzz.entries import Compiled
from fuzz.generate import case_of
from fuzz.minimise import minimised
from fuzz.oracle import Noise, Reference, judged
from fuzz.program import Program, Row, Weight, module_of
from fuzz.runner import Runner, Settings
from fuzz.tensors import VALUES, T
from fuzz.worker import OTHERWISE, is_torchs, shrunk, signature
from hypatia import faults
from hypatia.compiler import pipeline
from hypatia.execute import native
from hypatia.frontend import compiled_call
from hypatia.frontend.direct import CompiledModel

SAMPLE = range(104, 144)
"""Seeds of the cases that every run of the tests sees."""

KEPT = sorted(keep.FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Internal errors are findings of their own, not exceptions."""
    monkeypatch.setattr(pipeline, "raise_errors", False)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_random_programs(seed: int) -> None:
    outcome = run_case(case_of(seed))
    assert not outcome.found, f"{outcome.kind}: {outcome.message}"


@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.stem)
def test_what_was_found_stays_mended(path: Path) -> None:
    module = keep.load(path)
    outcome = keep.check(module.Model, module.ENTRY, module.CALLS)
    assert not outcome.found, f"{outcome.kind}: {outcome.message}"
    assert outcome.kind != "invalid", outcome.message


def test_a_seed_gives_the_same_case_every_time() -> None:
    for seed in range(50):
        first, second = case_of(seed), case_of(seed)
        assert first == second
        assert first.program.source() == second.program.source()
    assert len({case_of(seed).program.source() for seed in range(50)}) == 50


def test_programs_cover_what_the_compiler_promises() -> None:
    cases = [case_of(seed) for seed in range(800)]
    assert all(5 <= len(c.program.rows) <= 64 for c in cases)
    assert {c.entry.name for c in cases} == {"direct", "optimize", "torch", "step"}
    assert {c.entry.training for c in cases} == {True, False}
    assert {c.program.doors for c in cases} == {"flat", "dict", "tree", "groups", "optional"}
    assert {dict(c.entry.options).get("verify") for c in cases} == {None, "off"}
    sources = "".join(c.program.source() for c in cases)
    wanted = ("F.linear", "torch.bmm", "F.layer_norm", "torch.rsqrt", "scaled_dot_product_attention", "::2")
    wanted += ("torch.int8", "torch.bfloat16", "add_(", "register_buffer", ".argmax(")
    assert not [w for w in wanted if w not in sources]
    assert any(w.tied for c in cases for w in c.program.weights)
    values = {v.values for c in cases for plan in c.plans[1:] for v in plan.inputs if isinstance(v, T)}
    layouts = {v.layout for c in cases for plan in c.plans[1:] for v in plan.inputs if isinstance(v, T)}
    assert {v for v in values if not v.startswith("below ")} == {*VALUES}
    assert {c.entry.form for c in cases} == {*FORMS}
    counts = [w.spec for c in cases for w in c.program.weights] + [
        v for c in cases for _, v in c.program.inputs
    ]
    assert sum(isinstance(v, T) and v.values.startswith("below ") for v in counts) > 20
    assert "index_copy_" in sources
    assert layouts == {"dense", "swapped", "steps", "offset", "expanded", "channels last"}
    images = ("F.conv2d", "groups=", "F.conv_transpose2d", "F.max_pool2d", "F.group_norm", "F.pixel_shuffle")
    assert not [w for w in images if w not in sources]


def _case(
    *rows: Row, weights: tuple[Weight, ...] = (), results: tuple[str, ...] = ("v1",), **entry: Any
) -> Case:
    x = T((4, 8), seed=1)
    program = Program((("x0", x),), weights, rows, results, "one" if len(results) == 1 else "tuple")
    options = tuple({"ilp_deadline_ms": 0, "verify": "off", **entry.pop("options", {})}.items())
    return Case(
        0, program, Entry(options=options, **entry), (Plan((x,)), Plan((dataclasses.replace(x, seed=2),)))
    )


LAYERS = (
    Row("v0", "F.linear({0}, {1})", ("x0", "w0")),
    Row("v9", "torch.tanh({0}) * 2", ("v0",)),
    Row("v1", "torch.relu({0})", ("v9",)),
)
WEIGHT = (Weight("w0", T((8, 8), seed=3)),)


@pytest.mark.parametrize("name", ["direct", "optimize", "torch"])
def test_a_wrong_rule_is_found(name: str) -> None:
    case = _case(*LAYERS, weights=WEIGHT, name=name)
    assert run_case(case).kind == "ok"
    with faults.wrong_rule():
        assert run_case(case).kind == "wrong"
        strict = case.replace(entry=dataclasses.replace(case.entry, options=(("verify", "strict"),)))
        assert run_case(strict).kind == "rolled back"


def test_a_wrong_rule_is_found_in_training() -> None:
    case = _case(*LAYERS, weights=WEIGHT, name="step", training=True)
    assert run_case(case).kind == "ok"
    with faults.wrong_rule():
        assert run_case(case).kind == "wrong"


def _spoiled(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    run = native.NativeGraph.run

    def spoiled(self: native.NativeGraph, args: Any) -> Any:
        results = run(self, args)
        return None if results is None else tuple(change(r) for r in results)

    return spoiled


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.reshape(-1), "shape"),
        (lambda r: r.double(), "dtype"),
        (lambda r: r.t().contiguous().t(), "strides"),
        (lambda r: r * 1.00001, "values are wrong"),
        (lambda r: r.clamp(max=1.0), "values are wrong"),
    ],
    ids=["shape", "dtype", "strides", "values", "some values"],
)
def test_a_wrong_result_of_a_plan_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    case = _case(*LAYERS, weights=WEIGHT)
    monkeypatch.setattr(native.NativeGraph, "run", _spoiled(change))
    # What the first call of a plan shows, the compiler sees by itself.
    monkeypatch.setattr(compiled_call, "has_same_layout", lambda *_, **__: True)
    outcome = run_case(case)
    assert outcome.kind == "wrong"
    assert said in outcome.message


def test_an_exception_and_an_internal_error_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("planted")

    case = _case(*LAYERS, weights=WEIGHT)
    monkeypatch.setattr(native.NativeGraph, "run", failing)
    # What fails while a model is compiled is no reason to fail.
    outcome = run_case(case)
    assert outcome.kind == "internal"
    assert "planted" in outcome.message
    monkeypatch.undo()
    monkeypatch.setattr(CompiledModel, "__call__", failing)
    assert (run_case(case).kind, run_case(case).message) == ("exception", "RuntimeError: planted")
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "raise_errors", False)
    monkeypatch.setattr(pipeline, "rebuild", failing)
    assert run_case(case).kind == "internal"


def test_equal_programs_differ_and_are_right() -> None:
    """Prices by lot bring out other programs that are equal."""
    rows = (
        Row("v0", "F.linear({0}, {1})", ("x0", "w0")),
        Row("v2", "F.linear({0}, {1})", ("x0", "w1")),
        Row("v3", "({0} + {1}) * 2.0", ("v0", "v2")),
        Row("v1", "{0} * torch.sigmoid({0})", ("v3",)),
    )
    weights = (*WEIGHT, Weight("w1", T((8, 8), seed=4)))
    found = set()
    for random_costs in range(6):
        case = _case(*rows, weights=weights, name="optimize", random_costs=random_costs, again=True)
        assert run_case(case).kind == "ok"
        found.add(_program(case))
    assert len(found) > 1


def _program(case: Case) -> str:
    model = module_of(case.program.source())()
    with torch.no_grad(), faults.any_equal(case.entry.random_costs):
        return str(hypatia.optimize(model, T((4, 8)).make(), options=dict(case.entry.options)).graph)


def test_a_failing_case_is_made_small() -> None:
    case = next(
        c for c in map(case_of, range(500)) if any("F.linear" in r.text for r in c.program.rows[4:-4])
    )

    def fails(candidate: Case) -> bool:
        model = module_of(candidate.program.source())()
        try:
            for call in candidate.calls():
                given = (call.args, dict(call.kwargs))
                args, kwargs = pytree.tree_map(lambda v: v.make() if isinstance(v, T) else v, given)
                model(*args, **kwargs)
        except Exception:
            return False
        return any("F.linear" in r.text for r in candidate.program.rows)

    small = minimised(case, fails, seconds=20)
    assert len(small.program.rows) == 1
    assert len(small.plans) == 1
    assert len(small.program.results) == 1
    assert small.entry.options == ()
    assert run_case(small).kind != "invalid"


def test_what_is_made_small_has_the_same_fault(tmp_path: Path) -> None:
    rows = (
        *LAYERS,
        Row("v2", "{0} + 1.0", ("v1",)),
        Row("v3", "{0}.t()", ("v2",)),
        Row("v4", "{0} * {1}", ("v2", "x0")),
    )
    case = _case(*rows, weights=WEIGHT, results=("v3", "v4"))
    with faults.wrong_rule():
        outcome = run_case(case)
        small = shrunk(case, outcome, "cpu", seconds=30)
        again = run_case(small)
        assert signature(again) == signature(outcome)
        assert len(small.program.rows) <= 2
        module = keep.load(keep.kept(small, again, tmp_path))
        assert keep.check(module.Model, module.ENTRY, module.CALLS).kind == "wrong"
    assert keep.check(module.Model, module.ENTRY, module.CALLS).kind == "ok"


STEADY = """
import sys

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from fuzz.check import is_steady
from tests.test_fuzz import Row, _case

for size in (60, 300, 1000):
    # Now and then the tensor gets memory that nothing had before.
    case = _case(Row("v1", f"{{0}} + torch.empty(4, {size}).gt(1).sum()", ("x0",)))
    assert not all(is_steady(case) for _ in range(3)), size
assert is_steady(_case(Row("v1", "{0} * 2", ("x0",))))
"""


def test_a_kernel_that_reads_memory_as_it_was_is_seen() -> None:
    """In a process of its own: one that has run for long has gaps in its memory that nothing fills."""
    done = fresh.run(STEADY, Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr


def test_a_model_that_torch_captures_otherwise_is_torchs() -> None:
    """Torch foretells that the norm is not contiguous, so that a copy of it would be changed."""
    weights = tuple(Weight(f"b{i}", T((2,), seed=i), "buffer") for i in range(2))
    rows = (
        Row("v0", "F.batch_norm({0}, {1}, {1}.abs() + 1)", ("x0", "b0")),
        Row("v1", "{0}.contiguous()", ("v0",)),
        Row("v2", "{0}.clamp_(-0.1, 0.1)", ("v1",), changes=True),
        Row("v3", "{0}.add_(1)", ("b1",), changes=True),
        Row("v4", "{0} * {1}", ("v0", "v3")),
    )
    x = T((3, 2), layout="swapped")
    program = Program((("x0", x),), weights, rows, ("v4",), "one")
    case = Case(0, program, Entry(), (Plan((x,)),))
    outcome = run_case(case)
    assert (outcome.kind, OTHERWISE in outcome.message) == ("internal", True)
    assert is_torchs(case, outcome, "cpu")
    assert not is_torchs(case.replace(plans=(Plan((T((3, 2)),)),)), outcome, "cpu")


def test_a_run_prints_seeds_counts_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Runner(Settings(0, count=2, jobs=1, folder=tmp_path)).run()
    assert first["seeds"] == [0, 1]
    assert first["cases"] == 2 == sum(first["kinds"].values())
    second = Runner(Settings(0, count=3, jobs=1, folder=tmp_path, resume=True)).run()
    assert second["cases"] == 3
    assert second["found"][: len(first["found"])] == first["found"]


def test_a_process_that_hangs_is_a_finding(tmp_path: Path) -> None:
    found = Runner(Settings(0, count=1, jobs=1, folder=tmp_path, limit=0.01)).run()
    assert found["kinds"]["hang"] == 1


PLANTED = """
import os

from fuzz import check, worker
from fuzz.case import Case, Entry, Plan
from fuzz.program import Program, Row
from fuzz.tensors import T

x = T((4, 8))
program = Program((("x0", x),), (), (Row("v0", {row!r}, ("x0",)),), ("v0",), "one")
worker.case_of = lambda seed: Case(0, program, Entry(training=True), (Plan((x,)),))
{more}
worker.main()
"""


@pytest.mark.parametrize(
    ("row", "more", "kind"),
    [
        ("torch.os.abort() or {0}", "", "torch's"),
        ("{0} * 2", "check.Compiled = lambda *_: os.abort()", "crash"),
        ("torch.os._exit(1) or {0}", "", "crash"),
    ],
    ids=["torch alone", "the compiler", "no signal"],
)
def test_a_process_that_torch_itself_ends_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, more: str, kind: str
) -> None:
    """As the gradient of a group norm with channels last does on a CPU in torch 2.11."""
    (tmp_path / "planted.py").write_text(PLANTED.format(row=row, more=more))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Runner(Settings(0, count=1, jobs=1, folder=tmp_path, worker="planted")).run()
    assert found["kinds"][kind] == 1, found


def _judged(
    mine: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor, *members: torch.Tensor, odd: bool = False
) -> str:
    drawn = list(members)
    reference = Reference([eager], [wide], lambda i, _: [drawn[i % len(drawn)] if drawn else eager], odd)
    return judged(mine, reference, 0)


def test_what_the_oracle_lets_pass() -> None:
    eager = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    wide = eager.double()
    assert not _judged(eager.clone(), eager, wide)
    assert not _judged(eager * (1 + 2e-7), eager, wide), "a few roundings"
    # Eager overflowed, float64 does not, and neither does the result.
    assert not _judged(torch.tensor([1e38]), torch.tensor([float("inf")]), torch.tensor([1e38]).double())
    # A sum of infinities in another order.
    odd = torch.tensor([float("nan")]), torch.tensor([float("inf")])
    assert not _judged(odd[0], odd[1], odd[1].double(), odd=True)
    assert _judged(odd[0], odd[1], odd[1].double())
    # A comparison that a rounding decides.
    flips = torch.tensor([True]), torch.tensor([False])
    assert not _judged(flips[0], flips[1], flips[1], flips[0], flips[1])
    # Cancellation: eager's runs spread as far.
    near = [torch.tensor([v]) for v in (0.0, 1e-3, -2e-3)]
    assert not _judged(torch.tensor([2e-3]), near[0], near[0].double(), *near)


def test_attention_on_a_gpu_gives_subnormal_numbers_few_digits() -> None:
    """It splits fp32 into pieces of TF32, whose subnormal numbers are multiples of 1.1e-41."""
    eager = torch.tensor([-4.54062741e-41, 3e-38, 1.1e-38])
    wide = torch.tensor([-4.54053855e-41, 3e-38, 1.1e-38], dtype=torch.float64)
    right = (-4.59177481e-41, 3e-38, 1.1e-38)

    def said(*mine: float, split: bool = True, ordinary: float = 3e-38) -> str:
        given, exact = eager.clone(), wide.clone()
        given[1] = exact[1] = ordinary
        reference = Reference([given], [exact], lambda *_: [given], splits=lambda: split)
        return judged(torch.tensor(mine), reference, 0)

    assert not said(*right)
    assert "1 of 3 values are wrong, at [0]" in said(*right, split=False)
    # An ordinary number beside it, by no more than that.
    assert "1 of 3 values are wrong, at [1]" in said(right[0], 3.0002e-38, right[2])
    assert "1 of 3 values are wrong, at [1]" in said(right[0], 1.00001, right[2], ordinary=1.0)
    # Subnormal numbers that are wrong.
    assert "1 of 3 values are wrong, at [0]" in said(-4.54062741e-40, *right[1:])
    assert "1 of 3 values are wrong, at [2]" in said(*right[:2], 1.0e-38)
    assert "1 of 3 values are wrong, at [2]" in said(*right[:2], 0.0)


@pytest.mark.parametrize("name", ["direct", "optimize", "torch"])
def test_whether_a_graph_calls_attention_is_known(name: str) -> None:
    rows = (
        Row("v0", "{0} @ {0}.mT / 2.0", ("x0",)),
        Row("v2", "{0}.softmax(-1)", ("v0",)),
        Row("v1", "{0} @ {1}", ("v2", "x0")),
    )
    for last, attends in ((rows, True), ((*rows[:2], Row("v1", "{0} * 2", ("v2",))), False)):
        case = _case(*last, name=name)
        x = T((2, 2, 4, 8), seed=1)
        program = dataclasses.replace(case.program, inputs=(("x0", x),))
        model = module_of(program.source())()
        with torch.no_grad():
            compiled = Compiled(case.entry, model, (x.make(),), {})
            compiled((x.make(),), {})
        assert compiled.attends() == attends


def test_the_sign_of_a_sum_of_zeros_is_the_kernels_choice() -> None:
    column, negative = torch.zeros(4, 1), torch.full((1, 4), -0.5)
    assert torch.signbit(column @ negative).all(), "eager's product of several rows has a sign"
    assert not torch.signbit(column[:1] @ negative).any(), "and that of one row has none"
    with Noise(0, 1.0):
        signs = torch.signbit(column @ negative)
    assert signs.any()
    assert not signs.all()


def test_a_norm_of_one_number_may_be_exact() -> None:
    """Eager has noise there, which a division makes large; without it the quotient is NaN."""
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).half() / 3
    half = torch.full((1,), 0.5).half()
    assert F.layer_norm(x, (1,)).any()
    zeros, halves = [], []
    for seed in range(4):
        with Noise(seed, 1.0):
            zeros.append(not F.layer_norm(x, (1,)).abs().gt(1e-6).any())
            halves.append(bool(F.layer_norm(x, (1,), half, half).sub(0.5).abs().max() < 2e-3))
    assert zeros == [False, True, False, True]
    assert all(halves)
    odd = torch.tensor([[float("inf")], [1.0]])
    with Noise(1, 1.0):
        assert F.layer_norm(odd, (1,)).isnan().tolist() == [[True], [False]]


def test_an_overflow_that_eager_has_not_may_end_as_another_number() -> None:
    """The kernel of GELU overflows above half of the greatest number, and so may rules that are not exact."""
    rows = (
        Row("v0", "{0} * 0.5 * (1.0 + torch.erf({0} / 1.4142135623730951))", ("x0",)),
        Row("v1", "torch.atan2(torch.relu({0}), {1})", ("v0", "x0")),
    )
    case = _case(*rows, name="optimize")
    huge = dataclasses.replace(case.plans[0].inputs[0], values="huge")
    case = case.replace(plans=(case.plans[0], Plan((huge,))))
    assert run_case(case).kind == "ok"
    with faults.wrong_rule():
        assert run_case(case).kind == "wrong"
    exact = dataclasses.replace(case.entry, options=(*case.entry.options, ("numerics", "exact")))
    assert run_case(case.replace(entry=exact)).kind == "ok"


@pytest.mark.parametrize(
    "f", [lambda x: x.sort(), lambda x: torch.topk(x, 3, 0), lambda x: x.sort(dim=0, stable=True)]
)
def test_which_of_equal_numbers_comes_first_is_drawn(f: Callable[..., Any]) -> None:
    x = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    places = set()
    for seed in range(8):
        with Noise(seed, 1.0):
            values, indices = f(x)
        assert torch.equal(values, f(x)[0])
        assert torch.equal(x[indices], values)
        places.add(tuple(indices.tolist()))
    stable = f(x)[1].tolist() == [4, 1, 2, 3, 0] and len(places) == 1
    assert stable or len(places) > 2


def test_what_becomes_of_infinities_that_sums_add_is_not_judged() -> None:
    """Two layers of an infinity are NaN, one layer of both weights is an infinity, and `sign` tells."""
    rows = (
        Row("v0", "F.linear({0}, {1})", ("x0", "w0")),
        Row("v2", "F.linear({0}, {1})", ("x0", "w1")),
        Row("v3", "{0} + {1}", ("v0", "v2")),
        Row("v1", "torch.sign({0}) * 2", ("v3",)),
    )
    x = T((4, 2), values="inf", seed=8)
    weights = (Weight("w0", T((8, 2), seed=3)), Weight("w1", T((8, 2), seed=4)))
    case = _case(*rows, weights=weights, name="optimize")
    first = dataclasses.replace(x, values="normal")
    inputs = (("x0", first),)
    case = case.replace(
        program=dataclasses.replace(case.program, inputs=inputs), plans=(Plan((first,)), Plan((x,)))
    )
    assert run_case(case).kind == "ok"
    infinite = torch.tensor([[float("inf"), 1.0]])
    for loose, kinds in ((True, 3), (False, 1)):
        found = set()
        for seed in range(24):
            with Noise(seed, 1.0, loose=loose):
                found.add(torch.sign(infinite @ torch.ones(2, 1)).item())
        assert len(found) == kinds


def test_what_the_oracle_finds() -> None:
    one = torch.ones(3)
    assert _judged(one * 1.0001, one, one.double())
    assert _judged(torch.tensor([float("nan")]), torch.tensor([0.0]), torch.zeros(1).double())
    assert _judged(torch.tensor([1.0]), torch.tensor([float("nan")]), torch.tensor([float("nan")]).double())
    assert _judged(torch.tensor([3]), torch.tensor([4]), torch.tensor([4]))
    # float64 agrees, but eager compares with a number rounded to its own dtype, and no rounding moves that.
    assert _judged(torch.tensor([False]), torch.tensor([True]), torch.tensor([False]))
    assert _judged(torch.tensor([-0.7]), torch.tensor([1.4]), torch.tensor([-0.7]).double())


def test_outcomes_that_are_findings() -> None:
    assert not Outcome("ok").found
    assert not Outcome("invalid").found
    assert Outcome("wrong").found


def test_every_mutation_has_a_place() -> None:
    """`make test-mutations` takes half an hour; that its faults can be put in is seen here."""
    mutations = importlib.import_module("mutations")
    root = Path(__file__).parent.parent
    counts = {m.what: (root / m.file).read_text().count(m.old) for m in mutations.MUTATIONS}
    assert all(count == 1 for count in counts.values()), counts
