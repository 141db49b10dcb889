"""Runs a case: eager, float64 and compiled side by side, call after call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hypatia
from hypatia import faults
from hypatia.errors import UnsupportedError
from hypatia.execute.agreement import agree

from . import KINDS
from .case import Call, Case, Entry
from .entries import Compiled, Seen, watching
from .oracle import Noise, Overflows, Reference, judged
from .program import module_of, widened
from .tensors import T, twin

_SMALL, _GAPS = 2**12, 1500
"""Elements of blocks of which so many are filled."""


@dataclasses.dataclass
class Outcome:
    """What running a case showed."""

    kind: str = "ok"
    """ok, invalid (eager itself fails at the first call) or one of the kinds of findings."""
    message: str = ""
    calls: int = 0
    """Calls that were compared."""
    imprecise: int = 0
    proofs: int = 0
    graphs: int = 0

    @property
    def found(self) -> bool:
        """Whether something is to be mended."""
        return self.kind in KINDS


class FoundError(Exception):
    """Something is wrong with a compiled program."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RefusedError(Exception):
    """hypatia.optimize has no graph for this, and says so."""


class InvalidError(Exception):
    """Eager itself cannot run the program."""


@dataclasses.dataclass
class Run:
    """What one run of a model gave and changed."""

    results: Any
    leaves: list[Any]
    inputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]

    def values(self) -> dict[str, torch.Tensor]:
        """All tensors that are compared, by name."""
        found = {f"result {i}": v for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor)}
        found |= {f"input {i} after the call": v for i, v in enumerate(self.inputs)}
        found |= {f"buffer {n} after the call": v for n, v in self.buffers.items()}
        found |= {f"gradient of {n}": v for n, v in self.gradients.items() if v is not None}
        # Later runs change buffers again.
        return {name: value.detach().clone() for name, value in found.items()}


def run_case(case: Case, device: str = "cpu") -> Outcome:
    """Runs a case to its first finding."""
    return run(case.program.source(), case.entry, case.calls(), device)


def run(source: str, entry: Entry, calls: list[Call], device: str = "cpu") -> Outcome:
    """The same for a program given by its source."""
    outcome = Outcome()
    broken: list[str] = []
    with watching() as seen:
        try:
            _Session(source, entry, device, seen, outcome, broken).run(calls)
        except InvalidError as reason:
            outcome.kind, outcome.message = "invalid", str(reason)
        except RefusedError:
            pass
        except FoundError as found:
            outcome.kind, outcome.message = found.kind, str(found)
        outcome.imprecise = len(seen.imprecise)
    # A wrong result says more than that the compiler noticed it.
    for kind, said in (
        ("rolled back", seen.rolled_back),
        ("internal", seen.internal),
        ("broken proof", broken),
    ):
        if outcome.kind == "ok" and said:
            outcome.kind, outcome.message = kind, said[0]
    return outcome


def run_alone(case: Case, device: str = "cpu") -> None:
    """Makes all calls by torch alone, as running the case does: eager, float64, moved roundings.

    A process that does not live through this was not ended by the compiler.
    """
    session = _Session(case.program.source(), case.entry, device, Seen(), Outcome(), [])
    with contextlib.suppress(InvalidError):
        session.alone(case.calls())


def is_steady(case: Case, device: str = "cpu") -> bool:
    """Whether eager returns the same each time: some kernels read or return memory that they never wrote."""
    model = module_of(case.program.source())().to(device).eval()
    state = _state(model)
    for call in case.calls():
        made = pytree.tree_map(
            lambda v: v.make(device) if isinstance(v, T) else v, (call.args, dict(call.kwargs))
        )
        runs = []
        if device != "cpu":
            # Where an index is out of range a GPU ends the process, a CPU says so.
            on_cpu = copy.deepcopy(model).cpu()
            try:
                _ran(on_cpu, pytree.tree_map(_on_cpu, twin(made)), case.entry.training)
            except Exception:
                continue
        for number in (0.0, 3.0, -1e30, math.nan):
            _restore(model, state)
            _leave_behind(number, device)
            with contextlib.suppress(Exception):
                runs.append(_ran(model, twin(made), case.entry.training).values())
        for other in runs[1:]:
            if not all(torch.equal(a.nan_to_num(), other[n].nan_to_num()) for n, a in runs[0].items()):
                return False
    return True


