"""Makes a failing case small: fewer calls, fewer results, fewer rows, simpler arguments, smaller sizes."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .case import Case, Entry, Plan
from .program import Program, Row, Weight
from .tensors import T

Fails = Callable[[Case], bool]


def minimised(case: Case, fails: Fails, seconds: float = 60.0) -> Case:
    """The smallest case that was found in this time for which ``fails`` still holds."""
    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for step in (_calls, _results, _rows, _settings, _inputs, _weights, _sizes):
            progress = True
            while progress and time.monotonic() < end:
                progress = False
                for candidate in step(case):
                    if time.monotonic() > end:
                        break
                    if _weight(candidate) < _weight(case) and fails(candidate):
                        case, progress, changed = candidate, True, True
                        break
    return case


def _weight(case: Case) -> tuple[int, ...]:
    """How large a case is: what is smaller is simpler."""
    p = case.program
    numbers = sum(v.numel() for v in _shapes(case))
    odd = sum(_odd(v) for plan in case.plans for v in plan.inputs)
    entry = len(repr(case.entry))
    choices = sum(plan.choice for plan in case.plans) + sum(map(bool, [plan.change for plan in case.plans]))
    plain = (p.shape != "one") + (p.doors != "flat")
    texts = sum(len(r.text) for r in p.rows)
    return (
        len(p.rows),
        len(case.plans),
        len(p.results),
        len(p.inputs) + len(p.weights),
        plain,
        odd,
        entry,
        choices,
        numbers,
        texts,
    )


def _shapes(case: Case) -> Iterator[torch.Size]:
    for spec in [*(v for plan in case.plans for v in plan.inputs), *(w.spec for w in case.program.weights)]:
        if isinstance(spec, T):
            yield torch.Size(spec.shape)


def _odd(value: Any) -> int:
    if not isinstance(value, T):
        return 1
    return (value.values != "normal") + (value.layout != "dense") + value.grad + (value.dtype != "float32")


def _calls(case: Case) -> Iterator[Case]:
    """Without one of the calls; the first one shows what the program was compiled for."""
    plans = case.plans
    if len(plans) > 2:
        yield case.replace(plans=plans[-1:])
        yield case.replace(plans=(plans[0], plans[-1]))
    if len(plans) > 1:
        for i in range(len(plans)):
            yield case.replace(plans=plans[:i] + plans[i + 1 :])


def _results(case: Case) -> Iterator[Case]:
    p = case.program
    if len(p.results) > 1:
        for i in range(len(p.results)):
            yield _with(case, results=(p.results[i],), shape="one")
        for i in range(len(p.results)):
            yield _with(case, results=p.results[:i] + p.results[i + 1 :])
    elif p.shape != "one":
        yield _with(case, shape="one")
        yield _with(case, shape="tuple")


def _rows(case: Case) -> Iterator[Case]:
    """A row replaced by something of its kind that is there, or by a new input; a result taken earlier."""
    p = case.program
    for row in reversed(p.rows):
        if p.results == (row.name,):
            for use in row.uses:
                yield _with(case, results=(use,), rows=tuple(r for r in p.rows if r.name != row.name))
    try:
        kinds = _values(case)
    except Exception:
        return
    for i in range(len(p.rows) - 1, -1, -1):
        row, value = p.rows[i], kinds[p.rows[i].name]
        if not isinstance(value, torch.Tensor):
            continue
        for name in [*row.uses, *[n for n, _ in p.inputs]]:
            other = kinds.get(name)
            if isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype):
                yield _renamed(case, row, name)
        if row.uses and value.dim() <= 4 and len(p.inputs) < 6 and p.doors == "flat":
            yield _cut(case, row, value)


def _values(case: Case) -> dict[str, Any]:
    """What each name stands for in the first call."""
    p = case.program
    values = {
        n: v.make() if isinstance(v, T) else v
        for (n, _), v in zip(p.inputs, case.plans[0].inputs, strict=True)
    }
    for w in p.weights:
        values[w.name] = values[w.tied] if w.tied else w.spec.make()
    with torch.set_grad_enabled(case.entry.training):
        return p.run(values)


def _renamed(case: Case, gone: Row, name: str) -> Case:
    p = case.program
    rows = []
    for row in p.rows:
        if row is not gone:
            uses = tuple(name if u == gone.name else u for u in row.uses)
            rows.append(dataclasses.replace(row, uses=uses))
    results = tuple(name if r == gone.name else r for r in p.results)
    return _with(case, rows=tuple(rows), results=results)


def _cut(case: Case, gone: Row, value: torch.Tensor) -> Case:
    """The row becomes an input."""
    p = case.program
    name = f"x{1 + max([int(n[1:]) for n, _ in p.inputs], default=-1)}"
    dtype = str(value.dtype).removeprefix("torch.")
    spec = T(tuple(value.shape), dtype, grad=case.entry.training and value.requires_grad)
    cut = _renamed(case, gone, name)
    program = dataclasses.replace(cut.program, inputs=(*p.inputs, (name, spec)))
    plans = tuple(dataclasses.replace(plan, inputs=(*plan.inputs, _alike(spec, plan))) for plan in case.plans)
    made = case.replace(program=program.without_dead_rows(), plans=plans)
    return next(_inputs(made), made)


def _alike(spec: T, plan: Plan) -> T:
    """Values of the same kind as those of the call's other inputs."""
    kinds = [v.values for v in plan.inputs if isinstance(v, T) and v.values != "normal"]
    return dataclasses.replace(spec, values=kinds[0] if kinds else "normal")


