"""``make test-mutations``: faults put into the source one at a time; tests must find each.

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
    """Files of tests, or ``cargo`` and its arguments."""


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
        "tests/frontend/test_call_keys.py::test_models_that_ask_for_strides_are_compiled_for_them",
    ),
    Mutation(
        "constants lose digits on their way back into a graph",
        "constants",
        "python/hypatia/compiler/rebuild.py",
        'return float(arg["float"])',
        'return round(float(arg["float"]), 6)',
        "tests/compiler/test_numbers.py::test_constants_keep_all_their_digits",
    ),
    Mutation(
        "views that are results forget where they begin",
        "plan results",
        "python/hypatia/capture/graph_layouts.py",
        '"offset": offset - first, "memory"',
        '"offset": 0, "memory"',
        "tests/execute/test_results.py::test_results_lie_as_in_eager"
        "[overlapping parts-compile-strict-inference]",
    ),
    Mutation(
        "results that lie otherwise are not noticed",
        "plan results",
        "python/hypatia/verifier/same_layout.py",
        "    return found[0] == (found[1] if known is None else known)",
        "    return True",
        "tests/execute/test_results.py::test_norms_of_permuted_inputs",
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
    Mutation(
        "parts that are replaced or added are not noticed",
        "keys",
        "python/hypatia/capture/model_state.py",
        "self._whole: _Whole = [(d, list(d.items())) for d in owners]",
        "self._whole: _Whole = []",
        "tests/frontend/test_attributes.py",
    ),
    Mutation(
        "a file may name any attribute of torch.ops as a call",
        "caches",
        "python/hypatia/capture/records.py",
        "if isinstance(found, OpOverload) and str(found) == name:",
        "if found is not None:",
        "tests/test_safety.py::test_a_name_that_is_no_op_of_torch_is_not_resolved",
    ),
    Mutation(
        "what others may write is read",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "is_ours(about.st_uid) && about.st_mode & 0o022 == 0",
        "is_ours(about.st_uid)",
        "extension tests/test_safety.py::test_a_folder_that_others_may_write_is_refused",
    ),
    Mutation(
        "a folder that everybody may exchange is used",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "if mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {",
        "if false {",
        "extension tests/test_safety.py::test_a_folder_below_one_that_everybody_may_exchange_is_refused",
    ),
    Mutation(
        "a link in place of the folder is followed",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "flags(&[OFlags::RDONLY, OFlags::DIRECTORY, OFlags::NOFOLLOW])",
        "flags(&[OFlags::RDONLY, OFlags::DIRECTORY])",
        "extension tests/test_safety.py::test_a_link_in_place_of_the_folder_is_refused",
    ),
    Mutation(
        "files are as private as the umask says",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "const FILE_MODE: u32 = 0o600;",
        "const FILE_MODE: u32 = 0o666;",
        "extension tests/test_safety.py::test_folders_and_files_are_private",
    ),
    Mutation(
        "a folder without the marker is ours",
        "caches",
        "crates/hypatia-runtime/src/store.rs",
        "if strange && !is_marked(&place)? {",
        "if strange && false {",
        "extension tests/test_safety.py::test_a_folder_of_somebody_else_with_our_name_is_left_alone",
    ),
    Mutation(
        "files of others with names like ours are removed",
        "caches",
        "crates/hypatia-runtime/src/store.rs",
        "is_ok_and(|start| start == magic)",
        "is_ok()",
        "extension tests/test_safety.py::test_files_of_others_stay",
    ),
    Mutation(
        "all files that end like unfinished ones are removed",
        "caches",
        "crates/hypatia-runtime/src/store.rs",
        "private::unfinished_of(name).is_some_and(|stem| stem == TUNING || is_stem(stem))",
        'name.ends_with(".tmp") || name.ends_with(".part")',
        "extension tests/test_safety.py::test_files_of_others_stay",
    ),
    Mutation(
        "pipes are waited for",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "flags(&[OFlags::RDONLY, OFlags::NOFOLLOW, OFlags::NONBLOCK])",
        "flags(&[OFlags::RDONLY, OFlags::NOFOLLOW])",
        "extension tests/test_safety.py::test_an_odd_entry_counts_as_absent_and_nobody_waits",
    ),
    Mutation(
        "links in place of entries are followed",
        "caches",
        "crates/hypatia-runtime/src/store/private.rs",
        "flags(&[OFlags::RDONLY, OFlags::NOFOLLOW, OFlags::NONBLOCK])",
        "flags(&[OFlags::RDONLY, OFlags::NONBLOCK])",
        "extension tests/test_safety.py::test_an_odd_entry_counts_as_absent_and_nobody_waits",
    ),
    Mutation(
        "entries of any size are read",
        "caches",
        "crates/hypatia-runtime/src/store.rs",
        "place.read(&name, LARGEST.min(self.limit))",
        "place.read(&name, 1 << 62)",
        "extension tests/test_safety.py::test_an_odd_entry_counts_as_absent_and_nobody_waits",
    ),
    Mutation(
        "libraries are looked for where Python looks for modules",
        "process",
        "python/hypatia/devices/cuda_libraries.py",
        "places.append(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))",
        'places += __import__("sys").path',
        "tests/test_safety.py::test_libraries_are_not_looked_for_in_the_working_folder",
    ),
    Mutation(
        "tracing patches the classes of the modules",
        "process",
        "python/hypatia/capture/attribute_reads.py",
        "    return made_class",
        "    own.__getattribute__ = read\n    return made_class",
        "tests/test_safety.py::test_tracing_patches_nothing_that_others_use",
    ),
    Mutation(
        "backward passes run in the thread that calls them, unasked",
        "process",
        "python/hypatia/options.py",
        "backward_in_caller: bool = dataclasses.field(\n        default=False",
        "backward_in_caller: bool = dataclasses.field(\n        default=True",
        "tests/test_safety.py::test_backward_passes_stay_in_autograds_threads_unless_asked",
    ),
    Mutation(
        "plans are bound without leaving Python",
        "process",
        "crates/hypatia-py/src/plan.rs",
        "let runnable = logged(py, || {",
        "let runnable = caught(|| {",
        "extension tests/test_safety.py::test_other_threads_run_while_a_plan_is_bound",
    ),
    Mutation(
        "programs may be nested as deep as they like",
        "process",
        "crates/hypatia-core/src/sexp.rs",
        "'(' if stack.len() > DEEPEST =>",
        "'(' if stack.len() > usize::MAX - 1 =>",
        "cargo --lib sexp",
    ),
    Mutation(
        "inputs may have sizes that no tensor can have",
        "process",
        "crates/hypatia-core/src/ir/text.rs",
        "if !ty.can_exist() {",
        "if false && !ty.can_exist() {",
        "cargo --lib ir::text",
    ),
    Mutation(
        "a proof is replayed for as long as it takes",
        "process",
        "crates/hypatia-core/src/proof.rs",
        "if start.elapsed() >= patience {",
        "if false && start.elapsed() >= patience {",
        "cargo --lib proof",
    ),
]


def main() -> int:
    """Exits with 1 if a fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="mutations whose description has this text")
    parser.add_argument("--kind", help="mutations of this kind")
    parser.add_argument("--python", action="store_true", help="mutations of Python alone: nothing is built")
    asked = parser.parse_args()
    left = 0
    for mutation in MUTATIONS:
        if asked.only and asked.only not in mutation.what:
            continue
        if asked.kind not in (None, mutation.kind) or (asked.python and mutation.file.endswith(".rs")):
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
    elif what == "extension":
        environment["CARGO_TARGET_DIR"] = str(ROOT / "target" / "mutated")
        _built(environment)
        run.append(rest)
    else:
        run.append(mutation.found_by)
    start = time.monotonic()
    try:
        done = subprocess.run(run, cwd=COPY, env=environment, capture_output=True, timeout=LIMIT)
        code, told = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, told = 0, b""
    # Processes that are stopped at the first failure count as interrupted.
    if "pytest" in run and code > 1 and b" failed" not in told:
        sys.exit(f"{mutation.found_by} did not run: pytest ended with {code}")
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
