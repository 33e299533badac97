"""The engine (caches, prefix reuse, retention, continuous batching), its gRPC service, and `Client` to reach one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.client import AsyncClient, Client, ServiceError

__all__ = ["AsyncClient", "Client", "ServiceError"]


def __getattr__(name: str) -> Any:
    """The clients, imported when they are asked for: the engine needs no gRPC."""
    if name in __all__:
        from serving import client

        return getattr(client, name)
    raise AttributeError(f"module 'serving' has no attribute {name!r}; it has {', '.join(__all__)}")
