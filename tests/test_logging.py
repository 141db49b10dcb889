"""What the Rust crates say, in Python's logging."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hypatia


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(4, 16)
    with torch.no_grad():
        hypatia.compile(model, x)(x)


def native(caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """Messages by the loggers of Rust modules."""
    found: dict[str, list[str]] = {}
    for record in caplog.records:
        if record.name.split(".")[:2] in (["hypatia", "core"], ["hypatia", "runtime"], ["hypatia", "cuda"]):
            found.setdefault(record.name, []).append(record.getMessage())
    return found


def test_a_compile_shows_what_rust_does(caplog: pytest.LogCaptureFixture) -> None:
    # What was not said at first is said once the level allows it.
    run()
    assert not native(caplog)
    with caplog.at_level(logging.DEBUG, logger="hypatia"):
        run()
    found = native(caplog)
    search, extraction = found["hypatia.core.optimize"][:2]
    assert search.startswith("search finished rounds=")
    assert "node_limit_reached=false" in search
    assert extraction.startswith("program extracted method=")
    assert any(m.startswith("plan lowered device=cpu steps=") for m in found["hypatia.runtime.lower.plan"])


def test_nothing_is_said_at_the_default_level(caplog: pytest.LogCaptureFixture) -> None:
    run()
    assert not native(caplog)
    # Nor is anything collected meanwhile that shows later.
    with caplog.at_level(logging.DEBUG, logger="hypatia"):
        hypatia._native.tuning_folder(None)
    assert not native(caplog)


def test_one_crate_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="hypatia.runtime"):
        run()
    assert {name.split(".")[1] for name in native(caplog)} == {"runtime"}


def test_what_a_handler_raises_is_raised() -> None:
    class Stop(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise KeyboardInterrupt

    log = logging.getLogger("hypatia.core.optimize")
    stop = Stop()
    log.addFilter(stop)
    log.parent.setLevel(logging.DEBUG)  # type: ignore[union-attr]
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        log.removeFilter(stop)
        log.parent.setLevel(logging.NOTSET)  # type: ignore[union-attr]


def test_several_threads(caplog: pytest.LogCaptureFixture) -> None:
    """No thread waits for another one's GIL, and no event is lost."""
    with caplog.at_level(logging.DEBUG, logger="hypatia"):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    events = native(caplog)["hypatia.core.optimize"]
    assert sum(event.startswith("search finished") for event in events) >= 4
