"""The client for scripts and notebooks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from serving.client import requests
from serving.client.channel import Answer, Connection
from serving.client.errors import ServiceError
from serving.client.requests import Prompt
from serving.client.results import Delta, Result
from serving.protocol import messages


class Stream(Answer):
    """An answer on its way: an iterator of `Delta`. Its `results` are there at the end."""

    def __init__(self, client: "Client", request: Any, timeout: int | float | None) -> None:
        super().__init__(client, request, timeout)
        self._iterator = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._iterator

    def __next__(self) -> Delta:
        return next(self._iterator)

    def _read(self) -> Iterator[Delta]:
        for attempt in range(self._client.retries + 1):
            try:
                for message in self._call:
                    yield from self._folding.add(message)
                return
            except grpc.RpcError as error:
                time.sleep(self._pause(error, attempt))
                self._ask()

    @property
    def results(self) -> list[Result]:
        """All answers; runs what is left of the stream."""
        for _ in self._iterator:
            pass
        return self._folding.results()

    @property
    def result(self) -> Result:
        """The first answer; runs what is left of the stream."""
        return self.results[0]


class Client(Connection):
    """A connection to a service; a context manager.

    Options of `generate` and `chat` are the fields of `k3jax.v1`: max_tokens, temperature, top_p, top_k, min_p, the
    penalties, seed, stop, stop_ids, min_tokens, ignore_eos, n, logprobs, prompt_logprobs, logit_bias, one of
    json_schema, json_object, regex, grammar, choice and structural_tag, session, retention, salt, priority;
    `timeout` is the deadline in seconds. Calls raise `ServiceError`.
    """

    _library = grpc

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def generate(self, prompt: Prompt, *, timeout: int | float | None = None, **options: Any) -> Stream:
        """Continues a text or token ids."""
        return Stream(self, requests.generate(prompt, options), timeout or self.timeout)

    def chat(
        self, conversation: Sequence[Mapping[str, Any]], *, timeout: int | float | None = None, **options: Any
    ) -> Stream:
        """Answers OpenAI-style messages; more options: tools, tool_choice, effort, thinking, response_format."""
        return Stream(self, requests.chat(conversation, options), timeout or self.timeout)

    def _call(self, method: Any, request: Any, timeout: int | float | None = None) -> Any:
        try:
            return method(request, timeout=timeout or self.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ServiceError.of(error) from error

    def model(self) -> Any:
        """What is served: a `k3jax.v1.Model`."""
        return self._call(self._stub.GetModel, messages.GetModelRequest())

    def stats(self) -> dict[str, int | float]:
        """Every figure of the engine."""
        return dict(self._call(self._stub.GetStats, messages.GetStatsRequest()).values)

    def health(self) -> str:
        """SERVING or NOT_SERVING."""
        answer = self._call(self._health.Check, health_pb2.HealthCheckRequest())
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def abort(self, *request_ids: str) -> list[str]:
        """Ends requests of any client; returns those that were found."""
        return list(self._call(self._stub.Abort, messages.AbortRequest(request_ids=request_ids)).aborted)

    def flush(self) -> int:
        """Drops every cached prefix."""
        return self._call(self._stub.FlushCache, messages.FlushCacheRequest()).dropped

    def inspect(self, prompt: Prompt, salt: str = "") -> Any:
        """What the cache holds of a prompt: a `k3jax.v1.InspectCacheResponse`."""
        return self._call(self._stub.InspectCache, requests.cached(prompt, messages.InspectCacheRequest, salt))

    def release(self, session: str) -> bool:
        """Lets go of what a session holds."""
        return self._call(self._stub.ReleaseSession, messages.ReleaseSessionRequest(session=session)).found

    def export_state(self, prompt: Prompt, salt: str = "", *, timeout: int | float | None = None) -> list[Any]:
        """The cached state of a prompt, as chunks for `import_state` of another server; by default within 60 s."""
        request = requests.cached(prompt, messages.ExportStateRequest, salt)
        pull = lambda *args, **rest: list(self._stub.ExportState(*args, **rest))  # noqa: E731
        return self._call(pull, request, self._moving(timeout))

    def import_state(self, chunks: Sequence[Any], *, timeout: int | float | None = None) -> int:
        """Stores what another server has exported, by default within 60 s; returns how many tokens it holds."""
        return self._call(self._stub.ImportState, iter(chunks), self._moving(timeout)).tokens
