"""Numbers and bytes for people."""

from __future__ import annotations


def digits(value: float) -> str:
    """A number with about four digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def size(count: float) -> str:
    """Bytes with the unit that fits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{digits(count)} {unit}"
        count /= 1024
    return f"{digits(count)} GiB"