def is_captured_otherwise(case: Case, device: str = "cpu") -> bool:
    """Whether the functional graph that torch.export makes computes something else than the model."""
    model = module_of(case.program.source())().to(device).eval()
    state = _state(model)
    for call in case.calls():
        made = pytree.tree_map(
            lambda v: v.make(device) if isinstance(v, T) else v, (call.args, dict(call.kwargs))
        )
        with contextlib.suppress(Exception):
            eager = _ran(model, twin(made), training=False).values()
            _restore(model, state)
            with torch.no_grad():
                graph = torch.export.export(model, *twin(made)).run_decompositions({}).module()
            theirs = _ran(graph, twin(made), False, model).values()
            if not all(agree(theirs[name], value) for name, value in eager.items()):
                return True
        _restore(model, state)
    return False


def _leave_behind(number: float, device: str) -> None:
    """Fills memory of many sizes with a number and gives it back: what is not written has it then, mostly.

    A process that has run for long has thousands of small gaps, and the next tensor may get any of them.
    """
    sizes = [n for power in range(2, 17) for n in (2**power, 3 * 2 ** (power - 1))]
    many = _GAPS if device == "cpu" else 4
    blocks = [
        torch.full((n,), number, device=device) for n in sizes for _ in range(many if n <= _SMALL else 4)
    ]
    blocks.clear()


