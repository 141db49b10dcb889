"""The suites: lists, one model through its forms, resuming, means, samples of GraphNet."""

from __future__ import annotations

import importlib
import json
import math
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"

MODEL = """
    import torch
    from torch import device


    class GraphModule(torch.nn.Module):
        def forward(
            self,
            L_ids_: torch.Tensor,
            L_self_modules_e_parameters_weight_: torch.nn.parameter.Parameter,
            L_self_buffers_scale_: torch.Tensor,
            s0: torch.SymInt,
        ):
            x = torch.nn.functional.embedding(L_ids_, L_self_modules_e_parameters_weight_)
            y = torch.arange(s0, device=device(type="cuda", index=0))
            return (torch.relu(x * L_self_buffers_scale_) + y[:, None],)
"""
WEIGHTS = """
    class Program_weight_tensor_meta_e:
        name = "L_self_modules_e_parameters_weight_"
        shape = [10, 4]
        dtype = "torch.float32"
        device = "cuda:0"
        mean = 0.5
        std = 0.0
        data = None


    class Program_weight_tensor_meta_scale:
        name = "L_self_buffers_scale_"
        shape = [4]
        dtype = "torch.float32"
        mean = None
        std = None
        data = [1.0, -2.0, float("inf"), 0.5]
"""
INPUTS = """
    class Program_weight_tensor_meta_ids:
        name = "L_ids_"
        shape = [3]
        dtype = "torch.int64"
        data = [1, 2, 9]


    class Program_weight_tensor_meta_s0:
        name = "s0"
        shape = []
        dtype = "torch.int64"
        data = [3]
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the suites."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setenv("HYPATIA_CACHE", "off")
    return lambda name: importlib.import_module(f"suites.{name}")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A folder with one sample of GraphNet, another one that is broken, and a file that is none."""
    for name in ("tiny", "broken"):
        folder = tmp_path / "samples" / "kind" / name
        folder.mkdir(parents=True)
        files = {"model.py": MODEL, "weight_meta.py": WEIGHTS, "graph_net.json": "{}"}
        files |= {"input_meta.py": INPUTS} if name == "tiny" else {}
        for file, text in files.items():
            (folder / file).write_text(textwrap.dedent(text))
    (tmp_path / "samples" / "model.py").write_text("raise SystemExit")
    return tmp_path / "samples"


def line(name: str, settings: Any = None, **times: float | None) -> dict[str, Any]:
    cells = {form: {"right": True, "error": 1e-7} | ({"us": us} if us else {}) for form, us in times.items()}
    return {"name": name, "settings": settings, "cells": cells}


def test_lists_have_each_name_once(load: Any) -> None:
    rows, lists = load("rows"), load("lists")
    sizes = {"hf": 40, "timm": 48, "conv": 22}
    for suite, least in sizes.items():
        names = [row.name for row in lists.rows(suite, rows.Setting())]
        assert len(names) == len(set(names)) >= least
    narrow = lists.rows("conv", rows.Setting(dtype="bf16"))
    assert narrow
    assert all(row.dtype == "bf16" for row in narrow)


