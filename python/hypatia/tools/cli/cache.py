"""``hypatia cache``."""

from __future__ import annotations

import time

import click

from ..units import size as size_text
from .output import console, safe, table, write_json


@click.group()
def cache() -> None:
    """Look at or empty the store of compiled programs and measured times.

    \b
    Examples:
      hypatia cache show
      hypatia cache clear
      HYPATIA_CACHE_DIR=store hypatia cache show
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(as_json: bool) -> None:
    """List what is kept, least recently used first."""
    from hypatia import store as store

    found = store.entries()
    total = sum(e.size for e in found)
    if as_json:
        kept = [{"kind": e.kind, "key": e.key, "bytes": e.size, "used": e.used} for e in found]
        head = {"folder": str(store.folder()), "enabled": store.enabled(), "limit_bytes": store.size_limit()}
        write_json("-", {**head, "bytes": total, "entries": kept, "measurements": store.measurements()})
        return
    out = console()
    if found:
        rows = table("kind", ">size", "last used", "key")
        for e in found:
            stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))
            rows.add_row(e.kind, size_text(e.size), stamp, *safe(e.key))
        out.print(rows)
    state = "" if store.enabled() else ", turned off by HYPATIA_CACHE"
    out.print(
        f"{len(found)} entries, {size_text(total)} of {size_text(store.size_limit())}, "
        f"{store.measurements()} measured kernels in {store.folder()}{state}",
        markup=False,
    )


@cache.command()
def clear() -> None:
    """Remove all of it."""
    from hypatia import store as store

    size = sum(e.size for e in store.entries())
    click.echo(f"{store.clear()} entries removed, {size_text(size)} freed")
