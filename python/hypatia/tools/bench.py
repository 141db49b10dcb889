"""Backends measured side by side on one workload: time, compile time, and the error to float64 beside."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .._torch import pytree
from ..frontend.direct import CompiledModel
from ..frontend.direct import compile as hypatia_compile
from ..verifier.gradients import WithGradients
from ..verifier.verify import Errors
from .measure import REST_SECONDS, Block, block, wait
from .peers import AT_ONCE, NotMeasured, compiled_by, training_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NOISY = 1.5
"""Samples that differ by more were disturbed by something else."""

SETTLED = 0.02
"""Ratios that are to be settled are known well enough if they are off by less than this, 19 times in 20."""

MANY = 60
"""Rounds after which long calls are settled, too."""


@dataclasses.dataclass
class Cell:
    """One workload on one backend."""

    workload: str
    backend: str
    microseconds: float | None = None
    ratio: float | None = None
    compile_seconds: float | None = None
    error: float | None = None
    correct: bool | None = None
    reason: str = ""
    samples: list[float] = dataclasses.field(default_factory=list)
    least: float | None = None
    """Microseconds of the shortest call."""
    form: str = ""
    """What Hypatia kept: plan, graph or eager."""

    @property
    def spread(self) -> float:
        """The longest sample over the shortest."""
        return max(self.samples) / min(self.samples) if self.samples else 1.0

    @property
    def noise(self) -> str:
        """A warning when the samples differ too much for their median to mean anything."""
        return f"noisy: samples differ by {self.spread:.1f}x" if self.spread > NOISY else ""

    def data(self) -> dict[str, object]:
        """All of it, for JSON."""
        return {**dataclasses.asdict(self), "spread": self.spread, "noise": self.noise}


class Peer:
    """A backend that is no function of torch's: it says what compiling took, and times itself."""

    compile_seconds: float

    def __call__(self, *inputs: torch.Tensor) -> object:
        """The results, as torch's tensors of the model's dtype."""
        raise NotImplementedError

    def block(self) -> Block:
        """Calls as :func:`block` makes them, without turning inputs and results into torch's."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what it holds."""


Maker = Callable[[nn.Module, Sequence[torch.Tensor]], Callable[..., object]]
"""Compiles a model for inputs: a function or a :class:`Peer`."""


