"""``hypatia rules``."""

from __future__ import annotations

import difflib
import json
from typing import TypedDict

import click

from .output import console, safe, table, write_json


class _Rule(TypedDict):
    name: str
    phase: str
    numerics: str
    law: str
    gradient: bool
    guards: list[str]


class _Walk(TypedDict):
    """What one walk saw of a rule."""

    rule: str
    fired: int
    failure: str | None


class _Walked(_Walk):
    """The same of several walks."""

    seed: int | None
    """Of the first failure."""


class _Seeds(click.ParamType):
    """A number, or a range of them with both ends."""

    name = "seeds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range:
        if isinstance(value, range):
            return value
        first, dots, last = str(value).partition("..")
        if first.isdecimal() and (last.isdecimal() if dots else True):
            found = range(int(first), int(last if dots else first) + 1)
            if found and found[-1] < 2**64:
                return found
        raise click.BadParameter(f"{value!r} is neither a number nor a range such as 0..99", ctx, param)


@click.command()
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Test that both sides of every rule are equal; takes a minute.")
@click.option(
    "--seed",
    "seeds",
    type=_Seeds(),
    default="1",
    show_default=True,
    help="Of the values that --check draws: a number, or a range such as 0..99.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def rules(ctx: click.Context, name: str | None, check: bool, seeds: range, as_json: bool) -> None:
    """List the rewrite rules: law, numerics class, phase, guards.

    NAME picks those whose names contain it.

    \b
    Examples:
      hypatia rules
      hypatia rules fuse-linear
      hypatia rules --check
      hypatia rules --check --seed 0..99
    """
    from hypatia import _native

    listed = _named(json.loads(_native.rules()), name)
    if check:
        failed = _check({r["name"] for r in listed}, seeds, as_json)
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


def _named(found: list[_Rule], name: str | None) -> list[_Rule]:
    listed = [r for r in found if name is None or name in r["name"]]
    if not listed:
        close = difflib.get_close_matches(name or "", [r["name"] for r in found], 3)
        hint = f"; close to it are {', '.join(close)}" if close else ""
        raise click.ClickException(f"no rule is called like {name!r}{hint}")
    return listed


def _check(names: set[str], seeds: range, as_json: bool) -> int:
    """Prints what the soundness walk found; the number of rules that failed."""
    from rich.progress import Progress

    from hypatia import _native

    seen: dict[str, _Walked] = {}
    with Progress(console=console(err=True), transient=True) as progress:
        task = progress.add_task("both sides of every rule", total=len(seeds))
        for seed in seeds:
            progress.update(task, description=f"both sides of every rule, seed {seed}")
            for found in json.loads(_native.check_rules(seed)):
                if found["rule"] in names:
                    _note(seen, found, seed)
            progress.advance(task)
    walked = list(seen.values())
    failed = [r for r in walked if r["failure"]]
    if as_json:
        write_json("-", walked)
        return len(failed)
    rows = table("rule", ">cases", "result")
    for r in walked:
        colour = "red" if r["failure"] else "green"
        rows.add_row(*safe(r["rule"], str(r["fired"])), f"[{colour}]{safe(r['failure'] or 'sound')[0]}[/]")
    out = console()
    out.print(rows)
    out.print(f"{len(walked)} rules, {len(walked) - len(failed)} sound, {len(failed)} not, {_said(seeds)}")
    return len(failed)


def _note(seen: dict[str, _Walked], found: _Walk, seed: int) -> None:
    """Adds what one walk saw of a rule; the first failure stays."""
    known = seen.setdefault(found["rule"], {"rule": found["rule"], "fired": 0, "failure": None, "seed": None})
    known["fired"] += found["fired"]
    failure = found["failure"] or (None if found["fired"] else "never fired, so not tested")
    if failure and not known["failure"]:
        known["failure"], known["seed"] = f"seed {seed}: {failure}", seed


def _said(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
