"""``hypatia rules``."""

from __future__ import annotations

import difflib
import json
from typing import Any

import click

from .output import console, safe, table, write_json


@click.command()
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Test that both sides of every rule are equal; takes a minute.")
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the values that --check draws."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def rules(ctx: click.Context, name: str | None, check: bool, seed: int, as_json: bool) -> None:
    """List the rewrite rules: law, numerics class, phase, guards.

    NAME picks those whose names contain it.

    \b
    Examples:
      hypatia rules
      hypatia rules fuse-linear
      hypatia rules --check
    """
    from hypatia import _native

    listed = _named(json.loads(_native.rules()), name)
    if check:
        failed = _check(_native, {r["name"] for r in listed}, seed, as_json)
        ctx.exit(1 if failed else 0)
    if as_json:
        write_json("-", listed)
        return
    rows = table("rule", "phase", "numerics", "law", "guards")
    for rule in listed:
        rows.add_row(
            *safe(rule["name"], rule["phase"], rule["numerics"], rule["law"], " ".join(rule["guards"]))
        )
    out = console()
    out.print(rows)
    out.print(f"{len(listed)} rules")


def _named(found: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    listed = [r for r in found if name is None or name in r["name"]]
    if not listed:
        close = difflib.get_close_matches(name or "", [r["name"] for r in found], 3)
        hint = f"; close to it are {', '.join(close)}" if close else ""
        raise click.ClickException(f"no rule is called like {name!r}{hint}")
    return listed


def _check(native: Any, names: set[str], seed: int, as_json: bool) -> int:
    """Prints what the soundness walk found; the number of rules that failed."""
    out = console(err=True)
    with out.status("both sides of every rule on many shapes, dtypes and values"):
        walked = [r for r in json.loads(native.check_rules(seed)) if r["rule"] in names]
    failed = [r for r in walked if r["failure"] or not r["fired"]]
    if as_json:
        write_json("-", walked)
        return len(failed)
    rows = table("rule", ">cases", "result")
    for r in walked:
        result = r["failure"] or ("sound" if r["fired"] else "never fired, so not tested")
        colour = "red" if r in failed else "green"
        rows.add_row(*safe(r["rule"], str(r["fired"])), f"[{colour}]{safe(result)[0]}[/]")
    out = console()
    out.print(rows)
    out.print(f"{len(walked)} rules, {len(walked) - len(failed)} sound, {len(failed)} not")
    return len(failed)
