"""What the commands print with: one console, one kind of table, JSON to a file or to standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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


@contextlib.contextmanager
def progress(title: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, on standard error while that is a terminal; gives what to tell it with."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(err=True), transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda text: shown.update(task, description=f"{title}: {text}")


def check_targets(*targets: str | None) -> None:
    """An error if one of these files cannot be written: before the work, not after it."""
    for target in targets:
        if target in (None, "-"):
            continue
        path = Path(target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as e:
            raise _unwritable(target, e) from e


def write_json(target: str, data: object) -> None:
    """Writes JSON to a file, or to standard output for ``-``."""
    from hypatia.jsonable import as_json

    write_text(target, as_json(data) + "\n")


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
        raise _unwritable(target, e) from e
    click.echo(f"written to {target}", err=True)


def _unwritable(target: str, error: OSError) -> click.ClickException:
    return click.ClickException(f"{target} cannot be written: {error.strerror or error}")