def _settings(case: Case) -> Iterator[Case]:
    """A plainer way to compile it."""
    entry = case.entry
    for field in dataclasses.fields(Entry):
        if field.name not in ("name", "options") and getattr(entry, field.name) != field.default:
            yield case.replace(entry=dataclasses.replace(entry, **{field.name: field.default}))
    for i, (name, value) in enumerate(entry.options):
        yield case.replace(
            entry=dataclasses.replace(entry, options=entry.options[:i] + entry.options[i + 1 :])
        )
        if name == "disabled_rules":
            half = len(value) // 2
            for part in (
                value[:half],
                value[half:],
                *[value[:j] + value[j + 1 :] for j in range(len(value)) if half < 8],
            ):
                options = (*entry.options[:i], (name, part), *entry.options[i + 1 :])
                yield case.replace(entry=dataclasses.replace(entry, options=options))
    if case.program.doors != "flat":
        yield _with(case, doors="flat")
    for i, plan in enumerate(case.plans):
        for simpler in ({"choice": 0}, {"choice": plan.choice % 4}, {"change": ""}):
            yield _planned(case, i, dataclasses.replace(plan, **simpler))


def _planned(case: Case, i: int, plan: Plan) -> Case:
    return case.replace(plans=(*case.plans[:i], plan, *case.plans[i + 1 :]))


def _inputs(case: Case) -> Iterator[Case]:
    """Without an input that is not used, or with plainer ones."""
    p = case.program
    used = {u for r in p.rows for u in r.uses} | set(p.results)
    unused = [i for i, (n, _) in enumerate(p.inputs) if n not in used]
    if unused and len(p.inputs) > len(unused):
        kept = [i for i in range(len(p.inputs)) if i not in unused]
        plans = tuple(
            dataclasses.replace(plan, inputs=tuple(plan.inputs[i] for i in kept)) for plan in case.plans
        )
        yield case.replace(
            program=dataclasses.replace(p, inputs=tuple(p.inputs[i] for i in kept)), plans=plans
        )
    for k, plan in enumerate(case.plans):
        for i, value in enumerate(plan.inputs):
            if not isinstance(value, T):
                continue
            for plainer in ({"values": "normal"}, {"layout": "dense"}, {"grad": False}, {"dtype": "float32"}):
                spec = dataclasses.replace(value, **plainer)
                inputs = (*plan.inputs[:i], spec, *plan.inputs[i + 1 :])
                yield _planned(case, k, dataclasses.replace(plan, inputs=inputs))
    for i, (_, value) in enumerate(p.inputs):
        if isinstance(value, T) and value.grad:
            yield _everywhere(case, lambda v, j, i=i: dataclasses.replace(v, grad=False) if i == j else v)


def _everywhere(case: Case, change: Callable[[T, int], T]) -> Case:
    def changed(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(change(v, i) if isinstance(v, T) else v for i, v in enumerate(values))

    p = case.program
    specs = changed(tuple(v for _, v in p.inputs))
    inputs = tuple((n, s) for (n, _), s in zip(p.inputs, specs, strict=True))
    plans = tuple(dataclasses.replace(plan, inputs=changed(plan.inputs)) for plan in case.plans)
    return case.replace(program=dataclasses.replace(p, inputs=inputs), plans=plans)


def _weights(case: Case) -> Iterator[Case]:
    """Weights that are their own, in float32."""
    p = case.program
    for i, w in enumerate(p.weights):
        if w.tied:
            alone = dataclasses.replace(w, tied="")
            yield _with(case, weights=(*p.weights[:i], alone, *p.weights[i + 1 :]))
    narrow = {"float16", "bfloat16", "float64"}
    if any(v.dtype in narrow for v in _specs(case)):
        yield _in_fp32(case)


def _specs(case: Case) -> Iterator[T]:
    for value in [*(v for plan in case.plans for v in plan.inputs), *(w.spec for w in case.program.weights)]:
        if isinstance(value, T):
            yield value


def _in_fp32(case: Case) -> Case:
    def plain(v: T, _: int = 0) -> T:
        floating = v.dtype in ("float16", "bfloat16", "float64")
        return dataclasses.replace(v, dtype="float32") if floating else v

    changed = _everywhere(case, plain)
    weights = tuple(_respecified(w, plain(w.spec)) for w in case.program.weights)
    return _with(changed, weights=weights)


def _respecified(weight: Weight, spec: T) -> Weight:
    return dataclasses.replace(weight, spec=spec)


def _sizes(case: Case) -> Iterator[Case]:
    """One of the sizes made smaller wherever it stands."""
    sizes = sorted({n for shape in _shapes(case) for n in shape if n > 2}, reverse=True)
    for size in sizes:
        for smaller in (1, 2, 3, size // 2, size - 1):
            if 0 < smaller < size:
                yield _resized(case, size, smaller)


def _resized(case: Case, size: int, smaller: int) -> Case:
    def shrunk(v: T, _: int = 0) -> T:
        return dataclasses.replace(v, shape=tuple(smaller if n == size else n for n in v.shape))

    changed = _everywhere(case, shrunk)
    weights = tuple(_respecified(w, shrunk(w.spec)) for w in case.program.weights)
    pattern = re.compile(rf"(?<![\w.]){size}(?![\w.])")
    rows = tuple(dataclasses.replace(r, text=pattern.sub(str(smaller), r.text)) for r in case.program.rows)
    return _with(changed, weights=weights, rows=rows)


def _with(case: Case, **changes: Any) -> Case:
    """The case with another program, less what that does not need."""
    program: Program = dataclasses.replace(case.program, **changes)
    return case.replace(program=program.without_dead_rows())
