"""What a call costs by how it is called: positions, keywords, dictionaries, dataclasses, results of
transformers' own.

    make bench-calls                            or
    .venv/bin/python bench/calls.py [--rounds 9] [--json FILE]

Calls of a model are measured in turns, on one thread: eager, Inductor, `hypatia.compile`, and that of the
plain call of the same model, by positions and with a tensor as its result. `over plain` is what the
structure costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine
from torch import nn

import hypatia
from hypatia.tools import measure

OUT = Path(__file__).parent / "out" / "calls.json"
WIDTH = 8


class Policy(nn.Module):
    """A small net that takes observations in a structure, and returns one."""

    def __init__(
        self, take: Callable[[Any], tuple[torch.Tensor, torch.Tensor]], give: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.body, self.head, self.value = nn.Linear(2 * WIDTH, 32), nn.Linear(32, 4), nn.Linear(32, 1)
        self.take, self.give = take, give

    def forward(self, *seen: Any, **named: Any) -> Any:
        """Logits and a value."""
        place, speed = self.take(*seen, **named)
        hidden = torch.relu(self.body(torch.cat([place, speed], -1)))
        return self.give(self.head(hidden), self.value(hidden))


@dataclass
class Seen:
    """Observations as a dataclass."""

    place: torch.Tensor
    speed: torch.Tensor


def policy(take: Any, give: Any, call: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """A policy net and its arguments."""
    torch.manual_seed(0)
    model = Policy(take, give).eval()
    place, speed = torch.randn(1, WIDTH), torch.randn(1, WIDTH)
    return model, *call(place, speed)


def pair(*both: Any) -> Any:
    """Both as they are."""
    return both


def bert(by_keyword: bool) -> Any:
    """BERT of two layers: the usual call, or by positions with tensors as results."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(3, 1000, (1, 16))
    mask = torch.ones_like(ids)
    if by_keyword:
        return model, (), {"input_ids": ids, "attention_mask": mask}
    model.config.return_dict = False
    return model, (ids, mask), {}


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "policy, two tensors": ("", lambda: policy(pair, pair, lambda p, s: ((p, s), {}))),
    "policy, keywords": (
        "policy, two tensors",
        lambda: policy(
            lambda place, speed: (place, speed), pair, lambda p, s: ((), {"place": p, "speed": s})
        ),
    ),
    "policy, dict to dict": (
        "policy, two tensors",
        lambda: policy(
            lambda seen: (seen["place"], seen["speed"]),
            lambda logits, value: {"logits": logits, "value": value},
            lambda p, s: (({"place": p, "speed": s},), {}),
        ),
    ),
    "policy, dataclass, list": (
        "policy, two tensors",
        lambda: policy(
            lambda seen: (seen.place, seen.speed), lambda *r: list(r), lambda p, s: ((Seen(p, s),), {})
        ),
    ),
    "BERT of 2 layers, positions": ("", lambda: bert(by_keyword=False)),
    "BERT of 2 layers, keywords, ModelOutput": ("BERT of 2 layers, positions", lambda: bert(by_keyword=True)),
}
"""Cases: the plain call of the same model, and what makes the model and its arguments."""


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Microseconds of each form."""
    plain, build = CASES[name]
    torch._dynamo.reset()
    calls: dict[str, Callable[[], object]] = {}

    def add(form: str, model: Any, args: Any, kwargs: Any) -> None:
        calls[form] = lambda: model(*args, **kwargs)

    model, args, kwargs = build()
    add("eager", model, args, kwargs)
    add("inductor", torch.compile(model), args, kwargs)
    add("hypatia", hypatia.compile(build()[0]), args, kwargs)
    if plain:
        other, args, kwargs = CASES[plain][1]()
        add("plain", hypatia.compile(other), args, kwargs)
    with torch.no_grad():
        for _ in range(3):
            for call in calls.values():
                call()
        seconds = measure.compare(calls, repeats=rounds)
    return {"case": name, **{form: 1e6 * taken for form, taken in seconds.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    head = "| call | eager, us | Inductor | hypatia.compile | over Inductor | over plain |"
    lines = [head, "|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        ours = row["hypatia"]
        over = f"{ours - row['plain']:+.1f} us, {ours / row['plain']:.2f}x" if "plain" in row else ""
        lines.append(
            f"| {row['case']} | {row['eager']:.1f} | {row['inductor']:.1f} | {ours:.1f} | "
            f"{row['inductor'] / ours:.2f}x | {over} |"
        )
    return "\n".join(lines)


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="samples of every form")
    parser.add_argument("--json", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in CASES:
        rows.append(measured(name, given.rounds))
        print(table(rows).splitlines()[-1], flush=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
