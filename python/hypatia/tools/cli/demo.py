"""``hypatia demo``."""

from __future__ import annotations

import click


@click.command()
def demo() -> None:
    """Compile an MLP and a transformer block, show what was done, prove and check it.

    \b
    Example:
      hypatia demo
    """
    from hypatia.tools import demo as demonstration

    demonstration.main()
