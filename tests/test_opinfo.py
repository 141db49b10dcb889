"""PyTorch's own op database through the backend under test, on CPU in float32, forward and backward.

Every sample runs in eager, in eager with float64 arguments, and compiled: once under `no_grad` (the inference
graph) and once with gradients (the forward and the backward graph). A wrong result or an exception counts
against us unless torch's do-nothing backend has it too. By default a fixed tenth of the ops runs, with few
samples; `HYPATIA_OPINFO=all` runs every op, with strided arguments and in-place variants as well.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from support import (
    BACKEND,
    PEER,
    MismatchError,
    Reference,
    assert_as_close_as_eager,
    captured_count,
    compile_count,
    copied,
    fresh_dynamo,
    other_values,
    tensors,
)

EVERYTHING = os.environ.get("HYPATIA_OPINFO", "tenth") == "all"
SAMPLES = int(os.environ.get("HYPATIA_OPINFO_SAMPLES", "10" if EVERYTHING else "3"))
"""Samples of each form per op, taken evenly from the op's own list; 0 takes all."""

DYNAMIC = os.environ.get("HYPATIA_OPINFO_DYNAMIC", "0") == "1"
"""Whether sizes are symbols."""

UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
"""Ops whose results are uninitialised memory: only shape, dtype and strides can be compared."""

LATER = ("moved", "ties", "nan") if EVERYTHING else ("ties",)
"""What later calls are made with."""

SEED = 1234

Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One call of one op: what to call, with what, and whether to differentiate."""

    call: Callable[..., Any]
    sample: SampleInput
    form: str
    train: bool
    values: bool

    def __str__(self) -> str:
        return f"{self.form}, {'training' if self.train else 'inference'}, {self.sample.summary()}"


@dataclass
class Outcome:
    """What a call left behind."""

    outputs: Any
    gradients: list[torch.Tensor | None]
    arguments: Any
    aliases: list[list[int]]


@dataclass
class Tally:
    """What became of the samples of one op."""

    op: str
    cases: int = 0
    passed: int = 0
    peer_fails: int = 0
    failed: int = 0
    eager_fails: int = 0
    graphs: int = 0
    messages: list[str] = field(default_factory=list)


def in_the_tenth(op: OpInfo) -> bool:
    """A tenth of the database that depends on nothing but the ops' names."""
    return int(hashlib.sha256(op.formatted_name.encode()).hexdigest(), 16) % 10 == 0


def chosen_ops() -> list[OpInfo]:
    return [
        op
        for op in op_db
        if torch.float32 in op.supported_dtypes("cpu")
        and not op.name.startswith("jiterator")  # CUDA only, whatever the table says
        and (EVERYTHING or in_the_tenth(op))
    ]


