"""The CUDA runtime's lower layers as far as a machine without a GPU shows them."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
from hypatia import _native, store
from hypatia.devices import cuda, cuda_libraries
from hypatia.execute import plans

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1.0f; }'


@pytest.fixture(autouse=True)
def _prepared() -> None:
    cuda.prepare()


def _found(name: str) -> dict[str, str | None]:
    return next(found for found in json.loads(_native.cuda.libraries()) if found["name"] == name)


@pytest.fixture
def _compiler() -> None:
    if reason := _found("NVRTC")["error"]:
        pytest.skip(reason)


def test_libraries_are_found_or_missed_with_a_sentence() -> None:
    for found in json.loads(_native.cuda.libraries()):
        if found["error"] is None:
            assert re.fullmatch(r"\d+\.\d+(\.\d+)?", found["version"])
            assert found["origin"]
        else:
            assert found["error"].startswith(f"{found['name']} cannot be used: ")


def test_no_second_copy_is_loaded() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("there is no /proc to look at")
    _native.cuda.libraries()
    for library in cuda_libraries.KNOWN:
        stem = library.files[0].split(".so")[0]
        paths = {line.split()[-1] for line in maps.read_text().splitlines() if f"/{stem}.so" in line}
        assert len(paths) <= 1, paths


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("arch", [(8, 0), (9, 0), (10, 0)])
def test_a_kernel_becomes_machine_code(arch: tuple[int, int]) -> None:
    assert _native.cuda.compile("one", KERNEL, arch).startswith(b"\x7fELF")


@pytest.mark.usefixtures("_compiler")
def test_mistakes_in_a_kernel_are_shown() -> None:
    with pytest.raises(_native.HypatiaError, match=r"(?s)kernel broken does not compile.*nonsense"):
        _native.cuda.compile("broken", "int f() { return nonsense; }", (9, 0))
    with pytest.raises(_native.HypatiaError):
        _native.cuda.compile("nul", "a\0b", (9, 0))
    with pytest.raises(_native.HypatiaError):
        _native.cuda.compile("one", KERNEL, (1, 0))


@pytest.mark.usefixtures("_compiler")
def test_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYPATIA_CACHE", "on")
    monkeypatch.setenv("HYPATIA_CACHE_DIR", str(tmp_path))
    code = _native.cuda.compile("one", KERNEL, (9, 0))
    (entry,) = store.entries()
    assert entry.kind == "kernel"
    assert entry.key.startswith("one sm_90 nvrtc ")
    # What is kept is used; what is damaged, or no machine code, is compiled again.
    store.put("kernel", entry.key, b"\x7fELF another")
    assert _native.cuda.compile("one", KERNEL, (9, 0)) == b"\x7fELF another"
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    assert _native.cuda.compile("one", KERNEL, (9, 0)) == code
    store.put("kernel", entry.key, b"something else")
    assert _native.cuda.compile("one", KERNEL, (9, 0)) == code
    _native.cuda.compile("one", KERNEL, (8, 0))
    _native.cuda.compile("one", KERNEL + "\n", (9, 0))
    assert len(store.entries()) == 3


def test_products_are_named_by_all_that_matters() -> None:
    product = _native.cuda.Gemm(0, "bfloat16", [64, 256, 784], epilogue="relu_bias", residual=True)
    assert product.key == "gemm bf16>bf16 1x64x256x784 nt relu_bias+residual align 16"
    assert product.scratch_bytes > 2 * (64 * 784 + 256 * 784 + 64 * 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense", [8, 8, 8]), "no dtype"),
        (("float32", [8, 8, 8], "erf"), "no epilogue"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str) -> None:
    dtype, sizes, *epilogue = arguments
    with pytest.raises(ValueError, match=message):
        _native.cuda.Gemm(0, dtype, sizes, **({"epilogue": epilogue[0]} if epilogue else {}))
    with pytest.raises(ValueError, match="not tuned"):
        _native.cuda.Gemm(0, "float32", [8, 8, 8]).run(0, 0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_everything_says_so() -> None:
    assert cuda.available() == "torch sees no GPU"
    product = _native.cuda.Gemm(0, "float32", [8, 8, 8])
    with pytest.raises(_native.HypatiaError):
        product.tune(0, 0, 1 << 30)
    for script in ("run.py", "bench.py"):
        done = fresh.run(ROOT / "tests_gpu" / script)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        assert "torch sees no GPU" in done.stdout


CHECKS = """
import inspect, sys
sys.modules["pytest"] = None
import run
for name, check in run._checks():
    # Those of another module would run twice, and nobody gives them anything.
    assert name == f"{check.__module__}.{check.__name__}", name
    assert all(p.default is not p.empty for p in inspect.signature(check).parameters.values()), name
    print(name)