class _Session:
    def __init__(
        self, source: str, entry: Entry, device: str, seen: Seen, outcome: Outcome, broken: list[str]
    ) -> None:
        self.broken = broken
        self.entry, self.device, self.seen, self.outcome = entry, device, seen, outcome
        self.model = module_of(source)().to(device)
        # On a CPU: some kernels for GPUs have constants of float32 in them.
        self.wide = module_of(widened(source))()
        if not entry.training:
            for p in (*self.model.parameters(), *self.wide.parameters()):
                p.requires_grad_(False)
        self.eager = copy.deepcopy(self.model)
        self.on_cpu = copy.deepcopy(self.model).cpu().eval() if device != "cpu" else None
        for module in (self.model, self.eager, self.wide):
            module.eval()
        self.wide.double()
        self.compiled: Compiled | None = None
        self._strides: list[Any] = []

    def run(self, calls: list[Call]) -> None:
        """Makes all calls; raises what it finds."""
        torch.manual_seed(0)
        for i, call in enumerate(calls):
            self._call(call, first=i == 0)
        if self.compiled is not None:
            self._replay(self.compiled)

    def alone(self, calls: list[Call]) -> None:
        """Makes all calls without the compiler."""
        torch.manual_seed(0)
        for i, call in enumerate(calls):
            made, before, eager = self._eager_run(call, first=i == 0)
            if eager is None:
                continue
            after = _state(self.eager)
            reference = self._reference(made, before, eager)
            if reference.overflows or reference.wide is not None:
                reference.more(6, 1.0)
            _restore(self.model, after)

    def _replay(self, compiled: Compiled) -> None:
        for report in compiled.all_reports():
            self.outcome.graphs += 1
            if not dict(self.entry.options).get("proof", True):
                continue
            self.outcome.proofs += 1
            try:
                replay = report.replay(budget=1e6)
            except hypatia.HypatiaError as error:
                self.broken.append(f"the replay fails: {error}")
                continue
            if not replay.holds:
                self.broken.append("; ".join(replay.failures) or "the steps do not connect")

    def _eager_run(self, call: Call, *, first: bool) -> tuple[Any, dict[str, torch.Tensor], Run | None]:
        """The arguments, the weights before the call, and eager's run: none where it refuses a later one."""
        if not first:
            _change(self.model, call.change)
        made = pytree.tree_map(
            lambda v: v.make(self.device) if isinstance(v, T) else v, (call.args, dict(call.kwargs))
        )
        before = _state(self.model)
        try:
            if self.on_cpu is not None:
                # Where an index is out of range a GPU ends the process, a CPU says so.
                _restore(self.on_cpu, {n: t.cpu() for n, t in before.items()})
                _ran(self.on_cpu, pytree.tree_map(_on_cpu, twin(made)), self.entry.training)
            _restore(self.eager, before)
            return made, before, _ran(self.eager, twin(made), self.entry.training)
        except Exception as error:
            if first:
                raise InvalidError(f"{type(error).__name__}: {error}") from None
            _restore(self.model, before)
            return made, before, None

    def _call(self, call: Call, *, first: bool) -> None:
        made, before, eager = self._eager_run(call, first=first)
        if eager is None:
            return
        args, kwargs = twin(made)
        try:
            if self.compiled is None:
                examples = twin(made)
                self.compiled = Compiled(self.entry, self.model, *examples)
                _compare_untouched(self.model, before, examples, made)
                _restore(self.model, before)
            ours = self._compiled_run(args, kwargs)
        except FoundError:
            raise
        except (hypatia.InputError, UnsupportedError) as error:
            if self.entry.name != "optimize":
                raise FoundError("exception", _said(error, self.seen)) from error
            # A graph says what it was made for, or why there is none.
            raise RefusedError(str(error)) from None
        except Exception as error:
            raise FoundError("exception", _said(error, self.seen)) from error
        self.outcome.calls += 1
        reference = self._reference(made, before, eager)
        if self.seen.rolled_back and (_is_odd((made, before)) or reference.overflows):
            # Checked for the first time on numbers whose sums depend on their order, or that a kernel takes
            # for zeros, a graph may be refused.
            self.seen.imprecise += self.seen.rolled_back
            self.seen.rolled_back.clear()
        strides = self._strides = self._strides or _all_strides(made)
        # The graph of hypatia.optimize stays the same for inputs that lie otherwise.
        _compare(ours, eager, reference, lying=self.entry.name != "optimize" or strides == _all_strides(made))

    def _compiled_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        compiled = self.compiled
        if self.entry.name != "step" or kwargs:
            return _ran(lambda *a, **k: compiled(a, k), (args, kwargs), self.entry.training, self.model)
        taken: list[Any] = []

        def loss(result: Any) -> torch.Tensor:
            taken.append(result)
            return _loss([result])

        self.model.zero_grad()
        compiled.step(args, loss)
        return _seen(taken[0], (args, kwargs), self.model)

    def _graph(self, made: Any) -> Callable[..., Any]:
        """The optimized graph of the model, by torch's ops; its proof is replayed elsewhere."""
        options = {k: v for k, v in self.entry.options if k != "verify"} | {"verify": "off"}
        args, kwargs = twin(made)
        with contextlib.ExitStack() as stack:
            if self.entry.random_costs is not None:
                stack.enter_context(faults.any_equal(self.entry.random_costs))
            stack.enter_context(torch.set_grad_enabled(self.entry.training))
            return hypatia.optimize(self.eager, *args, kwargs=kwargs, options=options)

    def _reference(self, made: Any, before: dict[str, torch.Tensor], eager: Run) -> Reference:
        """What to judge by; float64 and noise are run from the same state."""
        names = list(eager.values())
        numerics = dict(self.entry.options).get("numerics")
        loose = numerics not in ("exact", "wider")

        def listed(run: Run) -> list[torch.Tensor]:
            values = run.values()
            return [values[n] for n in names] if set(names) <= set(values) else []

        def noisy(seed: int, roundings: float) -> list[torch.Tensor]:
            _restore(self.eager, before)
            attends = self.compiled is not None and self.compiled.attends()
            with Noise(seed, roundings, loose=loose, attends=attends):
                return listed(_ran(self.eager, twin(made), self.entry.training))

        def wide() -> list[torch.Tensor] | None:
            _restore(self.wide, {n: t.cpu() for n, t in before.items()})
            given = pytree.tree_map(_on_cpu, twin(made, wide=True)) if self.device != "cpu" else None
            try:
                run = _ran(self.wide, given or twin(made, wide=True), self.entry.training)
                return [t.to(self.device) for t in listed(run)] or None
            except Exception:
                return None

        def overflows() -> tuple[bool, bool, bool]:
            _restore(self.eager, before)
            with Overflows() as watch:
                _ran(self.eager, twin(made), self.entry.training)
            return watch.seen or _has_subnormals((made, before)), watch.made, not watch.ordered

        def by_graph(watched: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
            # A graph of hypatia.optimize has the weights of the model itself.
            itself = self.entry.name == "optimize" and self.compiled is not None
            owner = self.model if itself else self.eager
            after = _state(owner)
            _restore(owner, before)
            try:
                graph = self.compiled.call if itself else self._graph(made)
                with watched:
                    return listed(_ran(graph, twin(made), self.entry.training, owner))
            except Exception:
                return []
            finally:
                _restore(owner, after)

        def equal_overflows() -> bool:
            watch = Overflows()
            by_graph(watch)
            return watch.made

        found = _Lazy(listed(eager), noisy, wide, overflows, odd=_is_odd((made, before)))
        found.equal = lambda seed, roundings: by_graph(Noise(seed, roundings))
        found.equal_overflows = equal_overflows
        if self.device != "cpu" and self.compiled is not None:
            found.splits = self.compiled.attends
        found.ordered, found.exact = not loose, numerics == "exact"
        return found


class _Lazy(Reference):
    """A reference that asks float64 only when something differs from eager."""

    def __init__(
        self,
        eager: list[torch.Tensor],
        noisy: Callable[..., Any],
        wide: Callable[[], Any],
        overflows: Callable[[], tuple[bool, bool, bool]],
        *,
        odd: bool,
    ) -> None:
        self._wide = wide
        self._asked = False
        self._found: list[torch.Tensor] | None = None
        self.eager, self.noisy, self.members = eager, noisy, []
        self.odd = odd
        self._overflows = overflows
        self._overflowed: bool | None = None

    @property
    def overflows(self) -> bool:
        """Whether a number of eager's run overflows, or nearly, or is subnormal at first."""
        if self._overflowed is None:
            self._overflowed, self.made, self.reordered = self._overflows()
        return self._overflowed

    @property
    def wide(self) -> list[torch.Tensor] | None:
        """The float64 values."""
        if not self._asked:
            self._asked, self._found = True, self._wide()
        return self._found


def _ran(
    call: Callable[..., Any], given: tuple[Any, Any], training: bool, model: nn.Module | None = None
) -> Run:
    args, kwargs = given
    owner = model if model is not None else call
    assert isinstance(owner, nn.Module)
    owner.zero_grad()
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        if model is None:
            warnings.simplefilter("ignore")
        results = call(*args, **kwargs)
        if training:
            total = _loss(pytree.tree_leaves(results))
            if isinstance(total, torch.Tensor) and total.requires_grad:
                total.backward()
    return _seen(results, given, owner)


def _loss(results: list[Any]) -> Any:
    """A weighted sum of the results; the weights are the same in every precision."""
    total: Any = 0.0
    for i, r in enumerate(results):
        if isinstance(r, torch.Tensor) and r.requires_grad:
            dice = torch.Generator().manual_seed(i)
            weights = torch.randint(1, 17, r.shape, generator=dice).to(r) / 16
            total = total + (r * weights).sum().double()
    return total


def _seen(results: Any, given: tuple[Any, Any], model: nn.Module) -> Run:
    leaves = pytree.tree_leaves(results)
    inputs = [v for v in pytree.tree_leaves(given) if isinstance(v, torch.Tensor)]
    gradients = {n: p.grad for n, p in model.named_parameters()}
    gradients |= {f"input {i}": v.grad for i, v in enumerate(inputs) if v.is_leaf and v.requires_grad}
    return Run(results, leaves, inputs, dict(model.named_buffers()), gradients)


def _compare(ours: Run, eager: Run, reference: Reference, *, lying: bool) -> None:
    if pytree.tree_structure(ours.results) != pytree.tree_structure(eager.results):
        raise FoundError(
            "wrong", f"structure {pytree.tree_structure(ours.results)} of results is not eager's"
        )
    for i, (mine, theirs) in enumerate(zip(ours.leaves, eager.leaves, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            if type(mine) is not type(theirs) or mine != theirs:
                raise FoundError("wrong", f"result {i} is {mine!r}, eager's {theirs!r}")
            continue
        _compare_kind(f"result {i}", mine, theirs, lying=lying)
    if lying:
        _compare_memory(ours, eager)
    for name, theirs in eager.gradients.items():
        mine = ours.gradients.get(name)
        if (mine is None) != (theirs is None):
            raise FoundError("wrong", f"gradient of {name} is {_kind(mine)}, eager's {_kind(theirs)}")
    mine_by_name = ours.values()
    for index, (name, theirs) in enumerate(eager.values().items()):
        mine = mine_by_name[name]
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise FoundError("wrong", f"{name} is {_kind(mine)}, eager's {_kind(theirs)}")
        said = judged(mine, reference, index)
        if said:
            raise FoundError("wrong", f"{name}: {said}")


def _compare_untouched(model: nn.Module, before: dict[str, torch.Tensor], examples: Any, made: Any) -> None:
    """Compiling leaves weights, buffers and example inputs as they were."""
    for name, value in _state(model).items():
        if name in before and not _same_bits(value, before[name]):
            raise FoundError("wrong", f"compiling changed {name}")
    pairs = zip(pytree.tree_leaves(examples), pytree.tree_leaves(made), strict=True)
    for i, (ours, theirs) in enumerate(pairs):
        if isinstance(ours, torch.Tensor) and not _same_bits(ours, theirs):
            raise FoundError("wrong", f"compiling changed input {i}")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _compare_kind(name: str, mine: Any, theirs: torch.Tensor, *, lying: bool) -> None:
    if not isinstance(mine, torch.Tensor):
        raise FoundError("wrong", f"{name} is a {type(mine).__name__}, eager's a tensor")
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        a, b = getattr(mine, what), getattr(theirs, what)
        if a != b:
            raise FoundError("wrong", f"{name} has {what} {_plain(a)}, eager's {_plain(b)}")
    if lying and _strides(mine) != _strides(theirs):
        raise FoundError(
            "wrong",
            f"{name} has strides {mine.stride()}, eager's {theirs.stride()} for {tuple(theirs.shape)}",
        )


def _all_strides(values: Any) -> list[Any]:
    return [_strides(v) if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(values)]


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides that matter: those of dimensions with more than one element."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1] if tensor.numel() else []


def _compare_memory(ours: Run, eager: Run) -> None:
    """Results share memory with inputs, buffers and each other where eager's do."""

    def places(run: Run) -> dict[str, torch.Tensor]:
        found = {f"result {i}": v for i, v in enumerate(run.leaves) if isinstance(v, torch.Tensor)}
        found |= {f"input {i}": v for i, v in enumerate(run.inputs)}
        found |= {f"buffer {n}": v for n, v in run.buffers.items()}
        return {n: v for n, v in found.items() if v.numel()}

    mine, theirs = places(ours), places(eager)
    results = [n for n in theirs if n.startswith("result")]
    for i, left in enumerate(results):
        for right in [*results[i + 1 :], *[n for n in theirs if not n.startswith("result")]]:
            a, b = _shared(mine[left], mine[right]), _shared(theirs[left], theirs[right])
            if a != b:
                verb = {True: "shares memory", False: "shares no memory"}
                raise FoundError("wrong", f"{left} {verb[a]} with {right}, eager's {verb[b]}")


def _shared(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().requires_grad_(value.requires_grad)


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _said(error: Exception, seen: Seen) -> str:
    text = str(error).strip().splitlines() or [""]
    lines = [line for line in text if line.strip()][:1] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().clone() for n, t in tensors}


def _restore(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Gives parameters and buffers these values, where they have others."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in state and not torch.equal(tensor, state[name]):
                tensor.copy_(state[name])


def _change(model: nn.Module, how: str) -> None:
    """Changes the parameters as training, loading or a user would."""
    if how == "load":
        model.load_state_dict(
            {n: v * 0.75 if v.is_floating_point() else v for n, v in model.state_dict().items()}
        )
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    with torch.no_grad():
        for i, (_, p) in enumerate(named):
            if how == "add":
                p.add_(0.125 * (i + 1))
            elif how == "copy":
                p.copy_(p.flip(0) if p.dim() else p * 2)
            elif how == "zero" and i == 0:
                p.zero_()
            elif how == "replace" and i == len(named) - 1:
                new = nn.Parameter(p.detach() * 1.5 - 0.1, requires_grad=p.requires_grad)
                for other, q in list(model.named_parameters(remove_duplicate=False)):
                    if q is p:
                        setattr(model, other, new)


def _has_subnormals(values: Any) -> bool:
    """Whether there are numbers that a kernel may take for zeros."""
    for v in pytree.tree_leaves(values):
        if isinstance(v, torch.Tensor) and v.is_floating_point():
            size = v.detach().double().abs()
            if bool(((size > 0) & (size < torch.finfo(v.dtype).smallest_normal)).any()):
                return True
    return False


def _is_odd(values: Any) -> bool:
    """Whether there are numbers that are not finite, or that overflow when they are multiplied."""
    for v in pytree.tree_leaves(values):
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel():
            largest = float(v.detach().double().abs().amax())
            if not largest < torch.finfo(v.dtype).max ** 0.5:
                return True
    return False
