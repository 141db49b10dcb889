"""From an integer to a case."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import torch

from . import counts, idioms, images, ops, patterns, views
from .builder import Builder
from .case import FORMS, Case, Entry, Plan
from .program import Program
from .tensors import FLOATS, INTEGERS, LAYOUTS, VALUES, T

MAKERS: tuple[tuple[ops.Maker, int], ...] = (
    *((ops.unary, 10), (ops.binary, 10), (ops.numbered, 8), (ops.compared, 4), (ops.cast, 4), (ops.whole, 4)),
    *((ops.reduction, 8), (ops.indexed, 2), (views.view, 14), (views.joined, 5), (views.copied, 2)),
    *((idioms.linear, 10), (idioms.mlp, 3), (idioms.several, 4), (idioms.product, 5), (idioms.norm, 6)),
    *((idioms.attention, 3), (idioms.by_hand, 8), (idioms.convolution, 2), (patterns.left_side, 12)),
)

FEWEST = 5
"""Calls that a program has at least."""

NETS = 0.08
"""Share of the programs that are convolutional nets, by dice of their own."""

CHANGES = ("", "", "", "add", "copy", "replace", "load", "zero")


def case_of(seed: int) -> Case:
    """The case of a seed."""
    for attempt in range(100):
        dice = random.Random(f"{seed} {attempt}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = _case(seed, dice)
        if made is not None:
            return made
    raise AssertionError(f"seed {seed} gives no program")


def _case(seed: int, dice: random.Random) -> Case | None:
    name = dice.choices(("direct", "optimize", "torch", "step"), (55, 22, 18, 5))[0]
    training = name == "step" or dice.random() < {"direct": 0.2, "optimize": 0.4, "torch": 0.35}[name]
    dtype = dice.choices(FLOATS, (78, 6, 12, 4))[0]
    b = Builder(dice, training=training, dtype=dtype)
    nets = random.Random(f"{seed} images").random() < NETS
    (images.begun if nets else _inputs)(b)
    wanted = min(60, int(dice.expovariate(1 / 14)) + 8)
    makers, weights = zip(*MAKERS, strict=True)
    favoured = [w * dice.choice((0.3, 1, 1, 3)) for w in weights]
    in_place = dice.random() < 0.2
    counted = _counted(seed)
    for i in range(4 * wanted):
        if len(b.rows) >= wanted:
            break
        if i in counted:
            counted[i](b)
        maker = ops.changing if in_place and b.chance(0.12) else dice.choices(makers, favoured)[0]
        (images.image if nets and b.chance(0.8) else maker)(b)
    if not b.rows:
        return None
    entry = _entry(b, name)
    if counted and random.Random(f"{seed} clock").random() < 0.6:
        entry = dataclasses.replace(entry, form="clock")
    program = _program(b, entry)
    if program is None or len(program.rows) < FEWEST:
        return None
    plans = _plans(b, program, entry)
    if nets:
        plans = images.laid_out(plans, random.Random(f"{seed} layouts"))
    return Case(seed, program, entry, plans)


def _counted(seed: int) -> dict[int, ops.Maker]:
    """Some programs count their calls, from one of their first rows on. By dice of their own: other programs
    stay as they were."""
    dice = random.Random(f"{seed} counts")
    if dice.random() >= 0.15:
        return {}
    makers = (counts.cache, counts.cache, counts.count)
    return {dice.randrange(8): dice.choice(makers) for _ in range(dice.choice((1, 1, 2)))}


def _inputs(b: Builder) -> None:
    """Inputs that fit each other: some share all sizes, some the last ones."""
    batch, length, width = b.one(1, 2, 3, 4, 5), b.one(1, 2, 3, 4, 7, 9), b.one(1, 2, 4, 5, 8, 8, 16, 32)
    shape = b.one(
        (batch, width), (batch, length, width), (batch, length, width), (batch, 2, 4, 4), (width,), ()
    )
    b.input(shape, batch=True)
    for _ in range(b.one(0, 0, 1, 1, 2)):
        other = b.one(shape, shape, shape[-1:], shape[-2:], (1, *shape[1:]), ())
        b.input(other, batch=other == shape)
    if b.chance(0.2):
        b.input(b.one(shape, (batch,), (4,)), b.dice.choice((*INTEGERS, "bool", "int64")), batch=True)
    if b.chance(0.1):
        b.input(shape, b.dice.choice(FLOATS), batch=True)
    if b.chance(0.12):
        number = b.one(2, 3, 0.5, 1.5, True)
        name = f"x{len(b.inputs)}"
        b.inputs.append((name, number))
        b.values[name] = number
        for _ in range(2):
            b.emit(b.one("{0} * {1}", "{0} + {1}", "{0} - {1}"), b.floats(), name)


def _entry(b: Builder, name: str) -> Entry:
    dice = b.dice
    options: dict[str, Any] = {}
    if dice.random() < 0.45:
        options["verify"] = "off"
    if dice.random() < 0.15:
        options["numerics"] = dice.choice(("exact", "wider"))
    if dice.random() < 0.2:
        names = _rule_names()
        options["disabled_rules"] = tuple(dice.sample(names, len(names) // dice.choice((2, 4, 8))))
    if dice.random() < 0.1:
        options["freeze"] = dice.choice((True, False)) if not b.training else False
    if dice.random() < 0.05:
        options["weight_copies"] = 0
    # Exact extraction stops by the clock.
    options["ilp_deadline_ms"] = 0
    random_costs = dice.randrange(1 << 30) if dice.random() < 0.35 else None
    return Entry(
        name,
        b.training,
        tuple(options.items()),
        form=dice.choices(FORMS, (68, 14, 4, 14))[0],
        random_costs=random_costs,
        again=random_costs is not None and name == "optimize" and dice.random() < 0.6,
        dynamic=dice.choice((None, None, True, False)) if name in ("torch", "optimize") else None,
        examples=dice.random() < 0.7,
    )


_names: list[str] = []


def _rule_names() -> list[str]:
    if not _names:
        from hypatia import _native

        _names.extend(sorted(rule["name"] for rule in json.loads(_native.rules())))
    return _names


def _program(b: Builder, entry: Entry) -> Program | None:
    """The program with its results: late values, some that share memory, now and then an input itself."""
    dice = b.dice
    late = [r.name for r in b.rows if isinstance(b.values[r.name], torch.Tensor)]
    if not late:
        return None
    results = [late[-1]]
    used = {u for r in b.rows for u in r.uses}
    unused = [n for n in late if n not in used and n != late[-1]]
    results += dice.sample(unused, min(len(unused), dice.choice((0, 1, 2, 4, 6))))
    results += [dice.choice(late[-8:]) for _ in range(dice.choice((0, 0, 0, 1, 2)))]
    if dice.random() < 0.12 and entry.name != "step":
        results.append(dice.choice([*b.tensors(), *[w.name for w in b.weights]]))
    if dice.random() < 0.3:
        extra = b.emit(
            b.one("{0}.view(-1)", "{0}.squeeze()", "{0}[0]", "{0}.unsqueeze(0)", "{0}.mT"), results[0]
        )
        results += [extra] if extra else []
    if dice.random() < 0.3:
        dice.shuffle(results)
    shape = (
        "one"
        if len(results) == 1 and dice.random() < 0.7
        else dice.choice(("tuple", "tuple", "list", "dict", "nested"))
    )
    doors = dice.choices(("flat", "dict", "tree", "groups", "optional"), (60, 10, 10, 10, 10))[0]
    if entry.name == "step":
        floating = [n for n in results if b.values[n].requires_grad]
        if not floating:
            return None
        results, shape, doors = floating[:1], "one", "flat"
    if doors == "optional" and not isinstance(b.inputs[-1][1], T):
        doors = "flat"
    program = Program(tuple(b.inputs), tuple(b.weights), tuple(b.rows), tuple(results), shape, doors)
    return program.without_dead_rows()


def _plans(b: Builder, program: Program, entry: Entry) -> tuple[Plan, ...]:
    """The first call as the program was made, later ones with other values, layouts, sizes and weights."""
    dice = b.dice
    first = tuple(v for _, v in program.inputs)
    # hypatia.optimize makes a graph for these arguments alone, with their structure and numbers.
    fixed = entry.name == "optimize"
    plans = [Plan(first, choice=dice.choice((0, 0, dice.randrange(12))))]
    opened = {name for name, _ in b.open}
    batch = {v.shape[0] for n, v in program.inputs if n in opened}
    for _ in range(dice.choice((2, 3, 4, 5))):
        values = dice.choice(VALUES) if dice.random() < 0.75 else "normal"
        layout = dice.choice(LAYOUTS) if dice.random() < 0.25 else "dense"
        size = dice.choice((1, 2, 3, 6, 11)) if dice.random() < 0.3 and len(batch) == 1 else None
        if fixed and not (entry.dynamic and program.doors == "flat" and plans[0].choice == 0 and size != 1):
            size = None
        inputs: list[Any] = []
        for name, v in program.inputs:
            if not isinstance(v, T):
                inputs.append(v if fixed else _number(dice, v))
                continue
            shape = (size, *v.shape[1:]) if size is not None and name in opened else v.shape
            plain = dice.random() < 0.2
            inputs.append(
                dataclasses.replace(
                    v,
                    shape=shape,
                    seed=dice.randrange(10_000),
                    values=v.values if v.values not in VALUES else "normal" if plain else values,
                    layout=layout if dice.random() < 0.7 else v.layout,
                )
            )
        change = dice.choice(CHANGES)
        if fixed and change == "replace":
            change = "add"
        choice = plans[0].choice if fixed else dice.choice((plans[0].choice, dice.randrange(12)))
        plans.append(Plan(tuple(inputs), choice, change))
    return tuple(plans)


def _number(dice: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return dice.random() < 0.5
    return dice.choice((value, value, -1 if isinstance(value, int) else -0.25))
