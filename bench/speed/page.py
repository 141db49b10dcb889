"""Puts tables into a page, between lines that mark where they belong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .run import disturbed
from .tables import Table


def write(path: Path, sections: dict[str, Any], parts: dict[str, list[Table]], picture: str) -> None:
    """Renews the picture and every marked part of which there are results; the others stay."""
    text = put(path.read_text(), "chart", picture)
    for name, found in parts.items():
        lines = [_head(sections[name])] if name in sections else []
        text = put(text, name, "\n\n".join([*lines, *(table.markdown() for table in found)]))
    path.write_text(text)


def put(text: str, name: str, content: str) -> str:
    """The page with other content between the marks of a part."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"the page has no lines {begin} and {end}")
    return marked.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def _head(section: dict[str, Any]) -> str:
    m = section["machine"]
    some = "" if section["complete"] else ", not all cases"
    warning = disturbed(section)
    return (
        f"{section['when']}: hypatia {m['hypatia']}, torch {m['torch']}, Python {m['python']}, {m['cpu']}, "
        f"{m['threads']} threads, {section['repeats']} rounds{some}."
        f"{warning and f' **{warning}.**'}"
    )
