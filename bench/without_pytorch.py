"""Validation that needs no PyTorch: programs through `hypatia-opt`, their proofs checked again in float64.

    .venv/bin/python bench/without_pytorch.py [--binary PATH] [--target cpu] [--json FILE|-]

A program falls short when the expected ops are not in what comes out, when the cost did not go down, when the
proof has no step or does not hold, or when the same program gives another result the second time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from diagnostic import ROOT, Diagnostic, parser

BUILD = "cargo build --release -p hypatia-core"


@dataclass(frozen=True)
class Program:
    """A program, the ops that must be in its optimized form, once or any number of times, or be gone."""

    name: str
    text: str
    once: tuple[str, ...]
    some: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def symbolic(self) -> bool:
        """Whether a size is a symbol: steps without numbers for their sizes cannot be evaluated."""
        return ":[s" in self.text


def _heads(projection: str) -> str:
    return f"(permute (reshape {projection} [2,16,4,16]) [0,2,1,3])"


ATTENTION = (
    "(attention "
    + " ".join(_heads(f"(linear w{i}:[64,64] b{i}:[64] x:[2,16,64])") for i in (1, 2, 3))
    + " none false none)"
)

PROGRAMS = [
    Program(
        "linear+relu",
        "(relu (linear w:[512,784] b:[512] x:[64,784]))",
        ("fused_linear_relu",),
        gone=("relu",),
    ),
    Program(
        "linear+gelu",
        "(gelu (linear w:[512,784] b:[512] x:[64,784]))",
        ("fused_linear_gelu",),
        gone=("gelu",),
    ),
    Program(
        "MLP of two layers",
        "(linear w2:[10,256] b2:[10] (relu (linear w1:[256,784] b1:[256] x:[64,784])))",
        ("fused-mlp",),
        gone=("linear", "relu"),
    ),
    Program(
        "MLP of three layers",
        "(linear w3:[10,256] b3:[10] (relu (linear w2:[256,256] b2:[256] "
        "(relu (linear w1:[256,784] b1:[256] x:[64,784])))))",
        ("fused-mlp",),
        gone=("linear", "relu"),
    ),
    Program(
        "captured linear",
        "(relu (reshape (addmm b:[32] (reshape x:[2,6,16] [12,16]) (permute w:[32,16] [1,0])) [2,6,32]))",
        ("fused_linear_relu",),
        gone=("addmm", "permute", "reshape"),
    ),
    Program(
        "q, k, v merged",
        "(tuple (linear w1:[64,64] b1:[64] x:[4,64]) (linear w2:[64,64] b2:[64] x) "
        "(linear w3:[64,64] b3:[64] x))",
        ("linear",),
        some=("cat", "slice"),
    ),
    Program("attention", ATTENTION, ("attention", "linear"), some=("cat",)),
    Program(
        "SwiGLU",
        "(linear w3:[64,172] none (mul (silu (linear w1:[172,64] none x:[2,5,64])) "
        "(linear w2:[172,64] none x)))",
        ("fused_swiglu",),
        gone=("silu", "mul"),
    ),
    Program(
        "LoRA folded",
        "(add (linear w:[256,256] b:[256] x:[128,256]) "
        "(mul (linear w1:[256,8] none (linear w2:[8,256] none x)) 2.0))",
        ("linear", "mm"),
    ),
    Program(
        "matrix chain", "(mm (mm a:[64,512] c:[512,512]) d:[512,4])", (), some=("mm",), flags=("--live",)
    ),
    Program(
        "two weights, one input",
        "(add (linear w1:[64,64] none x:[512,64]) (linear w2:[64,64] none x))",
        ("linear", "add"),
    ),
    Program(
        "sum before product",
        "(sum (linear w:[64,64] none x:[512,64]) [-2] false)",
        ("linear", "sum"),
    ),
    Program(
        "convolution and batch norm",
        "(relu (batch_norm (conv x:[1,8,16,16] w:[16,8,3,3] none [1,1] [1,1] [1,1] 1) "
        "w1:[16] b1:[16] w2:[16] w3:[16] 1e-5))",
        ("fused_conv_relu",),
        gone=("batch_norm", "relu"),
    ),
    Program(
        "affine norm folded",
        "(linear w:[64,32] b:[64] (layer_norm x:[8,32] [32] w1:[32] b1:[32] 1e-5))",
        ("layer_norm",),
        some=("linear",),
    ),
    Program("softmax of a shift", "(softmax (add x:[4,8] 3.0) -1)", ("softmax",), gone=("add",)),
    Program(
        "symbolic batch",
        "(relu (linear w:[512,784] b:[512] x:[s0,784]))",
        ("fused_linear_relu",),
        gone=("relu",),
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What the optimizer printed, taken apart."""

    program: str
    before: float
    after: float
    steps: int
    evaluated: int
    holds: bool
    ops: Counter[str]


