"""``hypatia doctor``."""

from __future__ import annotations

import dataclasses

import click

from .output import console, safe, table, write_json

_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quick", is_flag=True, help="Leave out the self-check, which compiles a small model.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, quick: bool) -> None:
    """Show what was found on this machine, what is missing, and what to do about it.

    The exit code is 1 only when Hypatia cannot work here.

    \b
    Examples:
      hypatia doctor
      hypatia doctor --json
    """
    from hypatia.tools import doctor

    with console(err=True).status("looking around"):
        findings = doctor.examine(self_check=not quick)
    works = not any(f.fatal for f in findings)
    if as_json:
        write_json("-", {"works": works, "findings": [dataclasses.asdict(f) for f in findings]})
        ctx.exit(0 if works else 1)
    rows = table("", "state", "found", "what to do")
    topic = None
    for f in findings:
        if f.topic != topic:
            rows.add_section()
            rows.add_row(f"[bold]{f.topic}[/]")
            topic = f.topic
        rows.add_row(*safe(f"  {f.name}"), f"[{_COLOURS[f.state]}]{f.state}[/]", *safe(f.found, f.advice))
    out = console()
    out.print(rows)
    counts = [f"{sum(f.state == s for f in findings)} {s}" for s in _COLOURS]
    out.print(f"\n{', '.join(counts)}: Hypatia {'works here' if works else 'CANNOT work here'}")
    ctx.exit(0 if works else 1)
