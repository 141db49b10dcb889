"""What the commands print with: one console, one kind of table, JSON to a file or to standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 150
"""Columns when standard output is no terminal: tables in logs are not to be cut."""


def console(*, err: bool = False) -> Console:
    """Where text goes."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; a column whose name starts with ``>`` is one of numbers."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        number = name.startswith(">")
        made.add_column(
            name.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    return made


def safe(*texts: str) -> list[str]:
    """Texts of others with their brackets, which are mark-up to the console."""
    from rich.markup import escape

    return [escape(t) for t in texts]


def write_json(target: str, data: Any) -> None:
    """Writes JSON to a file, or to standard output for ``-``."""
    write_text(target, json.dumps(data, indent=1) + "\n")


def write_text(target: str, text: str) -> None:
    """Writes to a file, or to standard output for ``-``; a folder that is missing is made."""
    if target == "-":
        click.echo(text, nl=False)
        return
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise click.ClickException(f"{target} cannot be written: {e.strerror or e}") from e
    click.echo(f"written to {target}", err=True)


def human_size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
