"""One model in a process of its own: every form made, checked against float64, timed in turns.

    python -m suites.one JOB.json RESULT.json

The result is written after every step, so that what a time limit or a crash cuts off is not lost.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Its profiler writes a line for each start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.utils import _pytree as pytree

from hypatia.frontend.dynamo import collecting
from hypatia.tools import measure
from hypatia.tools.bench import reason
from hypatia.verifier.verify import FACTOR, ULPS, Errors

from .forms import OURS, Form, Messages
from .lists import row_named
from .rows import Arguments, Case, Setting, widened
from .turns import Turns

SEEDS = (1, 2)
"""Of the inputs of the first call, and of those of a later one."""
PROFILED = 3
"""Calls under the profiler."""
MOVES = 8
"""How often weights and inputs are moved where gradients are wrong."""
TOP = 8
"""Kernels that are told."""


@dataclasses.dataclass
class Subject:
    """A model, and what its forms are judged by."""

    case: Case
    inputs: list[Arguments]
    exact: list[list[torch.Tensor]]
    """Results in float64, for each of the inputs."""
    own: list[list[Errors]] = dataclasses.field(default_factory=list)
    """Errors of the first form that was made, eager's."""


class Moved:
    """Makes numbers wider, and moves each of them by some roundings, as results may be off by."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """The same each time for a seed and a tensor of this size."""
        dice = torch.Generator().manual_seed(self.seed * 1_000_003 + value.numel())
        by = torch.rand(value.shape, generator=dice, dtype=torch.float64).to(value.device) - 0.5
        return value.double() * (1 + by * ULPS * torch.finfo(value.dtype).eps)


class One:
    """What is done to a model."""

    def __init__(self, job: dict[str, Any], out: Path) -> None:
        self.job, self.out = job, out
        self.setting = Setting(**job["setting"])
        self.training = self.setting.training
        self.gpu = torch.device(self.setting.device).type == "cuda"
        self.result: dict[str, Any] = {"name": job["name"], "cells": {}}
        self.forms: dict[str, Form] = {}
        self.turns = Turns(job["turns"])
        self.clock = time.process_time if job.get("cpu_time") else time.perf_counter

    def run(self) -> None:
        """All of it: ours are compiled and all are timed while no other model is at work."""
        with self.turns.together():
            case, inputs = self.build()
            if self.job["prefill"]:
                return
            self.tell("float64")
            subject = Subject(case, inputs, [self.exact(case, given) for given in inputs])
            for name in [n for n in self.job["forms"] if n not in OURS]:
                self.form(name, subject)
        self.tell("waiting")
        with self.turns.alone():
            for name in [n for n in self.job["forms"] if n in OURS]:
                self.form(name, subject)
            if not self.job["check_only"]:
                self.tell("timing")
                self.time(inputs[0])
                self.tell("profile")
                self.profile(inputs[0])

    def build(self) -> tuple[Case, list[Arguments]]:
        """The model with its inputs; Inductor's kernels, where only they are wanted."""
        self.tell("building")
        row = row_named(self.job["suite"], self.job["name"], self.setting)
        case = row.build(self.setting)
        inputs = [case.arguments(seed) for seed in SEEDS]
        self.result |= {"parameters": sum(p.numel() for p in case.model.parameters())}
        torch.set_grad_enabled(self.training)
        if self.job["prefill"]:
            for name in self.job["forms"]:
                self.tell(name)
                Form(name, case.model, inputs[0], self.training)(inputs[0])
        return case, inputs

    def form(self, name: str, subject: Subject) -> None:
        """Makes a form; why it cannot be made is in its cell."""
        self.tell(name)
        self.result["cells"][name] = cell = {}
        try:
            self.make(name, subject, cell)
        except Exception as e:
            cell["reason"] = reason(e)[:300]
            self.forms.pop(name, None)
        subject.case.model.zero_grad(set_to_none=True)

    def tell(self, stage: str) -> None:
        """Writes what is known so far, and what comes next."""
        self.result["stage"] = stage
        there = self.out.with_suffix(".new")
        there.write_text(json.dumps(self.result))
        there.replace(self.out)

    def exact(
        self, case: Case, given: Arguments, move: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double
    ) -> list[torch.Tensor]:
        """Results in float64, of weights and inputs that are moved."""
        model = copy.deepcopy(case.model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.data = move(weight.data)
        model = model.double()
        if hasattr(model, "set_experts_implementation"):
            # The grouped products of torch have no float64.
            model.set_experts_implementation("eager")

        def wide(t: Any) -> Any:
            return move(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

        form = Form("eager", model, given, self.training)
        with widened():
            return self.results(form, pytree.tree_map(wide, given))

    def results(self, form: Form, given: Arguments) -> list[torch.Tensor]:
        """What a form returns; in training its gradients, too."""
        found = [*form(given), *(form.gradients() if self.training else [])]
        return [t.detach().clone() for t in found]

    def make(self, name: str, subject: Subject, cell: dict[str, Any]) -> None:
        """Makes a form and judges what it returns, at the first call and at one with other values."""
        inputs = subject.inputs
        before = self.memory()
        start = self.clock()
        with collecting() as reports, Messages() as messages:
            form = Form(name, subject.case.model, inputs[0], self.training)
            found = [self.results(form, inputs[0])]
            measure.wait(self.setting.device)
            cell["compile_s"] = self.clock() - start
            found.append(self.results(form, inputs[1]))
        cell["held_mib"] = (self.memory() - before) / 2**20
        if name in OURS:
            reports += [r for r in getattr(form.compiled, "reports", []) if all(r is not o for o in reports)]
            cell |= _told(reports, messages.lines)
        self.forms[name] = form
        errors = [
            [Errors.of(*pair) for pair in zip(*both, strict=True)]
            for both in zip(found, subject.exact, strict=True)
        ]
        subject.own = subject.own or errors
        most = [
            max((e.ulps for e in each if e.ulps == e.ulps), default=0.0)
            for each in zip(*subject.own, strict=True)
        ]
        cell["error"] = max((e.max_relative for call in errors for e in call), default=0.0)
        wrong = [
            {"call": call, "result": place, "ulps": e.ulps, "eager_ulps": most[place]}
            for call, (ours, eager) in enumerate(zip(errors, subject.own, strict=True))
            for place, (e, o) in enumerate(zip(ours, eager, strict=True))
            if not _is_right(e.ulps, o.ulps, most[place])
        ]
        if wrong and self.training:
            kinks = self.kinks(subject, wrong, found)
            cell |= {"kinks": len(kinks)} if kinks else {}
            wrong = [entry for entry in wrong if entry not in kinks]
        cell["right"] = not wrong
        if wrong:
            cell["wrong"] = wrong

    def kinks(
        self, subject: Subject, wrong: list[dict[str, Any]], found: list[list[torch.Tensor]]
    ) -> list[dict[str, Any]]:
        """Those of the wrong gradients that float64 has, too, where weights and inputs are moved by
        roundings: an input of a ReLU is on the other side of zero then."""
        explained = []
        for call in sorted({entry["call"] for entry in wrong}):
            exact = subject.exact[call]
            shifts = [torch.zeros_like(e) for e in exact]
            for seed in range(MOVES):
                moved = self.exact(subject.case, subject.inputs[call], Moved(seed))
                for shift, m, e in zip(shifts, moved, exact, strict=True):
                    torch.maximum(shift, (m - e).abs(), out=shift)
            for entry in [entry for entry in wrong if entry["call"] == call]:
                place = entry["result"]
                ours, right = found[call][place], exact[place]
                roundings = FACTOR * entry["eager_ulps"] + ULPS
                scale = torch.finfo(ours.dtype).eps * right.abs().max()
                allowed = FACTOR * shifts[place] + roundings * scale
                if bool(((ours.double() - right).abs() <= allowed).all()):
                    explained.append(entry)
        return explained

    def memory(self) -> int:
        """Bytes that torch holds on a GPU; on a CPU the most that the process ever held."""
        if self.gpu:
            gc.collect()
            return torch.cuda.memory_allocated()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def time(self, given: Arguments) -> None:
        """Samples in turns: on a GPU the least of them, with calls queued; on a CPU their median."""
        samples: dict[str, list[float]] = {name: [] for name in self.forms}
        for number in range(self.job["rounds"]):
            names = list(samples)
            shift = number % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                time.sleep(measure.REST_SECONDS)
                cell = self.result["cells"][name]
                try:
                    taken = measure.block(
                        functools.partial(self.forms[name], given), self.setting.device, self.clock
                    )
                except Exception as e:
                    cell["reason"] = reason(e)[:300]
                    del samples[name], self.forms[name]
                    continue
                samples[name].append(1e6 * taken.median)
                chosen = min if self.gpu else statistics.median
                cell |= {"us": chosen(samples[name]), "samples_us": samples[name]}
            self.tell("timing")

    def profile(self, given: Arguments) -> None:
        """Kernels, host time and memory of a call; on a CPU the ops, if that was asked for."""
        if not (self.gpu or self.job["profile"]):
            return
        for name, form in self.forms.items():
            cell = self.result["cells"][name]
            try:
                if self.gpu:
                    cell |= _on_host(form, given)
                cell |= _kernels(form, given, self.gpu)
            except Exception as e:
                cell["no_profile"] = reason(e)[:200]


def _is_right(ours: float, eager: float, most: float) -> bool:
    """Whether an error is eager's, but for roundings; where eager has no number, none is asked for.

    ``most`` is eager's largest error of this result at any of the calls: where a mean of many roundings is
    nearly right, that is luck, which other inputs do not have.
    """
    return eager != eager or ours <= FACTOR * most + ULPS


def _told(reports: list[Any], lines: list[str]) -> dict[str, Any]:
    """Which form runs, and why no plan does."""
    kept = Counter(r.kept for r in reports)
    why = list(dict.fromkeys(r.no_plan for r in reports if r.no_plan))
    graphs = [{"kind": r.kind, "kept": r.kept, "no_plan": r.no_plan, "times": r.times} for r in reports]
    names = [f"{count}x {name}" if count > 1 else name for name, count in kept.items()]
    return {
        "kept": "+".join(names) or "as it is",
        "no_plan": why if reports else lines,
        "log": lines,
        "graphs": graphs,
    }


def _on_host(form: Form, given: Arguments) -> dict[str, float]:
    """Microseconds until a call returns, nothing being queued, and bytes that it takes meanwhile."""
    taken = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        form(given)
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"host_us": 1e6 * statistics.median(taken), "call_mib": peak / 2**20}


def _kernels(form: Form, given: Arguments, gpu: bool) -> dict[str, Any]:
    """How many kernels a call runs, how long they take, and the longest ones; ops on a CPU."""
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            form(given)
        if gpu:
            torch.cuda.synchronize()
    events = list(profiler.key_averages())
    if gpu:
        events = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    times = {e.key: (e.self_device_time_total if gpu else e.self_cpu_time_total) / PROFILED for e in events}
    counts = {e.key: e.count / PROFILED for e in events}
    top = sorted(times, key=lambda key: -times[key])[:TOP]
    found: dict[str, Any] = {"top": [[key[:120], counts[key], times[key]] for key in top]}
    return {**found, "kernels": sum(counts.values()), "device_us": sum(times.values())} if gpu else found


def main() -> None:
    """One job; what stops it is in the result."""
    warnings.simplefilter("ignore")
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    one = One(job, Path(sys.argv[2]))
    try:
        one.run()
    except Exception as e:
        one.result["error"] = f"{one.result.get('stage')}: {reason(e)[:400]}"
    one.tell("done")


if __name__ == "__main__":
    main()
