"""A browser without a window, driven over WebDriver's HTTP with the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's reference, by the standard."""


class BrowserError(RuntimeError):
    """What the browser answered when it could not do something."""


def missing() -> str:
    """Why no browser can be driven here; empty when one can."""
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        return "no chromium or google-chrome on this machine"
    return "" if shutil.which("chromedriver") else "no chromedriver on this machine"


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Browser]:
    """A new browser with an empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            yield from _session(driver, [*FLAGS, f"--user-data-dir={profile}", *flags])
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()


def _session(driver: subprocess.Popen[str], flags: list[str]) -> Iterator[Browser]:
    port = next(m[1] for line in driver.stdout if (m := re.search(r"successfully on port (\d+)", line)))
    root = f"http://127.0.0.1:{port}"
    chrome = {"args": flags, "binary": shutil.which("chromium") or shutil.which("google-chrome")}
    capabilities = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
    session = _send("POST", f"{root}/session", {"capabilities": {"alwaysMatch": capabilities}})
    opened = Browser(f"{root}/session/{session['sessionId']}")
    try:
        yield opened
    finally:
        _send("DELETE", opened.root)


def _send(method: str, url: str, body: Any = None) -> Any:
    data = None if method != "POST" else json.dumps(body or {}).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as e:
        value = json.load(e)["value"]
        raise BrowserError(f"{value['error']}: {value['message']}") from None


class Browser:
    """One window."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, page: Path) -> None:
        """Loads a file and waits until it is there."""
        _send("POST", f"{self.root}/url", {"url": page.resolve().as_uri()})

    def resize(self, width: int, height: int) -> None:
        """Makes the window another size."""
        _send("POST", f"{self.root}/window/rect", {"width": width, "height": height})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return _send("POST", f"{self.root}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any) -> Any:
        """Like run, for a body that calls its last argument when it is done."""
        return _send("POST", f"{self.root}/execute/async", {"script": script, "args": list(arguments)})

    def element(self, selector: str) -> dict[str, str]:
        """The first element that matches."""
        return _send("POST", f"{self.root}/element", {"using": "css selector", "value": selector})

    def click(self, selector: str) -> None:
        """A real click: fails if something else lies on top."""
        _send("POST", f"{self.root}/element/{self.element(selector)[ELEMENT]}/click")

    def type(self, selector: str, keys: str) -> None:
        """Keys pressed one after the other."""
        _send("POST", f"{self.root}/element/{self.element(selector)[ELEMENT]}/value", {"text": keys})

    def wheel(self, selector: str, by: int) -> None:
        """A turn of the wheel over the middle of an element."""
        action = {
            "type": "scroll", "duration": 0, "deltaX": 0, "deltaY": by, "x": 0, "y": 0,
            "origin": self.element(selector),
        }  # fmt: skip
        _send(
            "POST",
            f"{self.root}/actions",
            {"actions": [{"type": "wheel", "id": "wheel", "actions": [action]}]},
        )

    def drag(self, selector: str, x: int, y: int) -> None:
        """The mouse pressed in the middle of an element, moved and released."""
        origin = self.element(selector)
        steps = [
            {"type": "pointerMove", "duration": 0, "origin": origin, "x": 0, "y": 0},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 50, "origin": origin, "x": x, "y": y},
            {"type": "pointerUp", "button": 0},
        ]
        mouse = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": steps,
        }
        _send("POST", f"{self.root}/actions", {"actions": [mouse]})

    def complaints(self) -> list[str]:
        """Errors and warnings of scripts and of the console since the last call."""
        entries = _send("POST", f"{self.root}/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(_send("GET", f"{self.root}/screenshot"))

    def prefer(self, scheme: str) -> None:
        """Light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        _send(
            "POST",
            f"{self.root}/goog/cdp/execute",
            {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}},
        )
