"""The CUDA libraries made known to the Rust core, and single matrix products, for tests and measurements."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from .. import _native, store
from . import cuda_libraries

__all__ = ["Product", "available", "prepare"]


@functools.cache
def prepare() -> None:
    """Tells the core where torch's libraries are and where compiled kernels are kept."""
    _native.cuda.search_in(cuda_libraries.folders())
    _native.cuda.keep_in(
        functools.partial(store.get, "kernel"), lambda key, code: store.put("kernel", key, code)
    )


@functools.cache
def available() -> str | None:
    """Why native kernels cannot be run on a GPU here; None if they can."""
    prepare()
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    missing = [library for library in json.loads(_native.cuda.libraries()) if library["error"]]
    return "; ".join(library["error"] for library in missing) or None


class Product:
    """``epilogue(left @ right + residual)`` by a tuned algorithm; factors may be transposed views."""

    def __init__(
        self, left: torch.Tensor, right: torch.Tensor, *, epilogue: str = "none", **options: Any
    ) -> None:
        prepare()
        self._transposed = (_transposed(left), _transposed(right))
        self._device = left.device
        batch = left.shape[0] if left.dim() == 3 else 1
        sizes = [left.shape[-2], right.shape[-1], left.shape[-1]]
        self.gemm = _native.cuda.Gemm(
            self._device.index or 0,
            str(left.dtype).removeprefix("torch."),
            sizes,
            transposed=self._transposed,
            batch=batch,
            epilogue=epilogue,
            **options,
        )

    def tune(self) -> dict[str, object]:
        """The trials and the best algorithm, which is used from now on."""
        scratch = self._empty(self.gemm.scratch_bytes)
        found: dict[str, object] = json.loads(
            self.gemm.tune(self._stream(), scratch.data_ptr(), scratch.numel())
        )
        self._workspace = self._empty(self.gemm.workspace)
        return found

    def use(self, tuned: dict[str, object]) -> None:
        """Takes an algorithm that was found before."""
        self.gemm.use(json.dumps(tuned))
        self._workspace = self._empty(self.gemm.workspace)

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the result to ``out``, on the current stream."""
        if (_transposed(left), _transposed(right)) != self._transposed:
            raise ValueError("the factors have other strides than those it was made for")
        self.gemm.run(
            self._stream(),
            left.data_ptr(),
            right.data_ptr(),
            out.data_ptr(),
            residual=_address(residual),
            bias=_address(bias),
            aux=_address(aux),
            workspace=self._workspace.data_ptr(),
        )
        return out

    def aux(self) -> torch.Tensor:
        """Room for what the epilogue keeps."""
        return self._empty(self.gemm.aux[0])

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _transposed(matrix: torch.Tensor) -> bool:
    if matrix.is_contiguous():
        return False
    if matrix.mT.is_contiguous():
        return True
    raise ValueError(f"a matrix with strides {matrix.stride()} of shape {tuple(matrix.shape)}")
