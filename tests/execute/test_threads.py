"""Which threads keep a step that draws random numbers from being recorded."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hypatia.execute import cuda_graph


def may_draw() -> set[threading.Thread]:
    """The threads that may; pytest has some of its own."""
    return {t for t in threading.enumerate() if not cuda_graph._never_draws(t)}


def test_threads_of_users_may_draw() -> None:
    before = may_draw()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert len(may_draw() - before) == 1
        assert not cuda_graph._is_alone()
    assert may_draw() == before


def test_autograds_threads_only_work_while_another_waits() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            # This is what logging does.
            threading.current_thread()
            cuda_graph.note_thread_of_autograd()
            return 2 * gradient

    before = may_draw()
    Doubled.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert may_draw() == before


def test_inductors_threads_compile() -> None:
    before = may_draw()
    module = importlib.import_module("torch._inductor.async_compile")
    module.AsyncCompile.pool().submit(int).result()
    assert may_draw() == before


@pytest.mark.parametrize(
    "module", ["wandb.sdk.internal", "ipykernel.iostream", "tqdm._monitor", "torch._inductor.x"]
)
def test_threads_of_libraries_draw_nothing(module: str) -> None:
    before, end = may_draw(), threading.Event()

    def work() -> None:
        end.wait()

    work.__module__ = module
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert may_draw() == before
    finally:
        end.set()
        thread.join()


def test_inductors_timer_draws_nothing() -> None:
    before = may_draw()
    timer = importlib.import_module("torch._inductor.compile_worker.timer").Timer(0.05, lambda: None)
    timer.record_call()
    assert may_draw() == before
    timer.quit()
