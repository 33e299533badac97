"""The life of the server process: listen, load, warm up, serve, drain, end."""

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from k3jax.cache import KvCacheDtype
from k3jax.dspark.quantized import DraftWeights
from serving.engine import Engine
from serving.launch import Sizes, launch
from serving.service import memory, threads
from serving.service.metrics import Metrics
from serving.service.model_card import ModelCard
from serving.service.options import ServiceOptions
from serving.service.request_log import event
from serving.service.server import Service

CRASHED, STALLED = 70, 75
"""Exit codes: the engine failed; it stood still (sysexits EX_SOFTWARE and EX_TEMPFAIL)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What to load, and how large the engine is to be."""

    checkpoint: Path | None
    draft: str | None
    dtype: str
    kv_cache_dtype: KvCacheDtype
    mesh: str | None
    name: str | None
    sizes: Sizes
    draft_weights: DraftWeights = "auto"


def load(loading: Loading, options: ServiceOptions, metrics: Metrics) -> tuple[Engine, ModelCard]:
    """Loads the model and compiles every program of its engine, which is not started yet."""
    import jax

    from k3jax import api
    from serving.runner import tokens_per_step

    model = api.load(
        loading.checkpoint,
        dtype=default_dtype() if loading.dtype == "auto" else jax.numpy.dtype(loading.dtype),
        mesh=loading.mesh,
        draft=loading.draft,
        kv_cache_dtype=loading.kv_cache_dtype,
        draft_weights=loading.draft_weights,
    )
    metrics.drafts(tokens_per_step(model) - 1)
    core = launch(model, loading.sizes, report=lambda line: event(line))
    memory.settle()
    threads.put_answers_first()
    engine = Engine(core, stream_limit=options.write_wait_outputs, on_step=metrics.step.observe)
    return engine, ModelCard.of(model, loading.name, core.options.max_length)


def default_dtype() -> Any:
    """float32 on the CPU, which computes bfloat16 in software; bfloat16 elsewhere."""
    import jax

    return jax.numpy.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


async def run(options: ServiceOptions, loading: Loading, metrics_port: int) -> int:
    """Serves until a signal comes or the engine fails; returns the exit code."""
    metrics = Metrics()
    service = Service(options, metrics)
    signals = Signals(asyncio.get_running_loop())
    await service.start()
    with contextlib.ExitStack() as stack:
        try:
            if metrics_port:
                stack.callback(metrics.serve(options.host, metrics_port)[1])
            await prepare(service, signals, lambda: load(loading, options, metrics))
        except BaseException:
            await service.stop()
            raise
        print(f"ready {options.host}:{service.port}", flush=True)
        await first_of(signals.first.wait(), service.failed.wait())
        if service.failed.is_set():
            end_at_once(service)
        complete = await service.drain(options.drain_seconds, signals.second)
        await service.stop()
    event("ended", complete=complete)
    return 0 if complete else 1


async def prepare(service: Service, signals: "Signals", build: Callable[[], tuple[Engine, ModelCard]]) -> None:
    """Builds the engine in a thread, while health is answered already. A signal meanwhile ends the process."""
    building = asyncio.ensure_future(asyncio.to_thread(build))
    stopping = asyncio.ensure_future(signals.first.wait())
    await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        event("stopped while loading", logging.WARNING)
        # Compilation cannot be interrupted, and nobody waits for its result.
        sys.stderr.flush()
        os._exit(0)
    stopping.cancel()
    engine, card = building.result()
    engine.start()
    await service.attach(engine, card)


class Signals:
    """SIGTERM and SIGINT: the first drains, the second hurries."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._come)

    def _come(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def first_of(*waiting: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of them has ended."""
    tasks = [asyncio.ensure_future(item) for item in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def end_at_once(service: Service) -> None:
    """Ends a process whose engine has failed: its thread may never come back, so nothing is waited for."""
    engine = service.engine
    stalled = engine is None or engine.error is None
    if stalled:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    event("process ends", logging.ERROR, reason=service.failure, threads=threading.active_count())
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(STALLED if stalled else CRASHED)
