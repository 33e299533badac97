"""How clients reach a service, and what their two kinds share."""

from pathlib import Path
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from serving.client.errors import ServiceError
from serving.client.results import Folding
from serving.protocol import services

ARGUMENTS = (
    # A silent server is noticed within half a minute, also through a proxy that has forgotten the connection.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", -1),
)

MOVE_SECONDS = 60.0
"""Deadline of a cached state that comes or goes, where the client gives none: later, computing it again is better."""


class Connection:
    """A channel, its stubs, and what goes with each call."""

    _library: ClassVar[Any]
    """`grpc` or `grpc.aio`."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        key: Path | str | None = None,
        timeout: int | float | None = None,
        retries: int = 2,
    ) -> None:
        """`timeout` is the default deadline in seconds; `retries` are made only while nothing has come back."""
        secure = credentials(ca, certificate, key)
        self._channel: Any = (
            self._library.insecure_channel(target, ARGUMENTS)
            if secure is None
            else self._library.secure_channel(target, secure, ARGUMENTS)
        )
        self._stub = services.GenerateStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.timeout, self.retries = timeout, retries

    def _moving(self, timeout: int | float | None) -> int | float:
        return timeout or self.timeout or MOVE_SECONDS

    def _open(self, request: Any, timeout: int | float | None) -> Any:
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)


class Answer:
    """An answer on its way; how it is read is for the client's kind to say."""

    def __init__(self, client: Connection, request: Any, timeout: int | float | None) -> None:
        self._client, self._request, self._timeout = client, request, timeout
        self._folding = Folding()
        self._ask()

    def _ask(self) -> None:
        self._call: Any = self._client._open(self._request, self._timeout)

    def _pause(self, error: grpc.RpcError, attempt: int) -> int | float:
        """Seconds after which to ask again. Raises `ServiceError` when that must not be."""
        failure = ServiceError.of(error)
        # What has begun must not be said twice.
        if self._folding.seen or attempt == self._client.retries or not failure.may_retry:
            raise failure from error
        return failure.retry_after or 0.1 * 2**attempt

    @property
    def request_id(self) -> str:
        """The request's id, once the answer has begun."""
        return self._folding.request_id

    @property
    def prompt_logprobs(self) -> Any:
        """Log-probabilities of the prompt, if asked for, once the answer has begun."""
        return self._folding.prompt_logprobs

    def cancel(self) -> None:
        """Hangs up."""
        self._call.cancel()


def credentials(ca: Path | str | None, certificate: Path | str | None, key: Path | str | None) -> Any:
    """TLS credentials from PEM files; None without any."""
    if ca is None and certificate is None and key is None:
        return None
    files = [None if path is None else Path(path).read_bytes() for path in (ca, key, certificate)]
    return grpc.ssl_channel_credentials(*files)
