"""Takes the pictures of docs/report.md: `PYTHONPATH=tests python docs/screenshots.py` from the checkout.

Needs chromium and chromedriver. Prints the size of the page and the time it took to load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from browser import Browser, browser
from hypatia.tools.explain import explain
from hypatia.tools.workloads import find

IMAGES = Path(__file__).parent / "images"
LOADED = "const [t] = performance.getEntriesByType('navigation'); return t.loadEventEnd - t.startTime"


def to(selector: str) -> str:
    """A script that scrolls an element to the top, under the bar of the page."""
    return f"scrollTo(0, document.querySelector('{selector}').getBoundingClientRect().top + scrollY - 56)"


def light(page: Browser) -> None:
    page.run("scrollTo(0, 0)")


def dark(page: Browser) -> None:
    page.prefer("dark")
    page.run(to(".drawing"))
    page.click("[data-side=after] .node.fused")
    page.run("document.querySelector('[data-side=after] .tip').hidden = true")


def detail(page: Browser) -> None:
    page.prefer("light")
    page.click("[data-do=weights]")
    page.run(to(".tools"))
    for side in ("before", "after"):
        page.click(f"[data-side={side}] [data-do=in]")


def tables(page: Browser) -> None:
    page.click("[data-do=weights]")
    page.run(to("#rewrites"))


def memory(page: Browser) -> None:
    page.run(to("#modules"))


def proof(page: Browser) -> None:
    page.run("document.querySelector('.steps').open = true")
    page.run(to("#proof"))


def time(page: Browser) -> None:
    page.run("document.querySelector('.steps').open = false")
    page.run(to("#accuracy"))


VIEWS: tuple[Callable[[Browser], None], ...] = (light, dark, detail, tables, memory, proof, time)


def main() -> None:
    model, inputs = find("bert-base").build()
    with tempfile.TemporaryDirectory() as folder, browser("--force-device-scale-factor=1") as page:
        path = explain(model, *inputs, name="bert-base").save(Path(folder) / "bert.html")
        page.resize(1440, 1150)
        page.open(path)
        print(f"{path.stat().st_size / 1e3:.0f} kB, loaded after {page.run(LOADED):.0f} ms")
        IMAGES.mkdir(exist_ok=True)
        for view in VIEWS:
            view(page)
            # Two frames, so that what was asked for is drawn.
            page.wait("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")
            (IMAGES / f"report-{view.__name__}.png").write_bytes(page.picture())


if __name__ == "__main__":
    main()
