"""How clients reach a service."""

from pathlib import Path
from typing import Any

import grpc

ARGUMENTS = (
    # A silent server is noticed within half a minute, also through a proxy that has forgotten the connection.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", -1),
)


def credentials(ca: Path | str | None, certificate: Path | str | None, key: Path | str | None) -> Any:
    """TLS credentials from PEM files; None without any."""
    if ca is None and certificate is None and key is None:
        return None
    files = [None if path is None else Path(path).read_bytes() for path in (ca, key, certificate)]
    return grpc.ssl_channel_credentials(*files)


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with each call."""
    return (("authorization", f"Bearer {token}"),) if token else ()
