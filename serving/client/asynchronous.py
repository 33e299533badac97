"""The client for event loops."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from serving.client import requests
from serving.client.channel import Answer, Connection
from serving.client.errors import ServiceError
from serving.client.requests import Prompt
from serving.client.results import Delta, Result
from serving.protocol import messages


class AsyncStream(Answer):
    """An answer on its way: an asynchronous iterator of `Delta`. Its results are there at the end."""

    def __init__(self, client: "AsyncClient", request: Any, timeout: int | float | None) -> None:
        super().__init__(client, request, timeout)
        self._iterator = self._read()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._iterator

    async def _read(self) -> AsyncIterator[Delta]:
        for attempt in range(self._client.retries + 1):
            try:
                async for message in self._call:
                    for delta in self._folding.add(message):
                        yield delta
                return
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause(error, attempt))
                self._ask()

    async def results(self) -> list[Result]:
        """All answers; runs what is left of the stream."""
        async for _ in self._iterator:
            pass
        return self._folding.results()

    async def result(self) -> Result:
        """The first answer; runs what is left of the stream."""
        return (await self.results())[0]


class AsyncClient(Connection):
    """A connection to a service; an asynchronous context manager. Options as for `Client`."""

    _library = grpc.aio

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    def generate(self, prompt: Prompt, *, timeout: int | float | None = None, **options: Any) -> AsyncStream:
        """Continues a text or token ids."""
        return AsyncStream(self, requests.generate(prompt, options), timeout or self.timeout)

    def chat(
        self, conversation: Sequence[Mapping[str, Any]], *, timeout: int | float | None = None, **options: Any
    ) -> AsyncStream:
        """Answers OpenAI-style messages; more options: tools, tool_choice, effort, thinking, response_format."""
        return AsyncStream(self, requests.chat(conversation, options), timeout or self.timeout)

    async def _call(self, method: Any, request: Any, timeout: int | float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout or self.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ServiceError.of(error) from error

    async def model(self) -> Any:
        """What is served: a `k3jax.v1.Model`."""
        return await self._call(self._stub.GetModel, messages.GetModelRequest())

    async def stats(self) -> dict[str, int | float]:
        """Every figure of the engine."""
        return dict((await self._call(self._stub.GetStats, messages.GetStatsRequest())).values)

    async def health(self) -> str:
        """SERVING or NOT_SERVING."""
        answer = await self._call(self._health.Check, health_pb2.HealthCheckRequest())
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def abort(self, *request_ids: str) -> list[str]:
        """Ends requests of any client; returns those that were found."""
        return list((await self._call(self._stub.Abort, messages.AbortRequest(request_ids=request_ids))).aborted)

    async def flush(self) -> int:
        """Drops every cached prefix."""
        return (await self._call(self._stub.FlushCache, messages.FlushCacheRequest())).dropped

    async def inspect(self, prompt: Prompt, salt: str = "") -> Any:
        """What the cache holds of a prompt: a `k3jax.v1.InspectCacheResponse`."""
        request = requests.cached(prompt, messages.InspectCacheRequest, salt)
        return await self._call(self._stub.InspectCache, request)

    async def release(self, session: str) -> bool:
        """Lets go of what a session holds."""
        return (await self._call(self._stub.ReleaseSession, messages.ReleaseSessionRequest(session=session))).found

    async def export_state(self, prompt: Prompt, salt: str = "", *, timeout: int | float | None = None) -> list[Any]:
        """The cached state of a prompt, as chunks for `import_state` of another server; by default within 60 s."""
        request = requests.cached(prompt, messages.ExportStateRequest, salt)
        try:
            call = self._stub.ExportState(request, timeout=self._moving(timeout), metadata=self._metadata)
            return [chunk async for chunk in call]
        except grpc.RpcError as error:
            raise ServiceError.of(error) from error

    async def import_state(self, chunks: Sequence[Any], *, timeout: int | float | None = None) -> int:
        """Stores what another server has exported, by default within 60 s; returns how many tokens it holds."""
        return (await self._call(self._stub.ImportState, iter(chunks), self._moving(timeout))).tokens
