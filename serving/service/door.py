"""Who is let in: bearer tokens, and methods that are there only once the model is."""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
from grpc import StatusCode

from serving.protocol import NATIVE, WORKER
from serving.service.refusals import Context

SERIALIZED = f"/{WORKER}/Generate"
"""Its servicer serializes by itself: a message a token, so that every microsecond counts."""
OPEN_TO_ALL = ("/grpc.health.v1.Health/",)
"""Probes have no tokens."""


def refusing(code: StatusCode, text: str) -> grpc.RpcMethodHandler:
    """Answers any call with a status."""

    async def refuse(request: Any, context: Context) -> NoReturn:
        await context.abort(code, text)
        raise AssertionError("abort always raises")

    return grpc.unary_unary_rpc_method_handler(refuse)


def unserialized(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """The same method, which writes bytes instead of messages."""
    return grpc.unary_stream_rpc_method_handler(handler.unary_stream, handler.request_deserializer)


class Door(grpc.GenericRpcHandler):
    """The methods of both protocols; until they are added, every call to them is UNAVAILABLE.

    It stands in for a server where generated code registers a servicer.
    """

    def __init__(self) -> None:
        self.calls = 0
        """Calls that gRPC has handed over."""
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._closed = refusing(StatusCode.UNAVAILABLE, "the model is being loaded; wait for the health service")

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: the same handlers come by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Adds a service's methods."""
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self._handlers[method] = unserialized(handler) if method == SERIALIZED else handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The handler of a method; None leaves it to others."""
        self.calls += 1
        method = handler_call_details.method
        if self._handlers:
            return self._handlers.get(method)
        return self._closed if method.split("/")[1] in (NATIVE, WORKER) else None


class TokenAuthentication(grpc.aio.ServerInterceptor):
    """Lets in calls with `authorization: Bearer TOKEN`."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._tokens = [token.encode() for token in tokens]
        text = "give a valid token as metadata 'authorization: Bearer TOKEN'"
        self._refusal = refusing(StatusCode.UNAUTHENTICATED, text)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, or one that refuses."""
        if handler_call_details.method.startswith(OPEN_TO_ALL) or self._knows(handler_call_details):
            return await continuation(handler_call_details)
        return self._refusal

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        scheme, _, token = str(given).partition(" ")
        # Every token is compared, so that the time says nothing of which one is close.
        known = [hmac.compare_digest(token.encode(), own) for own in self._tokens]
        return scheme.lower() == "bearer" and any(known)
