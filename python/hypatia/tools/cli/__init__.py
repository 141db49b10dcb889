"""The command ``hypatia``. Its modules import torch only inside of what needs it, so that help is quick."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from .bench import bench
from .cache import cache
from .demo import demo
from .doctor import doctor
from .explain import explain
from .rules import rules
from .verify import verify

__all__ = ["cli", "main"]

_INTERRUPTED = 130


class _Commands(click.Group):
    """A group whose errors are one line on standard error and exit code 2."""

    debug = False

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: object,
    ) -> NoReturn:
        """Runs a command and ends the process with its exit code."""
        self.debug = False
        try:
            result = super().main(args, prog_name or "hypatia", complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except click.Abort:
            click.echo("hypatia: interrupted", err=True)
            code = _INTERRUPTED
        except BrokenPipeError:
            # The reader has seen enough, as in `hypatia rules | head`; the interpreter must not flush again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except getattr(click.exceptions, "NoArgsIsHelpError", ()) as e:
            # Newer versions of click raise where older ones print; a group without a command shows its help.
            click.echo(e.format_message())
            code = 0
        except Exception as e:
            if self.debug:
                raise
            click.echo(f"hypatia: {_one_line(e)}", err=True)
            code = 2
        sys.exit(code)


def _one_line(e: Exception) -> str:
    if isinstance(e, click.UsageError):
        command = e.ctx.command_path if e.ctx else "hypatia"
        return f"{' '.join(e.format_message().split())} (see {command} --help)"
    if isinstance(e, click.ClickException):
        return " ".join(e.format_message().split())
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


def _version() -> str:
    try:
        return importlib.metadata.version("hypatia")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


@click.group("hypatia", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="hypatia")
@click.option(
    "--debug", is_flag=True, help="Show the whole traceback of an error; stands before the command."
)
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """A compiler for PyTorch models.

    \b
    hypatia doctor                      is this machine set up, and what is missing
    hypatia explain bert-base           what is done to a model
    hypatia explain models.py:build     ... of your own
    hypatia verify models.py:build      is the compiled model as exact as eager
    hypatia bench tiny_b64 bert-base    how fast, beside eager and Inductor
    """
    assert isinstance(ctx.command, _Commands)
    ctx.command.debug = debug


for _command in (bench, cache, demo, doctor, explain, rules, verify):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script."""
    cli.main()
