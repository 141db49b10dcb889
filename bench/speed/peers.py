"""ONNX Runtime and OpenVINO, by one export to ONNX with fixed sizes; results stay in their own arrays."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hypatia.tools import bench, measure
from hypatia.tools.bench import Peer
from hypatia.tools.measure import Block
from hypatia.tools.peers import NotMeasured

NEEDS = {
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Packages of each peer."""

OPSET = 22


def missing(name: str) -> str:
    """Why a peer is left out; empty if it is there."""
    absent = [p for p in NEEDS.get(name, ()) if importlib.util.find_spec(p) is None]
    if not absent:
        return ""
    install = "pip install -r requirements/bench.txt"
    return f"{name} is left out, because of missing packages: {', '.join(absent)} ({install})"


def makers(names: Sequence[str]) -> dict[str, bench.Maker]:
    """Makers of the peers for one case: the export is made once."""
    export = _Export()
    kinds = {"onnxruntime": _OnnxRuntime, "openvino": _OpenVino}
    return {name: functools.partial(kinds[name], export) for name in names}


class _Export:
    """A model as ONNX, and how long that took."""

    def __init__(self) -> None:
        self._made: tuple[bytes, float] | None = None

    def of(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[bytes, float]:
        if self._made is None:
            start = time.perf_counter()
            with _quiet(), torch.no_grad():
                program = torch.onnx.export(
                    model, tuple(inputs), dynamo=True, verbose=False, opset_version=OPSET
                )
            assert program is not None
            data = program.model_proto.SerializeToString()
            self._made = data, time.perf_counter() - start
        return self._made


@contextlib.contextmanager
def _quiet() -> Any:
    """Exporters warn and print at length."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _OnnxRuntime(Peer):
    def __init__(self, export: _Export, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        import onnxruntime

        data, exporting = export.of(model, inputs)
        start = time.perf_counter()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        try:
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as e:
            if inputs[0].dtype != torch.bfloat16:
                raise
            raise NotMeasured("has no bf16 kernels for it") from e
        names = [i.name for i in session.get_inputs()]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        self._call = functools.partial(session.run, None, feed)
        self._call()
        self.compile_seconds = exporting + time.perf_counter() - start

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(r) for r in self._call()]

    def block(self) -> Block:
        return measure.block(self._call)


class _OpenVino(Peer):
    def __init__(self, export: _Export, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        import openvino

        self._types = {openvino.Type.f32: torch.float32, openvino.Type.bf16: torch.bfloat16}
        data, exporting = export.of(model, inputs)
        start = time.perf_counter()
        self._dtype = inputs[0].dtype
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if self._dtype == torch.bfloat16 else "f32",
        }
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(io.BytesIO(data)), "CPU", settings)
        request = compiled.create_infer_request()
        self._inputs = [_bits(x) for x in inputs]
        kind = next(t for t, dtype in self._types.items() if dtype == self._dtype)
        for i, (array, x) in enumerate(zip(self._inputs, inputs, strict=True)):
            request.set_input_tensor(i, openvino.Tensor(array, list(x.shape), kind))
        self._outputs = len(compiled.outputs)
        self._request = request
        self._call = functools.partial(request.infer, share_outputs=True)
        self._call()
        self.compile_seconds = exporting + time.perf_counter() - start

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        self._call()
        found = [self._request.get_output_tensor(i) for i in range(self._outputs)]
        results = []
        for tensor in found:
            dtype = self._types[tensor.element_type]
            flat = torch.frombuffer(bytearray(tensor.data.tobytes()), dtype=dtype)
            results.append(flat.reshape(tuple(tensor.shape)).to(self._dtype))
        return results

    def block(self) -> Block:
        return measure.block(self._call)


def _bits(x: torch.Tensor) -> Any:
    """The memory of a tensor as an array; NumPy has no bf16."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