def test_unet_is_built_by_its_seed_and_in_its_layout(load: Any) -> None:
    rows, lists = load("rows"), load("lists")
    setting = rows.Setting(small=True)
    row = lists.row_named("conv", "unet.bf16.cl.b8", setting)
    case, again = row.build(setting), row.build(setting)
    for one, other in zip(case.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    ((x,), kwargs), ((y,), _) = case.arguments(1), case.arguments(2)
    assert (kwargs, x.dtype, x.shape[0]) == ({}, torch.bfloat16, 1)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(x, y)


@pytest.mark.parametrize("training", [False, True])
def test_one_model_through_all_forms_of_a_cpu(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    """What the process of a model does; Inductor needs a compiler of C++, and its answer is not ours."""
    rows, one, run, forms = (load(name) for name in ("rows", "one", "run", "forms"))
    lists = load("lists")
    monkeypatch.setattr(one.measure, "SAMPLE_SECONDS", 0.0)

    def make(setting: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
        return model, lambda dice: ((torch.randn(3, 8, generator=dice),), {})

    setting = rows.Setting(dtype="fp32", training=training)
    lists.SUITES["tiny"] = lambda _: [rows.Row("two layers", make)]
    # In training its first compilation takes most of a minute.
    peer = [] if training else ["inductor"]
    names = forms.forms_for("cpu", ",".join([*peer, "graph", "hypatia", "torch"]), check_only=True)
    assert names == ["eager", *peer, "hypatia", "torch"]
    before = torch.is_grad_enabled()
    plan = run.Plan("tiny", setting, tuple(names), check_only=training, rounds=2, profile=True)
    work = one.One(plan.job("two layers", names), tmp_path / "out")
    try:
        work.run()
        work.tell("done")
    finally:
        torch.set_grad_enabled(before)
        del lists.SUITES["tiny"]
        lists.rows.cache_clear()
    result = json.loads((tmp_path / "out").read_text())
    assert result["parameters"] == 212
    assert list(result["cells"]) == names
    assert all(result["cells"][name]["right"] for name in ("eager", *forms.OURS)), result
    assert all(result["cells"][name]["kept"] for name in forms.OURS)
    for name in ("eager", *forms.OURS):
        assert len(result["cells"][name].get("samples_us", [])) == (0 if training else 2)
    assert bool(result["cells"]["eager"].get("top")) == (not training)


def test_a_wrong_result_is_told(load: Any) -> None:
    one = load("one")
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def error(value: float) -> float:
        return one.Errors.of(torch.tensor([1.0, value]), exact).ulps

    eager = error(2.0)
    assert one._is_right(error(2.0 + 1e-7), eager, eager)
    assert not one._is_right(error(2.1), eager, eager)
    assert not one._is_right(error(math.nan), eager, eager)
    # At other inputs eager itself is as far off.
    assert one._is_right(error(2.1), eager, error(1.9))
    assert one._is_right(error(math.nan), error(math.nan), eager)


def test_gradients_at_kinks_are_told_apart(load: Any, tmp_path: Path) -> None:
    """In float32 3 * (1 / 3) is 1, so that a ReLU of the difference has no gradient; in float64 it is a
    little more. Rounded otherwise, a form may have the one or the other."""
    rows, one, run = (load(name) for name in ("rows", "one", "run"))

    class Kink(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1 / 3, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.w * x - torch.ones(2, dtype=x.dtype)).sum()

    given = ((torch.tensor([3.0, 3.0]),), {})
    case = rows.Case(Kink(), lambda _: given, torch.float32)
    plan = run.Plan("kink", rows.Setting(dtype="fp32", training=True), ("eager",))
    work = one.One(plan.job("kink", ["eager"]), tmp_path / "out")
    exact = work.exact(case, given)
    whole = exact[1][1].item()
    assert exact[1].tolist() == [whole, whole]
    assert whole > 1
    subject = one.Subject(case, [given], [exact])
    wrong = [{"call": 0, "result": 1, "eager_ulps": 0.0}]
    # The second number is far from its kink: nothing moves its gradient.
    for gradient, kinks in (([0.0, whole], wrong), ([whole, 0.0], [])):
        found = [exact[0].float(), torch.tensor(gradient)]
        assert work.kinks(subject, wrong, [found]) == kinks


def test_float32_inside_a_model_is_wide_in_the_reference(load: Any) -> None:
    rows = load("rows")
    x = torch.ones(2, dtype=torch.float64)
    with rows.widened():
        results = [x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32), torch.zeros(2)]
    assert {t.dtype for t in results} == {torch.float64}
    assert torch.zeros(2).dtype == torch.float32


def test_a_run_goes_on_where_it_was_stopped(load: Any, tmp_path: Path) -> None:
    rows, run = load("rows"), load("run")
    plan = run.Plan("hf", rows.Setting(dtype="fp32"), ("eager", "hypatia"))
    done = line("a", plan.settings, eager=1.0, hypatia=1.0)
    failed = {**line("b", plan.settings, eager=1.0), "error": "hypatia: took longer than 1 s"}
    other = line("c", {**plan.settings, "layers": 2}, eager=1.0, hypatia=1.0)
    fewer = line("d", plan.settings, eager=1.0)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (done, failed, other, fewer))) + '\n{"name": "e", "ce')
    kept = run.kept_lines(path, plan)
    assert [row["name"] for row in kept] == ["a"]
    assert run.to_do("bacde", kept, run.read_lines(path)) == ["e", "b", "c", "d"]
    assert run.kept_lines(tmp_path / "none", plan) == []


