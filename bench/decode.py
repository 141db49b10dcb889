"""Decoding with a static cache: a step beside peers, and tokens a second of `generate`.

    make bench-decode                           or
    python3 bench/decode.py [--model llama-1b] [--forms eager ro hypatia] [--layers 16] [--json FILE]

Every form has a process of its own. `step` is the time of a call that computes one token after `--context`
others, many of them queued. `tokens/s` is `generate` with `cache_implementation="static"`, compiled before
the clock starts. `same` is the share of its tokens that are eager's: weights are random, so two tokens are
often equally likely but for roundings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": (
        "Llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
"""The family of transformers, and sizes as published."""
FORMS = ("eager", "graph", "inductor", "ro", "ind+g", "hypatia", "torch")
"""As those of the suites; of `generate` there are no hand-made graphs."""
ROUNDS = 5
ROOM = 64
"""Places of the cache after the context, and calls until it ends where it did."""


def built(name: str, layers: int, device: str) -> Any:
    """The model with random weights, in bf16 on a GPU."""
    import torch
    import transformers

    family, sizes = MODELS[name]
    sizes = {**sizes, "num_hidden_layers": layers or sizes["num_hidden_layers"]}
    torch.manual_seed(0)
    with torch.device(device):
        config = getattr(transformers, f"{family}Config")(**sizes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def step(model: Any, form: str, context: int, batch: int, device: str) -> dict[str, Any]:
    """Microseconds of a call for one more token."""
    import torch
    import transformers
    from suites.forms import Form

    from hypatia.tools import measure

    cache = transformers.StaticCache(config=model.config, max_cache_len=context + ROOM)
    ids = torch.randint(3, model.config.vocab_size, (batch, context), device=device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    asked = {
        "input_ids": ids[:, :1].contiguous(),
        "position_ids": torch.full((1, 1), context, device=device),
        "past_key_values": cache,
        "use_cache": True,
    }
    arguments: Any = ((), asked)
    # Where the cache ends, which every call moves on.
    ends = [layer.cumulative_length for layer in cache.layers]
    start = [end.clone() for end in ends]
    call = Form(form, model, arguments, training=False)
    left = 0

    def again() -> None:
        nonlocal left
        if not left:
            torch._foreach_copy_(ends, start)
            left = ROOM
        left -= 1
        call(arguments)

    for _ in range(4):
        again()
    taken = [1e6 * measure.block(again, device).least for _ in range(ROUNDS)]
    return {"step_us": min(taken), "steps_us": taken}


def generated(model: Any, form: str, context: int, batch: int, new: int, device: str) -> dict[str, Any]:
    """Tokens a second of `generate`, and the tokens."""
    import torch
    from transformers import CompileConfig

    import hypatia
    from hypatia.frontend.dynamo import register
    from hypatia.tools import measure

    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (batch, context), device=device)
    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": "static",
    }
    if form == "eager":
        settings["disable_compile"] = True
    elif form in ("inductor", "ro"):
        mode = "reduce-overhead" if form == "ro" else "default"
        settings["compile_config"] = CompileConfig(mode=mode)
    elif form == "torch":
        register()
        settings["compile_config"] = CompileConfig(backend="hypatia", mode=None)
    else:
        model = hypatia.compile(model)
    start = time.perf_counter()
    for _ in range(2):
        found = model.generate(ids, **settings)
    first = time.perf_counter() - start
    best = float("inf")
    for _ in range(3):
        measure.wait(device)
        start = time.perf_counter()
        found = model.generate(ids, **settings)
        measure.wait(device)
        best = min(best, time.perf_counter() - start)
    return {
        "tokens_per_s": batch * new / best,
        "warm_up_s": first,
        "tokens": found[:, context:].tolist(),
    }


def one(name: str, form: str, given: argparse.Namespace) -> dict[str, Any]:
    """A form of a model: what it could be asked."""
    import torch

    found: dict[str, Any] = {}
    with torch.no_grad():
        for part, ask in (("step", step), ("generate", generated)):
            if part == "generate" and (form in ("graph", "ind+g") or not given.new):
                continue
            model = built(name, given.layers, given.device)
            more = (given.new,) if part == "generate" else ()
            try:
                found |= ask(model, form, given.context, given.batch, *more, given.device)
            except Exception as e:
                found[f"no_{part}"] = f"{type(e).__name__}: {e}".splitlines()[0][:300]
            torch._dynamo.reset()
    return found


def in_process(name: str, form: str, given: argparse.Namespace) -> dict[str, Any]:
    """The same in a new process."""
    command = [sys.executable, __file__, "--one", name, form, "--device", given.device]
    for word in ("context", "batch", "new", "layers"):
        command += [f"--{word}", str(getattr(given, word))]
    where = os.pathsep.join([str(HERE), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")])
    try:
        ran = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": where, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            check=False,
            timeout=given.limit,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"took longer than {given.limit:.0f} s"}
    if ran.returncode:
        return {"reason": (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| model | form | step us | tokens/s | same | warm-up s | |", "|---|---|--:|--:|--:|--:|---|"]
    for row in rows:
        eager = next(
            (r.get("tokens") for r in rows if r["model"] == row["model"] and r["form"] == "eager"), None
        )
        same = ""
        if eager and row.get("tokens"):
            pairs = [
                (a, b) for x, y in zip(eager, row["tokens"], strict=True) for a, b in zip(x, y, strict=True)
            ]
            same = f"{sum(a == b for a, b in pairs) / len(pairs):.0%}"
        numbers = [
            f"{row[key]:.{digits}f}" if key in row else ""
            for key, digits in (("step_us", 0), ("tokens_per_s", 0), ("warm_up_s", 1))
        ]
        why = "; ".join(str(row[key]) for key in ("reason", "no_step", "no_generate") if key in row)
        cells = [row["model"], row["form"], *numbers[:2], same, numbers[2], why]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Every model in every form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--context", type=int, default=1024, help="tokens before")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=128, help="tokens that generate makes; 0: the step only")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--limit", type=float, default=200, help="seconds of a form")
    parser.add_argument("--json", type=Path, default=HERE / "out" / "decode.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one, given)))
        return
    rows = []
    for name in given.model:
        for form in [f for f in given.forms if given.device == "cuda" or f not in ("graph", "ro", "ind+g")]:
            rows.append({"model": name, "form": form, **in_process(name, form, given)})
            print(table(rows).splitlines()[-1], flush=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