class Measured(Protocol):
    """A model with inputs: a workload, or a user's own."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def build(
        self, dtype: torch.dtype | None, device: str
    ) -> tuple[nn.Module, tuple[Any, ...]] | tuple[nn.Module, tuple[Any, ...], dict[str, object]]:
        """The model, its inputs, and its keyword arguments if it has some."""


def bench(
    workload: Measured,
    backends: Sequence[str] = ("eager", "hypatia"),
    *,
    dtype: torch.dtype | None = torch.float32,
    device: str = "cpu",
    training: bool = False,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda _: None,
    makers: Mapping[str, Maker] | None = None,
    settle: Sequence[str] = (),
    seconds: float = 0.0,
) -> list[Cell]:
    """One cell for each backend, measured in turns; a backend that fails leaves a reason.

    Ratios are eager's time over the backend's: eager is measured even if it was not asked for. ``makers``
    are backends besides those of this module, or instead of them. After ``repeats`` rounds of all backends,
    eager and those to ``settle`` go on, until their ratios are known well or these ``seconds`` are over and
    there were `MANY` rounds; not at all in no time.
    """
    names = ["eager", *(b for b in backends if b != "eager")]
    cells = {name: Cell(workload.name, name) for name in names}
    torch.compiler.reset()
    try:
        built = workload.build(dtype, device)
        model, inputs, kwargs = built if len(built) > 2 else (*built, {})
        model.train(training)
        exact = _exact(model, inputs, kwargs, training)
    except Exception as e:
        for cell in cells.values():
            cell.reason = reason(e)
        return [cells[name] for name in backends]
    blocks: dict[str, Callable[[], Block]] = {}
    own: list[Errors] = []
    peers: list[Peer] = []
    try:
        for name in names:
            progress(f"{workload.name}: {name}, first call")
            try:
                compiled = _made(name, model, inputs, kwargs, training, makers or {}, cells[name], peers)
                _judge(cells[name], _results(model, inputs, training, compiled), exact, own)
                blocks[name] = _sampler(compiled, model, inputs, training, device)
            except Exception as e:
                cells[name].reason = reason(e)
        for number in range(repeats):
            progress(f"{workload.name}: round {number + 1} of {repeats}")
            _round(blocks, cells, number)
        blocks = {name: sample for name, sample in blocks.items() if name in ("eager", *settle)}
        if seconds and len(blocks) > 1:
            _settle(blocks, cells, repeats, seconds, lambda text: progress(f"{workload.name}: {text}"))
    finally:
        for peer in peers:
            peer.close()
    _sum_up(cells)
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    return [cells[name] for name in backends]


def _sum_up(cells: Mapping[str, Cell]) -> None:
    for cell in cells.values():
        if cell.samples:
            cell.microseconds = 1e6 * statistics.median(cell.samples)
            cell.ratio = times_as_fast(cell.samples, cells["eager"].samples)


def _settle(
    blocks: dict[str, Callable[[], Block]],
    cells: Mapping[str, Cell],
    first: int,
    seconds: float,
    progress: Callable[[str], None],
) -> None:
    """More rounds, until ratios are known well, or the time is over and there were `MANY`."""
    end = time.perf_counter() + seconds
    for number in itertools.count(first):
        if _settled([cells[n] for n in blocks]) or (number >= MANY and time.perf_counter() > end):
            return
        progress(f"round {number + 1}, until ratios settle")
        _round(blocks, dict(cells), number)


def _exact(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], kwargs: dict[str, object], training: bool
) -> list[torch.Tensor]:
    """Results in float64."""
    wide = copy.deepcopy(model).double()
    wide_inputs, wide_kwargs = pytree.tree_map(_widened, (tuple(inputs), kwargs))
    return _results(wide, wide_inputs, training, _keyed(wide, wide_kwargs))


def times_as_fast(ours: Sequence[float], others: Sequence[float]) -> float | None:
    """Their median over ours, of the rounds in which both took part; none if there were none."""
    both = min(len(ours), len(others))
    return statistics.median(others[:both]) / statistics.median(ours[:both]) if both else None


def _settled(cells: Sequence[Cell]) -> bool:
    """The ratios to the first cell are known: by the errors of medians, twice over."""
    errors = [_error(cell.samples) for cell in cells]
    return all(2 * (errors[0] ** 2 + e**2) ** 0.5 < SETTLED for e in errors[1:])


def _error(samples: Sequence[float]) -> float:
    """The standard error of a median, relative, as that of a normal distribution with the same quartiles."""
    if len(samples) < 4:
        return float("inf")
    low, middle, high = statistics.quantiles(samples, n=4)
    return 1.253 * (high - low) / 1.349 / len(samples) ** 0.5 / middle


def _made(
    name: str,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    kwargs: Mapping[str, object],
    training: bool,
    makers: Mapping[str, Maker],
    cell: Cell,
    peers: list[Peer],
) -> Callable[..., object]:
    """The compiled model after its first call, which is part of compiling."""
    start = time.perf_counter()
    if kwargs and (name in makers or name in AT_ONCE):
        raise NotMeasured(f"{name} is measured without keyword arguments only")
    if name in makers:
        if training:
            raise NotMeasured(f"{name} is measured in inference only")
        compiled = makers[name](model, inputs)
    elif name == "hypatia-direct" and kwargs:
        compiled = hypatia_compile(model)
    else:
        compiled = compiled_by(name, model, inputs, training)
    if isinstance(compiled, Peer):
        peers.append(compiled)
        cell.compile_seconds = compiled.compile_seconds
        return compiled
    call = _keyed(compiled, kwargs)
    with torch.set_grad_enabled(training):
        training_step(call, model, inputs)() if training else call(*inputs)
    for device in {t.device for t in pytree.tree_leaves((inputs, kwargs)) if isinstance(t, torch.Tensor)}:
        wait(device)
    cell.compile_seconds = time.perf_counter() - start if name != "eager" else None
    if isinstance(compiled, CompiledModel) and compiled.reports:
        cell.form = compiled.reports[0].kept
    return call


def _keyed(function: Callable[..., object], kwargs: Mapping[str, object]) -> Callable[..., object]:
    return functools.partial(function, **kwargs) if kwargs else function


def _widened(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _judge(cell: Cell, results: list[torch.Tensor], exact: list[torch.Tensor], own: list[Errors]) -> None:
    """Compares results with float64; eager comes first and leaves its errors."""
    errors = [Errors.of(result, e) for result, e in zip(results, exact, strict=True)]
    if cell.backend == "eager":
        own[:] = errors
    cell.error = max((e.max_relative for e in errors), default=0.0)
    cell.correct = all(e.passes(o) for e, o in zip(errors, own, strict=True))


def _sampler(
    compiled: Callable[..., object],
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    training: bool,
    device: str,
) -> Callable[[], Block]:
    if isinstance(compiled, Peer):
        return compiled.block
    call = training_step(compiled, model, inputs) if training else functools.partial(compiled, *inputs)

    def sample() -> Block:
        # Here and not in the call, where it would take longer than a small layer.
        with torch.set_grad_enabled(training):
            return block(call, device)

    return sample


def _results(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    training: bool,
    compiled: Callable[..., object] | None = None,
) -> list[torch.Tensor]:
    call = compiled or model
    with torch.no_grad():
        results = WithGradients(model, call)(*inputs) if training else call(*inputs)
    return [t.detach().clone() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def _round(blocks: dict[str, Callable[[], Block]], cells: dict[str, Cell], number: int) -> None:
    """One sample of every backend; one that fails is out from then on."""
    names = list(blocks)
    # Every round starts with another one, so that none always follows the same.
    first = number % len(names) if names else 0
    for name in names[first:] + names[:first]:
        cell = cells[name]
        try:
            time.sleep(REST_SECONDS if len(names) > 1 else 0.0)
            sample = blocks[name]()
        except Exception as e:
            cell.reason = reason(e)
            del blocks[name]
            continue
        cell.samples.append(sample.median)
        cell.least = min(1e6 * sample.least, cell.least or float("inf"))


def reason(e: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(e, NotMeasured) else f"{type(e).__name__}: {text}" if text else type(e).__name__