def test_a_process_that_takes_too_long_leaves_what_it_had(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, run = load("rows"), load("run")
    slow = (
        'import sys, time; open(sys.argv[2], \'w\').write(\'{"stage": "float64", "cells": {"eager": {}}}\')'
    )
    monkeypatch.setattr(run, "COMMAND", ("-c", slow + "; time.sleep(60)"))
    plan = run.Plan("hf", rows.Setting(), ("eager",), limit=3.0)
    found = run.one(plan, "x")
    assert found["error"] == "float64: took longer than 3 s"
    assert found["cells"] == {"eager": {}}
    monkeypatch.setattr(run, "COMMAND", ("-c", "raise MemoryError('of 5 GiB')"))
    assert "MemoryError: of 5 GiB" in run.one(plan, "x")["error"]


def test_peers_of_an_earlier_run_are_kept_and_marked(load: Any) -> None:
    run = load("run")
    old = line("a", eager=10.0, inductor=5.0, hypatia=4.0)
    new = run.with_peers(line("a", eager=None, hypatia=2.0), old)
    assert {form: cell["us"] for form, cell in new["cells"].items()} == {
        "eager": 10,
        "inductor": 5,
        "hypatia": 2,
    }
    assert new["cells"]["inductor"]["earlier"]
    assert "earlier" not in new["cells"]["hypatia"]


def test_means_counts_and_reasons(load: Any) -> None:
    tables = load("tables")
    lines = [
        line("a", eager=8.0, inductor=6.0, ro=4.0, hypatia=2.0),
        line("b", eager=2.0, inductor=1.0, ro=3.0, hypatia=2.0),
        line("c", eager=2.0, hypatia=None),
    ]
    lines[0]["cells"]["hypatia"] |= {"kept": "plan", "no_plan": []}
    lines[1]["cells"]["hypatia"] |= {"kept": "graph", "no_plan": ["node 12 has gaps"], "right": False}
    lines[2]["cells"]["hypatia"] = {"reason": "RuntimeError: no"}
    means = {mean["over"]: mean for mean in tables.means(lines)}
    assert means["eager"]["mean"] == pytest.approx(2.0)
    assert means["the better Inductor mode"]["mean"] == pytest.approx(1.0)
    assert means["the better Inductor mode"]["least_model"] == "b"
    assert means["eager"]["models"] == 2
    assert tables.counted(lines, "hypatia") == {"right": 1, "WRONG": 1, "failed": 1}
    assert tables.why(lines, "hypatia") == {"node N has gaps": ["b"]}
    text = "\n".join([*tables.table(lines), *tables.summary(lines), *tables.profiles(lines)])
    assert "2.00x (2 models, 1.00 (b) to 4.00, 0 slower)" in text
    assert math.isnan(tables.geometric_mean([]))
    ElementTree.fromstring(load("chart").chart(lines, "a & b"))


def test_graphnet_samples_become_models(load: Any, sample: Path) -> None:
    rows, graphnet = load("rows"), load("graphnet")
    setting = rows.Setting(samples=str(sample))
    found = graphnet.rows(setting)
    assert [row.name for row in found] == ["kind/broken", "kind/tiny"]
    assert graphnet.chosen(found, 1, 0, setting) == graphnet.chosen(found, 1, 0, setting)
    assert {row.name for row in graphnet.chosen(found, 2, 0, setting)} == {"kind/broken", "kind/tiny"}
    small = rows.Setting(samples=str(sample), gib=1e-9)
    assert "kind/tiny" not in [row.name for row in graphnet.chosen(found, 2, 0, small)]
    case = found[1].build(setting)
    assert [p.shape for p in case.model.parameters()] == [(10, 4)]
    assert {p.mean().item() for p in case.model.parameters()} == {0.5}
    args, kwargs = case.arguments(1)
    assert (len(args), args[1], kwargs) == (2, 3, {})
    assert sorted(args[0].tolist()) == [1, 2, 9]
    (result,) = case.model(*args)
    expected = torch.tensor([0.5, 0.0, math.inf, 0.25]) + torch.arange(3)[:, None]
    assert torch.equal(result, expected)
    with pytest.raises(ValueError, match="nothing is said about L_ids_"):
        found[0].build(setting)
    with pytest.raises(ValueError, match="more than --gib"):
        found[1].build(rows.Setting(samples=str(sample), gib=1e-9))
    with pytest.raises(ValueError, match="no samples"):
        graphnet.rows(rows.Setting(samples=str(sample / "kind" / "none")))


def test_numbers_that_dynamo_made_tensors_of_are_numbers_again(load: Any, sample: Path) -> None:
    rows, graphnet = load("rows"), load("graphnet")
    folder = sample / "kind" / "tiny"
    text = textwrap.dedent(MODEL).replace(
        "s0: torch.SymInt,", "s0: torch.SymInt, L_self_modules_MyNorm_eps: torch.Tensor,"
    )
    text = text.replace("+ y[:, None]", "+ y[:, None] + (l_self_modules_my_norm_eps.item())")
    text = text.replace(
        "    x = ", "    l_self_modules_my_norm_eps = L_self_modules_MyNorm_eps\n        x = "
    )
    (folder / "model.py").write_text(text)
    meta = (
        "name = 'L_self_modules_MyNorm_eps'\n    shape = []\n    dtype = 'torch.float64'\n    data = [0.25]"
    )
    (folder / "input_meta.py").write_text(f"{textwrap.dedent(INPUTS)}\nclass Meta:\n    {meta}\n")
    case = graphnet.rows(rows.Setting(samples=str(sample)))[1].build(rows.Setting())
    args, _ = case.arguments(1)
    (result,) = case.model(*args)
    assert torch.equal(result[:, 0], 0.75 + torch.arange(3))
    exported = torch.export.export(case.model, args)
    assert not any("item" in str(node.target) for node in exported.graph.nodes)


def test_forms_that_do_not_exist_are_refused(load: Any) -> None:
    forms = load("forms")
    assert forms.forms_for("cuda", "", check_only=False) == list(forms.LABELS)
    assert forms.forms_for("cpu", "", check_only=False) == ["eager", "inductor", "hypatia", "torch"]
    with pytest.raises(ValueError, match="no form 'fast'"):
        forms.forms_for("cpu", "eager,fast", check_only=False)