def spread(samples: list[SampleInput], count: int) -> list[SampleInput]:
    """`count` samples evenly from the list, the first among them."""
    if count == 0 or len(samples) <= count:
        return samples
    return [samples[index * len(samples) // count] for index in range(count)]


def cases_of(op: OpInfo) -> Iterator[Case]:
    values = op.name not in UNDEFINED
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    torch.manual_seed(SEED)
    samples = spread(list(op.sample_inputs("cpu", torch.float32, requires_grad=differentiable)), SAMPLES)
    forms = [("contiguous", op.get_op(), samples)]
    if EVERYTHING:
        forms.append(("strided", op.get_op(), [s.noncontiguous() for s in samples if all_strided(s)]))
        if (inplace := op.get_inplace()) is not None:
            forms.append(("in place", inplace, [s for s in samples if not s.broadcasts_input]))
    for form, call, listed in forms:
        for sample in listed:
            yield Case(call, sample, form, train=False, values=values)
            if differentiable and form != "in place":
                yield Case(call, sample, form, train=True, values=values)


def all_strided(sample: SampleInput) -> bool:
    given = tensors((sample.input, sample.args, sample.kwargs))
    return all(tensor.layout == torch.strided for tensor in given)


def run(case: Case, call: Callable[..., Any], *, double: bool = False, nudge: bool = False) -> Outcome:
    """Call an op on a copy of the sample's arguments and, in training, differentiate by a fixed cotangent."""
    sample = case.sample
    given = copied((sample.input, sample.args, sample.kwargs), double=double, nudge=nudge)
    first, rest, named = given
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(case.train):
        outputs = call(first, *rest, **named)
    gradients: list[torch.Tensor | None] = []
    if case.train:
        leaves = [leaf for leaf in tensors(given) if leaf.requires_grad]
        roots = [root for root in tensors(sample.output_process_fn_grad(outputs)) if root.requires_grad]
        if leaves and roots:
            gradients = list(torch.autograd.grad(roots, leaves, cotangents(roots), allow_unused=True))
    return Outcome(outputs, gradients, given, shared_storages(outputs, given))


def cotangents(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients to start from: the same numbers whatever the precision of the results."""
    dice = torch.Generator().manual_seed(SEED)
    drawn = []
    for root in roots:
        single = torch.complex64 if root.is_complex() else torch.float32
        drawn.append(torch.randn(root.shape, generator=dice, dtype=single).to(root.dtype))
    return drawn


def shared_storages(outputs: object, arguments: object) -> list[list[int]]:
    """For each result, the arguments whose memory it shares."""
    given = [leaf for leaf in tensors(arguments) if leaf.layout == torch.strided]
    addresses = [leaf.untyped_storage().data_ptr() for leaf in given]
    return [
        [
            place
            for place, address in enumerate(addresses)
            if address == leaf.untyped_storage().data_ptr() != 0
        ]
        if leaf.layout == torch.strided
        else []
        for leaf in tensors(outputs)
    ]


def attempt(case: Case, backend: Backend, eager: Outcome, exact: Outcome | None) -> tuple[str | None, int]:
    """Compile and compare; the complaint, or None, and the number of graphs that Dynamo captured."""
    fresh_dynamo()
    before = compile_count()
    call = case.call

    def caller(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled = torch.compile(caller, backend=backend, dynamic=DYNAMIC)
    complaint = _compared(case, compiled, eager, exact)
    for kind in LATER:
        if complaint is not None:
            return complaint, 0
        # Nothing verifies a later call but this.
        given = other_values((case.sample.input, case.sample.args, case.sample.kwargs), kind)
        sample = SampleInput(
            given[0],
            args=given[1],
            kwargs=given[2],
            output_process_fn_grad=case.sample.output_process_fn_grad,
        )
        later = replace(case, sample=sample)
        try:
            eager = run(later, case.call)
        except Exception:
            continue
        complaint = _compared(later, compiled, eager, in_float64(later))
        complaint = complaint and f"{complaint} ({kind} values, later call)"
    if complaint is not None:
        return complaint, 0
    captured = captured_count()
    if backend == BACKEND and captured and compile_count() == before:
        return f"Dynamo captured {captured} graphs, and the backend compiled none", 0
    return None, captured


def _compared(case: Case, call: Callable[..., Any], eager: Outcome, exact: Outcome | None) -> str | None:
    """What is wrong with a call, if anything is."""
    try:
        compare(case, run(case, call), eager, exact)
    except MismatchError as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:400]}"
    return None


def compare(case: Case, compiled: Outcome, eager: Outcome, exact: Outcome | None) -> None:
    def reference(part: Callable[[Outcome], Any]) -> Reference | None:
        if exact is None:
            return None
        return Reference(
            tensors(part(exact)), lambda: tensors(part(run(case, case.call, double=True, nudge=True)))
        )

    def check(label: str, part: Callable[[Outcome], Any], strides: bool = True) -> None:
        assert_as_close_as_eager(
            part(compiled),
            part(eager),
            reference(part),
            values=case.values,
            strides=strides,
            label=label,
        )

    check("output", lambda outcome: outcome.outputs)
    check("gradient", lambda outcome: outcome.gradients, strides=False)
    check("argument", lambda outcome: outcome.arguments)
    if compiled.aliases != eager.aliases:
        raise MismatchError(f"results share memory with {compiled.aliases}, in eager with {eager.aliases}")


def in_eager(case: Case) -> tuple[Case, Outcome] | None:
    """The case as eager can run it: without gradients where eager has none, and None where eager refuses."""
    try:
        return case, run(case, case.call)
    except Exception:
        if not case.train:
            return None
    return in_eager(replace(case, train=False))


def in_float64(case: Case) -> Outcome | None:
    try:
        return run(case, case.call, double=True)
    except Exception:
        return None


def judge(case: Case, tally: Tally, backend: Backend = BACKEND) -> None:
    tally.cases += 1
    runnable = in_eager(case)
    if runnable is None:
        tally.eager_fails += 1
        return
    case, eager = runnable
    exact = in_float64(case)
    complaint, graphs = attempt(case, backend, eager, exact)
    tally.graphs += graphs
    if complaint is None:
        tally.passed += 1
        return
    peer_complaint, _ = attempt(case, PEER, eager, exact)
    if peer_complaint is not None:
        tally.peer_fails += 1
        tally.messages.append(f"peer fails too: {case}: {peer_complaint}")
    else:
        tally.failed += 1
        tally.messages.append(f"FAILED: {case}: {complaint}")


@pytest.mark.opinfo
@pytest.mark.parametrize("op", chosen_ops(), ids=lambda op: op.formatted_name)
def test_op(op: OpInfo, record_property: Callable[[str, object], None]) -> None:
    tally = Tally(op.formatted_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases_of(op):
            judge(case, tally)
    record_property("opinfo", asdict(tally))
    assert tally.failed == 0, "\n".join(m for m in tally.messages if m.startswith("FAILED"))
    assert tally.passed + tally.peer_fails > 0, "no sample ran"


def scaled(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that is wrong by one part in ten thousand."""
    return lambda *args: [out * 1.0001 for out in graph(*args)]


def transposing(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend whose results have other strides than eager's."""
    return lambda *args: [out.mT.contiguous().mT for out in graph(*args)]


def raising(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that does not know an op."""
    raise NotImplementedError("no such op")


@pytest.mark.parametrize("backend", [scaled, transposing, raising], ids=lambda backend: backend.__name__)
def test_a_wrong_backend_is_caught(backend: Backend) -> None:
    sample = SampleInput(torch.randn(3, 4), args=(torch.randn(4, 5),))
    tally = Tally("mm")
    judge(Case(torch.mm, sample, "contiguous", train=False, values=True), tally, backend)
    assert (tally.failed, tally.passed) == (1, 0), tally
