"""The gRPC server: starts before the model is there, opens when it is, drains, and notices when the engine dies."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from serving.engine import Engine
from serving.protocol import NATIVE, WORKER, services
from serving.service import kv_events
from serving.service.door import Door, TokenAuthentication
from serving.service.generation import Generator
from serving.service.jobs import Jobs
from serving.service.kv_events import Publisher
from serving.service.metrics import EngineCollector, Metrics
from serving.service.model_card import ModelCard
from serving.service.native import NativeServicer
from serving.service.options import ServiceOptions, Tls
from serving.service.refusals import Refusal, unavailable
from serving.service.request_log import LOGGER, RequestLog, event
from serving.service.state import EngineState
from serving.service.worker import WorkerServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LIVENESS = "liveness"
"""Name in the health service that tells whether the process should be left alone, ready or not."""
READINESS = ("", NATIVE, WORKER)
LAST_WORDS_SECONDS = 1.0
"""For statuses to reach their clients before a server that has failed goes."""
QUIET_SECONDS = 0.05
"""Without a call for so long, none is on its way through gRPC."""


class Service:
    """One server and, once it is attached, one engine."""

    def __init__(self, options: ServiceOptions, metrics: Metrics | None = None) -> None:
        self.options = options
        self.metrics = metrics or Metrics()
        self.jobs = Jobs(options)
        self.engine: Engine | None = None
        self.port = 0
        self.failed = asyncio.Event()
        """Set when the engine has crashed or stands still; the process should end."""
        self.failure = ""
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._door = Door()
        self._unlisten: Callable[[], None] = lambda: None
        self._watch: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens; health says NOT_SERVING. Raises `OSError` when the address cannot be had."""
        options = self.options
        interceptors = [TokenAuthentication(options.tokens)] if options.tokens else []
        server = grpc.aio.server(interceptors=interceptors, options=options.channel_arguments())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set(NOT_SERVING, *READINESS)
        await self._set(SERVING, LIVENESS)
        if options.reflection:
            names = (NATIVE, WORKER, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        server.add_generic_rpc_handlers((self._door,))
        address = f"{options.host}:{options.port}"
        try:
            secure = options.tls is not None
            self.port = (
                server.add_secure_port(address, credentials(options.tls))
                if secure
                else server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}; is the port taken, or the host not of this machine?") from error
        await server.start()
        self._server = server
        event("listening", host=options.host, port=self.port, tls=options.tls is not None)

    async def _set(self, status: int, *names: str) -> None:
        for name in names:
            await self._health.set(name, status)

    async def attach(self, engine: Engine, card: ModelCard) -> None:
        """Starts to serve with an engine that has been started."""
        self.engine = engine
        state = EngineState(engine, self.jobs)
        publisher = Publisher(state.unit, state.engine_load)
        generator = Generator(engine, card, self.options.limits, self.jobs, self.metrics, RequestLog())
        self._unlisten = await kv_events.follow(publisher, engine.core.cache.events.listen)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(WorkerServicer(generator, state, publisher), self._door)
        services.add_GenerateServicer_to_server(NativeServicer(generator, state), self._door)
        collector = EngineCollector(state.stats_within, self.jobs, lambda: time.monotonic() - engine.beat)
        self.metrics.registry.register(collector)
        self.jobs.closed = None
        self._watch = asyncio.create_task(self._watch_engine(engine))
        await self._set(SERVING, *READINESS)
        event("serving", model=card.name)

    async def _watch_engine(self, engine: Engine) -> None:
        """Gives up an engine that has crashed or shows no sign of life."""
        stall = self.options.stall_seconds
        while True:
            await asyncio.sleep(min(stall / 8, 0.25))
            silence = time.monotonic() - engine.beat
            if engine.error is not None:
                await self._fail(f"the engine has crashed ({engine.error!r})")
                return
            if silence > stall * 0.8:
                await self._fail(f"the engine has shown no sign of life for {silence:.1f} s")
                return

    async def _fail(self, text: str) -> None:
        self.failure = text
        self.jobs.closed = unavailable(f"{text}; the server is going down")
        await self._set(NOT_SERVING, *READINESS, LIVENESS)
        cause = None if self.engine is None else self.engine.error
        LOGGER.error("engine failed", exc_info=cause, extra={"fields": {"reason": text}})
        self.jobs.refuse_all(Refusal(grpc.StatusCode.INTERNAL, text))
        try:
            await asyncio.wait_for(self.jobs.drained(), LAST_WORDS_SECONDS)
        except TimeoutError:
            event("calls without a status", logging.ERROR, calls=len(self.jobs))
        self.failed.set()

    async def drain(self, seconds: int | float, hurry: asyncio.Event) -> bool:
        """Lets nobody in and waits for those inside; what is left after `seconds`, or at `hurry`, gets a status.

        Returns whether all calls ended by themselves.
        """
        await self._health.enter_graceful_shutdown()
        self.jobs.closed = unavailable("the server is shutting down; another one will serve you")
        event("draining", calls=len(self.jobs), seconds=seconds)
        drained, hurried = asyncio.ensure_future(self.jobs.drained()), asyncio.ensure_future(hurry.wait())
        await asyncio.wait({drained, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        complete = not len(self.jobs)
        if not complete:
            self.jobs.refuse_all(unavailable("the server is shutting down and this call took too long to end"))
            await asyncio.wait({drained}, timeout=LAST_WORDS_SECONDS)
        for task in (drained, hurried):
            task.cancel()
        await self._refuse_latecomers()
        return complete

    async def _refuse_latecomers(self) -> None:
        """Waits for calls that gRPC has accepted and not handed over: stopped now, it would call them cancelled."""
        end, seen = time.monotonic() + LAST_WORDS_SECONDS, -1
        while seen != self._door.calls and time.monotonic() < end:
            seen = self._door.calls
            await asyncio.sleep(QUIET_SECONDS)

    async def stop(self, grace: int | float = LAST_WORDS_SECONDS) -> None:
        """Closes the server and stops the engine; call `drain` first to be kind."""
        if self._watch is not None:
            self._watch.cancel()
        self._unlisten()
        if self._server is not None:
            await self._server.stop(grace)
        if self.engine is not None and not self.failed.is_set():
            await asyncio.to_thread(self.engine.stop)


def credentials(tls: Tls) -> grpc.ServerCredentials:
    """What the server shows, and what it wants to see."""
    ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    pairs = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
    return grpc.ssl_server_credentials(pairs, root_certificates=ca, require_client_auth=ca is not None)
