"""The picture of the architecture, drawn from the imports of the Python package and of the crates."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from import_graph import FLOORS, all_imports, purpose

CRATES = Path(__file__).parent.parent / "crates"
WIDTH, ROW, GAP, LEFT = 980, 76, 14, 20


def picture() -> str:
    """The picture as SVG."""
    rows = [*_packages(), *_crates()]
    height = len(rows) * (ROW + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (kind, name, text, modules, below) in enumerate(rows):
        top = GAP + number * (ROW + GAP)
        colour = "#e8f0fe" if kind == "python" else "#fdeede"
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{ROW}" rx="6" '
            f'fill="{colour}" stroke="#667085"/>'
        )
        parts.append(_text(LEFT + 12, top + 22, f"{name} ({kind})", weight="bold"))
        parts.append(_text(LEFT + 240, top + 22, text))
        parts.append(_text(LEFT + 240, top + 43, modules, colour="#475467", size=11))
        parts.append(_text(LEFT + 240, top + 63, f"imports: {below}", colour="#475467", size=11))
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: int, y: int, text: str, *, weight: str = "normal", colour: str = "#101828", size: int = 13
) -> str:
    about = f'fill="{colour}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x}" y="{y}" {about}>{escape(text)}</text>'


Row = tuple[str, str, str, str, str]


def _packages() -> list[Row]:
    imports = all_imports()
    rows = []
    for package in FLOORS:
        mine = [m for m in imports if m.split(".")[0] == package]
        seen = {other.split(".")[0] for m in mine for other in imports[m]} - {package}
        below = [f for f in FLOORS if f in seen] + (["modules beside"] if seen - set(FLOORS) else [])
        names = sorted({m.split(".")[1] for m in mine if "." in m})
        rows.append(("python", package, purpose(package), _short(names), ", ".join(below)))
    return rows


def _crates() -> list[Row]:
    rows = []
    for name in ("hypatia-py", "hypatia-cuda", "hypatia-runtime", "hypatia-core"):
        manifest = (CRATES / name / "Cargo.toml").read_text()
        (text,) = re.findall(r'^description = "(.*)"$', manifest, re.MULTILINE)
        below = re.findall(r"^(hypatia-\w+)", manifest.split("[dependencies]")[1], re.MULTILINE)
        modules = re.findall(
            r"^(?:pub )?mod (\w+);", (CRATES / name / "src" / "lib.rs").read_text(), re.MULTILINE
        )
        rows.append(("rust", name, text, _short(sorted(modules)), ", ".join(below) or "nothing"))
    return rows


def _short(names: list[str], most: int = 105) -> str:
    text = " · ".join(names)
    return text if len(text) <= most else text[:most].rsplit(" · ", 1)[0] + " · …"
