"""Settings of the service, apart from those of the engine."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    prompt_bytes: int = 8 * 2**20
    """Of text, before it is encoded."""
    choices: int = 16
    stop_strings: int = 16
    stop_string_bytes: int = 1024
    stop_ids: int = 64
    logit_bias: int = 300
    alternatives: int = 20
    constraint_bytes: int = 256 * 1024
    id_bytes: int = 256
    """Of request ids, salts, sessions and tenants."""
    tools: int = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM; with `client_ca`, clients must show a certificate too."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Where and how to serve. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 takes a free one."""
    queue_limit: int = 256
    """Sequences that may wait for a row of the batch."""
    queue_tokens: int = 4 * 2**20
    """Prompt tokens that may wait."""
    rows: int = 8
    """Sequences that run at a time."""
    limits: Limits = Limits()
    message_bytes: int = 64 * 2**20
    """Largest message that is received."""
    drain_seconds: int | float = 30.0
    stall_seconds: int | float = 60.0
    """An engine that shows no sign of life for so long is given up."""
    keepalive_seconds: int | float = 20.0
    keepalive_timeout_seconds: int | float = 10.0
    min_ping_seconds: int | float = 5.0
    """Clients may ping so often."""
    max_connection_age_seconds: int | float = 0.0
    """0: connections live on."""
    max_connection_grace_seconds: int | float = 300.0
    tls: Tls | None = None
    tokens: tuple[str, ...] = ()
    """Bearer tokens that are let in; everybody is without any."""
    reflection: bool = True
    write_wait_outputs: int = 4096
    """Outputs that may wait for a slow reader before it is dropped."""

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Arguments of the gRPC server."""
        return list(self._arguments())

    def _arguments(self) -> Iterator[tuple[str, int]]:
        yield "grpc.max_receive_message_length", self.message_bytes
        yield "grpc.max_send_message_length", -1
        yield "grpc.keepalive_time_ms", int(1000 * self.keepalive_seconds)
        yield "grpc.keepalive_timeout_ms", int(1000 * self.keepalive_timeout_seconds)
        # A gateway pings every few seconds through a long prefill; the default would hang up on it.
        yield "grpc.keepalive_permit_without_calls", 1
        yield "grpc.http2.min_recv_ping_interval_without_data_ms", int(1000 * self.min_ping_seconds)
        yield "grpc.http2.max_ping_strikes", 0
        yield "grpc.so_reuseport", 0
        if self.max_connection_age_seconds:
            yield "grpc.max_connection_age_ms", int(1000 * self.max_connection_age_seconds)
            yield "grpc.max_connection_age_grace_ms", int(1000 * self.max_connection_grace_seconds)
