"""Clients of a running service, for scripts (`Client`) and for event loops (`AsyncClient`)."""

from serving.client.asynchronous import AsyncClient, AsyncStream
from serving.client.errors import ServiceError
from serving.client.results import Delta, Result, ToolCall
from serving.client.synchronous import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Delta", "Result", "ServiceError", "Stream", "ToolCall"]
