"""``hypatia verify``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from .output import console, progress, safe, table, write_json
from .subject import SubjectType, load, parse_options

if TYPE_CHECKING:
    from hypatia.verifier.verify import Verification


@click.command()
@click.argument("subject", type=SubjectType(), metavar="MODULE:FACTORY")
@click.option("--against", default="hypatia", show_default=True, help="The backend that compiles the model.")
@click.option("--training", is_flag=True, help="Compare the gradients of the parameters as well.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="An option of the backend.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs: cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.pass_context
def verify(
    ctx: click.Context,
    subject: str,
    against: str,
    training: bool,
    options: tuple[str, ...],
    device: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare a compiled model with eager by their errors to float64; exit code 1 if it is worse.

    MODULE:FACTORY is as for `hypatia explain`.

    \b
    Examples:
      hypatia verify bert-base
      hypatia verify models.py:build --training
      hypatia verify models.py:build --against inductor
    """
    with progress(f"verify {subject}", quiet=quiet or as_json) as told:
        told("importing torch and the model")
        name, found = _compared(subject, against, training, options, device, told)
    if as_json:
        write_json("-", _data(name, against, found))
    else:
        _show(name, against, found, training)
    ctx.exit(0 if found.ok else 1)


def _compared(
    subject: str,
    against: str,
    training: bool,
    options: tuple[str, ...],
    device: str,
    told: Callable[[str], None],
) -> tuple[str, Verification]:
    """The name of the model, and what the comparison showed."""
    import torch

    import hypatia
    from hypatia import timeline
    from hypatia.verifier.gradients import WithGradients

    if against not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise click.ClickException(f"there is no backend {against!r}; there are {known}")
    parsed = parse_options(options) if against == "hypatia" else {}
    given = load(subject, device)
    compiled = torch.compile(given.model, backend=against, options=parsed or None)
    reference, candidate = given.model, compiled
    if training:
        reference, candidate = WithGradients(given.model), WithGradients(given.model, compiled)
    with timeline.watching(told), timeline.dynamo():
        return given.name, hypatia.verify(reference, candidate, *given.inputs, kwargs=given.kwargs)


def _data(name: str, backend: str, found: Verification) -> dict[str, object]:
    results = [
        {"compiled": dataclasses.asdict(ours), "eager": dataclasses.asdict(theirs)}
        for ours, theirs in zip(found.candidate, found.reference, strict=True)
    ]
    return {"model": name, "backend": backend, "ok": found.ok, "reason": found.reason, "results": results}


def _show(name: str, backend: str, found: Verification, training: bool) -> None:
    rows = table("result", "of", ">max abs", ">mean abs", ">max rel", ">cosine", ">ulps")
    for i, pair in enumerate(zip(found.candidate, found.reference, strict=True)):
        for side, e in zip((backend, "eager"), pair, strict=True):
            numbers = (f"{e.max_abs:.2e}", f"{e.mean_abs:.2e}", f"{e.max_relative:.2e}")
            rows.add_row(
                str(i) if side == backend else "", side, *numbers, f"{e.cosine:.8f}", f"{e.ulps:.3g}"
            )
    out = console()
    out.print(
        f"{name}: errors to float64{', results first, then gradients' if training else ''}", markup=False
    )
    out.print(rows)
    verdict = "[green]passed[/]" if found.ok else f"[red]FAILED[/]: {safe(found.reason)[0]}"
    out.print(f"verification {verdict}")
