"""``make test-mutations``: faults put into the source one at a time; tests or the fuzzer must find each.

Every mutation changes one place in a copy of the working tree and runs what should find it. Those of Rust
are built there; the extension is built once more only for those that the Rust tests cannot see.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPY = ROOT / "target" / "mutations"
LIMIT = 300
"""Seconds in which a fault must be found, without those that building takes."""


class Mutation(NamedTuple):
    """A fault, and what finds it."""

    what: str
    kind: str
    file: str
    old: str
    new: str
    found_by: str
    """Files of tests, ``cargo`` and its arguments, or ``fuzz`` and a first seed."""


MUTATIONS = [
    Mutation(
        "numbers of a call are told apart by their types alone",
        "keys",
        "python/hypatia/frontend/structure_code.py",
        'self._refuse(f"{compared} != {self.name(known[1])}")',
        'self._refuse(f"type({compared}) is not {self.name(type(known[1]))}")',
        "tests/frontend/test_call_keys.py",
    ),
    Mutation(
        "tensors that share memory are not told from others",
        "keys",
        "python/hypatia/frontend/call_key.py",
        "return () if alike == tuple(range(len(alike))) else alike",
        "return ()",
        "tests/frontend/test_call_keys.py",
    ),
    Mutation(
        "strides are no part of a key",
        "keys",
        "python/hypatia/frontend/call_key.py",
        "layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout",
        "layout = leaf.layout",
        "fuzz 1000",
    ),
    Mutation(
        "constants lose digits on their way back into a graph",
        "constants",
        "python/hypatia/compiler/rebuild.py",
        'return float(arg["float"])',
        'return round(float(arg["float"]), 6)',
        "fuzz 1000",
    ),
    Mutation(
        "views that are results forget where they begin",
        "plan results",
        "python/hypatia/capture/graph_layouts.py",
        '"offset": offset - first, "memory"',
        '"offset": 0, "memory"',
        "tests/execute/test_results.py",
    ),
    Mutation(
        "results that lie otherwise are not noticed",
        "plan results",
        "python/hypatia/verifier/same_layout.py",
        "    return found[0] == found[1]",
        "    return True",
        "tests/execute/test_results.py",
    ),
    Mutation(
        "a result in the memory of another begins at its first element",
        "plan results",
        "crates/hypatia-runtime/src/lower/plan/results.rs",
        "offset: self.offset,\n            shape",
        "offset: 0,\n            shape",
        "extension tests/execute/test_results.py",
    ),
    Mutation(
        "numbers that tensors are compared with keep all digits",
        "constants",
        "crates/hypatia-runtime/src/lower/plan/numbers.rs",
        "_ => Some(Scalar::Float(rounded))",
        "_ => Some(scalar)",
        "cargo --lib lower::plan::numbers",
    ),
    Mutation(
        "a rule of floats is used for integers",
        "rules",
        "crates/hypatia-core/src/rules/algebra.rs",
        '"(relu (abs ?x))" => "(abs ?x)" if "(float ?x)"',
        '"(relu (abs ?x))" => "(abs ?x)"',
        "cargo --test soundness",
    ),
    Mutation(
        "a rule has its operands in the wrong order",
        "rules",
        "crates/hypatia-core/src/rules/algebra.rs",
        '"(neg (sub ?x ?y))" => "(sub ?y ?x)"',
        '"(neg (sub ?x ?y))" => "(sub ?x ?y)"',
        "cargo --test soundness",
    ),
    Mutation(
        "a rule that only moderate numbers bear takes all",
        "rules",
        "crates/hypatia-core/src/rules/algebra.rs",
        '"(mul ?x ($div ?b ?a))" if "(moderate ($div ?b ?a))"',
        '"(mul ?x ($div ?b ?a))"',
        "extension tests/compiler/test_numbers.py",
    ),
]


def main() -> int:
    """Exits with 1 if a fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="mutations whose description has this text")
    asked = parser.parse_args()
    left = 0
    for mutation in MUTATIONS:
        if asked.only and asked.only not in mutation.what:
            continue
        found, seconds = tried(mutation)
        left += not found
        verdict = f"found in {seconds:.0f} s" if found else f"NOT FOUND in {seconds:.0f} s"
        print(f"{verdict:18} {mutation.kind:13} {mutation.what} ({mutation.found_by})", flush=True)
    return int(left > 0)


def tried(mutation: Mutation) -> tuple[bool, float]:
    """Whether a fault is found, and in what time."""
    _copied()
    path = COPY / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {text.count(mutation.old)} places of {mutation.old!r}, not one")
    path.write_text(text.replace(mutation.old, mutation.new))
    environment = {**os.environ, "PYTHONPATH": f"{COPY}/python:{COPY}", "HYPATIA_CACHE": "off"}
    what, _, rest = mutation.found_by.partition(" ")
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider"]
    if what == "cargo":
        crate = Path(mutation.file).parts[1]
        build = ["cargo", "test", "-p", crate, "--locked", "--no-run", rest.split()[0]]
        build += rest.split()[1:] if rest.startswith("--test") else []
        run = ["cargo", "test", "-p", crate, "--locked", *rest.split()]
        environment["CARGO_TARGET_DIR"] = str(ROOT / "target" / "mutated")
        subprocess.run(build, cwd=COPY, env=environment, check=True, capture_output=True)
    elif what == "fuzz":
        run = [
            sys.executable,
            "-m",
            "fuzz",
            "--seed",
            rest,
            "--seconds",
            str(LIMIT - 30),
            "--first",
            "--as-they-are",
        ]
    elif what == "extension":
        environment["CARGO_TARGET_DIR"] = str(ROOT / "target" / "mutated")
        _built(environment)
        run.append(rest)
    else:
        run.append(mutation.found_by)
    start = time.monotonic()
    try:
        code = subprocess.run(run, cwd=COPY, env=environment, capture_output=True, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        code = 0
    return code != 0, time.monotonic() - start


def _copied() -> None:
    """Makes the copy like the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = [n for n in listed.split("\0") if n and (ROOT / n).is_file()]
    names.append("python/hypatia/_native.abi3.so")
    for name in names:
        there = COPY / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() or there.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy(ROOT / name, there)


def _built(environment: dict[str, str]) -> None:
    """Builds the extension of the copy."""
    command = ["cargo", "build", "--release", "-p", "hypatia-py", "--locked"]
    subprocess.run(command, cwd=COPY, env=environment, check=True, capture_output=True)
    made = Path(environment["CARGO_TARGET_DIR"]) / "release" / "lib_native.so"
    shutil.copy(made, COPY / "python" / "hypatia" / "_native.abi3.so")


if __name__ == "__main__":
    sys.exit(main())