def run(binary: Path, program: Program, target: str) -> Outcome:
    """Optimizes a program with its proof; a RuntimeError says what the optimizer complained about."""
    command = [str(binary), "--explain", "--target", target, *program.flags]
    done = subprocess.run(
        command, input=program.text, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    lines = done.stdout.splitlines()
    text = " ".join(line for line in lines if not line.startswith(";"))
    comments = "\n".join(line for line in lines if line.startswith(";"))
    cost = re.search(r"cost ([\d.]+) -> ([\d.]+) us", comments)
    steps = re.search(r"; proof, (\d+) steps", comments)
    checked = re.search(r"; checked: (\d+) steps evaluated", comments)
    if not (cost and steps and checked):
        raise RuntimeError("the output has no cost, no proof or no check")
    return Outcome(
        text,
        float(cost[1]),
        float(cost[2]),
        int(steps[1]),
        int(checked[1]),
        "the proof holds" in comments,
        Counter(op for op in re.findall(r"\(([a-z][\w-]*)", text) if op != "let"),
    )


def shortfall(program: Program, outcome: Outcome, again: Outcome) -> str:
    """Why a program falls short."""
    missing = [op for op in (*program.once, *program.some) if op not in outcome.ops]
    many = [op for op in program.once if outcome.ops[op] > 1]
    left = [op for op in program.gone if op in outcome.ops]
    reasons = {
        f"without {', '.join(missing)}": missing,
        f"{', '.join(many)} more than once": many,
        f"{', '.join(left)} left over": left,
        "the cost did not go down": outcome.after >= outcome.before,
        "the proof has no steps": not outcome.steps,
        "not all steps were evaluated": outcome.evaluated < outcome.steps and not program.symbolic,
        "the proof does not hold": not outcome.holds,
        "another result the second time": again != outcome,
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


def find_binary(given: Path | None) -> Path | None:
    """The optimizer: as given, else as cargo leaves it, else on the PATH."""
    if given is not None:
        return given if given.is_file() else None
    built = ROOT / "target" / "release" / "hypatia-opt"
    installed = shutil.which("hypatia-opt")
    return built if built.is_file() else Path(installed) if installed else None


def main() -> int:
    """All programs; the exit code."""
    made = parser(__doc__)
    made.add_argument("--binary", type=Path, help="hypatia-opt (target/release/hypatia-opt)")
    made.add_argument("--target", default="cpu", help="cost model: cpu, gpu or h200 (cpu)")
    arguments = made.parse_args()
    columns = ("program", ">cost us", ">after", ">steps", ">checked", "ops")
    diagnostic = Diagnostic(f"Programs without PyTorch, cost model {arguments.target}", columns, arguments)
    binary = find_binary(arguments.binary)
    if binary is None:
        place = arguments.binary or "target/release/hypatia-opt"
        diagnostic.console.print(f"there is no {place}; this builds it: {BUILD}", markup=False)
        return 2
    for program in PROGRAMS:
        try:
            outcome, again = (run(binary, program, arguments.target) for _ in range(2))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            diagnostic.add(program.name, *"-----", short=str(e), program=program.name, text=program.text)
            continue
        diagnostic.add(
            program.name,
            f"{outcome.before:.2f}",
            f"{outcome.after:.2f}",
            str(outcome.steps),
            str(outcome.evaluated),
            ", ".join(op if n == 1 else f"{op} x{n}" for op, n in sorted(outcome.ops.items())),
            short=shortfall(program, outcome, again),
            program=program.name,
            text=program.text,
            result=outcome.program,
            cost_before=outcome.before,
            cost_after=outcome.after,
            steps=outcome.steps,
            holds=outcome.holds,
        )
    assert "torch" not in sys.modules, "this validation must not need PyTorch"
    return diagnostic.finish()


if __name__ == "__main__":
    sys.exit(main())