"""


def test_all_checks_for_a_gpu_are_ones_that_the_runner_calls() -> None:
    """They import no pytest, nothing in them waits for pytest, and no function waits for nobody."""
    folder = ROOT / "tests_gpu"
    everything = "".join(p.read_text() for p in folder.glob("*.py"))
    done = fresh.run(CHECKS, env={**os.environ, "PYTHONPATH": str(folder)})
    assert done.returncode == 0, done.stderr
    called = set(done.stdout.split())
    for path in folder.glob("test_*.py"):
        text = path.read_text()
        defined = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        checks = {f"{path.stem}.{n.name}" for n in defined if n.name.startswith("check_")}
        assert checks, f"{path.name} checks nothing"
        assert checks <= called, f"{path.name}: {checks - called}"
        for name in (n.name for n in defined if not n.name.startswith("check_")):
            assert not name.lower().startswith("test"), f"{path.name}: {name} waits for pytest"
            assert len(re.findall(rf"\b{name}\b", everything)) > 1, f"{path.name}: nothing uses {name}"


def test_convolutions_of_plans_follow_torchs_settings() -> None:
    args = ("image", "kernel", [1, 1], [2, 2], [1, 1], 1, False, False, False)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
        target, given, _ = plans._convolution(args)
        assert target is torch.ops.aten.cudnn_convolution.default
        assert given == (*args[:6], True, True, False)
    with torch.backends.cudnn.flags(enabled=False):
        target, given, _ = plans._convolution(args)
        assert target is torch.ops.aten.convolution.default
        assert given == ("image", "kernel", None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_other_convolutions_do_not_use_tf32_where_the_check_forbids_it(
    monkeypatch: pytest.MonkeyPatch, transposed: bool, biased: bool
) -> None:
    """Transposed ones, say, of which torch's own op has no such argument."""
    image, kernel = torch.randn(2, 4, 5, 6), torch.randn(4, 4, 3, 3)
    bias = torch.randn(4) if biased else None
    args = (image, kernel, bias, [2, 1], [1, 0], [1, 1], transposed, [0, 0], 1)
    target, given, _ = plans._exact_convolution(args)
    cudnn, name = torch.ops.aten, "cudnn_convolution_transpose" if transposed else "cudnn_convolution"
    assert target is getattr(cudnn, name).default or target.args == (getattr(cudnn, name).default,)
    schema = getattr(cudnn, name).default._schema.arguments
    said = dict(zip([a.name for a in schema], [*given[:2], *given[2 + biased :]], strict=True))
    assert not said["allow_tf32"]

    def instead(image: torch.Tensor, kernel: torch.Tensor, *how: Any) -> torch.Tensor:
        given = dict(zip([a.name for a in schema[2:]], how, strict=True))
        more = given.get("output_padding", [0, 0])
        rest = (given["stride"], given["padding"], given["dilation"], transposed, more, given["groups"])
        return torch.ops.aten.convolution.default(image, kernel, None, *rest)

    run = functools.partial(plans._biased, instead) if biased else instead
    torch.testing.assert_close(run(*given), torch.ops.aten.convolution.default(*args))


@pytest.mark.parametrize(("allowed", "tf32"), [(True, True), (True, False), (False, True)])
def test_convolutions_use_tf32_where_both_torch_and_the_check_allow_it(allowed: bool, tf32: bool) -> None:
    given = ("x", "w", [0, 0], [1, 1], [1, 1], 1)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        target, args, _ = plans._convolution(given, tf32=tf32)
    assert target is torch.ops.aten.cudnn_convolution.default
    assert args[-1] is (allowed and tf32)
