"""A process that runs cases: seeds come in by lines, outcomes go out as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HYPATIA_CACHE"] = "off"

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from .case import Case
from .check import Outcome, is_captured_otherwise, is_steady, run_alone, run_case
from .generate import case_of
from .keep import kept, snippet
from .minimise import minimised
from .program import module_of
from .tensors import T

MEMORY = 8 << 30
"""Bytes that a process may have on a CPU."""

OTHERWISE = "what was captured of it computes something else"
"""Said of a model that runs as it is."""

MINIMISING = 40.0
"""Seconds that making a case small may take."""


_WRONG = ("shape", "strides", "memory", "dtype", "requires_grad", "values", "structure", "gradient of")


def signature(outcome: Outcome) -> str:
    """What two outcomes share that are the same fault, roughly: the kind and the words without numbers."""
    words = outcome.message.split(":")[0] if outcome.kind == "exception" else ""
    if outcome.kind == "wrong":
        words = next((w for w in _WRONG if w in outcome.message), "")
        words += " gradient" if outcome.message.startswith("gradient") else ""
    if outcome.kind == "rolled back":
        words = outcome.message.split(";")[0]
    return f"{outcome.kind} {words}"


def examine(seed: int, device: str) -> dict[str, Any]:
    """Runs the case of a seed."""
    start = time.perf_counter()
    case = case_of(seed)
    outcome = run_case(case, device)
    if outcome.found and (is_torchs(case, outcome, device) or not is_steady(case, device)):
        outcome.kind = "torch's"
    line: dict[str, Any] = {
        "seed": seed,
        "kind": outcome.kind,
        "entry": case.entry.name,
        "training": case.entry.training,
        "doors": case.program.doors,
        "rows": len(case.program.rows),
        "calls": outcome.calls,
        "imprecise": outcome.imprecise,
        "proofs": outcome.proofs,
        "message": outcome.message[:400],
    }
    # After an error of the device, nothing in this process can be trusted.
    line["over"] = "CUDA error" in outcome.message
    line["seconds"] = round(time.perf_counter() - start, 3)
    return line


def lives(seed: int, device: str) -> dict[str, Any]:
    """Runs the case of a seed by torch alone: that there is an answer says that the process lives."""
    run_alone(case_of(seed), device)
    return {"over": False}


def reduced(seed: int, device: str, folder: Path, seconds: float = MINIMISING) -> dict[str, Any]:
    """Makes the failing case of a seed small and writes it into the folder."""
    case = case_of(seed)
    outcome = run_case(case, device)
    if not outcome.found:
        return {"over": False}
    small = shrunk(case, outcome, device, seconds)
    again = run_case(small, device)
    if not again.found:
        small, again = case, outcome
    path = kept(small, again, folder)
    return {
        "message": again.message[:400],
        "snippet": snippet(small, again),
        "file": path.name,
        "over": False,
    }


def is_torchs(case: Case, outcome: Outcome, device: str) -> bool:
    """Whether torch's own machinery fails in the same way."""
    if outcome.kind == "internal" and _is_said_by_decompositions(case, outcome.message):
        return True
    if outcome.kind == "internal" and OTHERWISE in outcome.message:
        return is_captured_otherwise(case, device)
    if case.entry.name not in ("torch", "optimize"):
        return False
    if " has strides " in outcome.message and _said_strides(outcome.message) in _fake_strides(case):
        return True
    peer = run_case(case.replace(entry=dataclasses.replace(case.entry, peer=True)), device)
    return peer.found and signature(peer) == signature(outcome)


def _is_said_by_decompositions(case: Case, message: str) -> bool:
    """Whether the graph that torch.export decomposes does not run either, for the same reason: it has views
    of values whose strides torch foretells wrongly."""
    model = module_of(case.program.source())().train(case.entry.training)
    call = case.calls()[0]
    given = pytree.tree_map(lambda v: v.make() if isinstance(v, T) else v, (call.args, dict(call.kwargs)))
    try:
        program = torch.export.export(model, *given).run_decompositions({})
        program.module()(*given[0], **given[1])
    except RuntimeError as error:
        return str(error).splitlines()[0][:60] in message
    return False


def _said_strides(message: str) -> tuple[str, str]:
    """The result that a message is about, and the strides that it has."""
    name, said = message.split(" has strides ")
    return name, said.split(", eager")[0]


def _fake_strides(case: Case) -> set[tuple[str, str]]:
    """The strides of results as torch foretells them: whoever compiles relies on them."""
    model = module_of(case.program.source())().eval()
    found = set()
    for call in case.calls():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            given = pytree.tree_map(
                lambda v, mode=mode: mode.from_tensor(v.make()) if isinstance(v, T) else v,
                (call.args, dict(call.kwargs)),
            )
            with contextlib.suppress(Exception):
                results = pytree.tree_leaves(model(*given[0], **given[1]))
                found |= {
                    (f"result {i}", str(r.stride()))
                    for i, r in enumerate(results)
                    if isinstance(r, torch.Tensor)
                }
    return found


def shrunk(case: Case, outcome: Outcome, device: str, seconds: float) -> Case:
    """A small case with the same fault."""
    wanted = signature(outcome)

    def fails(candidate: Case) -> bool:
        try:
            found = run_case(candidate, device)
        except Exception:
            return False
        if not found.found or signature(found) != wanted:
            return False
        return not is_torchs(candidate, found, device)

    return minimised(case, fails, seconds)


def shrunk_outside(case: Case, device: str, limit: float, seconds: float) -> Case:
    """The same for a case that hangs or ends the process: each candidate runs in a process of its own."""

    def fails(candidate: Case) -> bool:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run_case(candidate, device)
            os._exit(0)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) != 0
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True

    return minimised(case, fails, seconds)


def main() -> None:
    """Answers each seed of the standard input."""
    torch.set_num_threads(1)
    # Eager's digits are to be fp32's.
    torch.backends.cudnn.allow_tf32 = False
    if sys.argv[1] == "cpu":
        # A case that takes all memory is a finding, and not the end of what else runs here.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    device, folder = sys.argv[1], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    # What libraries print must not mix with the answers.
    os.dup2(2, 1)
    for text in sys.stdin:
        word, seed = text.split()
        if word == "run":
            line = examine(int(seed), device)
        else:
            line = lives(int(seed), device) if word == "alone" else reduced(int(seed), device, folder)
        out.write(json.dumps(line) + "\n")
        out.flush()
        if line["over"]:
            return


if __name__ == "__main__":
    main()
