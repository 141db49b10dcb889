"""The Rust core. Graphs, options and reports cross as JSON."""

from collections.abc import Callable, Sequence

import torch

__version__: str

class HypatiaError(RuntimeError):
    """The compiler could not do what was asked."""

class Optimization:
    """An optimized program."""

    def emission(self) -> str: ...
    def report(self) -> str: ...
    def plan(
        self,
        sizes: dict[str, int] = ...,
        saved: bool = False,
        keep: Sequence[int] = ...,
        masked: Sequence[int] = ...,
        layouts: str | None = None,
    ) -> NativePlan: ...
    def kept(self) -> str | None: ...
    def graphs(self) -> str: ...
    def steps(self) -> str: ...
    def step_emission(self) -> str: ...
    def texts(self) -> tuple[str, str]: ...
    def replay(self, seed: int, budget: float) -> str: ...

class NativePlan:
    """A plan that waits for its constants."""

    def describe(self) -> str: ...
    def outputs(self) -> int: ...
    def bind(
        self,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        calls: list[str | Callable[..., None]],
        libtorch: str,
        threads: int,
        most: int | None = None,
        without: list[str] = ...,
        like: BoundPlan | None = None,
    ) -> BoundPlan: ...

class BoundPlan:
    """A plan with its constants."""

    def __call__(self, threads: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None: ...
    def current(self) -> bool: ...
    def kinds(self) -> list[str]: ...
    def bytes(self) -> tuple[int, int]: ...

class BoundCudaPlan:
    """A plan with its constants, on a GPU."""

    def __init__(
        self,
        plan: NativePlan,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        calls: list[str | Callable[..., None]],
        libtorch: str,
        gpu: int,
        stream: int,
        tf32: bool,
        returns: list[int | None] | None = None,
        split: bool = True,
        most: int | None = None,
        like: BoundCudaPlan | None = None,
    ) -> None: ...
    def __call__(self, stream: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None: ...
    def current(self) -> bool: ...
    def bytes(self) -> tuple[int, int]: ...
    def kinds(self) -> list[str]: ...
    def is_native(self) -> bool: ...

class Watch:
    """Parts of a model that are to stay what they are."""

    def __init__(self, entries: list[tuple[dict, str, object]], empty: list[dict]) -> None: ...
    def holds(self) -> bool: ...

class Gemm:
    """A matrix product of dense matrices on a GPU; ``tune`` or ``use`` comes before ``run``."""

    def __init__(
        self,
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
    ) -> None: ...
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

class Cuda:
    """The module ``cuda``: the lower layers of the CUDA runtime."""

    Gemm: type[Gemm]
    epilogues: list[str]
    def search_in(self, folders: list[str]) -> None: ...
    def keep_in(self, get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> None: ...
    def libraries(self) -> str: ...
    def compile(self, name: str, source: str, arch: tuple[int, int]) -> bytes: ...

cuda: Cuda

def optimize(graph: str, options: str) -> Optimization: ...
def program_text(graph: str) -> str: ...
def kept_plan(
    graph: str,
    kept: str,
    sizes: dict[str, int],
    saved: bool = False,
    keep: Sequence[int] = ...,
    masked: Sequence[int] = ...,
    layouts: str | None = None,
) -> NativePlan: ...
def ops() -> str: ...
def rules() -> str: ...
def check_rules(seed: int) -> str: ...
def targets() -> list[str]: ...
def tuning_folder(folder: str | None) -> None: ...
def tuning_entries() -> int: ...
def borrow_threads(libtorch: str) -> bool: ...
