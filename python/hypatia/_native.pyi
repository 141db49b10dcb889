"""The Rust core. Graphs, options and reports cross as JSON."""

from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from typing_extensions import Self

__all__ = [
    "BoundCudaPlan",
    "BoundPlan",
    "CudaPlanRest",
    "HypatiaError",
    "KeptProgram",
    "NativePlan",
    "Optimization",
    "Store",
    "Watch",
    "__version__",
    "borrow_threads",
    "check_rules",
    "cuda",
    "ops",
    "optimize",
    "program_text",
    "rule_pairs",
    "rules",
    "target_numbers",
    "targets",
    "tuning_entries",
    "tuning_folder",
    "weight_state",
]

_T = TypeVar("_T")

__version__: str

class HypatiaError(RuntimeError):
    """The compiler could not do what was asked."""

@final
class Optimization:
    """An optimized program."""

    def emission(self) -> str: ...
    def report(self) -> str: ...
    def plan(self, wish: str) -> NativePlan: ...
    def kept(self) -> str | None: ...
    def graphs(self) -> str: ...
    def steps(self) -> str: ...
    def step_emission(self) -> str: ...
    def texts(self) -> tuple[str, str]: ...
    def replay(self, seed: int, budget: float) -> str: ...

@final
class KeptProgram:
    """A program that was kept, over the captured graph that it came from."""

    def __new__(cls, graph: str, kept: str, report: str) -> Self: ...
    def emission(self) -> str: ...
    def report(self) -> str: ...
    def plan(self, wish: str) -> NativePlan: ...

@final
class NativePlan:
    """A plan that waits for its constants."""

    def describe(self) -> str: ...
    def outputs(self) -> int: ...
    def bind(
        self,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        calls: list[str | Callable[..., object]],
        libtorch: str,
        threads: int,
        most: int | None = None,
        without: list[str] = ...,
        like: BoundPlan | None = None,
    ) -> BoundPlan: ...

@final
class BoundPlan:
    """A plan with its constants."""

    def __call__(self, threads: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None: ...
    def current(self) -> bool: ...
    def step_times(self, threads: int, *inputs: torch.Tensor) -> list[float] | None:
        """Seconds of each step of a call; none if the plan is not for these inputs."""

    def refusal(self, *inputs: torch.Tensor) -> str: ...
    def kinds(self) -> list[str]: ...
    def bytes(self) -> tuple[int, int]: ...

@final
class BoundCudaPlan:
    """A plan with its constants, on a GPU."""

    def __new__(
        cls,
        plan: NativePlan,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        calls: list[str | Callable[..., object]],
        libtorch: str,
        gpu: int,
        stream: int,
        tf32: bool,
        returns: list[int | None] | None = None,
        split: bool = True,
        most: int | None = None,
        like: BoundCudaPlan | None = None,
    ) -> Self: ...
    def __call__(self, stream: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None: ...
    def begin(self, stream: int, *inputs: torch.Tensor) -> CudaPlanRest | None:
        """Runs the first steps, for a recording, and returns what runs the others."""

    def run_told(self, stream: int, next: Callable[[int], object], *inputs: torch.Tensor) -> bool:
        """Launches the steps one by one and tells the number of each before; whether it ran."""

    def current(self) -> bool: ...
    def refusal(self, *inputs: torch.Tensor) -> str: ...
    def bytes(self) -> tuple[int, int]: ...
    def kinds(self) -> list[str]: ...
    def is_native(self) -> bool: ...

@final
class CudaPlanRest:
    """The last steps of a plan, which follow a recording of the first ones."""

    @property
    def early(self) -> list[torch.Tensor | None]:
        """Outputs that the first steps have to do with, in memory that is always the same."""

    def __call__(self, stream: int) -> tuple[torch.Tensor, ...]:
        """Runs the last steps; the other outputs, in new memory."""

def weight_state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The state of a weight: its version counter, where it lies, and a number of some of its elements, its
    sizes and strides."""

@final
class Store:
    """A folder with entries, each under a kind and a key."""

    def __new__(cls, folder: str | PathLike[str], limit: int) -> Self: ...
    def get(self, kind: str, key: str) -> bytes | None: ...
    def put(self, kind: str, key: str, data: bytes) -> None: ...
    def drop(self, kind: str, key: str) -> None: ...
    def entries(self) -> list[tuple[str, str, int, float, Path]]: ...
    def clear(self) -> int: ...
    def tuning_folder(self) -> Path: ...
    def measurements(self) -> int: ...
    def probe(self) -> None: ...

@final
class Watch:
    """Parts of a model that are to stay what they are."""

    def __new__(
        cls,
        entries: list[tuple[dict[Any, Any], str, object]],
        absent: list[tuple[dict[Any, Any], str]],
        whole: list[tuple[dict[Any, Any], list[tuple[object, object]]]],
        items: list[tuple[Collection[object], list[object]]],
    ) -> Self: ...
    def holds(self) -> bool: ...

@final
class _Gemm:
    """A matrix product of dense matrices on a GPU; ``tune`` or ``use`` comes before ``run``."""

    def __new__(
        cls,
        device: int,
        dtype: str,
        sizes: list[int],
        *,
        transposed: tuple[bool, bool] = (False, True),
        output: str | None = None,
        batch: int = 1,
        tf32: bool = False,
        epilogue: str = "none",
        residual: bool = False,
        rows: list[int] | None = None,
        alignment: int = 16,
        candidates: int = 8,
        deadline_ms: int = 300,
        workspace: int = ...,
    ) -> Self: ...
    @property
    def key(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def aux(self) -> tuple[int, int]: ...
    @property
    def workspace(self) -> int: ...
    def tune(self, stream: int, address: int, bytes: int) -> str: ...
    def use(self, tuned: str) -> None: ...
    def run(
        self,
        stream: int,
        left: int,
        right: int,
        out: int,
        *,
        residual: int = 0,
        bias: int = 0,
        aux: int = 0,
        workspace: int = 0,
    ) -> None: ...

@final
class _Recording:
    """What was launched on a stream, to be run again by one call."""

    def launch(self, stream: int) -> None: ...

class _Cuda:
    """The module ``cuda``: the lower layers of the CUDA runtime."""

    Gemm: type[_Gemm]
    epilogues: list[str]
    def search_in(self, folders: list[str]) -> None: ...
    def keep_in(self, get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> None: ...
    def libraries(self) -> str: ...
    def record(self, gpu: int, stream: int, run: Callable[[], _T]) -> tuple[_Recording, _T]: ...
    def compile(self, name: str, source: str, arch: tuple[int, int]) -> bytes: ...
    def plant(self, texts: tuple[str, str] | None) -> None: ...

cuda: _Cuda

def optimize(graph: str, options: str) -> Optimization: ...
def program_text(graph: str) -> str: ...
def ops() -> str: ...
def rules() -> str: ...
def check_rules(seed: int) -> str: ...
def rule_pairs(seed: int, count: int) -> str: ...
def targets() -> list[str]: ...
def target_numbers(name: str) -> str: ...
def tuning_folder(folder: str | PathLike[str] | None) -> None: ...
def tuning_entries() -> int: ...
def borrow_threads(libtorch: str) -> bool: ...
