"""``hypatia explain``."""

from __future__ import annotations

from pathlib import Path

import click

from .output import check_targets, console, progress, write_json, write_text
from .subject import SubjectType, load, parse_options


@click.command()
@click.argument("subject", type=SubjectType(), metavar="MODULE:FACTORY")
@click.option("--html", metavar="FILE", help="Write the report as one self-contained page.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the report as JSON.")
@click.option("--training", is_flag=True, help="Compile forward and backward.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="An option of the backend.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs: cpu or cuda.")
@click.option("--timings/--no-timings", default=True, help="Time eager and the compiled model.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def explain(
    subject: str,
    html: str | None,
    json_file: str | None,
    training: bool,
    options: tuple[str, ...],
    device: str,
    timings: bool,
    quiet: bool,
) -> None:
    """Show what is done to a model: rewrites, proof, costs, errors, times.

    MODULE:FACTORY is a function without arguments, in an importable module or in a file, that returns
    (model, inputs) or (model, inputs, kwargs). The name of a workload does as well (hypatia bench --list).

    \b
    Examples:
      hypatia explain tiny_b64
      hypatia explain bert-base --html bert.html
      hypatia explain models.py:build --training --option numerics=exact
      hypatia explain mypackage.models:build --json -
    """
    check_targets(html, json_file)
    with progress(f"explain {subject}", quiet=quiet or json_file == "-") as told:
        told("importing torch and the model")
        parsed = parse_options(options)
        given = load(subject, device)
        import hypatia

        report = hypatia.explain(
            given.model,
            *given.inputs,
            kwargs=given.kwargs,
            options=parsed or None,
            training=training,
            timings=timings,
            name=given.name,
            progress=told,
        )
    if html:
        write_text(str(Path(html)), report.html())
    if json_file:
        write_json(json_file, report.json())
    if json_file != "-":
        report.print(console())
